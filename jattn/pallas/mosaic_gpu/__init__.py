"""Pallas kernels on Mosaic GPU, for Hopper."""
