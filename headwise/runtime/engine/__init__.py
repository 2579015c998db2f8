"""One replica's core: its requests, its cache's policy, its steps."""
