"""Create a paged KV cache, and write new tokens into it in place."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp

from jattn import call as calls
from jattn import capability, checks, formats, integers
from jattn.call import arrays, caches
from jattn.cpu.native import huge_pages
from jattn.cpu.native import writing as native
from jattn.cpu.xla import writing as xla
from jattn.formats import base

# The implementations of `update_kv_cache`.
IMPLEMENTATIONS = ("native", "xla")

KeyCache = TypeVar("KeyCache", bound=formats.Cache)
ValueCache = TypeVar("ValueCache", bound=formats.Cache | None)


class _Contents(TypedDict, total=False):
    value_dim: int | None
    format: formats.Format | tuple[formats.Format, formats.Format] | None


class CacheOptions(_Contents, total=False):
    """Keyword arguments of `init_kv_cache`, except the layout."""

    values_in_keys: bool


class _PairOptions(_Contents, total=False):
    kv_layout: str


# Unwritten slots are never read, so they may as well be zeros.


@overload
def init_kv_cache(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    *,
    values_in_keys: Literal[False] = False,
    **options: Unpack[_PairOptions],
) -> tuple[formats.KVArray, formats.KVArray]: ...


@overload
def init_kv_cache(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    *,
    values_in_keys: Literal[True],
    **options: Unpack[_PairOptions],
) -> tuple[formats.KVArray, None]: ...


@overload
def init_kv_cache(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    *,
    values_in_keys: bool,
    **options: Unpack[_PairOptions],
) -> tuple[formats.KVArray, formats.KVArray | None]: ...


@integers.with_python_ints
def init_kv_cache(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    format: formats.Format | tuple[formats.Format, formats.Format] | None = None,
    kv_layout: str = "HND",
    values_in_keys: bool = False,
) -> tuple[formats.KVArray, formats.KVArray | None]:
    """Make an empty paged cache: a pair of `KVArray`s for keys and values.

    On Linux CPUs, arrays of 4 MiB or more use huge pages if the native library is present and the
    system lets programs request them, so that decode walks the page table less often.

    Args:
      num_blocks: N, blocks in the pool.
      num_kv_heads: K.
      block_size: S, tokens per block.
      head_dim: D of the keys.
      value_dim: V of the values; None for D.
      format: how numbers are stored, or a pair for keys and values; None for
        `jattn.Dense("bfloat16")`. If `format.takes_scale`, one scale per cache starts at 1: set
        yours with `cache.replace(scale=...)`, float32 of shape [] or [K] (see `jattn.calibrate`).
      kv_layout: "HND" [N, K, S, D] (fastest here) or "NHD" [N, S, K, D].
      values_in_keys: make no array of values, because they are the leading part of the keys. To
        read them, pass `value_dim=V` to `paged_attention` (MLA: head_dim 576, V 512).

    Returns:
      `(key_cache, value_cache)`; `(key_cache, None)` with `values_in_keys`.

    Raises:
      ValueError: a size is below 1, there are 2^31 slots or more, the format or layout is unknown,
        or the format cannot hold a head size.

    Example:
      >>> import jattn
      >>> key_cache, value_cache = jattn.init_kv_cache(64, 2, 16, 512)
      >>> key_cache.shape, key_cache.dtype.name, key_cache.nbytes
      ((64, 2, 16, 512), 'bfloat16', 2097152)
    """
    format = formats.Dense("bfloat16") if format is None else format
    pair = format if isinstance(format, tuple) else (format, format)
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {
        "num_blocks": num_blocks,
        "num_kv_heads": num_kv_heads,
        "block_size": block_size,
        "head_dim": head_dim,
        "value_dim": value_dim,
    }
    with checks.checking("init_kv_cache") as problems:
        good = True
        for name, size in sizes.items():
            good &= problems.expect(
                integers.is_int(size, 1), name, size, "an integer of at least 1"
            )
        if good:
            integers.require_int32_slots(problems, "num_blocks", num_blocks, block_size)
        known = problems.expect(
            len(pair) == 2 and all(isinstance(one, formats.Format) for one in pair),
            "format",
            format,
            "a jattn.Dense, Fp8, Int8, Int4 or Nvfp4, or a pair of them",
        )
        for name, one in zip(
            ("head_dim", "value_dim"), pair if good and known else (), strict=False
        ):
            problems.require(
                sizes[name] % one.dim_multiple == 0,
                name,
                str(sizes[name]),
                f"a multiple of {one.dim_multiple} for {one}",
            )
        caches.check_layout(problems, kv_layout)
        problems.expect(arrays.is_bool(values_in_keys), "values_in_keys", values_in_keys, "a bool")
        problems.require(
            not values_in_keys or value_dim == head_dim,
            "value_dim",
            f"{value_dim} with values_in_keys",
            "None: pass value_dim= to paged_attention",
        )
        problems.require(
            not (values_in_keys and known) or pair[0] == pair[1],
            "format",
            f"{format} with values_in_keys",
            "one format: there is no array of values",
        )

    def empty(dim: int, format: formats.Format) -> formats.KVArray:
        inner = (block_size, num_kv_heads) if kv_layout == "NHD" else (num_kv_heads, block_size)
        words = (num_blocks, *inner, dim // format.values_per_word)
        shapes = format.quant_param_shapes(words, kv_layout)
        scale = huge_pages.ones(shapes.scale or (), jnp.float32) if format.per is not None else None
        return formats.KVArray(
            huge_pages.zeros(words, format.word_dtype),
            scale,
            format,
            None if shapes.zero is None else huge_pages.zeros(shapes.zero, jnp.float32),
            None if shapes.group_scale is None else huge_pages.zeros(shapes.group_scale, jnp.uint8),
            kv_layout,
        )

    values = None if values_in_keys else empty(value_dim, pair[1])
    return empty(head_dim, pair[0]), values


def update_kv_cache(
    key_cache: KeyCache,
    value_cache: ValueCache,
    key: calls.Array,
    value: calls.Array | None,
    slot_mapping: calls.Array,
    *,
    k_scale: calls.Number | None = None,
    v_scale: calls.Number | None = None,
    kv_layout: str | None = None,
    implementation: str | None = None,
) -> tuple[KeyCache, ValueCache]:
    """Write one step's keys and values into their slots.

        cache[block, head, offset] = encode(key[t, head] / scale)
        slot_mapping[t] = block * S + offset

    If the caches are donated to the surrounding `jit`, they are written in place, and nothing of
    the pool's size is copied or converted. (Exception: "xla" on CPU copies plain arrays of fp8, and
    before JAX 0.12 of bfloat16, once and bit for bit; `KVArray`s are not copied.) A slot below 0,
    or N * S and above, is padding and writes nothing. If two tokens of a call name the same slot, a
    CPU keeps one of them, and which one is unspecified; a GPU may mix the numbers of both
    (`AttentionMetadata.check` detects this). Numbers are rounded to nearest even; formats narrower
    than 16 bits saturate at their largest value. NaN stays NaN. In formats without NaN
    (`jattn.Int8`, `jattn.Int4`, `jattn.Nvfp4`) it makes all numbers that share its scale NaN.

    A scale per token and head is written with the token. A scale per block and head is set by the
    call that writes the block's first slot, from all it writes into that block: `8 max |x|` becomes
    the format's largest number. This lets later tokens be eight times as large before they
    saturate, and costs fp8, a float, no precision. Later calls keep the scale, so that the value of
    a stored token never changes.

    Args:
      key_cache, value_cache: two `KVArray`s, or two float arrays, HND [N, K, S, D] and [N, K, S, V]
        or NHD; or a `KVRows` and None.
      key: [T, K, D] floats.
      value: [T, K, V] floats; None if values are the first numbers of keys, that is, if a `KVRows`
        has a `value_start` of 0, or else if `value_cache` is None.
      slot_mapping: int32 [T].
      k_scale, v_scale: what a stored value is multiplied by when read, [] or [K]; None for the
        cache's own scale, or 1.
      kv_layout: "HND" or "NHD"; None for the caches' own, HND for plain arrays.
      implementation: "native" (C++ on CPUs), or "xla", which runs everywhere; None for "native" if
        it can run the call, except in a `shard_map` that leaves axes automatic. Both write the same
        bits.

    Returns:
      `(key_cache, value_cache)`, of the same types as the arguments.

    Raises:
      ValueError: arguments do not fit; raised before anything is written, and lists them all.
      UnsupportedError: the named implementation cannot write these caches; lists every reason.

    Example:
      >>> import jax, jax.numpy as jnp, jattn
      >>> caches = jattn.init_kv_cache(4, 2, 16, 64)
      >>> step = jax.jit(jattn.update_kv_cache, donate_argnums=(0, 1))
      >>> new = jnp.ones((3, 2, 64), jnp.bfloat16)
      >>> caches = step(*caches, new, new, jnp.array([16, 17, -1], jnp.int32))
      >>> float(caches[0].values()[1, :, :2].min()), float(caches[0].values()[1, :, 2:].max())
      (1.0, 0.0)
    """
    found = check_update(
        *(key_cache, value_cache, key, value, slot_mapping),
        k_scale=k_scale,
        v_scale=v_scale,
        kv_layout=kv_layout,
        implementation=implementation,
    )
    rows = key_cache if isinstance(key_cache, formats.KVRows) else None
    slots = jnp.asarray(slot_mapping)

    def rows_of(cache: formats.Cache, new: object, scale: calls.Number | None) -> xla.NewRows:
        pool = formats.Quantized(jnp.asarray(formats.storage(cache)[0]), caches.quant_params(cache))
        scale = caches.per_head_scale(scale, cache, found.num_kv_heads)
        return xla.NewRows(pool, jnp.asarray(new), scale)

    layout, kinds = found.kv_layout, [found.key_format, found.value_format]
    if rows is not None:
        scales = [caches.per_head_scale(x, None, found.num_kv_heads) for x in (k_scale, v_scale)]
        pairs = zip((key,) if rows.values_in_keys else (key, value), scales, strict=False)
        joined = _join([_over_scale(x, scale) for x, scale in pairs], rows)
        pool = formats.Quantized(jnp.asarray(rows.data), formats.QuantParams())
        new_rows, layout = [xla.NewRows(pool, joined, None)], "NHD"
    else:
        new_rows = [rows_of(key_cache, key, k_scale)]
        if value_cache is not None:
            new_rows.append(rows_of(value_cache, value, v_scale))
    refusals_of = native.automatic_refusals if implementation is None else native.refusals
    refusals = refusals_of(new_rows)
    if implementation == "native" and refusals:
        raise capability.UnsupportedError(
            f"update_kv_cache: native cannot write these: {'; '.join(refusals)}"
        )
    write = xla.run if refusals or implementation == "xla" else native.run
    pools = write(xla.Writing(tuple(kinds[: len(new_rows)]), layout), tuple(new_rows), slots)
    if value_cache is None:
        return _with(key_cache, pools[0]), value_cache
    return _with(key_cache, pools[0]), _with(value_cache, pools[1])


def _over_scale(x: Any, scale: jax.Array | None) -> jax.Array:
    """Divide `x` [T, K, D] by scales [K]; None means 1."""
    return base.divided(jnp.asarray(x), None if scale is None else scale[None, :, None])


def _join(new_rows: list[jax.Array], cache: formats.KVRows) -> jax.Array:
    """Join keys [T, K, D], and values [T, K, V] if given, into tokens of a `KVRows`."""
    dtype = new_rows[0].dtype if len({x.dtype for x in new_rows}) == 1 else jnp.dtype(jnp.float32)
    heads = (0, cache.num_rows - cache.num_kv_heads)
    ends = (cache.value_start, cache.row_width) if len(new_rows) == 2 else (cache.row_width,)
    parts, at = [], 0
    for x, end in zip(new_rows, ends, strict=True):
        padding = ((0, 0), heads, (0, end - at - x.shape[2]))
        parts.append(jnp.pad(x.astype(dtype), padding))
        at = end
    return jnp.concatenate(parts, axis=2).reshape(-1, *cache.token_shape)


def _with(cache: Any, pool: formats.Quantized) -> Any:
    """Return the cache with the words and scales of `pool`."""
    if isinstance(cache, formats.KVRows):
        return cache.replace(data=pool.words)
    if not isinstance(cache, formats.KVArray):
        return pool.words
    kept = cache.scale if cache.format.takes_scale else pool.quant_params.scale
    params = pool.quant_params._replace(scale=kept)
    return cache.replace(data=pool.words, **params._asdict())


def check_update(
    key_cache: formats.Cache,
    value_cache: formats.Cache | None,
    key: object,
    value: object,
    slot_mapping: object,
    *,
    k_scale: object,
    v_scale: object,
    kv_layout: str | None,
    implementation: object,
) -> caches.Caches:
    """Check all arguments of `update_kv_cache` by shape and dtype; return facts about its caches.

    Raises:
      ValueError: arguments do not fit; lists every mismatch.
    """
    arguments: dict[str, object] = {"key_cache": key_cache, "value_cache": value_cache}
    arguments |= {"key": key, "value": value, "slot_mapping": slot_mapping}
    arguments |= {"k_scale": k_scale, "v_scale": v_scale}
    arrays.check_given("update_kv_cache", arguments)
    arrays.check_numbers("update_kv_cache", arguments)
    with checks.checking("update_kv_cache") as problems:
        found = caches.check_caches(problems, key_cache, value_cache, kv_layout)
        heads = None if found is None else found.num_kv_heads
        dims = (None, None) if found is None else (found.head_dim, found.value_dim)
        tokens = next(iter(arrays.shape_of(slot_mapping)), None)
        arrays.check_int32(problems, "slot_mapping", slot_mapping, (None,), ("T",))
        rows = key_cache if isinstance(key_cache, formats.KVRows) else None
        has_value = value_cache is not None if rows is None else not rows.values_in_keys
        new = [("key", key, "D", dims[0]), ("value", value, "V", dims[1])]
        for name, x, last, size in new[: 2 if has_value else 1]:
            want = (tokens, heads, size)
            problems.expect(
                arrays.matches(x, jnp.floating, want),
                name,
                x,
                f"floating point of shape [T, K, {last}]"
                + ("" if found is None else f" = {list(want)}"),
            )
        for name, given in (("value", value), ("v_scale", v_scale)):
            must = "None: keys hold values" + ("" if rows else ", since value_cache is None")
            problems.expect(given is None or has_value, name, given, must)
        caches.check_scale(problems, "k_scale", k_scale, key_cache, heads)
        caches.check_scale(problems, "v_scale", v_scale, value_cache, heads)
        problems.require(
            implementation in (None, *IMPLEMENTATIONS),
            "implementation",
            repr(implementation),
            "None, 'native' or 'xla'",
        )
    assert found is not None
    return found
