"""A model served step by step without an engine: the smallest thing that mixes chunks and decodes.

Requests arrive one after another; every step gives each running sequence a chunk of its pending
tokens, decodes first, within a budget. Blocks come from shuffled free lists and everything that
nobody has written holds NaN, so that a slot too many shows.
"""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from examples.engine import caches as engine_caches
from examples.engine.model import Batch, Model, StateIds


@dataclasses.dataclass
class Sequence:
    """A request and how far it is."""

    arrival: int
    tokens: list[int]
    ids: dict[str, list[int]]  # by group: blocks, or the slot of the states
    num_computed: int = 0
    chosen: list[int] = dataclasses.field(default_factory=list)
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def num_pending(self) -> int:
        """Tokens the caches do not hold yet."""
        return len(self.tokens) - self.num_computed


def poisoned(caches: engine_caches.Caches) -> engine_caches.Caches:
    """Caches whose every word is NaN in its format."""

    def poison(array: jax.Array) -> jax.Array:
        if jnp.issubdtype(array.dtype, jnp.floating):
            return jnp.full_like(array, jnp.nan)
        return jnp.full_like(array, jnp.iinfo(array.dtype).max)  # all ones is a NaN

    return jax.tree.map(lambda x: poison(x) if x.ndim else x, caches)


class Driver:
    """Pools for a model, its step compiled, and the loop."""

    def __init__(
        self,
        model: Model,
        caches: engine_caches.Caches,
        num_ids: dict[str, int],
        *,
        block_size: int = 16,
        max_seqs: int = 8,
        num_tokens: int = 40,
        max_len: int = 132,
        free: dict[str, collections.deque[int]] | None = None,
    ):
        self.model, self.caches = model, poisoned(caches)
        self.groups = engine_caches.group_layers(model.layers)
        self.block_size, self.max_seqs, self.num_tokens = block_size, max_seqs, num_tokens
        self.width = -(-max_len // block_size)
        rng = np.random.default_rng(0)
        self.free = free or {
            name: collections.deque(rng.permutation(count).tolist())
            for name, count in num_ids.items()
        }
        self.step = jax.jit(model.step, donate_argnums=1)
        self.num_steps = 0

    def serve(
        self,
        prompts: list[list[int]],
        num_new: int,
        *,
        chunk: int = 17,
        arrive_every: int = 2,
        follow: np.ndarray | None = None,
    ) -> list[Sequence]:
        """Serve prompts to the end; `follow` [R, num_new] is fed instead of what is chosen."""
        sequences = [
            Sequence(i * arrive_every, list(prompt), {group.name: [] for group in self.groups})
            for i, prompt in enumerate(prompts)
        ]
        now = 0
        while any(len(s.chosen) < num_new for s in sequences):
            running = [s for s in sequences if s.arrival <= now and len(s.chosen) < num_new]
            plan, left = [], self.num_tokens
            for s in sorted(running, key=lambda s: s.num_pending > 1)[: self.max_seqs]:
                n = min(s.num_pending, chunk, left)
                if n:
                    plan.append((s, n))
                    left -= n
            now += 1
            if not plan:
                continue
            logits = self._run(plan)
            for row, (s, n) in enumerate(plan):
                s.num_computed += n
                if s.num_pending:
                    continue
                s.logits.append(logits[row])
                token = int(logits[row].argmax())
                following = token if follow is None else follow[sequences.index(s), len(s.chosen)]
                s.chosen.append(token)
                s.tokens.append(int(following))
                if len(s.chosen) == num_new:
                    for name, ids in s.ids.items():
                        self.free[name].extend(ids)
        return sequences

    def _run(self, plan: list[tuple[Sequence, int]]) -> np.ndarray:
        decode = all(n == 1 for _, n in plan)
        num_tokens = self.max_seqs if decode else self.num_tokens
        tokens, positions = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
        lengths = [n for _, n in plan]
        starts = np.full(self.max_seqs + 1, sum(lengths), np.int32)
        starts[: len(plan)] = np.cumsum([0, *lengths[:-1]])
        last = np.zeros(self.max_seqs, np.int32)
        last[: len(plan)] = np.cumsum(lengths) - 1
        for row, (s, n) in enumerate(plan):
            span = slice(starts[row], starts[row] + n)
            tokens[span] = s.tokens[s.num_computed : s.num_computed + n]
            positions[span] = np.arange(s.num_computed, s.num_computed + n)
        attention, states = {}, {}
        longest = 1 if decode else self.num_tokens
        for group in self.groups:
            if group.is_state:
                states[group.name] = self._states(group.name, plan)
            else:
                attention[group.name] = self._attention(group.name, plan, num_tokens, longest)
        batch = Batch(tokens, positions, starts, last, attention, states, longest)
        self.num_steps += 1
        logits, self.caches = self.step(self.model.params, self.caches, batch)
        return np.asarray(logits)

    def _attention(self, name, plan, num_tokens, longest) -> jattn.AttentionMetadata:
        for s, n in plan:
            while len(s.ids[name]) * self.block_size < s.num_computed + n:
                s.ids[name].append(self.free[name].popleft())
        metadata = jattn.AttentionMetadata.from_lengths(
            [n for _, n in plan],
            [s.num_computed + n for s, n in plan],
            [s.ids[name] for s, _ in plan],
            self.block_size,
            max_query_len=longest,
        )
        return metadata.pad_to(
            num_tokens=num_tokens, num_seqs=self.max_seqs, table_width=self.width
        )

    def _states(self, name, plan) -> StateIds:
        read, write = (np.full(self.max_seqs, -1, np.int32) for _ in range(2))
        for row, (s, _) in enumerate(plan):
            if not s.ids[name]:
                s.ids[name].append(self.free[name].popleft())
            write[row] = s.ids[name][0]
            read[row] = write[row] if s.num_computed else -1
        return StateIds(read, write)
