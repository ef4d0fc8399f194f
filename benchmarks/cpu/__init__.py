"""The CPU paths: `python -m benchmarks.cpu`."""
