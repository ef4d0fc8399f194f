"""Benchmarks on this CPU: `python -m benchmarks.cpu`."""
