"""Tensor operations a model is written in: one contract (`base.py`), one file per framework."""
