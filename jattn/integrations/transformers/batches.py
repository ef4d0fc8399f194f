"""A reading as the arrays of one call, and tensors as JAX's arrays without a copy."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jattn.integrations.transformers import masks

# Up to here a copy of a CPU's tensor, which jit makes, is faster than sharing it: measured 8 and
# 110 us a tensor, on 2 cores with JAX 0.10.
SMALL_BYTES = 1 << 18
BFLOAT16 = np.dtype(jnp.bfloat16)


def to_jax(x: torch.Tensor) -> Any:
    """The same numbers on the same device as an argument of jit, shared unless they are few."""
    x = x.detach().contiguous()
    if x.device.type != "cpu" or x.nbytes > SMALL_BYTES:
        return jnp.from_dlpack(x)
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(BFLOAT16)
    return x.numpy()


def to_torch(x: jax.Array) -> torch.Tensor:
    """The same numbers as a tensor, shared. A capsule spares what asking for one costs."""
    return torch.from_dlpack(x.__dlpack__())


def bucket(count: int, least: int = 16) -> int:
    """The power of two from `least` on that holds `count`: few shapes, so few compilations."""
    return max(least, 1 << max(count - 1, 0).bit_length())


def pad_rows(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[T, heads, size] with rows of zeros up to `count`."""
    missing = count - rows.shape[0]
    return torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, missing)) if missing else rows


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The sequences of a call of `jattn.paged_attention`.

    Attributes:
      tokens: which of the B * Tq queries are the call's tokens, or None for all of them in order.
      num_tokens: T, padding included.
      arrays: its arguments that are arrays.
      limits: its window or chunk.
      is_causal: a bool, or None where `arrays` says so per sequence.
      max_query_len: static.
    """

    tokens: torch.Tensor | None
    num_tokens: int
    arrays: dict[str, jax.Array]
    limits: dict[str, jax.Array]
    is_causal: bool | None
    max_query_len: int

    def take_queries(self, query: torch.Tensor) -> torch.Tensor:
        """[B, H, Tq, D] as the call's tokens [T, H, D]."""
        flat = query.transpose(1, 2).flatten(0, 1)
        if self.tokens is not None:
            flat = flat[self.tokens]
        return pad_rows(flat, self.num_tokens)

    def put_back(self, out: torch.Tensor, batch: int, num_queries: int) -> torch.Tensor:
        """The call's result [T, H, V] as [B, Tq, H, V], zeros where a query sees nothing."""
        if self.tokens is None:
            out = out if len(out) == batch * num_queries else out[: batch * num_queries]
            return out.view(batch, num_queries, *out.shape[1:])
        whole = out.new_zeros(batch * num_queries, *out.shape[1:])
        whole[self.tokens] = out[: len(self.tokens)]
        return whole.unflatten(0, (batch, num_queries))


def make_batch(reading: masks.Reading, tables: np.ndarray[Any, Any]) -> Batch:
    """The call that a reading describes.

    Args:
      reading: of the mask.
      tables: [R, M]; the blocks of each sequence.
    """
    total = len(reading.tokens)
    counts = np.diff(reading.query_start_loc)
    longest = int(counts.max(initial=1))
    num_sequences = len(counts)
    # A decode step's shapes are its own; others are rounded up, to compile for few of them.
    padded = num_sequences if longest == 1 else bucket(num_sequences, 1)
    num_tokens = total if longest == 1 else bucket(total)
    missing = padded - num_sequences
    arrays = {
        "block_tables": np.pad(tables, ((0, missing), (0, 0)), constant_values=-1),
        "seq_lens": np.pad(reading.seq_lens, (0, missing)),
        "query_start_loc": np.pad(reading.query_start_loc, (0, missing), mode="edge"),
    }
    device_arrays = {name: jnp.asarray(x.astype(np.int32)) for name, x in arrays.items()}
    per_sequence = not isinstance(reading.is_causal, bool)
    if per_sequence:
        causal = np.pad(np.asarray(reading.is_causal), (0, missing))
        device_arrays["is_causal"] = jnp.asarray(causal)
    limits = {
        "sliding_window": reading.sliding_window,
        "attention_chunk_size": reading.attention_chunk_size,
    }
    in_order = np.array_equal(reading.tokens, np.arange(reading.num_queries))
    return Batch(
        None if in_order else torch.from_numpy(reading.tokens),
        num_tokens,
        device_arrays,
        {name: jnp.asarray(x, jnp.int32) for name, x in limits.items() if x is not None},
        None if per_sequence else bool(reading.is_causal),
        1 if longest == 1 else num_tokens,
    )
