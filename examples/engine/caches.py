"""The caches of all layers, as one pytree that a jitted step takes and returns.

Layers with the same window form a *group*, which shares block tables. Each layer has its own pool,
and a block id of the group names a block in the pool of each of its layers. Recurrent layers also
form a group, whose ids are slots. By default these are in pools of their own (`two pools`); with
`unified=True` they are in pages of the attention layers' pools, so that one free list serves both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import jattn
import jattn.blocks as jb
from examples.engine import context
from examples.engine.model import AttentionCache, Batch, StateCache
from examples.models import parallel

# States of a recurrent layer after each sequence's first tokens of a step, int32 [B].
After = Callable[[jax.Array], Sequence[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers that share ids of blocks or of states."""

    name: str
    layers: tuple[int, ...]
    window: int | None = None  # keys a query sees
    is_state: bool = False
    context: int = 1  # devices that the tokens of a block are distributed over


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one layer keeps its cache."""

    layer: int
    cache: AttentionCache | StateCache
    group: str
    pool: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Caches:
    """The pools of all layers."""

    pools: tuple[tuple[jattn.KVArray, jattn.KVArray] | jb.StateSlots, ...]
    places: tuple[Place, ...] = dataclasses.field(metadata={"static": True})
    implementation: str | None = dataclasses.field(default=None, metadata={"static": True})
    # While draft tokens are verified: per recurrent layer, a function that returns its states after
    # some of them.
    deferred: tuple[tuple[int, After], ...] | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    def attend(
        self,
        layer: int,
        query: jax.Array,
        batch: Batch,
        *,
        key: jax.Array | None = None,
        value: jax.Array | None = None,
        **options: Any,
    ) -> tuple[jax.Array, Caches]:
        """Write a layer's new keys and values, then attend to all that it has.

        Args:
          layer: the layer that owns the cache.
          query: [T, H, D].
          batch: the step's work.
          key, value: [T, K, D] and [T, K, V]; None: only read another layer's pages.
          options: of `jattn.paged_attention`, such as scale, sinks, logits_soft_cap, or value_dim
            for a cache whose values are in its keys.

        Returns:
          The output [T, H, V], and the written caches.
        """
        place = self._place(layer)
        metadata, caches = batch.attention[place.group], self
        if key is not None:
            pool = jattn.update_kv_cache(*self.pools[place.pool], key, value, metadata.slot_mapping)
            caches = self._with(place.pool, pool)
        options |= {
            "sliding_window": place.cache.window,
            "implementation": self.implementation,
        }
        if batch.tree_mask is not None:
            options["tree_mask"] = batch.tree_mask
        pool = caches.pools[place.pool]
        if parallel.num_devices(parallel.CONTEXT) > 1:
            dealt = place.cache.context > 1
            if dealt:
                metadata = context.deal(metadata, batch.positions, place.cache.context)
            return context.attend(query, pool, metadata, dealt=dealt, **options), caches
        return jattn.paged_attention(query, *pool, **metadata.as_kwargs(), **options), caches

    def read_states(self, layer: int, batch: Batch) -> tuple[jax.Array, ...]:
        """Return a recurrent layer's states before the step: an array [B, *shape] per tensor."""
        return self.states_at(layer, batch.states[self._place(layer).group].read)

    def write_states(
        self, layer: int, batch: Batch, states: Sequence[jax.Array], after: After | None = None
    ) -> Caches:
        """Write a recurrent layer's states after each sequence's last token of the step.

        Args:
          layer: the recurrent layer.
          batch: the step's work.
          states: [B, ...] each.
          after: `after(lengths)` returns the states after each sequence's first tokens of the step,
            int32 [B]. It is called once the accepted draft tokens are known (`drafts/rollback.py`).

        Raises:
          ValueError: draft tokens are verified, but `after` is None.
        """
        if self.deferred is None:
            ids = batch.states[self._place(layer).group].write
            return self.with_states_at(layer, ids, states)
        if after is None:
            raise ValueError(
                f"layer {layer}: `after` is None, but must return the states after some of the "
                "step's tokens when draft tokens are verified"
            )
        return dataclasses.replace(self, deferred=(*self.deferred, (layer, after)))

    def defer_states(self) -> Caches:
        """Return caches that write states once accepted tokens are known, in `write_deferred`."""
        return dataclasses.replace(self, deferred=())

    def write_deferred(self, batch: Batch, lengths: jax.Array) -> Caches:
        """Write the states after each sequence's first `lengths` tokens of the step, int32 [B]."""
        caches = dataclasses.replace(self, deferred=None)
        for layer, after in self.deferred or ():
            caches = caches.write_states(layer, batch, after(lengths))
        return caches

    def states_at(self, layer: int, ids: jax.Array) -> tuple[jax.Array, ...]:
        """Return a recurrent layer's states by id, int32 [B]: an array [B, *shape] per tensor."""
        pool = self._state_pool(self._place(layer))
        return jb.read_state(pool, _ids(pool, ids))

    def with_states_at(self, layer: int, ids: jax.Array, states: Sequence[jax.Array]) -> Caches:
        """Return the caches with a recurrent layer's states written by id, int32 [B]."""
        place = self._place(layer)
        pool = self._state_pool(place)
        written = jb.write_state(pool, _ids(pool, ids), states)
        if isinstance(written, jb.PagePool):
            old = self.pools[place.pool]
            written = tuple(
                dataclasses.replace(array, data=data)
                for array, data in zip(old, written.parts, strict=True)
            )
        return self._with(place.pool, written)

    def with_pools(self, pools: Sequence[Any]) -> Caches:
        """Return the same caches with other contents."""
        return dataclasses.replace(self, pools=tuple(pools))

    def _place(self, layer: int) -> Place:
        return next(place for place in self.places if place.layer == layer)

    def _with(self, index: int, pool) -> Caches:
        pools = (*self.pools[:index], pool, *self.pools[index + 1 :])
        return dataclasses.replace(self, pools=pools)

    def _state_pool(self, place: Place) -> jb.StateSlots | jb.PagePool:
        """Return the layer's slots, or an attention layer's pool as pages that hold states."""
        pool = self.pools[place.pool]
        if isinstance(pool, jb.StateSlots):
            return pool
        return jb.PagePool(tuple(array.data for array in pool), place.cache.layout)


def _ids(pool: jb.StateSlots | jb.PagePool, ids: jax.Array) -> jax.Array:
    """Shape ids as the pool takes them: a state is one slot, or a row of one page."""
    return ids[:, None] if isinstance(pool, jb.PagePool) else ids


def group_layers(
    layers: Mapping[int, AttentionCache | StateCache], *, unified: bool = False
) -> tuple[Group, ...]:
    """Return the cache groups of a model: one per window, and one for all recurrent layers.

    They are named "global", "sliding" (or "sliding-128" if windows differ) and "state". With
    unified pages, a state occupies a block in an attention layer's pool, so each group of recurrent
    layers ("state-0", "state-1"...) has at most as many layers as there are pools.
    """
    windows = {c.window for c in layers.values() if isinstance(c, AttentionCache)} - {None}
    num_pools = _num_unified_pools(layers)
    members: dict[str, list[int]] = {}
    num_states = 0
    for index, cache in sorted(layers.items()):
        if isinstance(cache, StateCache):
            name = f"state-{num_states // num_pools}" if unified else "state"
            num_states += 1
        elif cache.window is None:
            name = "global"
        else:
            name = "sliding" if len(windows) == 1 else f"sliding-{cache.window}"
        members.setdefault(name, []).append(index)
    return tuple(
        Group(
            name,
            tuple(indices),
            window=getattr(layers[indices[0]], "window", None),
            is_state=isinstance(layers[indices[0]], StateCache),
            context=getattr(layers[indices[0]], "context", 1),
        )
        for name, indices in members.items()
    )


def init_caches(
    layers: Mapping[int, AttentionCache | StateCache],
    num_ids: Mapping[str, int],
    block_size: int,
    kv_format: Any,
    *,
    unified: bool = False,
    implementation: str | None = None,
) -> Caches:
    """Make empty caches for every layer.

    Args:
      layers: what each layer caches.
      num_ids: blocks, or states, of each group.
      block_size: tokens in a block.
      kv_format: the storage format: a jattn format, or a pair for keys and values.
      unified: states live in pages of the attention layers' pools.
      implementation: which implementation of `jattn.paged_attention` reads them, or None.

    Raises:
      ValueError: a state does not fit a unified page, or a block cannot be divided among devices.
    """
    shares = max((getattr(cache, "context", 1) for cache in layers.values()), default=1)
    if block_size % shares or (unified and shares > 1):
        raise ValueError(
            f"block_size is {block_size}, but must be a multiple of the {shares} devices along "
            "context, where states must have pools of their own"
        )

    def kv_pool(cache: AttentionCache, count: int):
        sizes = (count, cache.num_kv_heads, block_size // cache.context, cache.head_dim)
        if cache.values_in_keys:
            return jattn.init_kv_cache(*sizes, format=kv_format, values_in_keys=True)
        return jattn.init_kv_cache(*sizes, value_dim=cache.value_dim, format=kv_format)

    groups = group_layers(layers, unified=unified)
    places, pools = [], []
    if unified:
        alike = _alike_attention(layers)
        pools = [kv_pool(alike, num_ids[groups[0].name]) for _ in range(_num_unified_pools(layers))]
    for group in groups:
        for position, index in enumerate(group.layers):
            cache, count = layers[index], num_ids[group.name]
            place = Place(index, cache, group.name, position if unified else len(pools))
            places.append(place)
            if unified and group.is_state:
                _check_fit(pools[position], place)
            elif not unified and group.is_state:
                pools.append(jb.init_state_slots(cache.layout, count))
            elif not unified:
                pools.append(kv_pool(cache, count))
    return Caches(tuple(pools), tuple(places), implementation)


def aligned_block_size(
    layers: Mapping[int, AttentionCache | StateCache], bytes_per_value: int, block_size: int
) -> int:
    """Return the multiple of `block_size` at which a page holds a state of any layer."""
    attention = _alike_attention(layers)
    values = attention.head_dim + (attention.value_dim or attention.head_dim)
    return jb.align_hybrid_block_size(
        bytes_per_token=attention.num_kv_heads * values * bytes_per_value,
        state_bytes=max(c.layout.nbytes for c in layers.values() if isinstance(c, StateCache)),
        kernel_sizes={"xla": [jb.MultipleOf(block_size)]},
        max_model_len=block_size,
        block_size=block_size,
    ).block_size


def _alike_attention(layers: Mapping[int, AttentionCache | StateCache]) -> AttentionCache:
    """Return the cache that all attention layers have, apart from their windows.

    Raises:
      ValueError: their caches differ, and so would their pages.
    """
    found = {
        dataclasses.replace(cache, window=None)
        for cache in layers.values()
        if isinstance(cache, AttentionCache)
    }
    if len(found) != 1:
        raise ValueError(
            f"unified pages need attention layers of one kind, but there are {len(found)} kinds"
        )
    return found.pop()


def _num_unified_pools(layers: Mapping[int, AttentionCache | StateCache]) -> int:
    """Return the size of the largest attention group: layer i of every group uses pool i."""
    windows = [c.window for c in layers.values() if isinstance(c, AttentionCache)]
    return max(map(windows.count, windows), default=0)


def _check_fit(pool: tuple[jattn.KVArray, jattn.KVArray], place: Place) -> None:
    pages = jb.PagePool(tuple(array.data for array in pool), place.cache.layout)
    if pages.pages_for(1) > 1:
        raise ValueError(
            f"block_size: a page of {pages.page_bytes} bytes cannot hold layer {place.layer}'s "
            f"state of {place.cache.layout.nbytes} bytes; `aligned_block_size` returns a block "
            "size that can"
        )
