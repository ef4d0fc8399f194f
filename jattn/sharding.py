"""Attention on a mesh: query and KV heads split over one axis, a sequence's keys over another.

Heads are independent, so with `n` devices along the axis each device computes `H / n` query heads
with the KV heads they read, and no data moves between devices:

    K % n == 0:  the caches are split over their KV heads
    K == 1:      every device holds the whole cache (MQA, MLA) and writes every token to it; only
                 the query heads are split

If `1 < K < n`, KV heads must be stored more than once: make the cache with `n` KV heads and write
`jnp.repeat(key, n // K, axis=1)`.

With context parallelism (`jattn.blocks.ContextParallel`) keys are distributed over an axis. Each
device attends to its own keys, and `merge_over` merges their partial results.

Split pools over KV heads, never over D. Split them over blocks only for `shard_map`, where each
device's tables name its own blocks. Any other split moves keys between devices in every call. A
`KVArray` or a float array split over D is refused if its sharding can be seen. On CPUs,
`jattn.paged_attention` and `jattn.update_kv_cache` also leave pools that are split over KV heads in
place under plain `jit`. On GPUs, use the functions here (or `shard_map`): otherwise XLA gathers the
pool.

The functions have the names and arguments of their `jattn` counterparts, plus a mesh and an axis.
All run under `jit`. Axis letters are those of `jattn.paged_attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jattn import api, cache, checks, formats, implementations, softmax
from jattn import call as calls
from jattn.call import arrays
from jattn.call.arguments import KINDS
from jattn.call.caches import check_layout, layout_of
from jattn.formats.kv_array import LAYOUTS

T = TypeVar("T")


def cache_specs(
    kv_cache: formats.Cache | jax.ShapeDtypeStruct | None,
    *,
    mesh: Mesh,
    axis_name: str,
    kv_layout: str | None = None,
) -> formats.KVArray | P | None:
    """Return how a cache of keys or values is split over the mesh: a PartitionSpec per array.

    Args:
      kv_cache: a `KVArray`, a float array, shapes of either, or None.
      mesh: the devices.
      axis_name: the axis of the mesh that splits heads.
      kv_layout: "HND" or "NHD"; None for the cache's own layout, HND for a plain array.

    Returns:
      A `KVArray` of PartitionSpecs for a `KVArray`, a PartitionSpec for an array, None for None.

    Raises:
      ValueError: the mesh has no such axis, neither `K % n == 0` nor `K == 1` holds for its size,
        or `kv_cache` is a `KVRows`.

    Example:
      >>> import jax, jattn, jattn.sharding
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("heads",))
      >>> key_cache, _ = jattn.init_kv_cache(4, 2, 16, 64, format=jattn.Int8())
      >>> specs = cache_specs(key_cache, mesh=mesh, axis_name="heads")
      >>> specs.data == P(None, "heads"), specs.scale == P(None, "heads")
      (True, True)
    """
    with checks.checking("cache_specs") as problems:
        size = _axis_size(problems, mesh, axis_name)
        layout = layout_of(kv_cache, kv_layout=kv_layout)
        check_layout(problems, layout if kv_layout is None else kv_layout)
        if layout in LAYOUTS and kv_layout in LAYOUTS:
            problems.expect(kv_layout == layout, "kv_layout", kv_layout, f"{layout!r}, its own")
        if isinstance(kv_cache, formats.KVRows):
            problems.add(
                "kv_cache",
                "a jattn.KVRows",
                "a jattn.KVArray or a float array; split a jattn.KVRows with jax.shard_map, and "
                "inside it make one of each device's own heads",
            )
        shape = tuple(getattr(kv_cache, "shape", ()))
        if kv_cache is not None and not isinstance(kv_cache, formats.KVRows):
            problems.expect(len(shape) == 4, "kv_cache", kv_cache, "4-d, or a jattn.KVArray")
        split = False
        if kv_cache is not None and size is not None and not problems.found:
            split = _splits(problems, shape[2 if layout == "NHD" else 1], size)
    if kv_cache is None:
        return None
    heads = P(*(None, None, axis_name) if layout == "NHD" else (None, axis_name))
    heads = heads if split else P()
    if not isinstance(kv_cache, formats.KVArray):
        return heads

    def spec(x: jax.Array | None) -> P | None:
        if x is None:
            return None
        if not split or np.ndim(x) == 0:
            return P()
        if x.ndim <= 2:  # a scale per KV head, or per block and head
            return P(*(None,) * (x.ndim - 1), axis_name)
        return heads

    return kv_cache.replace(
        data=heads,
        scale=spec(kv_cache.scale),
        zero=spec(kv_cache.zero),
        group_scale=spec(kv_cache.group_scale),
    )


def init_kv_cache(
    *sizes: int,
    mesh: Mesh,
    axis_name: str,
    kv_layout: str = "HND",
    **options: Unpack[cache.CacheOptions],
) -> tuple[formats.KVArray, formats.KVArray | None]:
    """Make an empty cache on a mesh: no device ever holds more than its own heads.

    Args:
      *sizes: num_blocks, num_kv_heads, block_size, head_dim, as in `jattn.init_kv_cache`.
      mesh: the devices.
      axis_name: the axis of the mesh that splits heads.
      kv_layout: "HND" or "NHD".
      **options: the other arguments of `jattn.init_kv_cache`.

    Returns:
      `(key_cache, value_cache)`, sharded as `cache_specs` says.

    Raises:
      ValueError: as `jattn.init_kv_cache` and `cache_specs`.

    Example:
      >>> import jax, jattn.sharding
      >>> mesh = jax.make_mesh((1,), ("heads",))
      >>> caches = jattn.sharding.init_kv_cache(64, 2, 16, 512, mesh=mesh, axis_name="heads")
      >>> caches[0].shape
      (64, 2, 16, 512)
    """
    make = functools.partial(cache.init_kv_cache, *sizes, kv_layout=kv_layout, **options)
    wanted = _specs(jax.eval_shape(make), mesh, axis_name, kv_layout)
    specs, tree = jax.tree.flatten(wanted, is_leaf=_is_spec)
    named = tuple(sorted(options.items()))
    return _maker(sizes, kv_layout, named, mesh, tuple(specs), tree)()


@functools.lru_cache(maxsize=256)
def _maker(
    sizes: tuple[int, ...],
    kv_layout: str,
    options: tuple[tuple[str, Any], ...],
    mesh: Mesh,
    specs: tuple[P, ...],
    tree: jax.tree_util.PyTreeDef,
) -> Callable[[], tuple[formats.KVArray, formats.KVArray | None]]:
    """Return one function object per kind of pool, so that a model's layers compile it once."""
    make = functools.partial(cache.init_kv_cache, *sizes, kv_layout=kv_layout, **dict(options))
    wanted = jax.tree.unflatten(tree, specs)
    where = jax.tree.unflatten(tree, [NamedSharding(mesh, spec) for spec in specs])
    # Within another `jit`, explicit axes ignore `out_shardings`: types say how arrays are split.
    return jax.jit(lambda: _placed(make(), wanted, mesh), out_shardings=where)


def update_kv_cache(
    key_cache: cache.KeyCache,
    value_cache: cache.ValueCache,
    key: calls.Array,
    value: calls.Array | None,
    slot_mapping: calls.Array,
    *,
    mesh: Mesh,
    axis_name: str,
    k_scale: float | jax.Array | None = None,
    v_scale: float | jax.Array | None = None,
    kv_layout: str | None = None,
    implementation: str | None = None,
) -> tuple[cache.KeyCache, cache.ValueCache]:
    """Run `jattn.update_kv_cache` on a mesh: each device writes its own KV heads.

    Args:
      key_cache, value_cache, key, value, slot_mapping, k_scale, v_scale, kv_layout,
        implementation: as in `jattn.update_kv_cache`, with the arrays of all heads.
      mesh: the devices.
      axis_name: the axis of the mesh that splits heads.

    Returns:
      `(key_cache, value_cache)`, split as before; written in place if donated.

    Raises:
      ValueError: as `jattn.update_kv_cache` and `cache_specs`.
      UnsupportedError: as `jattn.update_kv_cache`.

    Example:
      >>> import jax, jax.numpy as jnp, jattn.sharding
      >>> on = {"mesh": jax.make_mesh((1,), ("heads",)), "axis_name": "heads"}
      >>> caches = jattn.sharding.init_kv_cache(4, 2, 16, 64, **on)
      >>> new = jnp.ones((1, 2, 64), jnp.bfloat16)
      >>> slots = jnp.array([16], jnp.int32)
      >>> caches = jattn.sharding.update_kv_cache(*caches, new, new, slots, **on)
      >>> float(caches[0].values()[1, :, 0].min())
      1.0
    """
    caches = (key_cache, value_cache)
    specs = _specs(caches, mesh, axis_name, kv_layout)
    cache.check_update(
        *(*caches, key, value, slot_mapping),
        k_scale=k_scale,
        v_scale=v_scale,
        kv_layout=kv_layout,
        implementation=implementation,
    )
    rows = P(None, axis_name) if _is_split(specs) else P()
    new = _without_none(key=key, value=value)
    scales = {
        name: jnp.asarray(x, jnp.float32)
        for name, x in _without_none(k_scale=k_scale, v_scale=v_scale).items()
    }

    in_specs = (
        specs,
        {name: rows for name in new},
        P(),
        {name: _scale_spec(x, specs, axis_name) for name, x in scales.items()},
    )
    given = (caches, new, slot_mapping, scales)
    static = {"kv_layout": kv_layout, "implementation": implementation}
    return _sharded(_write, static, given, mesh, in_specs, specs)


def _write(
    caches: tuple[formats.Cache, formats.Cache | None],
    new: Any,  # by name, unchecked
    slots: jax.Array,
    scales: Mapping[str, jax.Array],
    **static: Any,
) -> tuple[formats.Cache, formats.Cache | None]:
    """Run `jattn.update_kv_cache` on one device."""
    keys, values = caches
    return cache.update_kv_cache(
        *(keys, values, new.get("key"), new.get("value"), slots),
        k_scale=scales.get("k_scale"),
        v_scale=scales.get("v_scale"),
        **static,
    )


@overload
def paged_attention(
    query: calls.Array,
    key_cache: formats.Cache,
    value_cache: formats.Cache | None,
    *,
    mesh: Mesh,
    axis_name: str,
    return_lse: Literal[False] = False,
    **options: Unpack[calls.CallOptions[calls.Array]],
) -> jax.Array: ...


@overload
def paged_attention(
    query: calls.Array,
    key_cache: formats.Cache,
    value_cache: formats.Cache | None,
    *,
    mesh: Mesh,
    axis_name: str,
    return_lse: Literal[True],
    **options: Unpack[calls.CallOptions[calls.Array]],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def paged_attention(
    query: calls.Array,
    key_cache: formats.Cache,
    value_cache: formats.Cache | None,
    *,
    mesh: Mesh,
    axis_name: str,
    return_lse: bool,
    **options: Unpack[calls.CallOptions[calls.Array]],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def paged_attention(
    query: calls.Array,
    key_cache: formats.Cache,
    value_cache: formats.Cache | None,
    *,
    mesh: Mesh,
    axis_name: str,
    return_lse: bool = False,
    **options: Unpack[calls.CallOptions[calls.Array]],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Run `jattn.paged_attention` on a mesh: each device computes its own query heads.

    Args:
      query: [T, H, D]; H a multiple of the axis size.
      key_cache, value_cache: as in `jattn.paged_attention`, with the arrays of all heads.
      mesh: the devices.
      axis_name: the axis of the mesh that splits heads.
      return_lse, **options: as in `jattn.paged_attention`.

    Returns:
      What `jattn.paged_attention` returns, split over its heads.

    Raises:
      ValueError: as `jattn.paged_attention` and `cache_specs`; H is no multiple of the axis size.
      UnsupportedError: as `jattn.paged_attention`.

    Example:
      >>> import jax, jax.numpy as jnp, jattn.sharding
      >>> on = {"mesh": jax.make_mesh((1,), ("heads",)), "axis_name": "heads"}
      >>> caches = jattn.sharding.init_kv_cache(4, 2, 16, 64, **on)
      >>> out = jattn.sharding.paged_attention(
      ...     jnp.ones((1, 8, 64)), *caches, block_tables=jnp.array([[3]], jnp.int32),
      ...     seq_lens=jnp.array([5], jnp.int32), **on)
      >>> out.shape
      (1, 8, 64)
    """
    caches = (key_cache, value_cache)
    specs = _specs(caches, mesh, axis_name, options.get("kv_layout"))
    size = mesh.shape[axis_name]
    with checks.checking("paged_attention") as problems:
        shape = arrays.shape_of(query)
        problems.expect(
            len(shape) == 3 and shape[1] % size == 0,
            "query",
            query,
            f"[T, H, D] with H a multiple of the {size} devices along {axis_name!r}",
        )
    given = calls.Arguments[calls.Array].of(
        "paged_attention",
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        return_lse=return_lse,
        **options,
    )
    implementations.names(given.implementation)  # a wrong one may have no hash
    calls.describe_call(given)  # so errors describe the whole call, not one device's
    arrays.check_numbers("paged_attention", vars(given))
    traced: dict[str, Any] = {}
    static: dict[str, Any] = {"return_lse": return_lse}
    for name, x in options.items():
        kind = KINDS[name]
        if x is None or kind.static or arrays.is_bool(x):
            static[name] = tuple(x) if isinstance(x, list) else x
        else:  # numbers are arrays inside: a new one compiles nothing
            traced[name] = jnp.asarray(x, kind.dtype) if kind.number else x

    def spec(name: str, x: jax.Array) -> P:
        kind = KINDS[name]
        if kind.per_kv_head:
            return _scale_spec(x, specs, axis_name)
        if kind.query_heads:
            return P(*(None,) * (x.ndim - kind.query_heads), axis_name)
        return P()

    heads = P(None, axis_name)
    in_specs = (heads, specs, {name: spec(name, x) for name, x in traced.items()})
    out_specs = (heads, heads) if return_lse else heads
    return _sharded(_attend, static, (query, caches, traced), mesh, in_specs, out_specs)


def _attend(
    query: jax.Array,
    caches: tuple[formats.Cache, formats.Cache | None],
    traced: Mapping[str, Any],
    **static: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Run `jattn.paged_attention` on one device."""
    keys, values = caches
    return api.paged_attention(query, keys, values, **static, **traced)


def merge_over(out: jax.Array, lse: jax.Array, axis_name: str) -> tuple[jax.Array, jax.Array]:
    r"""Merge the results of all devices along an axis, each over its own keys.

        lse = log(sum_i exp(lse_i))
        out = sum_i exp(lse_i - lse) * out_i

    This is `jattn.merge_attention_states` over all devices, for use inside `shard_map`, and just as
    differentiable. Count a sink once: pass it on one device only, or merge `(zeros, sink)` later.

    Args:
      out: [..., V], this device's result.
      lse: [...] float32, natural logarithm.
      axis_name: the axis of the mesh that splits keys.

    Returns:
      `(out [..., V], lse [...])`, the same on every device; zeros and -inf where none saw a key.

    Raises:
      ValueError: an argument is not an array, or shapes do not fit together.

    Example:
      >>> import jax, jax.numpy as jnp, jattn.sharding
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("keys",))
      >>> merge = jax.shard_map(lambda o, l: jattn.sharding.merge_over(o, l, "keys"),
      ...                       mesh=mesh, in_specs=(P(), P()), out_specs=(P(), P()))
      >>> out, lse = merge(jnp.ones((2, 4)), jnp.zeros(2))
      >>> float(out[0, 0]), float(lse[0])
      (1.0, 0.0)
    """
    with checks.checking("merge_over") as problems:
        for name, x in (("out", out), ("lse", lse)):
            is_array = isinstance(x, jax.Array | np.ndarray)
            problems.expect(is_array, name, x, "an array")
    with checks.checking("merge_over") as problems:
        problems.require(
            lse.shape == out.shape[:-1],
            "lse",
            checks.describe(lse),
            f"of shape {list(out.shape[:-1])}, to match out",
        )
    return softmax.merge_results([(out, lse)], axis_name)


def _axis_size(problems: checks.Problems, mesh: Mesh, axis_name: str) -> int | None:
    is_mesh = isinstance(mesh, Mesh | AbstractMesh)
    if not problems.expect(is_mesh, "mesh", mesh, "a jax.sharding.Mesh"):
        return None
    known = problems.require(
        axis_name in mesh.axis_names, "axis_name", repr(axis_name), f"an axis of {dict(mesh.shape)}"
    )
    return mesh.shape[axis_name] if known else None


def _splits(problems: checks.Problems, kv_heads: int, size: int) -> bool:
    """Whether the KV heads are split over `size` devices; if not, each holds them all."""
    problems.require(
        kv_heads % size == 0 or kv_heads == 1,
        "kv_cache",
        f"{kv_heads} KV heads",
        f"a multiple of the {size} devices along the axis, or 1 (with fewer heads than devices, "
        "make the cache with one head per device and write each head where it is read)",
    )
    return kv_heads % size == 0


def _sharded(
    f: Callable[..., Any],
    static: Mapping[str, object],
    given: tuple[object, ...],
    mesh: Mesh,
    in_specs: object,
    out_specs: object,
) -> Any:
    """Call `f(*given, **static)` on every device with its part of the arrays."""
    specs, tree = jax.tree.flatten((in_specs, out_specs), is_leaf=_is_spec)
    run = _program(f, tuple(sorted(static.items())), mesh, tuple(specs), tree)
    return run(*_placed(given, in_specs, mesh))


@functools.lru_cache(maxsize=256)
def _program(
    f: Callable[..., Any],
    static: tuple[tuple[str, object], ...],
    mesh: Mesh,
    specs: tuple[P, ...],
    tree: jax.tree_util.PyTreeDef,
) -> Callable[..., Any]:
    """Return one function object per kind of call: a new one would compile in every eager call."""
    in_specs, out_specs = jax.tree.unflatten(tree, specs)
    one = functools.partial(f, **dict(static))
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def _without_none(**given: T | None) -> dict[str, T]:
    return {name: x for name, x in given.items() if x is not None}


def _specs(
    caches: tuple[formats.Cache | jax.ShapeDtypeStruct | None, ...],
    mesh: Mesh,
    axis_name: str,
    kv_layout: str | None,
) -> tuple[formats.KVArray | P | None, ...]:
    return tuple(
        cache_specs(one, mesh=mesh, axis_name=axis_name, kv_layout=kv_layout) for one in caches
    )


def _placed(given: T, specs: object, mesh: Mesh) -> T:
    """Reshard arrays to `specs` if the mesh has explicit axes, which would refuse other shardings.

    With automatic axes, XLA moves the arrays itself.
    """
    if AxisType.Explicit not in mesh.axis_types:
        return given

    def one(spec: P, x: jax.Array) -> jax.Array:
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))

    return jax.tree.map(one, specs, given, is_leaf=_is_spec)


def _is_spec(x: object) -> bool:
    return isinstance(x, P)


def _is_split(specs: tuple[formats.KVArray | P | None, ...]) -> bool:
    return any(spec != P() for spec in jax.tree.leaves(specs, is_leaf=_is_spec))


def _scale_spec(
    scale: jax.Array, specs: tuple[formats.KVArray | P | None, ...], axis_name: str
) -> P:
    """Return the spec of a given scale: one per KV head is split with the heads."""
    return P(axis_name) if np.ndim(scale) == 1 and _is_split(specs) else P()
