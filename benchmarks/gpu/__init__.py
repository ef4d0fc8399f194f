"""Benchmarks of the GPU kernels: `python -m benchmarks.gpu`."""
