"""The Python client of a deployment, and the engine in the caller's own process."""
