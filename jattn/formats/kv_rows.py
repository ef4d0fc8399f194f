"""Keys and values of a paged cache in one array, side by side in every head's row."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from jattn import checks, pytrees
from jattn.formats.base import Format
from jattn.formats.kv_array import LAYOUTS, KVArray

ROWS_LAYOUT = "rows"
ALL_LAYOUTS = (*LAYOUTS, ROWS_LAYOUT)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where in a token of a `KVRows` keys and values are stored: static.

    Attributes:
      count: rows of a token, K or more.
      width: numbers of a row.
      value_start: where in a row its value begins.
    """

    count: int
    width: int
    value_start: int


@pytrees.register()
@dataclasses.dataclass(frozen=True, eq=False)
class KVRows:
    """One array of keys and values: a row holds a head's key and, further on, its value.

        numbers of a token, in order: rows of `row_width`, one per KV head
        key = row[:head_dim],    value = row[value_start : value_start + value_dim]

    Pass it as the key cache, with a value cache of None, to `paged_attention`, `explain` and
    `update_kv_cache`. They use it in place: no implementation copies it to separate keys from
    values. Rows past K and numbers outside a row's key and value are never read; writing a token
    fills them with zeros. The array keeps its shape, because XLA copies a donated pool if axes of
    length 1 are added or dropped.

    | cache of | data | |
    |---|---|---|
    | TPU kernels of JAX | [N, S, 2 K, D] | `KVRows.pairs(data)` |
    | tpu-inference | [N, S, 2 K / pack, pack, D] | `KVRows.pairs(data, num_kv_heads=K)` |
    | | [N, S, K, 2, D] | `KVRows.pairs(data)` |
    | heads of 64, rows of 128 | [N, S, K, 128] | `KVRows(data, K, 64, 128, 64, 64)` |
    | MLA, values in the keys | [N, S, W] | `KVRows(data, 1, 576, W, 0, 512)` |

    Attributes:
      data: [N, S, ...] floats (or words of `format`), a token's numbers in any number of axes.
      num_kv_heads: K; static, like all fields below.
      head_dim: D of the keys.
      row_width: numbers from one head's key to the next head's.
      value_start: where in a row its value begins; 0 if values are the first numbers of keys.
      value_dim: V.
      format: `Dense`, or `Fp8` with a scale per head, if `data` holds its words; None if `data`
        holds the numbers themselves. Scales come from the call, as `k_scale` and `v_scale`.
    """

    data: jax.Array
    num_kv_heads: int = dataclasses.field(metadata={"static": True})
    head_dim: int = dataclasses.field(metadata={"static": True})
    row_width: int = dataclasses.field(metadata={"static": True})
    value_start: int = dataclasses.field(metadata={"static": True})
    value_dim: int = dataclasses.field(metadata={"static": True})
    format: Format | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def pairs(
        cls,
        data: jax.Array,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        format: Format | None = None,
    ) -> KVRows:
        """Make rows from keys and values that alternate, each of `data.shape[-1]` numbers.

        Args:
          data: [N, S, ..., W]; the axes in between hold an even number of vectors of W.
          num_kv_heads: K; None for the number of pairs.
          head_dim: D and V; None for W.
          format: as the attribute.

        Example:
          >>> import jax.numpy as jnp, jattn
          >>> cache = jattn.KVRows.pairs(jnp.zeros((8, 16, 2, 4, 128)), num_kv_heads=3)
          >>> cache.row_width, cache.value_start, cache.num_rows
          (256, 128, 4)
        """
        with checks.checking("KVRows.pairs") as problems:
            problems.expect(checks.numpy_dtype(data) is not None, "data", data, "an array")
        shape = tuple(data.shape)
        with checks.checking("KVRows.pairs") as problems:
            even = len(shape) > 3 and math.prod(shape[2:-1]) % 2 == 0
            problems.require(
                even, "data", f"of shape {list(shape)}", "[N, S, ..., W] with pairs of vectors of W"
            )
        width = shape[-1]
        heads = math.prod(shape[2:-1]) // 2 if num_kv_heads is None else num_kv_heads
        dim = width if head_dim is None else head_dim
        return cls(data, heads, dim, 2 * width, width, dim, format)

    @property
    def token_shape(self) -> tuple[int, ...]:
        """The shape of one token in `data`."""
        return tuple(self.data.shape[2:])

    @property
    def num_rows(self) -> int:
        """Rows of a token: K, or more if the array is padded."""
        return math.prod(self.token_shape) // self.row_width

    @property
    def values_in_keys(self) -> bool:
        """Whether values are the first numbers of keys."""
        return self.value_start == 0

    @property
    def kv_layout(self) -> str:
        """The name of this layout in capability rows."""
        return ROWS_LAYOUT

    def rows(self) -> Rows:
        """Return where in a token keys and values are stored."""
        return Rows(self.num_rows, self.row_width, self.value_start)

    def replace(self, **changes: Any) -> KVRows:
        """Return a copy with some fields changed, e.g. `cache.replace(data=...)`."""
        return dataclasses.replace(self, **changes)


Cache = jax.Array | KVArray | KVRows


def storage(
    cache: Cache | jax.ShapeDtypeStruct,
) -> tuple[jax.Array | jax.ShapeDtypeStruct, Format | None]:
    """Return `(array of words, format)` of a cache; a plain array has no format."""
    if isinstance(cache, KVArray | KVRows):
        return cache.data, cache.format
    return cache, None
