"""Serving runtimes to compare, each in a process of its own: see `process.py`."""
