"""What processes say to each other: requests, batches, messages, and how they are encoded."""
