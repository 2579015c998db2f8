"""Storage backends: cache blocks kept beyond the life of a process, and shared between processes."""
