"""The messages between processes: requests, batches, and how they are encoded."""
