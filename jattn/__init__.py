"""Paged attention for serving language models with JAX."""

__version__ = "0.1.0"
