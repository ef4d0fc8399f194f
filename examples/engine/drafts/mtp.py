"""A model's own MTP layer, which predicts the token after the next one, as a proposer.

    step      t_0 ... t_i -> h_0 ... h_i, t_{i+1}; the layer's keys and values of (t_{j+1}, h_j)
              go into its pages, at the slots of tokens j <= i
    propose   (t_{i+1}, h_i) -> x_1, m_1;  (x_1, m_1) -> x_2, m_2;  ...           one program
    step      verifies x_1 ... x_k

The layer joins the group of full attention: its pages are shared, published, evicted and swapped
with the model's own. A step writes to them, which costs only a projection, since it needs just the
layer's keys and values. Guesses read the pages. Their own keys and values are in no page: there are
at most k per sequence, and attention to them is merged by lse.

The last entry of a block that another sequence published was made with that sequence's next token.
This may make a guess worse, but chosen tokens do not depend on guesses.

The layer samples with the random numbers that the model will use at the same positions.

On a mesh every device has its part of the layer and of its pages, as of the model's other layers,
and all hidden states. It has guesses' keys and values for its own KV heads; devices along `context`
share those, but not the query heads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Sequence as Row
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
import jattn.blocks as jb
from examples.engine.caches import Caches
from examples.engine.drafts.speculation import Guess
from examples.engine.model import Batch, Model
from examples.engine.request import Chunk, Sequence
from examples.engine.sampling import SamplingRows, sample, sampling_rows
from examples.engine.scheduler import Limits
from examples.models import parallel
from examples.models.parallel import CONTEXT

if TYPE_CHECKING:
    from examples.engine.engine import Engine

_einsum = functools.partial(jnp.einsum, precision="highest")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Feed:
    """Where guesses begin. Every field has arrays with an axis B."""

    tokens: np.ndarray  # int32, a sequence's last, t_{i+1}
    positions: np.ndarray  # int32, i
    rows: np.ndarray  # int32, of the block tables; -1 in padding
    places: np.ndarray  # int32 [2, B], of h_i among the hidden states
    sampling: SamplingRows


@dataclasses.dataclass(frozen=True)
class _Noted:
    """Where the hidden state before a sequence's last token is."""

    place: tuple[int, int]
    length: int  # of the sequence
    num_preemptions: int


@dataclasses.dataclass
class _Guessed:
    """What guesses attend to: the layer's pages, and keys and values of earlier guesses."""

    caches: Caches
    keys: jax.Array  # [B, k, K, D]; the first is in a page
    values: jax.Array  # [B, k, K, V]; not written if values are in the keys
    turn: jax.Array  # int32 [], the guess's index

    def attend(
        self,
        layer: int,
        query: jax.Array,
        batch: Batch,
        *,
        key: jax.Array,
        value: jax.Array | None = None,
        value_dim: int | None = None,
        scale: float | None = None,
    ) -> tuple[jax.Array, _Guessed]:
        """Attend as `Caches.attend` does, with one token per sequence, but write to no page."""
        options = {"scale": scale, "return_lse": True}
        if value is None:
            options["value_dim"] = value_dim
        (out, lse), _ = self.caches.attend(layer, query, batch, **options)
        keys, kept = self.keys.at[:, self.turn].set(key), self.values
        if value is not None:
            kept = kept.at[:, self.turn].set(value)
        count, (size, num_heads, head_dim) = keys.shape[1], query.shape
        seen_keys = _of_local_heads(keys, num_heads)
        seen_values = _of_local_heads(keys[..., :value_dim] if value is None else kept, num_heads)
        grouped = query.reshape(size, seen_keys.shape[2], -1, head_dim).astype(jnp.float32)
        logits = _einsum("bkgd,bnkd->bkgn", grouped, seen_keys.astype(jnp.float32))
        logits *= head_dim**-0.5 if scale is None else scale
        order = jnp.arange(count, dtype=jnp.int32)
        seen = (order > 0) & (order <= self.turn)
        logits = jnp.where(seen[None, None, None], logits, -jnp.inf).reshape(size, num_heads, count)
        new_lse = jax.nn.logsumexp(logits, axis=-1)
        weights = jnp.exp(logits - jnp.where(self.turn > 0, new_lse, 0.0)[..., None])
        weights = weights.reshape(size, seen_keys.shape[2], -1, count)
        new_out = _einsum("bkgn,bnkv->bkgv", weights, seen_values.astype(jnp.float32))
        new_out = new_out.reshape(size, num_heads, -1)
        out, _ = jattn.merge_attention_states(out, lse, new_out, new_lse)
        return out, dataclasses.replace(self, keys=keys, values=kept)


def _of_local_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """Arrange keys or values [B, k, K, D] to have equally many of a device's query heads per head.

    That already holds except for devices along `context`, which all have the KV heads of a group of
    query heads, but each only a run of these. There the result has a head per query head,
    [B, k, H, D].
    """
    num_shared = parallel.num_devices(CONTEXT)
    if num_shared == 1 or x.shape[2] == 1:
        return x
    order = parallel.rank(CONTEXT) * num_heads + jnp.arange(num_heads, dtype=jnp.int32)
    return x.at[:, :, order // (num_heads * num_shared // x.shape[2])].get(mode="clip")


class MtpGuesser:
    """Guesses with the model's MTP layer. Creating one compiles its programs."""

    is_cheap = False

    def __init__(
        self,
        model: Model,
        limits: Limits,
        num_drafts: int,
        sizes: Row[int],
        engine: Engine,
    ):
        """Compile the programs.

        Args:
          model: a model loaded with `mtp=True`.
          limits: the engine's limits.
          num_drafts: tokens to guess per sequence.
          sizes: numbers of sequences at once; each has its own program.
          engine: the engine whose caches, tables and hidden states are read.
        """
        self._model, self._limits, self._num_drafts = model, limits, num_drafts
        self._engine = engine
        attention = [group for group in limits.groups if not group.is_state]
        self._layer = model.mtp.layer
        self._group = next(i for i, g in enumerate(attention) if self._layer in g.layers)
        self._name = attention[self._group].name
        self._noted: dict[Sequence, _Noted] = {}
        self._programs = {size: self._compile(size) for size in sorted({*sizes, limits.max_seqs})}

    def note_step(self, plan: Row[Chunk]) -> None:
        """Note where a step left hidden states (`Engine.hidden`), after its tokens are taken."""
        self._noted = {}
        for i, chunk in enumerate(plan):
            sequence, length = chunk.sequence, len(chunk.sequence.tokens)
            accepted = length - chunk.stop - 1  # above len(drafts): not at its last token
            if 0 <= accepted <= len(chunk.drafts):
                self._noted[sequence] = _Noted((i, accepted), length, sequence.num_preemptions)

    def propose(self, sequences: Row[Sequence], most: Row[int]) -> list[Guess]:
        """Guess up to `most` tokens for each sequence, but none if the last step was without it."""
        asked = [s for s, n in zip(sequences, most, strict=True) if n > 0 and self._knows(s)]
        drafts: dict[Sequence, tuple[int, ...]] = {}
        if asked:
            size = next(size for size in self._programs if size >= len(asked))
            feed = self._feed(size, asked)
            if self._engine.followers:
                self._engine.followers.tell(run_there, size, feed)
            tokens = self.run(size, feed)
            drafts = dict(zip(asked, map(tuple, np.asarray(tokens).tolist()), strict=False))
        return [Guess(drafts.get(s, ())[:n]) for s, n in zip(sequences, most, strict=True)]

    def run(self, size: int, feed: Feed) -> jax.Array:
        """Return drafts int32 [size, num_drafts]. All processes sharing the devices call this."""
        engine = self._engine
        given = (engine.caches, engine.tables, engine.hidden, feed)
        return self._programs[size](self._model.params, *given)

    def _knows(self, sequence: Sequence) -> bool:
        noted = self._noted.get(sequence)
        return noted is not None and (noted.length, noted.num_preemptions) == (
            len(sequence.tokens),
            sequence.num_preemptions,
        )

    def _feed(self, size: int, sequences: Row[Sequence]) -> Feed:
        tokens, positions = np.zeros((2, size), np.int32)
        rows, places = np.full(size, -1, np.int32), np.zeros((2, size), np.int32)
        for i, sequence in enumerate(sequences):
            tokens[i], positions[i] = sequence.tokens[-1], len(sequence.tokens) - 2
            rows[i], places[:, i] = sequence.row, self._noted[sequence].place
        return Feed(tokens, positions, rows, places, sampling_rows(sequences, size))

    def _compile(self, size: int) -> Callable:
        sizes = self._limits.max_seqs, 1 + self._num_drafts, self._model.mtp.hidden_size
        params, caches, mesh = self._model.params, self._engine.caches, self._model.mesh
        run, everywhere = self._run, None
        if mesh is not None:
            run, everywhere = mesh.guess(run, params, caches), NamedSharding(mesh.devices, P())
        hidden = jax.ShapeDtypeStruct(sizes, jnp.dtype(self._model.dtype), sharding=everywhere)
        given = (params, caches, self._engine.tables, hidden, self._feed(size, []))
        return jax.jit(run).lower(*given).compile()

    def _run(
        self, params: Any, caches: Caches, tables: jb.BlockTables, hidden: jax.Array, feed: Feed
    ) -> jax.Array:
        """Return drafts [B, num_drafts]."""
        size, count = feed.rows.shape[0], self._num_drafts
        there = feed.rows >= 0
        starts = jnp.minimum(jnp.arange(size + 1), jnp.sum(there)).astype(jnp.int32)
        metadata = jattn.AttentionMetadata(
            jb.gather_block_tables(tables, feed.rows)[self._group],
            jnp.where(there, feed.positions + 1, 0),
            starts,
            jnp.full(size, -1, jnp.int32),
            1,
        )
        cache = self._model.layers[self._layer]
        dtype = hidden.dtype
        keys = jnp.zeros((size, count, cache.num_kv_heads, cache.head_dim), dtype)
        value_dim = cache.value_dim or cache.head_dim
        values = jnp.zeros((size, count, cache.num_kv_heads, value_dim), dtype)

        def guess(carry, turn):
            tokens, hidden, keys, values = carry
            batch = Batch(
                tokens=tokens,
                positions=feed.positions + turn,
                query_start_loc=starts,
                logit_tokens=jnp.arange(size, dtype=jnp.int32),
                attention={self._name: metadata},
                states={},
                max_query_len=1,
                num_tokens=starts[-1],
                num_logits=starts[-1],
            )
            known = _Guessed(caches, keys, values, turn)
            logits, hidden, known = self._model.mtp.guess(params, known, batch, hidden)
            rows = dataclasses.replace(feed.sampling, count=feed.sampling.count + turn)
            tokens = sample(logits, rows)
            return (tokens, hidden, known.keys, known.values), tokens

        begin = hidden.at[feed.places[0], feed.places[1]].get(mode="clip")
        first = (feed.tokens, begin, keys, values)
        _, drafts = jax.lax.scan(guess, first, jnp.arange(count, dtype=jnp.int32))
        return drafts.T


def run_there(engine: Engine, program: int | str, feed: Any) -> jax.Array:
    """Run another process's part of a proposer's `propose`."""
    return engine._speculator.proposer.run(program, feed)
