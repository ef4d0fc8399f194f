"""The example engine: `python -m benchmarks.serving`."""
