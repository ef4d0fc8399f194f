"""Tests that others wrote for their own kernels, run with jattn as the kernel.

    python -m tests.peers [--jax CHECKOUT] [NAME ...]

Their files stay theirs: a wheel is fetched from PyPI when it is run, JAX's tests, which no wheel
has, are read from a checkout of https://github.com/jax-ml/jax. References and tolerances are
theirs too. `kernels` says what is replaced, `suites` what is run and what does not apply.
"""
