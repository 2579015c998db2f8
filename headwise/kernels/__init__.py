"""Attention and KV-write kernels behind one contract (`base.py`)."""
