"""`cvt`: conversions between integers and floats of all sizes, including packed ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.support.ptx.numbers import (
    E4M3,
    E5M2,
    bf16_to_f32,
    f32_to_bf16,
    numpy_type,
    to_f32,
)
from tests.support.ptx.program import Form, Program, Step, elementwise, handles

ROUNDING = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


@handles("cvt")
def cvt(p: Program, form: Form) -> Step:
    """`cvt`: "Data Movement and Conversion Instructions: cvt".

    Floats saturate when converted to integers, and NaN becomes 0. Results that are floats round to
    nearest even unless the instruction says otherwise. The first operand of a packed result is its
    high half.
    """
    *modifiers, to, of = form.modifiers
    if set(modifiers) - {"rn", "rz", "ftz", "sat", *ROUNDING}:
        raise ValueError("modifiers")
    packed = _packed(to, of)
    if packed is not None:
        if set(modifiers) - {"rn"}:
            raise ValueError("modifiers")
        function, kinds, result = packed
        return elementwise(p, form, function, kinds, result)
    target = numpy_type(to)
    round_ = next((ROUNDING[m] for m in modifiers if m in ROUNDING), None)
    if of[0] == "f" and to[0] in "su":
        if round_ is None:
            raise ValueError("rounding")
        return elementwise(p, form, lambda x: _to_integer(round_(x), target), [of], to)
    if "rz" in modifiers and (to, of) == ("f32", "f64"):
        return elementwise(p, form, lambda x: to_f32(x, "rz"), [of], to)
    if "rz" in modifiers or (round_ is not None and to != of):
        raise ValueError("rounding")
    if "sat" in modifiers and to[0] != "f":
        raise ValueError("saturation of integers")

    def convert(x: np.ndarray) -> np.ndarray:
        x = (x if round_ is None else round_(x)).astype(target)
        if "sat" in modifiers:  # to [0, 1], NaN to 0
            x = np.where(np.isnan(x), target.type(0), np.clip(x, 0, 1))
        return x

    return elementwise(p, form, convert, [of], to)


def _to_integer(x: np.ndarray, target: np.dtype) -> np.ndarray:
    info = np.iinfo(target)
    x = np.nan_to_num(x.astype(np.float64), nan=0.0)
    # float64 cannot hold the largest 64-bit integers; a cast is right for smaller ones.
    top = x >= float(info.max)
    found = np.where(top, 0.0, np.maximum(x, float(info.min))).astype(target)
    return np.where(top, target.type(info.max), found)


def _packed(to: str, of: str) -> tuple[Callable, list[str], str] | None:
    """Return `(function, operand types, result type)` for 16-bit and 8-bit floats, or None."""

    def half(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float16).view(np.uint16)

    def join(high: np.ndarray, low: np.ndarray) -> np.ndarray:
        return high.astype(np.uint32) << np.uint32(16) | low

    narrow = {"bf16": f32_to_bf16, "f16": half}
    if of == "f32" and to in narrow:
        return narrow[to], ["f32"], "b16"
    if of == "f32" and to in ("bf16x2", "f16x2"):
        one = narrow[to[:-2]]
        return lambda high, low: join(one(high), one(low)), ["f32", "f32"], "b32"
    if (to, of) == ("f32", "bf16"):
        return bf16_to_f32, ["u16"], "f32"
    if (to, of) == ("bf16", "f16"):
        return lambda x: f32_to_bf16(x.astype(np.float32)), ["f16"], "b16"
    if "bf16" in (to, of):
        raise ValueError("bfloat16")
    if to == "f16x2" and of in ("e4m3x2", "e5m2x2"):
        table = (E4M3 if of == "e4m3x2" else E5M2).view(np.uint16)
        return lambda x: join(table[x >> np.uint16(8)], table[x & np.uint16(255)]), ["b16"], "b32"
    return None
