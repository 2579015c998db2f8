"""The Python client of a deployment, and the engine in one's own process."""
