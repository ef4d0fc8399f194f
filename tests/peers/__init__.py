"""Tests that others wrote for their own kernels, run with jattn as the kernel.

    python -m tests.peers [NAME ...]

Their files stay theirs: they are fetched from PyPI when they are run, or read from a checkout where
no distribution has them (`JATTN_PEERS_JAX`, `JATTN_PEERS_FLASHINFER`). References and tolerances
are theirs too. `suites` says what is run and what does not apply, `kernels` and `torch_kernels`
what is replaced.
"""
