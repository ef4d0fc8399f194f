"""Tests of the adapters for serving stacks, and of the real hosts if they are installed."""
