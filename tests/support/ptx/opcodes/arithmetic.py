"""Integer and floating-point arithmetic.

32-bit floats are computed by NumPy and rounded once; so are 16-bit floats, from results with more
than twice as many digits. The `approx` functions and `div.full` are NumPy's too, and more exact
than hardware. `.ftz` turns subnormal operands and results into zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.support.ptx.numbers import (
    LANES,
    bf16_to_f32,
    f32_to_bf16,
    flushed,
    fma32,
    numpy_type,
    to_f32,
    width_of,
)
from tests.support.ptx.program import Form, Program, Step, elementwise, handles

FLOATS = ("f32", "f64")
SHORT_FLOATS = ("f16", "f16x2", "bf16", "bf16x2")
INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")


def _flushing(function: Callable, form: Form) -> Callable:
    if "ftz" not in form.modifiers:
        return function
    return lambda *x: flushed(function(*map(flushed, x)))


def _packed(function: Callable) -> Callable:
    """Apply a float32 function to the two numbers in 64-bit operands."""

    def both(*x: np.ndarray) -> np.ndarray:
        two = (np.ascontiguousarray(y).view(np.float32).reshape(LANES, 2) for y in x)
        return np.ascontiguousarray(function(*two)).view(np.uint64)[:, 0]

    return both


def _float(p: Program, form: Form, function: Callable, count: int, *allowed: str) -> Step:
    """Make a step of a float operation of `count` operands, whose type comes last."""
    kind = form.modifiers[-1]
    if kind not in (*FLOATS, "f32x2"):
        raise ValueError(f"type .{kind}")
    form.take(*allowed, "ftz", kind)
    function = _flushing(function, form)
    if kind == "f32x2":
        function, kind = _packed(function), "b64"
    return elementwise(p, form, function, [kind] * count, kind)


def _short_float(p: Program, form: Form, function: Callable, count: int) -> Step:
    """Make a step of an operation on float16 or bfloat16 numbers, one or two in a register."""
    kind = form.modifiers[-1]
    form.take("rn", kind)

    def short(*x: np.ndarray) -> np.ndarray:
        if kind.startswith("bf16"):
            return f32_to_bf16(function(*map(bf16_to_f32, x)))
        return function(*(y.view(np.float16) for y in x)).view(np.uint16)

    def both(*x: np.ndarray) -> np.ndarray:
        two = (np.ascontiguousarray(y).view(np.uint16).reshape(LANES, 2) for y in x)
        return np.ascontiguousarray(short(*two)).view(np.uint32)[:, 0]

    packed = kind.endswith("x2")
    width = "b32" if packed else "b16"
    return elementwise(p, form, both if packed else short, [width] * count, width)


def _integer(p: Program, form: Form, function: Callable, count: int) -> Step:
    (kind,) = form.modifiers
    if kind not in INTEGERS:
        raise ValueError(f"type .{kind}")
    return elementwise(p, form, function, [kind] * count, kind)


def _is_float(form: Form) -> bool:
    return form.modifiers[-1][0] == "f"


def _rounded(exact: Callable, form: Form) -> Callable:
    """Round a float32 operation in a direction other than to nearest."""
    mode = next((m for m in form.modifiers if m in ("rm", "rp", "rz")), None)
    if mode is None:
        return exact
    if form.modifiers[-1] != "f32":
        raise ValueError(f"rounding .{mode}")
    return lambda *x: to_f32(exact(*(y.astype(np.float64) for y in x)), mode)


@handles("add", "sub")
def add_sub(p: Program, form: Form) -> Step:
    """`add`, `sub`: "Integer Arithmetic Instructions", "Floating Point Instructions".

    In a direction other than to nearest, the float64 sum is rounded a second time. That is right
    unless one operand is more than 2^29 times the other.
    """
    function = {"add": np.add, "sub": np.subtract}[form.name]
    if form.modifiers[-1] in SHORT_FLOATS:
        return _short_float(p, form, function, 2)
    if _is_float(form):
        return _float(p, form, _rounded(function, form), 2, "rn", "rm", "rp", "rz")
    return _integer(p, form, function, 2)


@handles("mul")
def mul(p: Program, form: Form) -> Step:
    """`mul`: for integers, the low half, the high half or all of the product."""
    if form.modifiers[-1] in SHORT_FLOATS:
        return _short_float(p, form, np.multiply, 2)
    if _is_float(form):
        return _float(p, form, _rounded(np.multiply, form), 2, "rn", "rm", "rp", "rz")
    return _product(p, form)


def _odd_sum(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Compute `a b + c` in float32, rounded to odd."""
    exact = a.astype(np.float64) * b + c
    short = to_f32(exact, "rz")
    inexact = (short != exact) & np.isfinite(exact)
    return (np.ascontiguousarray(short).view(np.uint32) | inexact).view(np.float32)


@handles("mad", "fma")
def mad_fma(p: Program, form: Form) -> Step:
    """`mad` of integers, `fma` of floats: a product and a sum, rounded once."""
    if form.name == "fma" and form.modifiers[-1] in ("bf16", "bf16x2"):
        # The product is exact in float32. The sum is rounded to odd, so rounding it to nearest in
        # 16 bits gives the same as rounding the exact sum.
        return _short_float(p, form, _odd_sum, 3)
    if not _is_float(form):
        if form.name == "fma":
            raise ValueError("integers")
        return _product(p, form)
    mode = next((m for m in form.modifiers if m in ("rn", "rm", "rp", "rz")), "rn")

    def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return fma32(a, b, c, mode) if a.dtype == np.float32 else a * b + c

    if form.modifiers[-1] == "f64":
        raise ValueError("float64, which would be rounded twice")
    return _float(p, form, fma, 3, "rn", "rm", "rp", "rz")


def _product(p: Program, form: Form) -> Step:
    half, kind = form.modifiers
    if kind not in INTEGERS or half not in ("lo", "hi", "wide"):
        raise ValueError("modifiers")
    count = len(form.operands) - 1
    if half == "lo":
        function = (lambda a, b: a * b) if count == 2 else (lambda a, b, c: a * b + c)
        return elementwise(p, form, function, [kind] * count, kind)
    if width_of(kind) == 64:
        if half == "wide" or count != 2:
            raise ValueError("products of 128 bits")
        return elementwise(p, form, _high_half, [kind] * 2, kind)
    twice = f"{kind[0]}{2 * width_of(kind)}"
    wide, narrow, bits = numpy_type(twice), numpy_type(kind), width_of(kind)

    def product(a: np.ndarray, b: np.ndarray, *c: np.ndarray) -> np.ndarray:
        x = a.astype(wide) * b.astype(wide)
        if half == "hi":
            x = (x >> wide.type(bits)).astype(narrow)
        return x + c[0] if c else x

    result = kind if half == "hi" else twice
    return elementwise(p, form, product, [kind, kind, result][:count], result)


def _high_half(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the upper 64 of 128 bits, from products of 32-bit numbers."""
    low, shift = np.uint64(2**32 - 1), np.uint64(32)
    x, y = a.view(np.uint64), b.view(np.uint64)
    middle = (x & low) * (y & low) >> shift
    middle = middle + (x >> shift) * (y & low)
    carry = middle >> shift
    middle = (middle & low) + (x & low) * (y >> shift)
    found = (x >> shift) * (y >> shift) + carry + (middle >> shift)
    if a.dtype.kind == "i":
        found = found - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return found.view(a.dtype)


@handles("div")
def div(p: Program, form: Form) -> Step:
    """`div`: integers toward zero; floats, `.full` and `.approx` as exactly as `.rn`."""
    if _is_float(form):
        return _float(p, form, np.divide, 2, "rn", "full", "approx")
    return _integer(p, form, _quotient, 2)


@handles("rem")
def rem(p: Program, form: Form) -> Step:
    """`rem`: the remainder has the dividend's sign; that of division by 0 is undefined."""
    return _integer(p, form, lambda a, b: (a - _quotient(a, b) * b).astype(a.dtype), 2)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divide toward zero; PTX leaves division by 0 unspecified, so it gives all ones."""
    safe = np.where(b == 0, np.ones_like(b), b)
    if a.dtype.kind == "u":
        found = a // safe
    else:
        found = a // safe
        found = found + ((found * safe != a) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(b == 0, np.zeros_like(a) - a.dtype.type(1), found)


@handles("min", "max")
def min_max(p: Program, form: Form) -> Step:
    """`min`, `max`: ignore a NaN, except with `.NaN`, which then gives the canonical one.

    `.relu` clips the result at zero.
    """
    lowest = form.name == "min"
    nan = "NaN" in form.modifiers
    plain = ((np.fmin, np.fmax), (np.minimum, np.maximum))[nan][0 if lowest else 1]

    def of_floats(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        found = plain(a, b)
        return np.where(np.isnan(found), found.dtype.type(np.nan), found)

    if form.modifiers[-1] == "bf16":
        form.take("NaN", "bf16")

        def of_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return f32_to_bf16(of_floats(bf16_to_f32(a), bf16_to_f32(b)))

        return elementwise(p, form, of_bf16, ["b16"] * 2, "b16")
    if _is_float(form):
        return _float(p, form, of_floats, 2, "NaN")
    *relu, kind = form.modifiers
    if relu not in ([], ["relu"]) or (relu and kind != "s32") or kind not in INTEGERS:
        raise ValueError("modifiers")
    function = np.minimum if lowest else np.maximum
    if relu:
        return elementwise(
            p, form, lambda a, b: np.maximum(function(a, b), a.dtype.type(0)), [kind] * 2, kind
        )
    return elementwise(p, form, function, [kind] * 2, kind)


@handles("neg", "abs")
def neg_abs(p: Program, form: Form) -> Step:
    """`neg`, `abs`; for 16-bit floats they change only the sign bit."""
    kind = form.modifiers[-1]
    if kind in ("bf16", "f16"):
        form.take(kind)
        change = {"neg": lambda x: x ^ 0x8000, "abs": lambda x: x & 0x7FFF}[form.name]
        return elementwise(p, form, change, ["b16"], "b16")
    function = {"neg": np.negative, "abs": np.abs}[form.name]
    return (_float if _is_float(form) else _integer)(p, form, function, 1)


@handles("copysign")
def copysign(p: Program, form: Form) -> Step:
    """`copysign`: the second operand with the sign of the first."""
    return _float(p, form, lambda a, b: np.copysign(b, a), 2)


FUNCTIONS = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": lambda x: 1 / x, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
}  # fmt: skip


@handles(*FUNCTIONS)
def functions(p: Program, form: Form) -> Step:
    """`ex2`, `lg2`, `rcp`, `sqrt`, `rsqrt`, `tanh`, `sin`, `cos` of float32."""
    if form.modifiers[-1] != "f32":
        raise ValueError("type")
    return _float(p, form, FUNCTIONS[form.name], 1, "approx", "rn")


@handles("popc", "clz")
def counts(p: Program, form: Form) -> Step:
    """`popc`, `clz`: the number of set bits, and of zeros before the first one."""
    (kind,) = form.modifiers
    bits = width_of(kind)
    if kind not in ("b32", "b64"):
        raise ValueError("type")

    def leading(x: np.ndarray) -> np.ndarray:
        found = np.full(x.shape, bits, np.uint32)
        for i in range(bits):
            found[(x >> x.dtype.type(i) & x.dtype.type(1)).astype(bool)] = bits - 1 - i
        return found

    ones = lambda x: np.bitwise_count(x).astype(np.uint32)  # noqa: E731
    return elementwise(p, form, ones if form.name == "popc" else leading, [kind], "u32")


@handles("bfe")
def bfe(p: Program, form: Form) -> Step:
    """`bfe`: a bit field, sign-extended for signed types; it must lie within the operand."""
    (kind,) = form.modifiers
    bits = width_of(kind)

    def field(a: np.ndarray, at: np.ndarray, size: np.ndarray) -> np.ndarray:
        at, size = (x.astype(np.int64) & 255 for x in (at, size))
        if ((at + size > bits) | (size == 0)).any():
            raise ValueError("bfe outside of its operand")
        up = (bits - at - size).astype(a.dtype)
        return (a << up) >> (bits - size).astype(a.dtype)

    return elementwise(p, form, field, [kind, "u32", "u32"], kind)
