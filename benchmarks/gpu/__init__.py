"""The GPU kernels: `python -m benchmarks.gpu`."""
