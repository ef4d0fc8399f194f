"""The parts of a `paged_attention` call: its arguments, static description, arrays and checks."""

from jattn.call.arguments import (
    CORE_OPTIONS,
    MASK_OPTIONS,
    OPTIONS,
    Arguments,
    Array,
    ArrayOrStruct,
    CallOptions,
    CascadeOptions,
    Integer,
    Number,
    Options,
)
from jattn.call.call import (
    QUERY_DTYPES,
    Call,
    Operands,
    Run,
    broken_promises,
    describe_call,
    guarded,
    take_operands,
)
from jattn.formats.kv_array import LAYOUTS

__all__ = [
    "CORE_OPTIONS",
    "LAYOUTS",
    "MASK_OPTIONS",
    "OPTIONS",
    "QUERY_DTYPES",
    "Arguments",
    "Array",
    "ArrayOrStruct",
    "Call",
    "CallOptions",
    "CascadeOptions",
    "Integer",
    "Number",
    "Operands",
    "Options",
    "Run",
    "broken_promises",
    "describe_call",
    "guarded",
    "take_operands",
]
