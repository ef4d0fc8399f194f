"""Native calls over sharded arrays, for tests in a process with four devices."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
import jattn.sharding
from jattn import testing

TABLES = np.array([[5, 0], [2, 4], [1, 3]], np.int32)
LENS = np.array([3, 8, 5], np.int32)
SLOTS = np.array([20, 21, 22, 8, 9, 10, 11, 16, 17, 18, 19, 4, 5, 6, 7, 12], np.int32)
MOVES = re.compile(r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)")


@dataclasses.dataclass(frozen=True)
class Case:
    """A cache, its layout, and a mesh of four devices."""

    format: jattn.Dense | jattn.Fp8 | jattn.Int8 | jattn.Int4 | jattn.Nvfp4 | None = None  # plain
    kv_layout: str = "HND"
    kv_heads: int = 4
    latent: int | None = None  # values are the first numbers of keys
    axes: str = "Auto"

    def mesh(self) -> Any:
        kind = (AxisType[self.axes],) * 2
        return jax.make_mesh((2, 2), ("data", "heads"), axis_types=kind)


class Batch:
    """The arrays of a case, on one device or on the case's mesh."""

    def __init__(self, case: Case, mesh: Any = None, blocks: int = 6):
        rng = np.random.default_rng(0)
        self.case, self.mesh = case, mesh
        heads = P(None, "heads")
        new = heads if case.kv_heads > 1 else P()

        def floats(shape: tuple[int, ...], spec: P) -> jax.Array:
            return self.put(jnp.asarray(rng.standard_normal(shape), jnp.float32), spec)

        how = {"format": case.format, "kv_layout": case.kv_layout}
        sizes = (blocks, case.kv_heads, 4, 16)
        caches = jattn.init_kv_cache(*sizes, **how, values_in_keys=case.latent is not None)
        if case.format is None:
            caches = tuple(cache and cache.numbers() for cache in caches)
        elif case.format.takes_scale:
            scale = jnp.arange(1, case.kv_heads + 1, dtype=jnp.float32) / 2
            caches = tuple(x and x.replace(scale=jnp.copy(scale)) for x in caches)
        if mesh is not None:
            on = {"mesh": mesh, "axis_name": "heads", "kv_layout": case.kv_layout}
            specs = [jattn.sharding.cache_specs(cache, **on) for cache in caches]
            caches = jax.tree.map(self.put, caches, tuple(specs))
        self.caches = caches
        self.query = floats((3, 8, 16), heads)
        rows = [floats((16, case.kv_heads, 16), new) for _ in range(2)]
        self.rows = (rows[0], None if case.latent else rows[1])
        by_head = P("heads")
        self.options = {"sinks": floats((8,), by_head), "alibi_slopes": floats((8,), by_head)}
        if case.kv_layout == "NHD":
            bias = floats((8, 9), by_head)
            self.options = {"sinks": floats((3, 8), heads), "relative_bias": bias}
        self.batch = {
            "block_tables": self.put(jnp.asarray(TABLES), P()),
            "seq_lens": self.put(jnp.asarray(LENS), P()),
        }

    def put(self, x: jax.Array, spec: P) -> jax.Array:
        return x if self.mesh is None else jax.device_put(x, NamedSharding(self.mesh, spec))

    def step(self) -> Any:
        """Return a function of (caches, query, rows, options, batch) that writes, then attends."""
        case = self.case

        def run(caches: Any, query: Any, rows: Any, options: Any, batch: Any) -> Any:
            caches = jattn.update_kv_cache(
                *caches, *rows, SLOTS, kv_layout=case.kv_layout, implementation="native"
            )
            out, lse = jattn.paged_attention(
                *(query, *caches),
                **batch,
                **options,
                kv_layout=case.kv_layout,
                value_dim=case.latent,
                return_lse=True,
                implementation="native",
            )
            return caches, out, lse

        return jax.jit(run, donate_argnums=0)

    def given(self) -> tuple[Any, ...]:
        return self.caches, self.query, self.rows, self.options, self.batch


def check(case: Case) -> None:
    """Check that four devices compute what one does, without communication or copies."""
    one, many = Batch(case), Batch(case, case.mesh())
    want = one.step()(*one.given())
    compiled = many.step().lower(*many.given()).compile()
    text = compiled.as_text()
    assert not MOVES.search(text), (case, MOVES.findall(text))
    assert text.count('"jattn_native_attend"') == 1, case
    assert text.count('"jattn_native_update"') == 1, case
    have = many.step()(*many.given())
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-5, atol=1e-6
        )
    split = have[1].sharding.shard_shape(have[1].shape)
    assert split == (3, 4, case.latent or 16), (case, split)
    share = jax.tree.leaves(have[0])[0].sharding.shard_shape(have[0][0].shape)
    assert max(case.kv_heads // 2, 1) in share[1:3], (case, share)
    large = Batch(case, case.mesh(), blocks=2**13)
    compiled = large.step().lower(*large.given()).compile()
    shares = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), large.caches
    )
    testing.assert_nothing_pool_sized(compiled, shares, max_temporaries=2**17)


def moves(compiled: Any) -> list[str]:
    """Return the collectives of a compiled program that must hold one native call."""
    text = compiled.as_text()
    assert text.count('"jattn_native_attend"') == 1
    return MOVES.findall(text)


def attend(
    query: Any, key_cache: Any, value_cache: Any, implementation: str = "native"
) -> jax.Array:
    return jattn.paged_attention(
        *(query, key_cache, value_cache),
        block_tables=jnp.asarray(TABLES),
        seq_lens=jnp.asarray(LENS),
        implementation=implementation,
    )


def floats(*shape: int) -> jax.Array:
    rng = np.random.default_rng(shape)
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def close(have: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


def check_other_shardings() -> None:
    """Check that the result is right whatever is split, and that gathering a pool warns."""
    mesh = Case().mesh()
    given = floats(3, 8, 16), floats(6, 4, 4, 16), floats(6, 4, 4, 17)[..., 1:]
    want = attend(*given)

    def put(specs: tuple[P, P, P], arrays: Any = given, mesh: Any = mesh) -> Any:
        placed = zip(arrays, specs, strict=True)
        return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in placed]

    heads, both, none = P(None, "heads"), P(None, ("data", "heads")), P()
    for specs, moved in (
        ((heads, heads, heads), False),
        ((both, both, both), False),
        ((P(None, ("heads", "data")),) * 3, False),
        ((none, heads, heads), True),  # gathers the result, which need not be split
        ((heads, none, none), True),  # queries
        ((P(None, None, "heads"), heads, heads), True),
    ):
        arrays = put(specs)
        assert bool(moves(jax.jit(attend).lower(*arrays).compile())) == moved, specs
        close(jax.jit(attend)(*arrays), want)
    for axes in ("Auto", "Explicit"):
        arrays = put((heads, P("data"), P("data")), mesh=Case(axes=axes).mesh())
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            close(jax.jit(attend)(*arrays), want)
        text = " ".join(str(warning.message) for warning in found)
        assert "key_cache [6, 4, 4, 16] is split over devices along axis 0" in text, text
        assert "value_cache [6, 4, 4, 16] is split over devices along axis 0" in text, text

    # Two KV heads on four devices, and columns split over all of them: pools stay where they are.
    line = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,))

    def step(query: Any, new: Any, *caches: Any) -> Any:
        new = new.reshape(16, 2, 16)
        caches = jattn.update_kv_cache(*caches, new, 2 * new, SLOTS, implementation="native")
        return attend(query.reshape(3, 8, 16), *caches), *caches

    columns = P(None, "tensor")
    arrays = floats(3, 128), floats(16, 32), given[1][:, :2], given[2][:, :2]
    placed = put((columns, columns, none, none), arrays, line)
    compiled = jax.jit(step, donate_argnums=(2, 3)).lower(*placed).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * arrays[2].nbytes
    want = jax.jit(step)(*arrays)
    close(jax.jit(step)(*placed), want)


def check_transformations() -> None:
    """Check that `vmap` and `scan` keep pools split, gradients, and partly manual meshes."""
    mesh = Case().mesh()
    given = floats(3, 8, 16), floats(6, 4, 4, 16), floats(6, 4, 4, 17)[..., 1:]
    heads = P(None, "heads")
    placed = [jax.device_put(x, NamedSharding(mesh, heads)) for x in given]
    many = jax.jit(jax.vmap(attend, in_axes=(0, None, None)))
    twice = jnp.stack([given[0], 2 * given[0]])
    split = jax.device_put(twice, NamedSharding(mesh, P(None, None, "heads")))
    assert not moves(many.lower(split, *placed[1:]).compile())
    close(many(split, *placed[1:]), jnp.stack([attend(q, *given[1:]) for q in twice]))

    several = [jnp.stack([x, x[::-1]]) for x in given]  # a batch of pools
    want = jnp.stack([attend(*(x[i] for x in several)) for i in range(2)])
    each = jax.jit(jax.vmap(attend))
    by_heads = [jax.device_put(x, NamedSharding(mesh, P(None, None, "heads"))) for x in several]
    assert not moves(each.lower(*by_heads).compile())
    close(each(*by_heads), want)
    explicit = NamedSharding(Case(axes="Explicit").mesh(), P(None, "data"))  # blocks are split
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the native kernel gathers it")
        close(each(several[0], *(jax.device_put(x, explicit) for x in several[1:])), want)

    grad = jax.jit(jax.grad(lambda *arrays: (attend(*arrays) ** 2).sum(), (0, 1, 2)))
    close(grad(*placed), grad(*given))

    def layers(query: Any, *caches: Any) -> Any:
        def layer(carry: Any, i: Any) -> Any:
            query, caches = carry
            new = query.reshape(3, 4, 2, -1)[:2, :, 0]
            slots = jnp.asarray([4, 5], jnp.int32) + i
            caches = jattn.update_kv_cache(*caches, new, new, slots, implementation="native")
            return (attend(query, *caches), caches), None

        return jax.lax.scan(layer, (query, caches), jnp.arange(3, dtype=jnp.int32))[0]

    step = jax.jit(layers, donate_argnums=(1, 2))
    close(jax.jit(layers)(*placed), jax.jit(layers)(*given))
    on = NamedSharding(mesh, heads)
    pool = (2**16, 4, 16, 64)  # 1 GiB
    large = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on) for shape in ((3, 8, 64), pool, pool)
    ]
    manual = jax.shard_map(attend, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads)
    for each in (step, jax.jit(manual)):
        compiled = each.lower(*large).compile()
        assert not moves(compiled)
        testing.assert_nothing_pool_sized(compiled, large[1:], max_temporaries=2**17)

    whole = P()
    part = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(whole,) * 3,
        out_specs=whole,
        axis_names={"data"},
        check_vma=False,
    )
    close(jax.jit(part)(*placed), attend(*given))


def check_explicit_axes() -> None:
    """Check that XLA splits what runs as its own operations: gradients, and the `xla` path."""
    mesh = Case(axes="Explicit").mesh()
    heads = NamedSharding(mesh, P(None, "heads"))
    given = floats(3, 8, 16), floats(6, 4, 4, 16), floats(6, 4, 4, 16)
    pools = [jax.device_put(x, heads) for x in given[1:]]
    for query in (jax.device_put(given[0], heads), given[0]):
        for name in ("native", "xla"):
            one = functools.partial(attend, implementation=name)
            grad = jax.grad(lambda *arrays, one=one: (one(*arrays) ** 2).sum(), (0, 1, 2))
            found = jax.jit(one)(query, *pools)
            close(found, one(*given))
            assert query is given[0] or found.sharding.is_equivalent_to(heads, 3)
            close(jax.jit(grad)(query, *pools), grad(*given))


def check_batches_on_explicit_axes() -> None:
    """Check `jax.vmap` over an axis that an explicit mesh splits, and meshes with a manual axis."""
    mesh = Case(axes="Explicit").mesh()
    given = floats(3, 8, 16), floats(6, 4, 4, 16), floats(6, 4, 4, 16)
    several = [jnp.stack([x, x[::-1]]) for x in given]
    for name in ("native", "xla"):
        one = functools.partial(attend, implementation=name)
        want = jnp.stack([one(*(x[i] for x in several)) for i in range(2)])
        grad = jax.grad(lambda *arrays, one=one: (one(*arrays) ** 2).sum(), (0, 1, 2))
        each, gradients = jax.vmap(one), jax.jit(jax.vmap(grad))
        for spec in (P("data"), P("data", None, "heads")):
            placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in several]
            close(each(*placed), want)
            close(jax.jit(each)(*placed), want)
            close(gradients(*placed), gradients(*several))
        part = jax.shard_map(
            grad,
            mesh=mesh,
            in_specs=(P(),) * 3,
            out_specs=(P(),) * 3,
            axis_names={"data"},
            check_vma=False,
        )
        placed = [jax.device_put(x, NamedSharding(mesh, P())) for x in given]
        close(jax.jit(part)(*placed), grad(*given))


def check_new_rows_on_explicit_axes() -> None:
    """Check that both writers take new rows that are split otherwise than the pool, in place."""
    mesh = Case(axes="Explicit").mesh()
    rows, plain = floats(16, 4, 16), floats(6, 4, 4, 16)
    block_scales = jattn.init_kv_cache(6, 4, 4, 16, format=jattn.Fp8("e4m3", "block"))[0]

    def step(name: str, cache: Any, new: jax.Array) -> Any:
        return jattn.update_kv_cache(cache, None, new, None, SLOTS, implementation=name)[0]

    def is_spec(x: object) -> bool:
        return isinstance(x, P)

    for cache in (plain, block_scales):
        want = step("xla", cache, rows)
        split = jattn.sharding.cache_specs(cache, mesh=mesh, axis_name="heads")
        whole = jax.tree.map(lambda _: P(), split, is_leaf=is_spec)
        places = itertools.product(
            (split, whole),
            (P(), P("data"), P(None, "heads"), P("data", "heads")),
            ("native", "xla"),
        )
        for specs, spec, name in places:
            where = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)
            pool = jax.tree.map(lambda x, to: jax.device_put(jnp.copy(x), to), cache, where)
            new = jax.device_put(rows, NamedSharding(mesh, spec))
            have = jax.jit(functools.partial(step, name), donate_argnums=0)(pool, new)
            assert jax.tree.leaves(pool)[0].is_deleted(), (name, specs, spec)
            for a, b, to in zip(*map(jax.tree.leaves, (have, want, where)), strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
                assert a.sharding.is_equivalent_to(to, a.ndim), (name, specs, spec)
