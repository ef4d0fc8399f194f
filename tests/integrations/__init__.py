"""Adapters for serving stacks, with the real hosts where they are installed."""
