"""The capability rows of the implementations for CPUs."""

from __future__ import annotations

import dataclasses

from jattn import call as calls
from jattn import capability, formats
from jattn.cpu.native import library

# Real models' sizes, MLA's, and some that are multiples of nothing convenient.
HEAD_DIMS = (16, 40, 64, 72, 80, 96, 112, 128, 144, 160, 192, 224, 256, 320, 512, 576)
BLOCK_SIZES = (1, 16, 32, 48, 64, 128, 528, 1056)

XLA = capability.Row(
    implementation="xla",
    summary="pure JAX, tuned for CPU, the default where no kernel fits",
    devices=("any",),
    head_dims=capability.Sizes(1, 65536, 1, tested=HEAD_DIMS),
    value_dims=capability.Sizes(1, 65536, 1, tested=HEAD_DIMS),
    block_sizes=capability.Sizes(1, 2**20, 1, tested=BLOCK_SIZES),
    query_dtypes=calls.QUERY_DTYPES,
    formats=capability.ALL_FORMATS,
    layouts=formats.ALL_LAYOUTS,
    options=calls.OPTIONS,
    automatic=True,
    differentiable=True,
)

NATIVE = dataclasses.replace(
    XLA,
    implementation="native",
    summary="C++ called through XLA's FFI, the fast path on CPUs",
    devices=("cpu",),
    requirements=(
        capability.Need(
            "x86-64 or 64-bit ARM; built by a C++ compiler, or pip's ziglang", library.missing
        ),
    ),
)
