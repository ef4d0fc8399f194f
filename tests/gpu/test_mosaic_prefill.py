"""The Mosaic GPU prefill kernels without a GPU: interpreted, race-detected, compiled.

The kernels have special branches for the interpreter (`accumulate` and `_weigh`): it supports
neither accumulators with initial values nor a left operand of wgmma in registers. The compile tests
cover the other branches.
"""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jattn import implementations, spec
from jattn.pallas import machine
from tests.support import budget, mosaic_cases, problems, promises, wrong
from tests.support.mosaic_cases import ALL, LSE

if mosaic_cases.NEW_ENOUGH:
    from jattn.pallas.mosaic_gpu import compat as mosaic_compat
    from jattn.pallas.mosaic_gpu.prefill import kernel as mosaic_prefill
    from jattn.pallas.mosaic_gpu.prefill import plan
    from jattn.pallas.mosaic_gpu.prefill import tiles as mosaic_prefill_tiles
    from jattn.pallas.mosaic_gpu.prefill import wide as mosaic_prefill_wide
    from jattn.pallas.mosaic_gpu.prefill.plan import Column

pytestmark = [mosaic_cases.needs_mosaic, pytest.mark.newer]


def problem(**changes):
    """Make a problem: an empty sequence, one token, more keys than queries, as many, others.

    A tile ends inside a block.
    """
    lens = {"query_lens": (0, 1, 9, 21, 12), "seq_lens": (0, 1, 40, 21, 75)}
    return problems.Problem(**(mosaic_cases.SMALL | lens | changes))


def prefill(batch, *, detect_races=False, counts=None, cluster=None):
    """Interpret the prefill kernels, by default for every sequence, and return `(out, lse)`."""

    def kernel(call, operands):
        lens = operands.query_start_loc[1:] - operands.query_start_loc[:-1]
        lens = lens if counts is None else counts
        return mosaic_prefill.run(call, operands, lens, cluster=cluster)

    return mosaic_cases.interpret(batch, detect_races=detect_races, kernel=kernel)


CASES = {
    "head192-value128-all-options-rows-fp8_e4m3": problem(
        head_dim=192, value_dim=128, options=ALL, kv_layout="rows", row_step=64, seed=1,
        format="fp8_e4m3",
    ),
    "head512-group8-block48": problem(
        head_dim=512, value_dim=512, num_heads=8, num_kv_heads=1, block_size=48
    ),
    "head576-value512-all-options-mla": problem(
        head_dim=576, value_dim=512, num_heads=2, num_kv_heads=1,
        options=ALL - {"v_scale"} | {"value_dim"},
    ),
    "head512-rows": problem(
        head_dim=512, value_dim=512, num_heads=8, kv_layout="rows", row_step=64, seed=1
    ),
}  # fmt: skip
SLOW_CASES = {
    "head80-group1-block8-fp16": problem(
        head_dim=80, value_dim=80, num_heads=2, block_size=8, query_dtype="float16",
        format="float16", options=frozenset({"not_causal", "sliding_window"}),
    ),
    "head96-value64-group5-block24": problem(
        head_dim=96, value_dim=64, num_heads=5, num_kv_heads=1, block_size=24,
        options=LSE | {"sinks"},
    ),
    "head320-value256-group5-block8": problem(
        head_dim=320, value_dim=256, num_heads=5, num_kv_heads=1, block_size=8,
        options=LSE | {"alibi_slopes", "sliding_window", "sinks"},
    ),
    "head64-value384-block24-not-causal": problem(
        value_dim=384, num_heads=8, num_kv_heads=1, block_size=24, options=LSE | {"not_causal"}
    ),
}  # fmt: skip
MORE = {
    "head64-all-options-nhd": problem(options=ALL, kv_layout="NHD"),
    "head64-all-options-nhd-fp8_e4m3": problem(options=ALL, kv_layout="NHD", format="fp8_e4m3"),
    "head96-group5-block24-fp16-fp8_e5m2": problem(
        head_dim=96, value_dim=96, num_heads=5, num_kv_heads=1, block_size=24,
        query_dtype="float16", format="fp8_e5m2", options=LSE | {"sinks", "not_causal"},
    ),
    "head256-group2-fp8_e5m2": problem(
        head_dim=256, value_dim=256, num_heads=2, num_kv_heads=1, format="fp8_e5m2",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        *(
            pytest.param(
                case,
                id=name,
                marks=() if name == "head512-group8-block48" else pytest.mark.extended,
            )
            for name, case in CASES.items()
        ),
        *(
            pytest.param(case, id=name, marks=pytest.mark.slow)
            for name, case in (SLOW_CASES | MORE).items()
        ),
    ],
)
def test_interpreted_within_budget_and_wrong_kernels_are_not(case):
    batch = problems.build(case)
    allowed = budget.of(batch)
    out, lse = prefill(batch)
    allowed.check(out, lse if "return_lse" in case.options else None)
    for name, kernel in wrong.kernels(batch):
        assert allowed.violations(*kernel()), name


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", [1, 2], ids=["tokens-apart", "heads-apart"])
def test_a_cluster_of_two_blocks(num_heads):
    """Rows are divided over both blocks, and barriers span them.

    The interpreter has no multicast copies: each block copies what the other would send it.
    """
    case = problem(
        head_dim=512, value_dim=512, num_heads=num_heads, num_kv_heads=1,
        options=LSE | {"sinks", "sliding_window"},
    )  # fmt: skip
    batch = problems.build(case)
    allowed = budget.of(batch)
    allowed.check(*prefill(batch, cluster=True))
    for name, kernel in wrong.kernels(batch):
        assert allowed.violations(*kernel()), name


def test_a_mixture_is_shared_with_the_decode_kernel():
    """`mosaic_launch` gives it sequences of up to 8 query tokens; padding must be zeros."""
    case = problem(query_lens=(1, 9, 0, 2), seq_lens=(40, 21, 5, 70), num_heads=2, num_kv_heads=1)
    batch = problems.build(case)
    budget.of(batch).check(*mosaic_cases.interpret(batch))


@pytest.mark.parametrize(
    "case",
    [
        problem(query_lens=(9, 18), seq_lens=(30, 150), num_heads=2, num_kv_heads=1),
        problem(
            query_lens=(9, 3), seq_lens=(30, 70), num_heads=1, num_kv_heads=1,
            head_dim=512, value_dim=512,
        ),
        pytest.param(
            problem(
                query_lens=(9, 3), seq_lens=(130, 70), num_heads=8, num_kv_heads=1,
                head_dim=512, value_dim=512,
            ),
            marks=pytest.mark.slow,
        ),
        problem(
            query_lens=(9,), seq_lens=(150,), num_heads=2, num_kv_heads=1, format="fp8_e4m3",
        ),
    ],
    ids=["head64", "head512", "head512-cluster", "head64-fp8_e4m3"],
)  # fmt: skip
def test_no_races(case):
    batch = problems.build(case)
    budget.of(batch).check(*prefill(batch, detect_races=True))


def test_a_missing_barrier_is_found(monkeypatch):
    """The race detector notices if the kernel reads keys that have not arrived."""
    monkeypatch.setattr(mosaic_prefill, "_wait_for_keys", lambda barrier: None)
    batch = problems.build(problem(query_lens=(9,), seq_lens=(300,), num_heads=1, num_kv_heads=1))
    with pytest.raises(Exception, match="RACE DETECTED"):
        prefill(batch, detect_races=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        *((name, 50, "RACE DETECTED") for name in (
            "q_ready", "k_ready", "v_ready", "top_ready", "p_ready", "totals_ready"
        )),
        # With more keys there are more phases: an unawaited phase may be noticed first.
        *((name, 100, "RACE DETECTED|no threads observed") for name in (
            "k_free", "v_free", "p_free"
        )),
    ],
)  # fmt: skip
def test_every_barrier_above_head256_is_needed(name, keys, said, monkeypatch):
    """Without its waits the interpreter raises, here in a cluster of two blocks."""
    barriers = []

    def seen(role):
        def run(*arguments):
            barriers.append(arguments[-1][name])
            role(*arguments)

        return run

    for role in ("_produce", "_consume"):
        monkeypatch.setattr(mosaic_prefill_wide, role, seen(getattr(mosaic_prefill_wide, role)))
    wait = mosaic_compat.barrier_wait

    def others(barrier):
        if not any(getattr(barrier, "ref", barrier) is left_out for left_out in barriers):
            wait(barrier)

    monkeypatch.setattr(mosaic_compat, "barrier_wait", others)
    case = problem(
        query_lens=(9,), seq_lens=(keys,), num_heads=2, num_kv_heads=1, head_dim=512, value_dim=512
    )
    with pytest.raises(Exception, match=said):
        prefill(problems.build(case), detect_races=True, cluster=True)


@pytest.mark.parametrize(
    ("owner", "name", "keys"),
    [
        ("fp8", "_wait_for_copies", 150),
        pytest.param("fp8.Widened", "await_values", 100, marks=pytest.mark.slow),
    ],
    ids=["copies", "hand-over"],
)
def test_a_missing_barrier_is_found_where_tiles_are_widened(monkeypatch, owner, name, keys):
    """If fp8 is read before it has arrived, or a tile before the other warpgroup widened it."""
    monkeypatch.setattr(f"jattn.pallas.mosaic_gpu.prefill.{owner}.{name}", lambda *arguments: None)
    case = problem(
        query_lens=(9,), seq_lens=(keys,), num_heads=2, num_kv_heads=1, format="fp8_e4m3"
    )
    with pytest.raises(Exception, match="RACE DETECTED"):
        prefill(problems.build(case), detect_races=True)


BEYOND = "logits beyond 2^31: a product and a difference in one instruction exceed the maximum"


@pytest.mark.slow
@pytest.mark.parametrize(
    "most", [36, pytest.param(40, marks=pytest.mark.xfail(strict=True, reason=BEYOND))]
)
def test_queries_beyond_float16(most):
    """bfloat16 query rows of different sizes, far outside the range of float16."""
    case = problem(query_lens=(9, 12), seq_lens=(40, 75), format="fp8_e4m3", num_heads=2)
    batch = problems.build(case)
    size = np.exp2(np.linspace(-40, most, len(batch.query))).astype(np.float32)
    query = (batch.query.astype(np.float32) * size[:, None, None]).astype(batch.query.dtype)
    given = dataclasses.replace(batch, query=query)
    real = batch.view.starts[-1]
    out, lse = (x[:real].astype(np.float64) for x in prefill(given))
    want_out, want_lse = (x[:real] for x in given.oracle())
    assert np.isfinite(out).all()
    largest = np.abs(want_lse).max(axis=1, keepdims=True)
    np.testing.assert_allclose(lse / largest, want_lse / largest, atol=2**-10)
    small = size[:real] < 2**-8  # where logits are nearly flat, so outputs are means of values
    np.testing.assert_allclose(out[small], want_out[small], atol=2**-7 * np.abs(want_out).max())


def test_sequences_of_another_kernel_are_left_alone():
    """Their rows are not written, and all others are."""
    batch = problems.build(problem(num_heads=2, num_kv_heads=1))
    allowed = budget.of(batch)
    starts = np.asarray(batch.kwargs["query_start_loc"])
    counts = np.diff(starts)
    counts[3] = 0
    out, _ = prefill(batch, counts=jnp.asarray(counts, jnp.int32))
    skipped = slice(starts[3], starts[4])
    # The interpreter fills outputs with NaN, which unwritten rows keep.
    assert np.isnan(out[skipped].astype(np.float32)).all()
    found = allowed.violations(out)
    assert len(found) == 1
    assert found[0].startswith("out of sequence 3 ")


def mixture():
    """Make a batch with two sequences for decode and two for prefill."""
    lens = {"query_lens": (1, 2, 12, 9), "seq_lens": (40, 50, 21, 45)}
    return problems.build(problem(**lens, num_heads=1, num_kv_heads=1, options=LSE | {"sinks"}))


@pytest.mark.extended
def test_a_mixture_that_breaks_promises_is_nan():
    batch = mixture()
    broken, sequences = promises.some_broken(batch)
    assert sequences == {0, 1, 3}
    promises.check(batch, *mosaic_cases.interpret(broken), sequences)
    broken.kwargs["max_query_len"] = 11
    out, lse = mosaic_cases.interpret(broken)
    real = batch.view.starts[-1]
    assert np.isnan(out[:real].astype(np.float32)).all()
    assert np.isnan(lse[:real]).all()
    np.testing.assert_array_equal(out[real:], 0)


def test_prefill_with_invalid_starts_is_nan_everywhere():
    for found in mosaic_cases.interpret(promises.with_starts(mixture(), "decreases")):
        assert np.isnan(found.astype(np.float32)).all()


def test_rows_of_nan_show_in_their_lse():
    batch = mixture()
    query, nan = batch.query.copy(), [1, 5]
    query[nan] = np.nan
    for x in mosaic_cases.interpret(dataclasses.replace(batch, query=query)):
        is_nan = np.isnan(x.astype(np.float32)).reshape(len(x), -1)
        for seen in (is_nan.all(axis=1), is_nan.any(axis=1)):
            np.testing.assert_array_equal(np.flatnonzero(seen), nan)


@pytest.mark.parametrize(
    ("num_heads", "longest", "block_size", "head_dim", "units"),
    [
        (16, 9, 16, 512, 2),  # two units of 4 heads per KV head
        (4, 32, 16, 512, 1),  # 2 heads and 32 tokens fill one unit
        (4, 33, 16, 512, 2),
        (10, 64, 16, 512, 1),  # 5 heads cannot be halved; tokens can
        (10, 65, 16, 512, 2),
        (16, 9, 8, 512, 2),
        (16, 9, 8, 576, 1),  # 9 times 64 columns in a copy of 8 rows
        (16, 9, 24, 576, 1),
        (16, 9, 48, 576, 2),
    ],
)
def test_which_blocks_share_copies(num_heads, longest, block_size, head_dim, units):
    case = problem(
        num_heads=num_heads, head_dim=head_dim, value_dim=512, block_size=block_size,
        query_lens=(1, longest), seq_lens=(1, longest),
    )  # fmt: skip
    call = dataclasses.replace(problems.build(case).call()[0], max_query_len=longest)
    tiles = mosaic_prefill_tiles.choose(call)
    assert tiles.units == units
    # Half of a block's copy is a whole number of tiles of 8 rows by 64 columns.
    assert tiles.copy_tokens // 8 * (head_dim // 64) % units == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("tile_tokens", [8, 16, 64])
def test_plan_covers_every_token_once_and_every_key_it_sees(tile_tokens, seed):
    """Checked against `spec.visible` for every pair; the plan is plain JAX."""
    rng = np.random.default_rng(seed)
    seq_lens = tuple(int(n) for n in rng.integers(0, 90, 6))
    query_lens = tuple(int(rng.integers(0, n + 1)) for n in seq_lens)
    options = {"sliding_window", "is_causal_per_sequence"} if seed else set()
    case = problem(query_lens=query_lens, seq_lens=seq_lens, options=frozenset(options))
    call, operands = problems.build(case).call()
    num_tokens = max(-(-call.num_tokens // 8) * 8, tile_tokens)
    starts = np.asarray(operands.query_start_loc)
    tiles = np.asarray(
        plan.make(
            call, operands, jnp.diff(operands.query_start_loc),
            num_tokens=num_tokens, tile_tokens=tile_tokens, copy_tokens=16,
        )
    )  # fmt: skip
    written = np.zeros(num_tokens, int)
    for tile in tiles:
        rows = np.arange(tile[Column.WRITE_START], tile[Column.WRITE_END])
        token = tile[Column.TOKEN]
        assert token % plan.ALIGNMENT == 0
        assert 0 <= token <= num_tokens - tile_tokens
        written[token + rows] += 1
        if not len(rows) or token + rows[0] >= starts[-1]:
            assert tile[Column.END] <= tile[Column.BASE]
            continue
        b = tile[Column.SEQUENCE]
        assert starts[b] <= token + rows[0]
        assert token + rows[-1] < starts[b + 1]
        keys = np.arange(seq_lens[b])[None, :] if b < len(seq_lens) else np.zeros((1, 0), int)
        queries = (tile[Column.POSITION] + rows)[:, None]
        causal = bool(operands.is_causal[b]) if call.is_causal is None else call.is_causal
        window = operands.sliding_window
        sight = spec.Sight(causal, None if window is None else int(window))
        seen = spec.visible(queries, keys, keys.shape[1], sight)
        inside = (keys >= tile[Column.BASE]) & (keys < tile[Column.END])
        assert not (seen & ~inside).any()
        clear = (keys >= tile[Column.CLEAR_START]) & (keys < tile[Column.CLEAR_END])
        assert seen[np.broadcast_to(clear & inside, seen.shape)].all()
        assert tile[Column.UNOWNED] >= tile[Column.END]
    np.testing.assert_array_equal(written[: call.num_tokens], 1)


SIZES = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (512, 512),
         (576, 512))  # fmt: skip
EVERYTHING = ALL - {"alibi_slopes"}  # options that every head size takes


def compiled(
    head,
    block_size,
    options,
    group,
    kv_layout="HND",
    dtype="bfloat16",
    format=None,
    *,
    cluster=None,
):
    """Return ptxas' report of the prefill kernel that dispatch would run."""
    from benchmarks.gpu import report as gpu_report
    from benchmarks.gpu import targets as gpu_targets

    try:
        gpu_targets.device_for(90)
    except gpu_targets.MissingCompilerError as error:
        pytest.skip(str(error))
    case = problem(
        head_dim=head[0], value_dim=head[1], block_size=block_size, options=frozenset(options),
        num_heads=2 * group, kv_layout=kv_layout, query_dtype=dtype, format=format or dtype,
    )  # fmt: skip
    call, operands = problems.build(case).call()
    assert not mosaic_prefill_tiles.refusals(call)
    counts = operands.query_start_loc[1:] - operands.query_start_loc[:-1]

    def run(operands, counts):
        return mosaic_prefill.run(call, operands, counts, cluster=cluster)

    found = gpu_report.report(run, operands, counts, sm=90)
    (kernel,) = [kernel for kernel in found if kernel.kind == "mosaic"]
    tiles = mosaic_prefill_tiles.choose(call, cluster=cluster)
    assert kernel.shared == mosaic_prefill_tiles.shared_bytes(tiles, call), kernel
    return kernel, tiles


def check_compiled(*arguments, **options):
    kernel, _ = compiled(*arguments, **options)
    assert kernel.target == "sm_90a"
    assert kernel.spill_bytes == 0, kernel
    assert kernel.shared <= machine.block_shared(90), kernel
    assert kernel.instructions["wgmma"] > 0
    assert kernel.instructions["tma"] > 0


@pytest.mark.parametrize(
    ("head", "block_size", "options", "group", "format"),
    [
        pytest.param((256, 256), 16, ALL, 2, None, id="head256-everything"),
        pytest.param((256, 256), 8, ALL, 4, "fp8_e4m3", id="head256-everything-fp8_e4m3"),
        pytest.param((512, 512), 16, EVERYTHING, 8, None, id="head512-everything"),
    ],
)
def test_nothing_spills(head, block_size, options, group, format):
    check_compiled(head, block_size, options, group, format=format)


@pytest.mark.slow
@pytest.mark.parametrize("head", SIZES, ids=lambda head: f"head{head[0]}-{head[1]}")
@pytest.mark.parametrize(
    ("block_size", "options", "group", "kv_layout", "dtype"),
    [
        (8, frozenset(), 1, "NHD", "bfloat16"),
        (24, ALL, 5, "HND", "bfloat16"),
        (16, LSE | {"sliding_window", "sinks"}, 16, "NHD", "float16"),
        (128, {"not_causal", "logits_soft_cap"}, 4, "HND", "bfloat16"),
    ],
    ids=["block8-nhd", "block24-everything", "block16-window-sinks", "block128-cap"],
)
def test_nothing_else_spills(head, block_size, options, group, kv_layout, dtype):
    arguments = (head, block_size, options, group)
    check_compiled(*arguments, kv_layout=kv_layout, dtype=dtype)


def constant(ptx, register):
    """Return the only number that a register is set to in a kernel's text."""
    (number,) = re.findall(rf"mov\.\w+\s+{register}, (\d+);", ptx)
    return int(number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "block_size", "options", "group", "kv_layout", "dtype", "format"),
    [
        ((128, 128), 8, LSE, 8, "HND", "bfloat16", None),
        ((128, 128), 64, ALL, 4, "NHD", "float16", None),
        ((256, 256), 8, ALL, 16, "NHD", "float16", None),
        ((64, 64), 24, ALL, 5, "HND", "bfloat16", "fp8_e4m3"),
        ((96, 96), 32, LSE, 2, "HND", "bfloat16", "fp8_e5m2"),
        ((128, 128), 8, ALL, 16, "NHD", "bfloat16", "fp8_e5m2"),
        ((192, 128), 16, ALL, 16, "NHD", "float16", "fp8_e4m3"),
        ((192, 192), 24, EVERYTHING, 3, "HND", "bfloat16", "fp8_e4m3"),
        ((256, 256), 16, ALL, 2, "HND", "bfloat16", "fp8_e4m3"),
        ((256, 256), 64, frozenset(), 2, "HND", "float16", "fp8_e5m2"),
    ],
)
def test_nothing_else_spills_up_to_256(head, block_size, options, group, kv_layout, dtype, format):
    """The kernels nearest to the limits, and fp8 caches, whose tiles are also widened."""
    check_compiled(head, block_size, options, group, kv_layout, dtype, format)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "block_size", "options", "group", "kv_layout"),
    [
        ((512, 512), 16, LSE, 8, "HND"),
        ((512, 512), 16, frozenset(), 8, "NHD"),
        ((512, 512), 16, EVERYTHING, 8, "HND"),
        ((512, 512), 64, frozenset(), 1, "HND"),
        ((576, 512), 64, LSE, 16, "HND"),
    ],
    ids=["lse", "nhd", "everything", "block64-group1", "head576"],
)
def test_a_cluster_compiles(head, block_size, options, group, kv_layout):
    """Every copy of keys and values goes to both blocks, and each block sends half of it."""
    kernel, tiles = compiled(head, block_size, options, group, kv_layout, cluster=True)
    assert tiles.units == 2
    assert kernel.shared <= machine.block_shared(90), kernel
    assert re.search(r"\.(reqnctapercluster|explicitcluster)", kernel.ptx)
    sent = re.findall(r"cp\.async\.bulk\.tensor\S*multicast::cluster", kernel.ptx)
    assert len(sent) >= 3, "keys, and both parts of the values"
    # Copies go to both blocks, and each of 128 threads expects its share of a whole copy.
    masks = re.findall(r"multicast::cluster\s.*, (%rs\d+);", kernel.ptx)
    assert len(masks) == len(sent)
    assert {constant(kernel.ptx, mask) for mask in masks} == {3}
    awaited = re.findall(r"arrive\.expect_tx\S+\s+\S+ \[[^]]+\], (%r\d+);", kernel.ptx)
    awaited = {constant(kernel.ptx, count) * 128 for count in awaited}
    copies = {tiles.copy_tokens * columns * 2 for columns in (head[0], head[1] // 2)}
    query = tiles.row_tokens * head[0] * 2
    assert awaited == copies | {query}
    assert kernel.spill_bytes == 0, kernel


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"head_dim": 512, "value_dim": 512, "format": "fp8_e4m3"},
            "key cache format is fp8_e4m3",
        ),
        ({"head_dim": 512, "value_dim": 320}, "value size V = 320"),
    ],
    ids=["fp8", "value320"],
)
def test_what_prefill_does_not_take_is_refused_with_a_reason(changes, reason):
    call, _ = problems.build(problem(**changes)).call()
    row = implementations.BY_NAME["mosaic_gpu"].row
    assert any(reason in found for found in row.refuses(call))
    decode, _ = problems.build(problem(query_lens=(1,) * 5, seq_lens=(1,) * 5, **changes)).call()
    decode = dataclasses.replace(decode, max_query_len=1)
    assert not any(reason in found for found in row.refuses(decode))


def test_more_tiles_than_a_grid_has_rows_are_refused():
    call, _ = problems.build(problem()).call()
    refuses = implementations.BY_NAME["mosaic_gpu"].row.refuses
    most = (machine.MOST_ROWS_OF_BLOCKS - 2 * (call.num_seqs + 1)) * 8 + 7
    assert not refuses(dataclasses.replace(call, num_tokens=most))
    (reason,) = refuses(dataclasses.replace(call, num_tokens=most + 1))
    assert "may be 65536 tiles; prefill takes at most 65535" in reason
