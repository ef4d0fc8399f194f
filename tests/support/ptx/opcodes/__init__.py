"""The meaning of opcodes, a file per subject. Importing this package fills the opcode table."""

from tests.support.ptx.opcodes import (
    access,
    arithmetic,
    async_copy,
    control,
    conversion,
    lanes,
    logic,
    matrix,
    mbarrier,
    tensor_copy,
    wgmma,
)

__all__ = [
    "access", "arithmetic", "async_copy", "control", "conversion", "lanes", "logic", "matrix",
    "mbarrier", "tensor_copy", "wgmma",
]  # fmt: skip
