"""The XLA path: pure JAX, tuned for CPU, running wherever XLA runs."""
