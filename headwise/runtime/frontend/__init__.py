"""What clients connect to: checks and tokenises requests, asks the index, dispatches each to an engine."""
