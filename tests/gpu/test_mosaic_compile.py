"""The Mosaic GPU kernels compiled for an H200, without a GPU.

Tests go through the public function, so they compile what dispatch picks there. No register may
spill, shared memory must fit 227 KiB, the code must have `wgmma` and TMA, and nothing may grow with
the pool. The default run has the configurations nearest to the limits; `-m slow` has all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

import jattn
from benchmarks.gpu import data as gpu_data
from benchmarks.gpu import loops as gpu_loops
from benchmarks.gpu import mosaic_decode as decode
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu import targets as gpu_targets
from benchmarks.gpu import workloads as gpu_workloads
from benchmarks.gpu.cases import Case
from jattn import implementations, varying
from jattn.pallas import machine
from tests.support import mosaic_cases

MAX_SHARED = machine.block_shared(90)


def _has_compiler() -> bool:
    try:
        gpu_targets.device_for(90)
    except gpu_targets.MissingCompilerError:
        return False
    return True


pytestmark = [
    mosaic_cases.needs_mosaic,
    pytest.mark.newer,
    pytest.mark.skipif(
        mosaic_cases.NEW_ENOUGH and not _has_compiler(),
        reason="no CUDA compiler: pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc",
    ),
]

NEAREST = (
    decode.configuration((512, 512), "bfloat16", 8, 8, "HND", everything=True),
    decode.configuration((512, 512), "fp8_e4m3", 16, 16, "NHD", everything=True),
    decode.configuration((256, 256), "bfloat16", 32, 32, "HND", everything=True),
)
ALL = {c.label: c for c in decode.configurations(thorough=True)}
in_rows = functools.partial(Case, kind="mixed", kv_layout="rows", implementation="mosaic_gpu")
by_label = functools.partial(pytest.mark.parametrize, "configuration", ids=lambda c: c.label)


def check(configuration: Case) -> None:
    tile = decode.tiles_of(configuration)
    fn, arguments = configuration.function()
    found = gpu_report.report(fn, *arguments, sm=90)
    kernels = [kernel for kernel in found if kernel.kind == "mosaic"]
    assert {kernel.name for kernel in kernels} == {"jattn_decode", "jattn_merge"}
    for kernel in kernels:
        assert kernel.target == "sm_90a"
        assert kernel.spill_bytes == 0, kernel
        assert kernel.shared <= MAX_SHARED, kernel
    main = max(kernels, key=lambda kernel: kernel.shared)
    assert main.blocks_per_core == tile.blocks_per_core, main
    # Exactly the sum of the list of buffers.
    assert main.shared == tile.shared_bytes, (tile.shared_bytes, main)
    assert main.grid[0] == gpu_targets.GPUS[90].cores * tile.blocks_per_core
    assert main.instructions["wgmma"] > 0
    assert main.instructions["tma"] > 0
    assert "mma" not in main.instructions


@by_label(NEAREST)
def test_nothing_spills(configuration):
    check(configuration)


@pytest.mark.extended
@pytest.mark.parametrize(
    "case",
    [
        in_rows((128, 128), options=("sinks", "return_lse")),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (in_rows((256, 256), format="fp8_e4m3"), in_rows((512, 512)))
        ),
        in_rows((576, 512), heads=(16, 1)),
    ],
    ids=lambda case: case.label,
)
def test_nothing_spills_or_is_copied_where_one_array_holds_keys_and_values(case):
    fn, arguments = case.function()
    kernels = [k for k in gpu_report.report(fn, *arguments, sm=90) if k.kind == "mosaic"]
    assert len(kernels) == 3
    for kernel in kernels:
        assert kernel.spill_bytes == 0, kernel
    assert_small(fn, arguments, 2**26)  # 1000 rows of queries and of results


@pytest.mark.extended
def test_a_logit_is_scaled_where_the_maximum_is_subtracted():
    """In one instruction: prefill's softmax has one FFMA per logit, and FADD only for its sum."""
    fn, arguments = Case((64, 64), "mixed", implementation="mosaic_gpu", num_blocks=64).function()
    found = [k for k in gpu_report.report(fn, *arguments, sm=90) if k.name == "jattn_prefill"]
    (loop,) = gpu_loops.loops_of(*found)
    logits = 128 * 128 // 256  # per thread, in tiles of 128 rows and 128 keys
    for name in ("MUFU.EX2", "FFMA", "FADD"):
        assert logits <= loop.opcodes[name] < 1.2 * logits


def test_the_merge_reads_several_splits_at_once():
    """Eight splits of eight rows: all loads come before the first exponential."""
    fn, arguments = decode.configuration((64, 64), "bfloat16", 8, 16, "HND", False).function()
    kernels = gpu_report.report(fn, *arguments, sm=90)
    merge = min((k for k in kernels if k.kind == "mosaic"), key=lambda kernel: kernel.shared)
    before, _ = merge.ptx.split("ex2", 1)
    assert len(re.findall(r"\bld\.(?:global\.)?v2\.b32", before)) == 8 * (2 + 2)


@pytest.mark.extended
@pytest.mark.parametrize("size", [272, 304, 368])
def test_nothing_spills_in_wide_chunks(size):
    """For head sizes with a prime factor above 16, whose columns are all read at once."""
    check(decode.configuration((size, size), "bfloat16", 8, 16, "HND", everything=True))


@pytest.mark.slow
@by_label(ALL.values())
def test_nothing_spills_anywhere(configuration):
    check(configuration)


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_sequences_over_devices_with_the_checks_of_shard_map(kind, implementation):
    """Each device attends for its own sequences, so results vary over the same axis."""
    mesh = jax.sharding.Mesh(np.array(gpu_targets.devices_for(90, 2)), ("data",))
    _, (given,) = Case((128, 128), kind, implementation=implementation, num_blocks=64).function()
    split, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    one_device = {"key_cache", "value_cache"}  # each has all blocks
    specs = {name: whole if name in one_device else split for name in given}

    def attend(given):
        # The arrays of one device: every array that is split has a leading axis for devices.
        mine = {k: v if k in one_device else v[0] for k, v in given.items()}
        out = jattn.paged_attention(**mine, implementation=implementation, **static)
        assert varying.as_varying(out, given) is out
        return out[None]

    static = {"max_query_len": 64} if kind == "mixed" else {}

    def stacked(name, x):
        return x if name in one_device else jax.ShapeDtypeStruct((2, *x.shape), x.dtype)

    arguments = {k: jax.tree.map(functools.partial(stacked, k), v) for k, v in given.items()}
    run = functools.partial(jax.shard_map, attend, mesh=mesh, in_specs=(specs,), out_specs=split)
    with jax.default_device(gpu_targets.device_for(90)):
        if implementation == "mosaic_gpu":
            with pytest.raises(jattn.UnsupportedError, match="seq_lens varies over 'data'"):
                jax.eval_shape(run(), arguments)
            run = functools.partial(run, check_vma=False)
        assert jax.eval_shape(run(), arguments).shape[0] == 2


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_heads_over_devices_with_the_checks_of_shard_map(kind):
    mesh = jax.sharding.Mesh(np.array(gpu_targets.devices_for(90, 2)), ("heads",))
    fn, (given,) = Case((128, 128), kind, implementation="mosaic_gpu", num_blocks=64).function()
    heads, whole = jax.sharding.PartitionSpec(None, "heads"), jax.sharding.PartitionSpec()
    split = {"query", "key_cache", "value_cache"}
    specs = ({name: heads if name in split else whole for name in given},)
    run = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=heads)
    with jax.default_device(gpu_targets.device_for(90)):
        assert jax.eval_shape(run, given).shape == given["query"].shape


def test_hopper_takes_it_and_untested_features_only_by_name(monkeypatch):
    _, (given,) = NEAREST[0].function()
    query, keys, values = (given.pop(name) for name in ("query", "key_cache", "value_cache"))
    with jax.default_device(gpu_targets.device_for(90)):
        tried = jattn.explain(query, keys, values, **given)
        assert tried.taken == "mosaic_gpu"
        assert "hardware" not in str(tried)
        kernels = implementations.BY_NAME["mosaic_gpu"]
        kernels = dataclasses.replace(kernels, row=dataclasses.replace(kernels.row, results=None))
        monkeypatch.setitem(implementations.BY_NAME, "mosaic_gpu", kernels)
        why = jattn.explain(query, keys, values, **given)
        assert why.taken != "mosaic_gpu"
        assert [r for r in why.refusals["mosaic_gpu"] if "not yet run on hardware" in r]
        named = jattn.explain(query, keys, values, implementation="mosaic_gpu", **given)
        assert named.taken == "mosaic_gpu"
        assert "note: mosaic_gpu: not yet run on hardware" in str(named)
        monkeypatch.undo()
        why = jattn.explain(query, keys, None, value_dim=512, **given)
        (reason,) = why.refusals["mosaic_gpu"]
        assert reason.startswith("it has not yet run with value_dim on hardware")
        assert why.taken == "triton"
        assert "note: triton: not yet run on hardware" in str(why)
    for sm in (80, 100):
        with jax.default_device(gpu_targets.device_for(sm)):
            why = jattn.explain(query, keys, values, implementation="mosaic_gpu", **given)
            reason = f"it runs on compute capability 9.0, and this GPU's is {sm / 10}"
            assert why.refusals == {"mosaic_gpu": (reason,)}


def test_few_tokens_behind_many_keys_are_left_to_triton():
    """If Triton can take them; asked for by name, Mosaic still takes them."""
    w = gpu_workloads.workload("gemma4-31b-tp4", "q128s64k")
    data = gpu_data.described(w)
    given = {k: x for k, x in gpu_data.arguments(w, data, data.tables).items() if x is not None}
    with jax.default_device(gpu_targets.device_for(90)):
        why = jattn.explain(**given)
        assert why.taken == "triton"
        few = "128 query tokens keep few multiprocessors busy"
        assert [r for r in why.refusals["mosaic_gpu"] if few in r]
        assert jattn.explain(**given, implementation="mosaic_gpu").taken == "mosaic_gpu"
        short = given | {"block_tables": jax.ShapeDtypeStruct((1, 32), np.int32)}
        assert jattn.explain(**short).taken == "mosaic_gpu"


def test_vmap_takes_the_batch_one_by_one_and_gradients_are_refused():
    case = decode.configuration((64, 64), "bfloat16", 8, 16, "HND", everything=False)
    fn, (given,) = case.function()
    axes = {name: 0 if name == "query" else None for name in given}
    query = given["query"]
    many = given | {"query": jax.ShapeDtypeStruct((3, *query.shape), query.dtype)}
    with jax.default_device(gpu_targets.device_for(90)):
        (out,) = jax.tree.leaves(jax.eval_shape(jax.vmap(fn, in_axes=(axes,)), many))
        assert out.shape == (3, *query.shape)
        text = str(jax.make_jaxpr(jax.vmap(fn, in_axes=(axes,)))(many))
        assert "scan[" in text or "while[" in text

        def loss(query, given):
            return fn(given | {"query": query}).astype(np.float32).sum()

        text = str(jax.make_jaxpr(jax.grad(loss))(query, given))
        assert "mosaic" in text, "the kernel runs forward"
        assert jax.eval_shape(jax.grad(loss), query, given).shape == query.shape


def test_nothing_grows_with_the_pool():
    """A pool of 8 GiB is neither converted nor copied."""
    case = decode.configuration(
        (64, 64), "fp8_e4m3", 8, 64, "HND", everything=False, num_blocks=2**20
    )
    assert_small(*case.function())


def assert_small(fn, given, most=2**23):
    """Check that a compiled call with pools of at least 8 GiB needs little memory of its own."""
    device = gpu_targets.device_for(90)
    sharding = jax.sharding.SingleDeviceSharding(device)
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), given)
    with jax.default_device(device):
        memory = jax.jit(fn).lower(*given).compile().memory_analysis()
    assert memory.argument_size_in_bytes > 2**33
    assert memory.temp_size_in_bytes < most


@pytest.mark.parametrize(
    ("layer", "starts", "count"), [("gemma4-31b", False, 4), ("llama-8b", True, 7)]
)
def test_decode_is_few_launches(tmp_path, layer, starts, count):
    """They are one graph: two for the plan, the kernel, the merge, and the check of starts.

    If a group is not a multiple of 8, rows of queries and of the result need launches too.
    """
    w = gpu_workloads.workload(layer, "4q1s8k")
    data = gpu_data.described(w)
    given = gpu_data.arguments(w, data, data.tables)
    if not starts:
        given |= {"query_start_loc": None}
    given = {name: x for name, x in given.items() if x is not None}
    bound = given.pop("max_query_len")

    def fn(given):
        return jattn.paged_attention(**given, max_query_len=bound, implementation="mosaic_gpu")

    with gpu_report.lowering(fn, given, sm=90) as lowered:
        thunks = gpu_report.thunks_of(lowered, tmp_path)
    launches = [line for line in thunks.strip().split("\n") if "kCommandBuffer" not in line]
    # XLA makes a graph of five or more launches.
    assert ("kCommandBuffer" in thunks) == (count >= 5), thunks
    assert len(launches) == count, thunks
    assert str(launches).count("kCustomCall ") == 2


@pytest.mark.extended
def test_a_mixture_is_launches_without_loops(tmp_path):
    """It is one graph without search loops, and decode's state is gathered only for its rows."""
    fn, (given,) = Case((128, 128), "mixed", implementation="mosaic_gpu").function()
    with gpu_report.lowering(fn, given, sm=90) as lowered:
        thunks = gpu_report.thunks_of(lowered, tmp_path)
    assert "kWhile" not in thunks
    first, *rest = [line for line in thunks.split("\n") if line.strip()]
    assert "kCommandBuffer" in first
    assert all(line.startswith(" ") for line in rest)
    num_tokens, num_heads, _ = given["query"].shape
    (text,) = (p.read_text() for p in tmp_path.glob("*gpu_after_optimizations.txt"))
    for shape in (f"f32[{num_tokens},{num_heads},128]", f"f32[{num_tokens},1,{num_heads},128]"):
        assert shape not in text
