"""The Triton language on NumPy: enough of it to run jattn's kernels on any machine.

Triton's own interpreter needs Triton, an older NumPy and a fix for its bfloat16 products, and it
lets a kernel read past the end of a buffer. This one needs none of these, and is stricter:

- a pointer knows its buffer: reading or writing outside it is an error, and so is adding 32-bit
  offsets to a `wide` buffer, because a pool may need larger ones;
- `//` and `%` refuse negative numbers, for which Triton and NumPy disagree;
- an overflow of a 32-bit integer is an error;
- every element of an output may be written only once, and unwritten elements stay NaN.

`kernels()` executes the kernel files with this module instead of Triton: the source that runs is
the source that is compiled for a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn import call as calls
from jattn.pallas import machine
from jattn.pallas.triton import launch as triton_launch

FOLDER = pathlib.Path(jattn.__file__).parent / "pallas" / "triton"


class Tensor(np.ndarray):
    """A NumPy array that behaves like a Triton tensor."""

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        dtype = np.dtype(dtype)
        if bitcast:
            assert dtype.itemsize == self.dtype.itemsize
            return tensor(np.asarray(self).view(dtype))
        with np.errstate(invalid="ignore"):  # NaN
            return tensor(np.asarray(self).astype(dtype))

    def __iadd__(self, other: Any) -> Tensor:
        return self + other  # values are immutable in Triton

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        plain = [np.asarray(x) if isinstance(x, Tensor) else x for x in inputs]
        assert method == "__call__"
        assert out is None
        if ufunc in (np.floor_divide, np.remainder):
            assert all(np.all(np.asarray(x) >= 0) for x in plain), "negative operand of // or %"
        if ufunc is np.true_divide:
            assert all(isinstance(x, float) or x.dtype.kind == "f" for x in plain)
        with np.errstate(all="ignore"):
            result = ufunc(*plain, **kwargs)
        if ufunc in (np.add, np.subtract, np.multiply) and result.dtype == np.int32:
            exact = ufunc(*(np.asarray(x, np.int64) for x in plain))
            assert np.all(exact == result), "a 32-bit integer overflows"
        return tensor(result)


def tensor(x: Any) -> Tensor:
    """`x` as a Tensor."""
    return np.asarray(x).view(Tensor)


@dataclasses.dataclass
class Buffer:
    """Memory of a kernel: an array, and which elements were written and read."""

    data: np.ndarray  # flat
    wide: bool = False
    written: np.ndarray | None = None  # None: an input
    read: set[int] | None = None  # offsets that were read; None if not tracked


@dataclasses.dataclass
class Pointer:
    """Pointers into a buffer: offsets in elements of `dtype`."""

    buffer: Buffer
    dtype_: np.dtype
    offsets: np.ndarray

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.dtype_)

    def __add__(self, more: Any) -> Pointer:
        more = np.asarray(more)
        narrow = self.buffer.wide and more.ndim and more.dtype != np.int64
        if narrow:
            # Offsets of columns within a row may have 32 bits, offsets of rows may not.
            assert more.size == max(more.shape), "32-bit offsets into a pool"
            assert np.all(more < 2**20), "32-bit offsets into a pool"
        return Pointer(self.buffer, self.dtype_, self.offsets + more.astype(np.int64))

    def __getitem__(self, at: Any) -> Pointer:
        return Pointer(self.buffer, self.dtype_, self.offsets[at])

    def to(self, kind: PointerType, bitcast: bool) -> Pointer:
        assert bitcast
        wider = np.dtype(kind.dtype).itemsize // self.dtype_.itemsize
        assert wider >= 1
        assert np.all(self.offsets % wider == 0)
        return Pointer(self.buffer, np.dtype(kind.dtype), self.offsets // wider)


@dataclasses.dataclass(frozen=True)
class PointerType:
    dtype: Any


_grid: list[Any] = [(0, 0, 0), (1, 1, 1)]


def _where_read(pointer: Pointer, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    mask = np.ones((), bool) if mask is None else np.asarray(mask)
    offsets, mask = np.broadcast_arrays(pointer.offsets, mask)
    inside = (offsets >= 0) & (offsets < pointer.buffer.data.view(pointer.dtype_).size)
    assert np.all(inside | ~mask), "out of bounds"
    return offsets, mask


def load(pointer: Pointer, mask: Any = None, other: Any = None, volatile: bool = False) -> Tensor:
    offsets, mask = _where_read(pointer, mask)
    data = pointer.buffer.data.view(pointer.dtype_)
    if pointer.buffer.read is not None:
        pointer.buffer.read.update(np.unique(offsets[mask]).tolist())
    if mask.all():
        return tensor(data[offsets])
    # Masked elements are undefined unless `other` is given.
    nothing = np.array(np.nan if data.dtype.kind in "fV" else -77) if other is None else other
    found = np.full(offsets.shape, nothing).astype(data.dtype)
    found[mask] = data[offsets[mask]]
    return tensor(found)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offsets, mask = _where_read(pointer, mask)
    buffer = pointer.buffer
    assert buffer.written is not None, "an input is written"
    to = offsets[mask]
    assert np.unique(to).size == to.size, "one element written twice"
    assert not buffer.written[to].any(), "one element written twice"
    buffer.written[to] = True
    value = np.asarray(value)
    if value.ndim:
        assert value.dtype == pointer.dtype_, "stored in another dtype"
    buffer.data[to] = np.broadcast_to(value, offsets.shape)[mask].astype(buffer.data.dtype)


def dot(a: Tensor, b: Tensor, acc: Any = None, input_precision: str = "tf32") -> Tensor:
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    assert a.dtype != np.float32 or input_precision == "ieee"
    for size in (*a.shape, *b.shape):
        assert size >= 16, "too small for a matrix unit"
        assert size & (size - 1) == 0
    with np.errstate(all="ignore"):
        found = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    return tensor(found if acc is None else found + np.asarray(acc))


def total(x: Tensor, axis: int) -> Tensor:
    return tensor(np.asarray(x).sum(axis=axis, dtype=x.dtype))


def where(condition: Any, x: Any, y: Any) -> Tensor:
    kinds = [np.asarray(v).dtype for v in (x, y) if isinstance(v, np.ndarray | np.generic)]
    assert len(set(kinds)) <= 1, kinds
    x, y = (v if isinstance(v, np.ndarray) else np.asarray(v, kinds[0]) for v in (x, y))
    return tensor(np.where(np.asarray(condition), np.asarray(x), np.asarray(y)))


def arange(start: int, stop: int) -> Tensor:
    size = stop - start
    assert size & (size - 1) == 0, "not a power of two"
    return tensor(np.arange(start, stop, dtype=np.int32))


def loop(*bounds: Any, num_stages: int | None = None) -> Any:
    return (tensor(np.int32(i)) for i in range(*(int(x) for x in bounds)))


language = types.ModuleType("triton.language")
for _name, _value in {
    "constexpr": lambda value: value,
    # Hints to the compiler do nothing here.
    "core": types.SimpleNamespace(builtin=lambda function: lambda *arguments: None),
    "pointer_type": PointerType,
    "program_id": lambda axis: tensor(np.int32(_grid[0][axis])),
    "num_programs": lambda axis: tensor(np.int32(_grid[1][axis])),
    "arange": arange,
    "zeros": lambda shape, dtype: tensor(np.zeros(shape, dtype)),
    "full": lambda shape, value, dtype: tensor(np.full(shape, value, dtype)),
    "load": load,
    "store": store,
    "dot": dot,
    "static_assert": lambda condition: exec("assert condition", {"condition": condition}),
    "permute": lambda x, axes: tensor(np.asarray(x).transpose(axes)),
    "trans": lambda x: tensor(np.asarray(x).T),
    "interleave": lambda a, b: tensor(np.stack([a, b], axis=-1).reshape(len(a), -1)),
    "where": where,
    # In Triton these ignore NaN.
    "maximum": lambda a, b: tensor(np.fmax(a, b)),
    "minimum": lambda a, b: tensor(np.fmin(a, b)),
    "max": lambda x, axis: tensor(np.fmax.reduce(np.asarray(x), axis=axis)),
    "min": lambda x, axis: tensor(np.fmin.reduce(np.asarray(x), axis=axis)),
    "sum": total,
    "cumsum": lambda x, axis: tensor(np.cumsum(np.asarray(x), axis=axis, dtype=x.dtype)),
    "abs": np.abs,
    "exp2": np.exp2,
    "log2": np.log2,
    "range": loop,
    "static_range": lambda count: range(count),
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "int32": np.int32,
    "int64": np.int64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": jnp.bfloat16.dtype,
    "float8e4nv": jnp.float8_e4m3fn.dtype,
}.items():
    setattr(language, _name, _value)


# The kernel files, in the order in which they import each other.
FILES = ("visibility", "pools", "fragments", "decode", "prefill")
_edits: list[tuple[str, str]] = []


@contextlib.contextmanager
def edited(text: str, replacement: str) -> Iterator[None]:
    """Run with `text` replaced in the kernel files."""
    if not any(text in (FOLDER / f"{file}.py").read_text() for file in FILES):
        raise ValueError(f"text is {text!r}, but must be in one of {FILES}")
    modules.cache_clear()
    _edits.append((text, replacement))
    try:
        yield
    finally:
        _edits.clear()
        modules.cache_clear()


@contextlib.contextmanager
def chunked_plan(size: int) -> Iterator[None]:
    """Make plans read `size` sequences at a time."""
    whole = triton_launch.launches

    def launches(*arguments: Any) -> tuple[triton_launch.Launch, ...]:
        return tuple(
            dataclasses.replace(launch, constants=dataclasses.replace(launch.constants, PLAN=size))
            for launch in whole(*arguments)
        )

    with mock.patch.object(triton_launch, "launches", launches):
        yield


@functools.cache
def modules() -> dict[str, types.ModuleType]:
    """Return the kernel files and a `triton` module by name, executed with this language."""
    triton = types.ModuleType("triton")
    triton.jit = lambda function: function
    triton.language = language
    found = {"triton": triton, "triton.language": language}
    for file in FILES:
        path = FOLDER / f"{file}.py"
        source = path.read_text()
        for edit in _edits:
            source = source.replace(*edit)
        module = types.ModuleType(f"jattn.pallas.triton.{file}")
        # Python's range would give the kernel a plain int, which has no dtype.
        module.range = loop
        with mock.patch.dict(sys.modules, found):
            exec(compile(source, str(path), "exec"), module.__dict__)
        found[module.__name__] = module
    return found


def kernels() -> triton_launch.Kernels:
    """Return the kernels of these modules, in the form in which `launch.run` imports them."""
    with mock.patch.dict(sys.modules, modules()):
        return triton_launch.kernels()


def fragments() -> types.SimpleNamespace:
    """Return the functions that the kernels consist of."""
    found = dict[str, Any]()
    for file in ("visibility", "pools", "fragments"):
        found |= vars(modules()[f"jattn.pallas.triton.{file}"])
    return types.SimpleNamespace(**found)


def run(
    call: calls.Call,
    operands: calls.Operands,
    gpu: machine.Machine,
    track: tuple[str, ...] = (),
) -> tuple[np.ndarray, np.ndarray, dict[str, Buffer]]:
    """Run a call's kernels; return `(out, lse, buffers)`. Buffers in `track` record reads."""
    arrays = jax.tree.map(np.asarray, operands)
    given = triton_launch.buffers_of(call, arrays, np)
    buffers = {
        name: Buffer(
            np.ascontiguousarray(x).reshape(-1),
            wide=name.endswith("_cache"),
            read=set() if name in track else None,
        )
        for name, x in given.items()
    }
    shapes = {}
    for launch in triton_launch.launches(call, gpu):
        kernel = getattr(kernels(), launch.kernel)
        inputs = [buffers[name] for name in launch.inputs]
        outputs = []
        for at, (name, shape, dtype) in enumerate(launch.outputs):
            continued = [i for i, to in launch.aliases.items() if to == at]
            if continued:
                outputs.append(inputs[continued[0]])
            else:
                data = np.full(int(np.prod(shape)), np.nan, jnp.dtype(dtype))
                outputs.append(Buffer(data, written=np.zeros(data.size, bool)))
            buffers[name], shapes[name] = outputs[-1], shape
        numbers = [tensor(np.int32(n)) for n in launch.numbers.values()]
        constants = launch.constants.in_language(language)
        pointers = [Pointer(b, b.data.dtype, np.zeros((), np.int64)) for b in (*inputs, *outputs)]
        arguments = [*pointers[: len(inputs)], *numbers, *pointers[len(inputs) :]]
        grid = (*launch.grid, 1, 1)[:3]
        for at in itertools.product(*map(range, grid)):
            _grid[:] = at, grid
            kernel(*arguments, C=constants)
    out, lse = (buffers[name].data.reshape(shapes[name]) for name in ("out", "lse"))
    return out, lse, buffers
