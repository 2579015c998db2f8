"""Attention variants: what a model's layers keep of a token, and how they attend to it."""
