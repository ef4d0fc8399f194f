"""A layer's paged caches as state of a flax nnx module.

    attention = jattn.nnx.PagedAttention(num_blocks, num_kv_heads, block_size, head_dim)
    out = attention(query, key, value, batch)      # writes key and value, then attends

The caches are `KVCache` variables. `nnx.split(model, jattn.nnx.KVCache, ...)` separates them from
the parameters, so that a jitted step can take them as donated arguments and return them. Under
`nnx.jit` and outside `jit`, a call replaces the variables' values. Pools are written in place only
if they are donated; otherwise XLA copies them.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax
from flax import nnx

from jattn import api, cache, checks, formats, implementations, integers, metadata
from jattn import call as calls
from jattn.call import arrays


class KVCache(nnx.Variable):
    """A pool of keys or values: a variable that holds a `jattn.KVArray`."""


class PagedAttention(nnx.Module):
    """Write to caches that the module keeps, and attend to them with `jattn.paged_attention`.

    Args:
      num_blocks, num_kv_heads, block_size, head_dim, value_dim, format, kv_layout: as in
        `jattn.init_kv_cache`.
      values_in_keys: keep one array, whose leading `value_dim` elements are the values (MLA).

    Attributes:
      key_cache, value_cache: `KVCache` variables; `value_cache` is None with `values_in_keys`.

    Raises:
      ValueError: as `jattn.init_kv_cache`, or `values_in_keys` is given without a `value_dim` from
        1 to `head_dim`.

    Example:
      >>> import jattn, jattn.nnx
      >>> import jax.numpy as jnp
      >>> attention = jattn.nnx.PagedAttention(8, 2, 16, 64)
      >>> batch = jattn.AttentionMetadata.from_lengths([3], [3], [[5]], 16)
      >>> query, new = jnp.ones((3, 4, 64), jnp.bfloat16), jnp.ones((3, 2, 64), jnp.bfloat16)
      >>> attention(query, new, new, batch).shape
      (3, 4, 64)
    """

    def __init__(
        self,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        format: formats.Format | tuple[formats.Format, formats.Format] | None = None,
        kv_layout: str = "HND",
        values_in_keys: bool = False,
    ):
        if values_in_keys and value_dim is None:
            raise ValueError(
                "PagedAttention: value_dim is None, but must be the number of leading elements of "
                "a key that are its value, because values_in_keys is True"
            )
        if values_in_keys and integers.is_int(head_dim, 1):
            step = format.values_per_word if isinstance(format, formats.Format) else 1
            with checks.checking("PagedAttention") as problems:
                problems.expect(
                    integers.is_int(value_dim, 1) and value_dim <= head_dim,
                    "value_dim",
                    value_dim,
                    f"an integer from 1 to head_dim = {head_dim}",
                )
                problems.expect(
                    not integers.is_int(value_dim, 1) or value_dim % step == 0,
                    "value_dim",
                    value_dim,
                    f"a multiple of {step}: {format} stores {step} numbers in a word",
                )
        keys, values = cache.init_kv_cache(
            num_blocks,
            num_kv_heads,
            block_size,
            head_dim,
            value_dim=None if values_in_keys else value_dim,
            format=format,
            kv_layout=kv_layout,
            values_in_keys=values_in_keys,
        )
        self.key_cache = KVCache(keys)
        self.value_cache = None if values is None else KVCache(values)
        self.value_dim = value_dim if values_in_keys else None
        self.kv_layout = kv_layout

    def update(
        self,
        key: calls.Array,
        value: calls.Array | None,
        slot_mapping: calls.Array,
        *,
        k_scale: calls.Number | None = None,
        v_scale: calls.Number | None = None,
        implementation: str | None = None,
    ) -> None:
        """Write new tokens: `jattn.update_kv_cache` on the module's caches.

        Args:
          key, value: [T, K, D] and [T, K, V]; value None with `values_in_keys`.
          slot_mapping: int32 [T]; negative writes nothing.
          k_scale, v_scale: scales, which `attend` must be given too.
          implementation: "native", "xla" or None.

        Raises:
          ValueError, UnsupportedError: as `jattn.update_kv_cache`, before anything is written.
        """
        keys, values = cache.update_kv_cache(
            *(*self._caches(), key, value, slot_mapping),
            k_scale=k_scale,
            v_scale=v_scale,
            implementation=implementation,
        )
        self.key_cache.set_value(keys)
        if self.value_cache is not None:
            self.value_cache.set_value(values)

    @overload
    def attend(
        self,
        query: calls.Array,
        batch: metadata.AttentionMetadata,
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[calls.Options[calls.Array]],
    ) -> jax.Array: ...

    @overload
    def attend(
        self,
        query: calls.Array,
        batch: metadata.AttentionMetadata,
        *,
        return_lse: Literal[True],
        **options: Unpack[calls.Options[calls.Array]],
    ) -> tuple[jax.Array, jax.Array]: ...

    @overload
    def attend(
        self,
        query: calls.Array,
        batch: metadata.AttentionMetadata,
        *,
        return_lse: bool,
        **options: Unpack[calls.Options[calls.Array]],
    ) -> jax.Array | tuple[jax.Array, jax.Array]: ...

    def attend(
        self,
        query: calls.Array,
        batch: metadata.AttentionMetadata,
        *,
        return_lse: bool = False,
        **options: Unpack[calls.Options[calls.Array]],
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Attend without writing, for layers that read another layer's keys.

        Args:
          query: [T, H, D].
          batch: the step's metadata.
          return_lse, **options: as in `jattn.paged_attention`: `sliding_window`, `sinks`, ...

        Returns:
          [T, H, V], with `return_lse` also the lse [T, H].

        Raises:
          ValueError, UnsupportedError: as `jattn.paged_attention`.
        """
        found: Any = api.paged_attention(**self._arguments(query, batch, return_lse, options))
        return found

    @overload
    def __call__(
        self,
        query: calls.Array,
        key: calls.Array,
        value: calls.Array | None,
        batch: metadata.AttentionMetadata,
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[calls.Options[calls.Array]],
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        query: calls.Array,
        key: calls.Array,
        value: calls.Array | None,
        batch: metadata.AttentionMetadata,
        *,
        return_lse: Literal[True],
        **options: Unpack[calls.Options[calls.Array]],
    ) -> tuple[jax.Array, jax.Array]: ...

    @overload
    def __call__(
        self,
        query: calls.Array,
        key: calls.Array,
        value: calls.Array | None,
        batch: metadata.AttentionMetadata,
        *,
        return_lse: bool,
        **options: Unpack[calls.Options[calls.Array]],
    ) -> jax.Array | tuple[jax.Array, jax.Array]: ...

    def __call__(
        self,
        query: calls.Array,
        key: calls.Array,
        value: calls.Array | None,
        batch: metadata.AttentionMetadata,
        *,
        return_lse: bool = False,
        **options: Unpack[calls.Options[calls.Array]],
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Call `update` with the batch's slots, then `attend`.

        The arguments of `attend` are checked, and its implementation is chosen, before anything is
        written. `k_scale` and `v_scale` apply to both, and so does an `implementation` that can do
        both.
        """
        arguments = self._arguments(query, batch, return_lse, options)
        given = calls.Arguments[calls.Array].of("PagedAttention.__call__", **arguments)
        implementation = options.get("implementation")
        implementations.choose(calls.describe_call(given), implementation)
        arrays.check_numbers("paged_attention", vars(given))
        self.update(
            *(key, value, batch.slot_mapping),
            k_scale=options.get("k_scale"),
            v_scale=options.get("v_scale"),
            implementation=implementation if implementation in cache.IMPLEMENTATIONS else None,
        )
        return self.attend(query, batch, return_lse=return_lse, **options)

    def _arguments(
        self,
        query: calls.Array,
        batch: metadata.AttentionMetadata,
        return_lse: bool,
        options: calls.Options[calls.Array],
    ) -> dict[str, Any]:
        """Return the keyword arguments for `jattn.paged_attention`."""
        keys, values = self._caches()
        given = {"query": query, "key_cache": keys, "value_cache": values, "return_lse": return_lse}
        dims = {} if self.value_dim is None else {"value_dim": self.value_dim}
        return {**given, **batch.as_kwargs(), **dims, **options}

    def _caches(self) -> tuple[formats.KVArray, formats.KVArray | None]:
        values = None if self.value_cache is None else self.value_cache.get_value()
        return self.key_cache.get_value(), values
