"""Triton kernels through jax-triton: the portable GPU path, sm_80 and up."""
