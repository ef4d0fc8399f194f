"""GPU kernels without a GPU: interpreted, compiled, and executed as PTX."""
