"""Measures which heads of a model need no more than a window."""
