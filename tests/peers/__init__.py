"""Tests that other projects wrote for their own kernels, run with jattn as the kernel.

    python -m tests.peers [NAME ...]

Their files are not part of this repository: a run fetches them from PyPI, or reads them from a
checkout if no distribution has them (`JATTN_PEERS_JAX`, `JATTN_PEERS_FLASHINFER`). References and
tolerances are theirs too. `suites` says what runs and what does not apply, `kernels` and
`torch_kernels` replace the kernels.
"""
