"""A call of `paged_attention`, taken apart: its static description, its arrays, their checks."""

from jattn.call.call import (
    CORE_OPTIONS,
    OPTIONS,
    QUERY_DTYPES,
    Call,
    Operands,
    describe_call,
    take_operands,
)

__all__ = [
    "CORE_OPTIONS",
    "OPTIONS",
    "QUERY_DTYPES",
    "Call",
    "Operands",
    "describe_call",
    "take_operands",
]
