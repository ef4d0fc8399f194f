"""All cache formats. Capability rows, tests and benchmarks read them from here."""

from __future__ import annotations

import numpy as np
from jax.typing import DTypeLike

from jattn import serialization
from jattn.formats.base import Format
from jattn.formats.dense import Dense
from jattn.formats.fp8 import Fp8
from jattn.formats.integer import Int4, Int8
from jattn.formats.nvfp4 import Nvfp4

ALL: tuple[Format, ...] = (
    *map(Dense, Dense.dtypes),
    *(Fp8(kind, per) for per in Fp8.scales for kind in Fp8.kinds),
    *(kind(zero) for kind in (Int8, Int4) for zero in (False, True)),
    Nvfp4(),
)
serialization.register_statics({type(format) for format in ALL})


def plain_format(dtype: DTypeLike) -> Format | None:
    """Return the format whose numbers a plain array of `dtype` holds, or None if there is none."""
    plain = (format for format in ALL if not format.chooses_scales)
    return next((format for format in plain if format.value_dtype == np.dtype(dtype)), None)
