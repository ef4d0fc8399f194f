"""A reading as the arrays of one call, and tensors as JAX arrays without a copy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.autograd import forward_ad

import jattn
from jattn.integers import power_of_two
from jattn.integrations.transformers import masks

# Up to this size, letting jit copy a CPU tensor is faster than sharing it: 8 and 110 us a tensor,
# measured on 2 cores with JAX 0.10.
SMALL_BYTES = 1 << 18
BFLOAT16 = np.dtype(jnp.bfloat16)


def placed(x: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Make JAX create arrays, and run programs without arrays, on the device of a tensor.

    Raises:
      UnsupportedError: JAX has no such device.
    """
    return jax.default_device(device_of(x.device))


@functools.cache
def device_of(device: torch.device) -> jax.Device:
    """Return the JAX device of a PyTorch device."""
    platform = {"cuda": "gpu"}.get(device.type, device.type)
    try:
        return jax.local_devices(backend=platform)[device.index or 0]
    except (RuntimeError, IndexError) as error:
        raise jattn.UnsupportedError(
            f"tensors are on {device}, but JAX's devices are {jax.local_devices()}: move the model "
            "to one of them, or install JAX for that device"
        ) from error


def refuse_tangents(tensors: Iterable[object]) -> None:
    """Refuse dual tensors: JAX would read their numbers and drop their tangents.

    Raises:
      UnsupportedError: one of the tensors has a tangent.
    """
    for x in tensors:
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise jattn.UnsupportedError(
                f"a tensor {list(x.shape)} that attention reads has a tangent: "
                "jattn.integrations.transformers has no forward-mode derivatives; use reverse "
                'mode, or attn_implementation="eager"'
            )


def to_jax(x: torch.Tensor) -> np.ndarray | jax.Array:
    """Return a tensor as an argument of jit on the same device, shared unless it is small."""
    if x.is_cpu and x.nbytes <= SMALL_BYTES:
        return _to_numpy(x)
    return jnp.from_dlpack(x.detach().contiguous())


def to_rows(x: torch.Tensor, count: int) -> np.ndarray | jax.Array:
    """Return [B, heads, n, size] as an argument of jit: [count, heads, size], padded with zeros."""
    batch, heads, tokens, size = x.shape
    if batch * tokens == count and x.is_cpu and x.nbytes <= SMALL_BYTES:
        # In a decode step a layer's weights evict this code from the caches, so less is better:
        # NumPy views and `few_to_torch` saved 0.1 of 0.9 ms of a layer's attention (Qwen3-0.6B).
        return _to_numpy(x).swapaxes(1, 2).reshape(count, heads, size)
    return to_jax(pad_rows(x.transpose(1, 2).flatten(0, 1), count))


def _to_numpy(x: torch.Tensor) -> np.ndarray:
    if x.requires_grad:
        x = x.detach()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(BFLOAT16)
    return x.numpy()


@functools.lru_cache(maxsize=256)
def number(x: float) -> jax.Array:
    """Return a number as an array on the device, cached: scales are the same in every step."""
    return jnp.float32(x)


def to_torch(x: jax.Array) -> torch.Tensor:
    """Return an array as a tensor on the same device, shared.

    Given the array itself, `from_dlpack` would also ask for its device, which costs as much again.
    """
    return torch.from_dlpack(x.__dlpack__())


def few_to_torch(x: jax.Array, *shape: int) -> torch.Tensor:
    """Copy an array to a CPU tensor of this shape: up to `SMALL_BYTES` that is faster than sharing
    it."""
    numbers = np.array(x).reshape(shape)
    if numbers.dtype == BFLOAT16:
        return torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(numbers)


def bucket(count: int, least: int = 16) -> int:
    """Round `count` up to a power of two, at least `least`: few shapes, so few compilations."""
    return max(least, power_of_two(count))


def pad_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Pad [T, heads, size] with rows of zeros up to `count` rows."""
    missing = count - rows.shape[0]
    return torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, missing)) if missing else rows


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The sequences of a call of `jattn.paged_attention`.

    Attributes:
      tokens: which of the B * Tq queries are the call's tokens, or None for all of them in order.
      num_tokens: T, padding included.
      arrays: the call's array arguments.
      limits: its window or chunk size.
      is_causal: a bool, or None if `arrays` has it per sequence.
      max_query_len: static.
    """

    tokens: torch.Tensor | None
    num_tokens: int
    arrays: dict[str, jax.Array]
    limits: dict[str, jax.Array]
    is_causal: bool | None
    max_query_len: int

    @functools.cached_property
    def arguments(self) -> dict[str, jax.Array]:
        """`arrays` and `limits` together."""
        return self.arrays | self.limits

    def take_queries(self, query: torch.Tensor) -> torch.Tensor:
        """Return [B, H, Tq, D] as the call's tokens [T, H, D]."""
        flat = query.transpose(1, 2).flatten(0, 1)
        if self.tokens is not None:
            flat = flat[self.tokens]
        return pad_rows(flat, self.num_tokens)

    def put_back(self, out: torch.Tensor, batch: int, num_queries: int) -> torch.Tensor:
        """Return the result [T, H, V] as [B, Tq, H, V], with zeros where a query sees nothing."""
        if self.tokens is None:
            out = out if len(out) == batch * num_queries else out[: batch * num_queries]
            return out.view(batch, num_queries, *out.shape[1:])
        whole = out.new_zeros(batch * num_queries, *out.shape[1:])
        whole[self.tokens] = out[: len(self.tokens)]
        return whole.unflatten(0, (batch, num_queries))


def make_batch(reading: masks.SplitMask, tables: np.ndarray) -> Batch:
    """Build the call that a reading describes.

    Args:
      reading: the mask's reading.
      tables: [R, M]; the blocks of each sequence.
    """
    total = len(reading.tokens)
    counts = np.diff(reading.query_start_loc)
    longest = int(counts.max(initial=1))
    num_sequences = len(counts)
    # A decode step keeps its exact shapes; others are rounded up, so that few are compiled.
    padded = num_sequences if longest == 1 else bucket(num_sequences, 1)
    num_tokens = total if longest == 1 else bucket(total)
    missing = padded - num_sequences
    arrays = {
        "block_tables": _padded(tables, missing, -1),
        "seq_lens": _padded(reading.seq_lens, missing, 0),
        "query_start_loc": _padded(reading.query_start_loc, missing, reading.query_start_loc[-1]),
    }
    arrays = {name: x.astype(np.int32) for name, x in arrays.items()}
    per_sequence = not isinstance(reading.is_causal, bool)
    if per_sequence:
        arrays["is_causal"] = _padded(np.asarray(reading.is_causal), missing, False)
    given = {
        "sliding_window": reading.sliding_window,
        "attention_chunk_size": reading.attention_chunk_size,
    }
    limits = {name: np.int32(x) for name, x in given.items() if x is not None}
    device_arrays, device_limits = jax.device_put((arrays, limits))
    in_order = np.array_equal(reading.tokens, np.arange(reading.num_queries))
    return Batch(
        None if in_order else torch.from_numpy(reading.tokens),
        num_tokens,
        device_arrays,
        device_limits,
        None if per_sequence else bool(reading.is_causal),
        1 if longest == 1 else num_tokens,
    )


def _padded(rows: np.ndarray, missing: int, value: int) -> np.ndarray:
    """Append `missing` rows of one value."""
    if not missing:
        return rows
    return np.concatenate([rows, np.full((missing, *rows.shape[1:]), value, rows.dtype)])
