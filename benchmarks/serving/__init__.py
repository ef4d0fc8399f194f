"""Benchmarks of the example engine: `python -m benchmarks.serving`."""
