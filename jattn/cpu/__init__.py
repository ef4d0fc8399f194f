"""XLA paths: pure JAX, tuned for CPU, running wherever XLA runs."""
