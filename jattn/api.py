"""`paged_attention`, with one signature and one meaning on every machine, and `explain`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, Unpack, overload

import jax
from jax.typing import DTypeLike

from jattn import call as calls
from jattn import capability, formats, implementations

Out = jax.Array
OutAndLse = tuple[jax.Array, jax.Array]


@overload
def paged_attention(
    query: calls.Array,
    key_cache: formats.Cache,
    value_cache: formats.Cache | None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[calls.CallOptions[calls.Array]],
) -> Out: ...


@overload
def paged_attention(
    query: calls.Array,
    key_cache: formats.Cache,
    value_cache: formats.Cache | None,
    *,
    return_lse: Literal[True],
    **options: Unpack[calls.CallOptions[calls.Array]],
) -> OutAndLse: ...


@overload
def paged_attention(
    query: calls.Array,
    key_cache: formats.Cache,
    value_cache: formats.Cache | None,
    *,
    return_lse: bool,
    **options: Unpack[calls.CallOptions[calls.Array]],
) -> Out | OutAndLse: ...


def paged_attention(
    query: calls.Array,
    key_cache: formats.Cache,
    value_cache: formats.Cache | None,
    *,
    block_tables: calls.Array,
    seq_lens: calls.Array,
    query_start_loc: calls.Array | None = None,
    max_query_len: int | None = None,
    scale: calls.Number | None = None,
    is_causal: bool | calls.Array = True,
    sliding_window: calls.Integer | None = None,
    logits_soft_cap: calls.Number | None = None,
    sinks: calls.Array | None = None,
    alibi_slopes: calls.Array | None = None,
    relative_bias: calls.Array | None = None,
    attention_chunk_size: calls.Integer | None = None,
    visible_end: calls.Array | None = None,
    tree_mask: calls.Array | None = None,
    selected_blocks: calls.Array | None = None,
    value_dim: int | None = None,
    k_scale: calls.Number | None = None,
    v_scale: calls.Number | None = None,
    kv_layout: str | None = None,
    out_dtype: DTypeLike | None = None,
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Out | OutAndLse:
    r"""Compute attention over a paged KV cache: prefill, decode or a mixture of both in one call.

    Query token i of a sequence b with n query tokens sits at position `p = seq_lens[b] - n + i`.
    With j over the keys that it sees (`jattn.spec`), softmax in float32 and the natural logarithm,

        s_j = cap * tanh(scale * k_scale * (q . k_j) / cap) + slope * (j - p) + bias[j - p]
        lse = log(sum_j exp(s_j) + exp(sink))
        out = sum_j exp(s_j - lse) * v_scale * v_j

    A row that sees no key returns zeros and `lse = -inf` (with a sink: zeros and `lse = sink`).
    Slots no sequence owns, table entries past `ceil(seq_len / S)` and padded rows may hold
    anything. A sequence returns NaN in all its rows if it has more keys than its table row has room
    for, or a block id outside the pool where its queries see keys. All rows are NaN if
    `query_start_loc` does not begin at 0, decreases or exceeds T. `AttentionMetadata.check` finds
    such errors on the host.

    Axes: T query tokens, B sequences, H query heads, K KV heads (H a multiple of K), D head size of
    queries and keys, V of values, N blocks of S tokens, M table width.

    Args:
      query: [T, H, D] float32, bfloat16 or float16; the tokens of all sequences, concatenated.
      key_cache, value_cache: two `KVArray`s, whose formats may differ, or two float arrays (fp8
        included), HND [N, K, S, D] and [N, K, S, V] or NHD [N, S, K, D] and [N, S, K, V]. With
        `value_cache` None and `value_dim` given, the first V numbers of every key are its value
        (MLA: D 576, V 512), read once. Or a `KVRows`, one array of keys and values, and None.
      block_tables: int32 [B, M]; row b names sequence b's blocks in order.
      seq_lens: int32 [B]; keys of each sequence, including this step's; 0 or less if it is empty.
      query_start_loc: int32 [B + 1]; sequence b's tokens are `[start[b], start[b + 1])`. None for
        one token per sequence (T == B). Tokens past `start[B]` are padding and return zeros.
      max_query_len: static upper bound on a sequence's query tokens; None for T. A sequence that
        exceeds it returns NaN.
      scale: number or 0-d array; None for `D ** -0.5`.
      is_causal: bool, or bool [B].
      sliding_window: how many keys a query sees, including its own (not causal: |p - j| < window);
        an integer or a 0-d int32. 2**31 - 1 means no window.
      logits_soft_cap: number or 0-d array; None for no cap.
      sinks: [H] or [T, H] float; a logit per head (and token), only added to the denominator.
      alibi_slopes: [H] float.
      relative_bias: [H, 2 E + 1] float; column `clip(j - p, -E, E) + E` is added to the logit.
      attention_chunk_size: a query sees only the keys of its own chunk of this many positions; an
        integer or a 0-d int32.
      visible_end: int32 [T]; a causal query also sees keys at positions below it, for images,
        prefixes and draft tokens with bidirectional attention. 0 for none.
      tree_mask: for speculative decoding with trees: which earlier query tokens of its sequence a
        query token sees, as bool [T, Q], or uint32 [T, W] with token j in bit j % 32 of word
        j // 32. A token always sees itself. Its position is given by its depth in the tree. Query
        tokens past the mask's Q, or 32 W, form a plain chain. Use ones for sequences without trees.
      selected_blocks: int32 [B, M']; the blocks that a sequence's queries attend to, as columns of
        its table in any order. Columns out of range (such as -1) and duplicates are ignored.
        Positions stay true positions.
      value_dim: V if `value_cache` is None and `key_cache` is not a `KVRows`, else None.
      k_scale, v_scale: what a stored value is multiplied by: a number, [] or [K]; None for the
        cache's own scale, or 1.
      kv_layout: "HND" or "NHD"; None for the caches' own layout, HND for plain arrays.
      out_dtype: a dtype that a query may have; None for the query's own.
      return_lse: whether to return the lse too.
      implementation: None for the first that can run the call, except kernels that might hang on
        hardware where they have not run; or "mosaic_gpu", "triton", "native", "xla", "reference",
        or a sequence of them in order of preference. See `jattn.explain`.

    Returns:
      out [T, H, V]; with `return_lse` also lse [T, H] float32. Sums over values are normalized at
      the end, so the largest |v| times the number of keys a query sees must stay below 3.4e38.

    Raises:
      ValueError: arguments do not fit; raised before any work, and lists every mismatch.
      UnsupportedError: no requested implementation can run the call; lists every reason.

    Shapes, dtypes, the layout, which options are present, a bool `is_causal`, `max_query_len` and
    `implementation` are static. Every number is dynamic: a new value never compiles anything.

    Example:
      >>> import jax.numpy as jnp, jattn
      >>> key_cache, value_cache = jattn.init_kv_cache(8, 1, 16, 512)
      >>> query = jnp.ones((2, 4, 512), jnp.bfloat16)
      >>> tables = jnp.array([[3, 5], [1, 0]], jnp.int32)
      >>> out = jattn.paged_attention(query, key_cache, value_cache, block_tables=tables,
      ...                             seq_lens=jnp.array([17, 3], jnp.int32))
      >>> out.shape, out.dtype.name
      ((2, 4, 512), 'bfloat16')
    """
    arguments = calls.Arguments(
        query, key_cache, value_cache, block_tables=block_tables, seq_lens=seq_lens,
        query_start_loc=query_start_loc, max_query_len=max_query_len, scale=scale,
        is_causal=is_causal, sliding_window=sliding_window, logits_soft_cap=logits_soft_cap,
        sinks=sinks, alibi_slopes=alibi_slopes, relative_bias=relative_bias,
        attention_chunk_size=attention_chunk_size, visible_end=visible_end, tree_mask=tree_mask,
        selected_blocks=selected_blocks, value_dim=value_dim, k_scale=k_scale, v_scale=v_scale,
        kv_layout=kv_layout, out_dtype=out_dtype, return_lse=return_lse,
        implementation=implementation,
    )  # fmt: skip
    call = calls.describe_call(arguments)
    chosen = implementations.choose(call, implementation)
    try:
        out, lse = _run(chosen.row.implementation, call, calls.take_operands(call, arguments))
    except TypeError as error:
        if "forward-mode" not in str(error):  # from functions with a rule for reverse mode only
            raise
        raise capability.UnsupportedError(
            "paged_attention: jax.jvp is not supported: gradients exist only in reverse mode "
            "(jax.grad, jax.vjp)"
        ) from error
    return (out, lse) if return_lse else out


@functools.partial(jax.jit, static_argnames=("name", "call"))
def _run(name: str, call: calls.Call, operands: calls.Operands) -> tuple[jax.Array, jax.Array]:
    """Run a call, compiled once per implementation and call for eager and jitted callers alike."""
    with jax.named_scope(f"jattn.{name}"):
        return implementations.BY_NAME[name].run(call, calls.guarded(operands))


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation a call would use, and why not the others. Print it.

    Attributes:
      call: the static description of the call.
      taken: the implementation it would use, or None if no candidate can run it.
      refusals: why each candidate is not taken; () for one that could run the call.
      notes: hints for this call.
    """

    call: calls.Call
    taken: str | None
    refusals: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = []
        for name, reasons in self.refusals.items():
            if name == self.taken:
                lines.append(f"{name}: taken")
            elif reasons:
                lines.append(f"{name}: refused: {'; '.join(reasons)}")
            else:
                lines.append(f"{name}: could run it, but comes later")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def explain(
    query: calls.ArrayOrStruct,
    key_cache: formats.Cache | jax.ShapeDtypeStruct,
    value_cache: formats.Cache | jax.ShapeDtypeStruct | None,
    *,
    return_lse: bool = False,
    **options: Unpack[calls.CallOptions[calls.ArrayOrStruct]],
) -> Explanation:
    """Report which implementation a call would use, and why not the others. Runs nothing.

    Args:
      query, key_cache, value_cache, return_lse, **options: the arguments of `paged_attention`,
        including `implementation`; arrays may be `jax.ShapeDtypeStruct`s.

    Returns:
      An `Explanation`; printed, it has one line per implementation, then one per note.

    Raises:
      ValueError, TypeError: as `paged_attention` would.

    Example:
      >>> import jax, jax.numpy as jnp, jattn
      >>> struct = jax.ShapeDtypeStruct
      >>> pool = struct((64, 2, 16, 512), jnp.float32)
      >>> why = jattn.explain(struct((4, 8, 512), jnp.float32), pool, pool,
      ...                     block_tables=struct((4, 8), jnp.int32),
      ...                     seq_lens=struct((4,), jnp.int32), implementation="xla")
      >>> print(why)
      xla: taken
    """
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    given = calls.Arguments[calls.ArrayOrStruct].of(
        "explain", query=query, **caches, return_lse=return_lse, **options
    )
    call = calls.describe_call(given)
    refused = implementations.refusals(call, given.implementation)
    refusals = {name: tuple(reasons) for name, reasons in refused}
    taken = next((name for name, reasons in refusals.items() if not reasons), None)
    notes = []
    narrow = call.plain_cache and call.key_format.word_dtype != call.key_format.value_dtype
    if narrow and taken == "xla":
        notes.append(
            f"plain {call.key_format.name} caches: on CPU a jattn.KVArray is faster, because XLA "
            "may convert a whole pool of narrow floats, but never the words of a KVArray"
        )
    if taken is not None and implementations.BY_NAME[taken].row.untried(call):
        notes.append(f"{taken}: not yet run on hardware")
    return Explanation(call, taken, refusals, tuple(notes))


def support_table() -> str:
    """Return the table of docs/support.md in Markdown: what each implementation takes."""
    return capability.table(implementations.ROWS)
