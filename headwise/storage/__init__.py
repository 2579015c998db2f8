"""What outlives an engine: the index of who holds which prefix, and the blocks that were put away."""
