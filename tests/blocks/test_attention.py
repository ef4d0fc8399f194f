"""Attention over an expanded table equals attention over the table: same slots, keys and result.

A pool may be laid out in the manager's blocks, [N, K, S, D], or in kernel blocks,
[N * n, K, S / n, D]. Slots are the same numbers in both, so the same `update_kv_cache` fills both;
the first is read through the table, the second through the expanded one. Bits agree if an
implementation groups keys by the same tokens. The oracle always does, the XLA path if block sizes
are multiples of 8; for others its two results are equally good.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
import jattn.blocks as jb

HEADS, KV_HEADS = 4, 2


def both_ways(block, kernel, head_dim, dtype, layout, implementation):
    """Return `(query, lengths, keys, values, results of the table, those of the expanded one)`."""
    rng = np.random.default_rng(block + kernel)
    lengths = np.asarray(
        [0, 1, kernel - 1, kernel, kernel + 1, block - 1, block, block + 1, 2 * block + 5], np.int32
    )
    seqs, num_blocks = len(lengths), 4 * len(lengths)
    free = iter(rng.permutation(num_blocks).tolist())
    ids = [[[next(free) for _ in range(-(-int(n) // block))]] for n in lengths]
    tables = jb.init_block_tables([jb.BlockGroup(block, 4, kernel)], seqs)
    tables, _ = jb.append_block_ids(tables, np.arange(seqs), *jb.pack_block_ids(ids, widths=[4]))
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    (slots,) = jb.compute_slot_mapping(tables, np.arange(seqs), starts, positions)
    keys, values = (
        jnp.asarray(rng.standard_normal((len(positions), KV_HEADS, head_dim)), dtype)
        for _ in range(2)
    )
    query = jnp.asarray(rng.standard_normal((seqs, HEADS, head_dim)), dtype)

    def attend(block_tables, num_blocks, block_size):
        caches = jattn.init_kv_cache(
            num_blocks, KV_HEADS, block_size, head_dim, format=jattn.Dense(dtype), kv_layout=layout
        )
        garbage = [  # slots that no sequence owns hold NaN
            cache.replace(data=jnp.full_like(cache.data, cache.format.encode(jnp.float32(jnp.nan))))
            for cache in caches
        ]
        caches = jattn.update_kv_cache(*garbage, keys, values, slots, kv_layout=layout)
        out, lse = jattn.paged_attention(
            query,
            *caches,
            block_tables=block_tables,
            seq_lens=jnp.asarray(lengths),
            kv_layout=layout,
            implementation=implementation,
            return_lse=True,
        )
        return np.asarray(out.astype(jnp.float32)), np.asarray(lse)

    gathered = jb.gather_block_tables(tables, np.arange(seqs))
    (expanded,) = jb.kernel_block_tables(tables, gathered)
    n = block // kernel
    assert expanded.shape == (seqs, 4 * n)
    plain = attend(gathered[0], num_blocks, block)
    return query, lengths, keys, values, plain, attend(expanded, num_blocks * n, kernel)


@pytest.mark.parametrize(
    ("block", "kernel", "head_dim", "dtype", "layout", "implementation"),
    [
        (528, 16, 64, "bfloat16", "HND", "reference"),
        pytest.param(528, 16, 64, "float32", "NHD", "reference", marks=pytest.mark.extended),
        (48, 16, 512, "float32", "HND", "reference"),
        pytest.param(64, 16, 64, "bfloat16", "NHD", "xla", marks=pytest.mark.extended),
        pytest.param(64, 16, 64, "float32", "HND", "xla", marks=pytest.mark.slow),
        pytest.param(512, 16, 64, "bfloat16", "HND", "xla", marks=pytest.mark.slow),
        pytest.param(528, 264, 64, "float32", "HND", "xla", marks=pytest.mark.extended),
        pytest.param(528, 16, 64, "float32", "HND", "xla", marks=pytest.mark.extended),
        pytest.param(528, 16, 512, "bfloat16", "NHD", "xla", marks=pytest.mark.extended),
        pytest.param(1056, 32, 128, "float32", "HND", "xla", marks=pytest.mark.slow),
        pytest.param(48, 16, 64, "float32", "HND", "xla", marks=pytest.mark.extended),
    ],
    ids=lambda x: str(x),
)
def test_expanded_tables_give_the_same_bits(block, kernel, head_dim, dtype, layout, implementation):
    *_, plain, expanded = both_ways(block, kernel, head_dim, dtype, layout, implementation)
    for x, y in zip(plain, expanded, strict=True):
        np.testing.assert_array_equal(x.view(np.uint32), y.view(np.uint32))


@pytest.mark.parametrize(
    ("block", "kernel", "head_dim"),
    [(60, 20, 512), (528, 16, 64)],
)
@pytest.mark.extended
def test_expanded_tables_give_results_as_good(block, kernel, head_dim):
    """If keys are grouped differently, sums round differently, but both stay near the oracle."""
    query, lengths, keys, values, plain, expanded = both_ways(
        block, kernel, head_dim, "float32", "HND", "xla"
    )
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for b, n in enumerate(lengths):
        if n == 0:
            assert not plain[0][b].any()
            assert not expanded[0][b].any()
            continue
        mine = slice(starts[b], starts[b + 1])
        k = np.repeat(np.asarray(keys[mine], np.float64), HEADS // KV_HEADS, axis=1)
        v = np.repeat(np.asarray(values[mine], np.float64), HEADS // KV_HEADS, axis=1)
        logits = np.einsum("hd,thd->ht", np.asarray(query[b], np.float64), k) * head_dim**-0.5
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        exact = np.einsum("ht,thd->hd", weights, v)
        # The budget is twice the error of the same sum in float32 by NumPy, plus a few ulps.
        logits32 = np.einsum("hd,thd->ht", np.asarray(query[b]), k.astype(np.float32))
        weights32 = np.exp(
            logits32 * np.float32(head_dim**-0.5) - logits.max(axis=1).astype(np.float32)[:, None]
        )
        single = np.einsum(
            "ht,thd->hd", weights32 / weights32.sum(axis=1, keepdims=True), v.astype(np.float32)
        )
        budget = 2 * np.abs(single - exact).max() + 8 * np.finfo(np.float32).eps
        for out in (plain[0][b], expanded[0][b]):
            assert np.abs(out - exact).max() <= budget
        # A table expanded by a wrong factor would read other blocks, far outside the budget.
        assert np.abs(np.roll(exact, 1, axis=0) - exact).max() > 100 * budget


def test_a_refused_append_gives_nan_and_not_tokens_of_another_sequence():
    rng = np.random.default_rng(0)
    keys = jnp.asarray(rng.standard_normal((64, 1, 64)), jnp.float32)
    query = jnp.asarray(rng.standard_normal((3, 1, 64)), jnp.float32)
    caches = jattn.init_kv_cache(4, 1, 16, 64, format=jattn.Dense("float32"))
    caches = jattn.update_kv_cache(*caches, keys, keys, jnp.arange(64, dtype=jnp.int32))
    groups = [jb.BlockGroup(16, 2, 8, sliding_window_reach=7), jb.BlockGroup(16, 2)]
    tables = jb.init_block_tables(groups, 2)
    held = jb.pack_block_ids([[[1, 2], [1, 2]], [[3], [3]]])
    tables, _ = jb.append_block_ids(tables, [0, 1], *held)
    lengths = jnp.asarray([25, 20, 0], jnp.int32)

    @jax.jit
    def step(tables):
        tables, refused = jb.append_block_ids(tables, 1, [[0, 0]] * 2, [2, 2])
        outputs = []
        for fill in (0, -1):
            window, full = jb.gather_block_tables(
                tables, [0, 1, -1], num_computed_tokens=lengths - 1, fill=fill
            )
            outputs += [
                jattn.paged_attention(
                    query, *caches, block_tables=table, seq_lens=lengths, sliding_window=size
                )
                for table, size in ((window, 8), (full, None))
            ]
        return refused, (window, full), outputs

    refused, gathered, (*with_zeros, window, full) = step(tables)
    assert refused
    assert [x.tolist() for x in gathered] == [
        [[-1, 2], [3, -1], [-1, -1]],
        [[1, 2], [3, -1], [-1, -1]],
    ]
    for plain, marked in zip(with_zeros, (window, full), strict=True):
        assert np.isfinite(plain).all()
        assert np.isnan(marked[1]).all()
        np.testing.assert_array_equal(marked[::2], plain[::2])
    kernel, _ = jb.kernel_block_tables(tables, gathered, strides=(3, None))
    none = [-1, -1]
    assert jnp.maximum(kernel, -1).tolist() == [[*none, 6, 7], [9, 10, *none], [*none, *none]]
    shifted = jb.layer_block_tables(kernel, 1, 12)
    assert shifted.tolist() == [[*none, 18, 19], [21, 22, *none], [*none, *none]]
    for wrong in (-2, 2**31, 0.0, None):
        with pytest.raises(ValueError, match=rf"fill: {wrong}, but must be a static integer from"):
            jb.gather_block_tables(tables, [0], fill=wrong)
