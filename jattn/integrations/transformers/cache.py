"""A transformers cache whose attention layers own jattn pools.

A layer's pools are `KVArray`s that only JAX accesses. `update` accepts a step's keys and values and
returns stand-ins for the whole history: tensors without data. The attention function finds the
layer in them, writes the new tokens in place and reads the blocks, in one program with donated
pools. A decode step copies nothing.

Every batch row has its own place p and owns blocks `p * M` to `(p + 1) * M`. When beams reorder the
rows and several continue one row, the first of them gets that row's place. The others get the
places of rows that end, and a copy of the blocks that hold tokens. Padding, which no query sees in
the step that brings it, is not written, so every row has its own length.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import cache_utils
from transformers.configuration_utils import PreTrainedConfig

import jattn
import jattn.blocks as jb
from jattn import checks, formats
from jattn.formats.kv_array import LAYOUTS
from jattn.integers import ceil_div
from jattn.integrations.transformers import batches, masks, sights

FORMATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class PagedCache(cache_utils.DynamicCache):
    """A transformers `Cache` whose keys and values live in jattn's pools.

        cache = PagedCache(model.config, max_cache_len=4096)
        model.generate(**inputs, cache=cache)  # past_key_values=cache before transformers 5.24

    The model must have `attn_implementation="jattn"`. Layers with full or sliding attention get
    pools with room for `max_cache_len` tokens per batch row; a sliding layer keeps all tokens, and
    its window hides the old ones. Other layers (recurrent states, indexers) stay those of
    transformers' `DynamicCache`. A decoder that attends to an encoder needs two caches, the second
    for the keys of the encoder: `EncoderDecoderCache(PagedCache(...), PagedCache(...))`. Gradients
    are not supported.

    Args:
      config: the model's config.
      max_cache_len: the most tokens that a batch row may have, padding included.
      block_size: S of the pools.
      format: how numbers are stored: a `jattn` format, or a pair of them for keys and values; None
        for the model's own dtype.
      kv_layout: "HND" or "NHD".

    Raises:
      ValueError: an argument is invalid, or the model has no layer with full or sliding attention.
      UnsupportedError: the model caches latents (MLA) and expands all of them before attention.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_cache_len: int,
        *,
        block_size: int = 32,
        format: formats.Format | tuple[formats.Format, formats.Format] | None = None,
        kv_layout: str = "HND",
    ) -> None:
        with checks.checking("PagedCache") as problems:
            for name, size in (("max_cache_len", max_cache_len), ("block_size", block_size)):
                whole = isinstance(size, int) and size > 0
                problems.expect(whole, name, size, "a number of tokens above 0")
            problems.expect(kv_layout in LAYOUTS, "kv_layout", kv_layout, '"HND" or "NHD"')
            pair = format if isinstance(format, tuple) else (format, format)
            known = len(pair) == 2 and all(isinstance(one, formats.Format) for one in pair)
            wanted = "None, a format such as jattn.Int8(), or a pair of them for keys and values"
            problems.expect(format is None or known, "format", format, wanted)
            is_config = hasattr(config, "get_text_config")
            given = f"a {type(config).__name__}"
            problems.require(is_config, "config", given, "a model's: model.config")
        if _expands_latents(config):
            raise jattn.UnsupportedError(
                f"PagedCache: {type(config).__name__} describes a model that caches latents and "
                "expands all of them to keys and values outside attention in every step, but only "
                "attention can read the pools of a PagedCache; use transformers' own caches"
            )
        pools = _Pools(max_cache_len, block_size, format, kv_layout)
        replaced = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
        layers = [
            PagedLayer(pools, index) if type(layer) in replaced else layer
            for index, layer in enumerate(cache_utils.DynamicCache(config=config).layers)
        ]
        if not any(isinstance(layer, PagedLayer) for layer in layers):
            kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
            raise ValueError(
                f"PagedCache: {type(config).__name__} describes layers of {kinds}, but must have "
                "one that caches the keys of full or sliding attention and nothing else"
            )
        # A DynamicCache in name only: EncoderDecoderCache can crop and select no other class.
        cache_utils.Cache.__init__(self, layers=layers)


def _expands_latents(config: PreTrainedConfig) -> bool:
    """Whether the model's attention caches latents: a class then has a method to expand them."""
    config = config.get_text_config(decoder=True)
    try:
        name = type(config).__module__.replace("configuration_", "modeling_")
        model = importlib.import_module(name)
    except ImportError:
        return False
    return any(hasattr(found, "expand_kv") for found in vars(model).values())


class _History:
    """Which of the tokens so far are stored, and where. Layers with equal histories share one.

    Attributes:
      kept: bool [B, n]; False for padding.
      places: [B]; the place of every batch row.
      changes: histories derived from this one, by the change, for as long as a layer has them.
    """

    def __init__(self, kept: np.ndarray, places: np.ndarray) -> None:
        self.kept, self.places = kept, places
        self.changes: weakref.WeakValueDictionary[Hashable, _History] = (
            weakref.WeakValueDictionary()
        )

    def changed(
        self, name: Hashable, kept: np.ndarray, places: np.ndarray | None = None
    ) -> _History:
        """Return a history with `kept` and `places`, the same object for the same change."""
        places = self.places if places is None else places
        known = self.changes.get(name)
        if known is None or not (
            np.array_equal(known.kept, kept) and np.array_equal(known.places, places)
        ):
            known = self.changes[name] = _History(kept, places)
        return known

    def extended(self, seen: np.ndarray) -> np.ndarray:
        """Return `kept` for a mask [B, Tq, n + new]: new keys are kept if some query sees them."""
        new = np.asarray(seen[:, :, self.kept.shape[1] :].any(axis=1))
        return np.append(self.kept, new, axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class _Pools:
    """How the pools of a cache are made, and the histories that its layers share."""

    max_cache_len: int
    block_size: int
    format: formats.Format | tuple[formats.Format, formats.Format] | None
    kv_layout: str
    _empty: dict[int, _History] = dataclasses.field(default_factory=dict)

    @property
    def width(self) -> int:
        """M: blocks per batch row."""
        return ceil_div(self.max_cache_len, self.block_size)

    def empty_history(self, batch: int) -> _History:
        """Return a history with no tokens in any row."""
        empty = _History(np.zeros((batch, 0), bool), np.arange(batch))
        return self._empty.setdefault(batch, empty)

    def make(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[formats.KVArray, formats.KVArray | None]:
        """Make empty pools for keys and values like these."""
        batch, heads, _, size = key.shape
        if key.dtype not in FORMATS:
            raise jattn.UnsupportedError(
                f"keys are {key.dtype}, but jattn computes in float32, bfloat16 or float16"
            )
        return jattn.init_kv_cache(
            batch * self.width,
            heads,
            self.block_size,
            size,
            value_dim=value.shape[3],
            format=self.format or jattn.Dense(FORMATS[key.dtype]),
            kv_layout=self.kv_layout,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """The plan of a step: what it reads, and where it writes."""

    reading: masks.SplitMask
    batch: batches.Batch
    slots: jax.Array
    history: _History


class PagedLayer(cache_utils.CacheLayerMixin):
    """One layer's pools, and the step's keys and values until attention writes them."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, pools: _Pools, index: int) -> None:
        super().__init__()
        self.pools, self.index = pools, index
        self._leaves: list[jax.Array] = []
        self._structure: jax.tree_util.PyTreeDef | None = None
        self._programs: dict[Hashable, Callable[..., tuple[jax.Array, list[jax.Array]]]] = {}
        self.history: _History | None = None
        self.new: tuple[torch.Tensor, torch.Tensor] | None = None
        self.length = 0
        self._empty: tuple[torch.Tensor, torch.Tensor] | None = None  # [0, K, 0, D], [0, K, 0, V]
        self._writer: weakref.ref[torch.nn.Module] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedLayer:
        """Copy the layer and its pools, on the same device. The rest never changes in place."""
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__)
        found._leaves = [leaf.copy() for leaf in self._leaves]
        found._programs = dict(self._programs)
        if found.new is None:
            found._writer = None  # the copy may continue with a copy of the model
        memo[id(self)] = found
        return found

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise jattn.UnsupportedError(
            "a PagedCache cannot be pickled or saved, because JAX holds its keys: use "
            "copy.deepcopy to copy it, or transformers' own caches"
        )

    @property
    def caches(self) -> tuple[Any, Any]:
        """The pools of keys and values, once there are any."""
        found: tuple[Any, Any] = jax.tree.unflatten(self._structure, self._leaves)
        return found

    @caches.setter
    def caches(self, caches: tuple[Any, Any]) -> None:
        # Kept as leaves: jit flattens a list of arrays four times as fast: 0.1 ms less a step.
        self._leaves, self._structure = jax.tree.flatten(caches)
        self._programs = {}

    # -- what transformers calls ------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the pools, for keys and values like these."""
        self.batch_size = key_states.shape[0]
        device = batches.device_of(key_states.device)
        with batches.placed(key_states):
            # Committed, so that programs on the pools run there, whatever JAX's default device is.
            self.caches = jax.device_put(self.pools.make(key_states, value_states), device)
        self.history = self.pools.empty_history(self.batch_size)
        self._empty = tuple(
            x.new_empty((0, x.shape[1], 0, x.shape[3])) for x in (key_states, value_states)
        )
        self.is_initialized = True

    @property
    def keys(self) -> torch.Tensor | None:
        """A stand-in for all keys. Cross-attention reads it once the encoder's keys are cached."""
        return None if self._empty is None else _StandIn.of(self, self._empty[0])

    @keys.setter
    def keys(self, _: None) -> None:
        """Do nothing: transformers' layers start by setting None."""

    @property
    def values(self) -> torch.Tensor | None:
        """A stand-in for all values."""
        return None if self._empty is None else _StandIn.of(self, self._empty[1])

    @values.setter
    def values(self, _: None) -> None:
        """Do nothing, as for keys."""

    @torch.compiler.disable  # makes pools of JAX arrays
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hold the keys and values for attention; return stand-ins for all so far, these last."""
        rows = key_states.shape[0]
        if not self.is_initialized or (self.length == 0 and rows != self.batch_size):
            self.lazy_initialization(key_states, value_states)
        if rows != self.batch_size:
            raise ValueError(
                f"layer {self.index} of the PagedCache: key_states has a batch of {rows}, but must "
                f"have one of {self.batch_size}, like the {self.length} tokens in the cache; call "
                "reset() to forget them"
            )
        if self.new is not None:
            raise jattn.UnsupportedError(
                f"layer {self.index} of the PagedCache was given keys twice with no attention in "
                'between: the model must have attn_implementation="jattn" and use it'
            )
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise jattn.UnsupportedError(
                "a PagedCache has no gradients: run the model under torch.no_grad(), or train "
                "with use_cache=False"
            )
        total = self.length + key_states.shape[2]
        if total > self.pools.max_cache_len:
            raise ValueError(
                f"layer {self.index} of the PagedCache would hold {total} tokens, but must hold at "
                f"most max_cache_len={self.pools.max_cache_len}"
            )
        self.new = key_states, value_states
        self.length = total
        keys = _StandIn.of(self, key_states)
        if value_states.shape == key_states.shape:
            return keys, keys
        return keys, _StandIn.of(self, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys this step has, and the position of the first."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens so far, padding included."""
        return self.length

    def get_max_length(self) -> int:
        """Return the most tokens that a batch row may have."""
        return self.pools.max_cache_len

    def offload(self) -> None:
        """Do nothing: JAX holds the pools."""

    prefetch = offload

    def reset(self) -> None:
        """Forget all tokens. Keep the pools, except those that an interrupted step had donated."""
        self.new, self.length, self._writer = None, 0, None
        if any(leaf.is_deleted() for leaf in self._leaves):
            self.is_initialized = False
        if self.is_initialized:
            self.history = self.pools.empty_history(self.batch_size)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop: tokens_to_remove is {tokens_to_remove}, but must be 0 or negative"
            )
        if tokens_to_remove and self.history is not None:
            # Keys that still wait for attention come last; they are dropped and never written.
            left = max(0, self.length + tokens_to_remove)
            kept = self.history.kept[:, :left]
            self.history = self.history.changed(("crop", left), kept)
            self.new, self.length = None, kept.shape[1]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Give batch row i the tokens of row `beam_idx[i]`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row `repeats` times."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the batch rows `indices`, in their order."""
        if self.history is None:
            return
        rows = np.arange(self.batch_size)[indices.cpu().numpy()]
        if np.array_equal(rows, np.arange(self.batch_size)):
            return
        if len(rows) == self.batch_size:
            places = self._reorder(rows)
        else:
            blocks = self.history.places[rows, None] * self.pools.width
            blocks = blocks + np.arange(self.pools.width)
            self.caches = jb.take_blocks(self.caches, blocks.reshape(-1).astype(np.int32))
            places = np.arange(len(rows))
        kept = self.history.kept[rows]
        self.history = self.history.changed(("select", *rows.tolist()), kept, places)
        self.batch_size = len(rows)

    def _reorder(self, rows: np.ndarray) -> np.ndarray:
        """Give batch row i the tokens of row `rows[i]`, and return the rows' new places [B]."""
        assert self.history is not None
        old, width = self.history.places, self.pools.width
        going_on, first = np.unique(rows, return_index=True)
        places = np.full(len(rows), -1)
        places[first] = old[going_on]
        copies = np.flatnonzero(places < 0)
        places[copies] = np.setdiff1d(old, places)
        used = ceil_div(self.history.kept.sum(axis=1), self.pools.block_size)
        pairs = [np.zeros((2, 0), int)]
        for place, row in zip(places[copies], rows[copies], strict=True):
            pairs.append(np.array([[old[row]], [place]]) * width + np.arange(used[row]))
        ids = np.concatenate(pairs, axis=1)
        if ids.size:
            padded = np.full((2, batches.bucket(ids.shape[1], 1)), -1, np.int32)
            padded[:, : ids.shape[1]] = ids
            source, target = padded
            self._leaves = _copy_blocks(self._structure, self._leaves, source, target)
        return places

    # -- what attention calls ---------------------------------------------------------------------

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        sight: sights.MaskSight,
        implementation: str | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Write the new keys and values, and attend to all of them: [B, Tq, H, V].

        If a step raises, the tokens of the steps before it stay.
        """
        with self._kept_if_it_raises():
            if self.new is not None:
                self._check_writer(module)
            batch, _, num_queries, _ = query.shape
            fresh = 0 if self.new is None else self.new[0].shape[2]
            assert self.history is not None
            if batch != self.batch_size:
                raise jattn.UnsupportedError(
                    f"layer {self.index} of the PagedCache: query has a batch of {batch}, but must "
                    f"have one of {self.batch_size}, like the keys in the cache"
                )
            if sight.mask is not None and sight.mask.shape[-1] != self.length:
                raise jattn.UnsupportedError(
                    f"layer {self.index} of the PagedCache: the mask {list(sight.mask.shape)} must "
                    f"be for the {self.length} keys in the cache; if a step was interrupted, "
                    "reset() the cache"
                )
            read = sight.plan(
                (self.history, fresh, self.pools),
                batch,
                num_queries,
                self.length,
                _plan,
                self.history.extended,
            )
            plan = read.plan
            if not len(plan.reading.tokens):
                assert self._empty is not None
                self.new, self.history = None, plan.history
                return query.new_zeros(batch, num_queries, query.shape[1], self._empty[1].shape[3])
            bias = sight.relative_bias(read, query.shape[1], "sinks" in options)
            given = options if bias is None else {**options, "relative_bias": bias}
            batches.refuse_tangents((query, *given.values(), *(self.new or ())))
            if torch.is_grad_enabled() and any(
                isinstance(x, torch.Tensor) and x.requires_grad for x in (query, *given.values())
            ):
                raise jattn.UnsupportedError(
                    "a PagedCache has no gradients: run the model under torch.no_grad()"
                )
            arrays = {
                name: batches.to_jax(x) if isinstance(x, torch.Tensor) else batches.number(x)
                for name, x in given.items()
            }
            rows = [batches.to_rows(x, len(plan.slots)) for x in self.new or ()]
            in_order = plan.batch.tokens is None and plan.batch.num_tokens == batch * num_queries
            if in_order:
                queries = batches.to_rows(query, batch * num_queries)
            else:
                queries = batches.to_jax(plan.batch.take_queries(query))
            static = (plan.batch.is_causal, plan.batch.max_query_len, implementation)
            if static not in self._programs:
                self._programs[static] = _program(self._structure, *static)
            out, self._leaves = self._programs[static](
                self._leaves,
                queries,
                tuple(rows),
                plan.slots,
                plan.batch.arguments,
                arrays,
            )
            self.new, self.history = None, plan.history
            if in_order and query.is_cpu and query.nbytes <= batches.SMALL_BYTES:
                return batches.few_to_torch(out, batch, num_queries, *out.shape[1:])
            return plan.batch.put_back(batches.to_torch(out), batch, num_queries)

    @contextlib.contextmanager
    def _kept_if_it_raises(self) -> Iterator[None]:
        """Drop the step's tokens if the block raises."""
        try:
            yield
        except BaseException:
            assert self.history is not None
            self.new, self.length = None, self.history.kept.shape[1]
            raise

    def _check_writer(self, module: torch.nn.Module) -> None:
        """Refuse keys of a second module, such as an encoder's after a decoder's."""
        known = None if self._writer is None else self._writer()
        if known is None:
            self._writer = weakref.ref(module)
        elif known is not module:
            raise jattn.UnsupportedError(
                f"layer {self.index} of the PagedCache was given the keys of two attention "
                "modules: a decoder that attends to an encoder needs EncoderDecoderCache("
                "PagedCache(...), PagedCache(...)); before another model uses the cache, reset() it"
            )


def _plan(reading: masks.SplitMask, history: _History, fresh: int, pools: _Pools) -> _Plan:
    kept = reading.kept
    width, size = pools.width, pools.block_size
    slots = np.full((len(kept), fresh), -1)
    if fresh:
        place = kept.cumsum(axis=1)[:, -fresh:] - 1
        first = history.places[:, None] * width * size
        slots = np.where(kept[:, -fresh:], first + place, -1)
    padded = slots.reshape(-1)
    if fresh > 1:
        more = batches.bucket(len(padded)) - len(padded)
        padded = np.pad(padded, (0, more), constant_values=-1)
    rows = reading.documents[reading.document, 0]
    tables = history.places[rows, None] * width + np.arange(width)
    return _Plan(
        reading,
        batches.make_batch(reading, tables),
        jnp.asarray(padded, jnp.int32),
        history.changed(fresh, kept) if fresh else history,
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _copy_blocks(
    structure: jax.tree_util.PyTreeDef,
    leaves: list[jax.Array],
    source: jax.Array,
    target: jax.Array,
) -> list[jax.Array]:
    caches = jax.tree.unflatten(structure, leaves)
    copied: list[jax.Array] = jax.tree.leaves(jb.copy_blocks(caches, source, target))
    return copied


@functools.cache
def _program(
    structure: jax.tree_util.PyTreeDef,
    is_causal: bool | None,
    max_query_len: int,
    implementation: str | None,
) -> Callable[..., tuple[jax.Array, list[jax.Array]]]:
    """Make the program of a step for caches of one structure.

    Layers hold their programs. One program for all would make jit compare structures, which are
    equal but not identical, in Python, at 0.1 ms per layer and step.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        leaves: list[jax.Array],
        query: jax.Array,
        new: tuple[jax.Array, ...],
        slots: jax.Array,
        batch: dict[str, jax.Array],
        options: dict[str, Any],
    ) -> tuple[jax.Array, list[jax.Array]]:
        key_cache, value_cache = jax.tree.unflatten(structure, leaves)
        if new:
            key, value = new
            caches = jattn.update_kv_cache(key_cache, value_cache, key, value, slots)
            key_cache, value_cache = caches
        given: dict[str, Any] = batch | options
        given |= {} if is_causal is None else {"is_causal": is_causal}
        out = jattn.paged_attention(
            query,
            key_cache,
            value_cache,
            max_query_len=max_query_len,
            implementation=implementation,
            **given,
        )
        return out, jax.tree.leaves((key_cache, value_cache))

    return step


class _StandIn(torch.Tensor):
    """A tensor with the shape of a history whose numbers are in pools."""

    jattn_layer: PagedLayer

    @classmethod
    def of(cls, layer: PagedLayer, new: torch.Tensor) -> _StandIn:
        """Return the history of `layer`, like `new` [any, heads, any, size]."""
        shape = (layer.batch_size, new.shape[1], layer.length, new.shape[3])
        found: _StandIn = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=new.dtype, device=new.device
        )
        found.jattn_layer = layer
        return found

    @classmethod
    def __torch_dispatch__(
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> NoReturn:
        raise jattn.UnsupportedError(
            f"{func} needs the numbers of keys that a PagedCache keeps in jattn's pools: the model "
            'must have attn_implementation="jattn" and pass it, unchanged, what the cache returns'
        )

    def __repr__(self) -> str:
        return f"_StandIn({list(self.shape)}, {self.dtype}, in jattn's pools)"
