"""The Mosaic GPU kernels without a GPU: interpreted, compared with the oracle, checked for races.

Ids read like `mosaic_gpu-head512-block16-bf16-everything-hnd-group8`. A case has an empty sequence,
sequences of one key, of a kernel block less one, and of just over a tile, and one that is split
between grid blocks. Slots that no sequence owns hold NaN, and tables end in garbage.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import implementations, spec
from jattn.pallas import machine
from tests.support import budget, mosaic_cases, problems, promises, wrong

if mosaic_cases.NEW_ENOUGH:
    from jattn.pallas.mosaic_gpu import compat as mosaic_compat
    from jattn.pallas.mosaic_gpu import fragments as mosaic_fragments
    from jattn.pallas.mosaic_gpu import launch as mosaic_launch
    from jattn.pallas.mosaic_gpu.decode import kernel as mosaic_decode
    from jattn.pallas.mosaic_gpu.decode import plan as mosaic_plan
    from jattn.pallas.mosaic_gpu.decode import tiles as mosaic_decode_tiles

pytestmark = [mosaic_cases.needs_mosaic, pytest.mark.newer]
ROW = implementations.BY_NAME["mosaic_gpu"].row

EVERYTHING = frozenset(ROW.options) - {"not_causal"}
CASES = {
    case.id: case
    for case in (
        mosaic_cases.Case(512, 512, 16, "bfloat16", EVERYTHING, "HND", 8),
        mosaic_cases.Case(512, 512, 8, "fp8_e4m3", {"k_scale", "v_scale"}, "NHD", 2),
        mosaic_cases.Case(576, 512, 64, "bfloat16", {"sinks", "value_dim"}, "NHD", 16),
        mosaic_cases.Case(192, 128, 48, "float16", {"alibi_slopes"}, "HND", 3),
        mosaic_cases.Case(256, 256, 32, "fp8_e5m2", {"not_causal"}, "HND", 5),
        mosaic_cases.Case(128, 128, 128, "bfloat16", {"not_causal", "sliding_window"}, "rows", 1),
        mosaic_cases.Case(96, 96, 16, "fp8_e4m3", {"is_causal_per_sequence"}, "HND", 12),
        mosaic_cases.Case(80, 80, 8, "bfloat16", {"alibi_slopes", "sliding_window"}, "HND", 20),
        mosaic_cases.Case(64, 64, 16, "float16", {"logits_soft_cap"}, "NHD", 6, "bfloat16"),
    )
}


@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    batch = CASES[name].batch()
    allowed = budget.of(batch)
    allowed.check(*mosaic_cases.interpret(batch, detect_races=True))
    passed = [name for name, kernel in wrong.kernels(batch) if not allowed.violations(*kernel())]
    assert not passed, f"within the budget: {passed}"


def test_the_cases_meet_every_claim():
    cases = list(CASES.values())
    assert {case.format for case in cases} == set(ROW.formats)
    assert {case.query_dtype for case in cases} == set(ROW.query_dtypes)
    assert {case.kv_layout for case in cases} == set(ROW.layouts)
    assert set().union(*(case.options for case in cases)) >= set(ROW.options)
    assert {case.head_dim for case in cases} == set(ROW.head_dims.tested)
    assert {case.value_dim for case in cases} == set(ROW.value_dims.tested) - {192}
    for case in cases:
        assert not ROW.refuses(case.batch().call()[0]), case.id


def test_one_token_per_sequence_without_query_start_loc():
    case = mosaic_cases.Case(64, 64, 16, "bfloat16", {"sinks"}, "HND", 2)
    problem = case.problem().replace(query_lens=(1,) * 4, seq_lens=(0, 1, 64, 65), ragged=False)
    batch = problems.build(problem)
    budget.of(batch).check(*mosaic_cases.interpret(batch))


SMALL = mosaic_cases.Case(64, 64, 16, "bfloat16", set(), "HND", 2)


def test_sequences_that_break_a_promise_are_nan():
    batch = SMALL.batch()
    broken, sequences = promises.some_broken(batch)
    promises.check(batch, *mosaic_cases.interpret(broken), sequences)


def test_a_large_batch_fits_the_grid():
    """It has more work items than CUDA allows along any axis but x."""
    call, operands = SMALL.batch().call()
    many = machine.MOST_ROWS_OF_BLOCKS // call.num_kv_heads + 1
    call = dataclasses.replace(call, num_seqs=many, num_tokens=many, max_query_len=1)

    def of_many(x, count):
        return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype)

    operands = jax.eval_shape(lambda x: x, operands)._replace(
        query=of_many(operands.query, many),
        block_tables=of_many(operands.block_tables, many),
        seq_lens=of_many(operands.seq_lens, many),
        query_start_loc=of_many(operands.query_start_loc, many + 1),
    )
    with mosaic_compat.interpreted():
        out, _ = jax.eval_shape(lambda given: mosaic_launch.run(call, given), operands)
    assert out.shape == operands.query.shape


@pytest.mark.parametrize("mistake", promises.MISTAKES)
def test_decode_with_invalid_starts_is_nan_everywhere(mistake):
    for found in mosaic_cases.interpret(promises.with_starts(SMALL.batch(), mistake)):
        assert np.isnan(found).all()


@pytest.mark.parametrize(("role", "forgotten"), [("_consume", "full"), ("_produce", "empty")])
def test_a_missing_wait_is_found(monkeypatch, role, forgotten):
    """If a consumer does not wait for a copy, or a producer does not wait for the consumer."""
    case = mosaic_cases.Case(64, 64, 64, "bfloat16", set(), "HND", 8)
    problem = case.problem().replace(query_lens=(1,), seq_lens=(200,), ragged=False)
    batch = problems.build(problem)
    pick = mosaic_decode_tiles.pick

    def small_ring(call, span):
        return dataclasses.replace(pick(call, span), ring=2)

    monkeypatch.setattr(mosaic_decode_tiles, "pick", small_ring)
    right = getattr(mosaic_decode, role)

    def wrong_role(*given):
        wait = mosaic_compat.barrier_wait
        with monkeypatch.context() as patch:
            patch.setattr(
                mosaic_compat,
                "barrier_wait",
                lambda barrier: None if barrier.ref is given[-1][forgotten] else wait(barrier),
            )
            right(*given)

    monkeypatch.setattr(mosaic_decode, role, wrong_role)
    # Either the race shows first, or a barrier without a wait.
    with pytest.raises(Exception, match=r"RACE DETECTED|no threads observed"):
        mosaic_cases.interpret(batch, detect_races=True, num_cores=1)


def test_fragments_agree_with_spec():
    """Point by point, with the causal flag as a number, as in the kernels."""
    q_pos = np.arange(-3, 14, dtype=np.int32)[:, None]
    k_pos = np.arange(-2, 15, dtype=np.int32)[None]
    for seq_len in (0, 1, 9):
        for window in (None, 1, 4, 2**31 - 1):
            for causal in (False, True):
                wanted = spec.visible(q_pos, k_pos, seq_len, spec.Sight(causal, window))
                wanted = np.broadcast_to(wanted, (17, 17))
                for given in (causal, jnp.int32(causal)):
                    found = mosaic_fragments.visible(
                        jnp.asarray(q_pos),
                        jnp.asarray(k_pos),
                        jnp.int32(seq_len),
                        spec.Sight(given, None if window is None else jnp.int32(window)),
                    )
                    np.testing.assert_array_equal(np.broadcast_to(found, (17, 17)), wanted)


def test_tanh_is_as_accurate_as_spec_requires():
    x = np.concatenate([np.geomspace(1e-30, 1e30, 20001), np.linspace(0, 12, 20001)])
    x = np.concatenate([x, -x]).astype(np.float32)
    found = np.asarray(mosaic_fragments.tanh(jnp.asarray(x)), np.float64)
    assert np.abs(found - np.tanh(x.astype(np.float64))).max() <= spec.TANH_ERROR


def test_the_plan_deals_out_every_tile_once():
    """Each tile of each work item goes to one grid block, none to padding, in runs of one share."""
    rng = np.random.default_rng(5)
    case = mosaic_cases.Case(64, 64, 16, "bfloat16", {"sliding_window"}, "HND", 3)
    for lens in (rng.integers(0, 400, 9), np.zeros(4, int), np.array([5000, 0, 1, 64])):
        counts = np.minimum(rng.integers(0, 5, len(lens)), lens)
        problem = case.problem().replace(
            query_lens=tuple(map(int, counts)),
            seq_lens=tuple(map(int, lens)),
            options=frozenset() if lens.max() > 4000 else frozenset({"sliding_window"}),
        )
        call, operands = problems.build(problem).call()
        starts = operands.query_start_loc
        plan = mosaic_plan.make(
            call,
            operands,
            starts[1:] - starts[:-1],
            tile=64,
            kernel_block=16,
            row_block=8,
            grid=5,
            min_share=2,
        )
        Fact = mosaic_plan.Fact
        sequences = np.arange(len(lens))
        facts = np.stack([np.asarray(plan[sequences, fact]) for fact in Fact], axis=1)
        work = facts[:, Fact.TILES] * facts[:, Fact.ROW_BLOCKS] * call.num_kv_heads
        share, total = int(plan.share), int(plan.total)
        assert total == work.sum()
        assert share == max(-(-total // 5), 2)
        np.testing.assert_array_equal(facts[:, Fact.START], np.cumsum(work) - work)
        np.testing.assert_array_equal(facts[:, Fact.TILES] > 0, facts[:, Fact.ROW_BLOCKS] > 0)
        owner = np.repeat(np.arange(len(work)), work)
        for block, seq in enumerate(np.asarray(plan.first_seq(np.arange(5)))):
            if block * share < total:
                assert owner[block * share] == seq
        for seq in np.flatnonzero(work):
            later = np.flatnonzero(work[seq + 1 :])
            if len(later):
                assert facts[seq, Fact.NEXT] == seq + 1 + later[0]
            covered = facts[seq, Fact.BASE] + 64 * facts[seq, Fact.TILES]
            assert facts[seq, Fact.BASE] <= facts[seq, Fact.FIRST_KEY]
            assert covered - 64 <= facts[seq, Fact.LAST_KEY] < covered
