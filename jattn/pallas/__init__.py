"""GPU kernels: Pallas on Mosaic GPU, and Triton through jax-triton."""
