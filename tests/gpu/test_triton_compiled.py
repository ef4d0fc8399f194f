"""The Triton kernels compiled for GPUs without a GPU: registers, memory, instructions, offsets.

Ids read like `sm90-triton-head512-mixed-bfloat16-bfloat16-block16-HND-group8-causal`. A mixed call
has all three kernels: decode, merge_splits and prefill. Nothing runs; the tests read the report of
XLA's and NVIDIA's compilers (`benchmarks.gpu.report`).
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from benchmarks.gpu import cases as gpu_cases
from benchmarks.gpu import data as gpu_data
from benchmarks.gpu import loops as gpu_loops
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu import shared_memory
from benchmarks.gpu import targets as gpu_targets
from benchmarks.gpu import workloads as gpu_workloads
from benchmarks.gpu.cases import DRAFTED, EVERYTHING, Case, struct
from jattn import formats, implementations
from jattn.pallas import machine
from jattn.pallas.triton import launch as triton_launch
from jattn.pallas.triton import needs as triton_needs
from jattn.pallas.triton import tiles as triton_tiles

INSTALL = "pip install -e '.[test,gpu-check]'"
lacks = triton_needs.packages_lack(*map(triton_needs._version, ("jax-triton", "triton", "x")))
if lacks:
    pytest.skip(f"compiling for GPUs needs {INSTALL}: {lacks[0]}", allow_module_level=True)
try:
    gpu_targets.device_for(90)
    gpu_report.find_ptxas(8.7)
except gpu_targets.MissingCompilerError as error:
    pytest.skip(f"compiling for GPUs needs {INSTALL}: {error}", allow_module_level=True)

# The matrix unit each kernel should use, by architecture: (small tiles, tiles of 64 rows and more).
UNITS = {80: ("mma", "mma"), 90: ("mma", "wgmma"), 100: ("mma", "tcgen05")}


CHUNKED = ("attention_chunk_size",)


def _swept() -> list[tuple[int, Case]]:
    found = [(90, Case(head, "mixed")) for head in gpu_cases.HEADS]
    found += [(sm, Case(head, "mixed")) for sm in (80, 100) for head in ((128, 128), (512, 512))]
    found += [(sm, Case(kind="mixed", options=EVERYTHING)) for sm in (80, 90, 100)]
    found.append((90, Case((128, 128), "mixed", options=EVERYTHING, block_size=64)))
    for format in ("fp8_e4m3", "fp8_e5m2"):
        found.append((90, Case(kind="mixed", format=format)))
    found.append((80, Case((128, 128), format="fp8_e5m2")))
    found.append((80, Case((128, 128), "mixed", format="fp8_e4m3")))  # widened by the kernel
    # Among scales, zero points and packed words, those that need the most registers.
    found += [(sm, Case(kind="mixed", format="nvfp4")) for sm in (80, 90, 100)]
    found += [(sm, Case((128, 128), "mixed", format="int8_zero")) for sm in (80, 90, 100)]
    found.append((90, Case((256, 256), "mixed", format="int4_zero", options=EVERYTHING)))
    found.append((90, Case((192, 128), "mixed", format="fp8_e4m3_token", kv_layout="NHD")))
    found.append((90, Case(kind="mixed", query_dtype="float32", format="float32")))
    found.append((90, Case((128, 128), "mixed", query_dtype="float16", format="float16")))
    found.append((90, Case(kind="speculative", kv_layout="NHD", block_size=64, plain=True)))
    found.append((90, Case((128, 128), "extend", options=EVERYTHING)))
    # As called for vLLM and sglang-jax: keys and values side by side, and latents.
    found += [(sm, Case((128, 128), "mixed", kv_layout="rows")) for sm in (80, 90)]
    found.append((90, Case((576, 512), "mixed", kv_layout="rows", heads=(16, 1))))
    found += [(sm, Case((128, 128), "mixed", options=CHUNKED)) for sm in (80, 90)]
    found += [
        (sm, Case((128, 128), "mixed", options=(mask,)))
        for mask, sm in zip(gpu_cases.MASKS, (80, 90, 80, 90, 100), strict=True)
    ]
    found += [(80, Case(kind="mixed", options=DRAFTED)), (90, Case((128, 128), options=DRAFTED))]
    found.append((90, Case((128, 128), "mixed", options=("tree_mask",), tree_words=8)))
    return found


def _more() -> list[tuple[int, Case]]:
    cases = [
        Case(head, kind, options=options, format=format)
        for head in gpu_cases.HEADS
        for kind in ("mixed", "speculative")
        for options in ((), *((option,) for option in gpu_cases.OPTIONS), EVERYTHING, CHUNKED)
        for format in ("bfloat16", "fp8_e4m3")
    ]
    cases += [
        Case(head, kind, query_dtype, format, options)
        for head in gpu_cases.HEADS
        for kind in ("extend", "decode")  # rows of 32 and 64, and of 16
        for options in ((), EVERYTHING)
        for query_dtype, format in (
            ("bfloat16", "bfloat16"),
            ("bfloat16", "fp8_e4m3"),
            ("float32", "float32"),
        )
    ]
    cases += [
        Case(head, "mixed", query_dtype, format, EVERYTHING, size, layout, plain)
        for head in gpu_cases.HEADS
        for query_dtype, format in (
            ("float32", "float32"), ("float16", "float16"), ("float32", "bfloat16"),
            ("bfloat16", "fp8_e5m2"),
        )
        for size, layout, plain in ((64, "NHD", True), (528, "HND", False))
    ]  # fmt: skip
    latent = tuple(option for option in EVERYTHING if option != "v_scale")  # k_scale is both
    cases += [
        Case(head, kind, "bfloat16", format, options, kv_layout="rows", heads=heads)
        for head, heads, all_options in (
            ((128, 128), (32, 4), EVERYTHING),
            ((512, 512), (32, 4), EVERYTHING),
            ((576, 512), (16, 1), latent),
        )
        for kind in ("decode", "mixed")
        for format in ("bfloat16", "fp8_e4m3")
        for options in ((), all_options)
    ]
    cases += [
        Case(head, kind, format=format, options=options)
        for head in gpu_cases.HEADS
        for kind in ("mixed", "speculative", "extend", "decode")
        for options in ((), EVERYTHING)
        for format in ("nvfp4", "int8_zero", "int4_zero", "fp8_e4m3_token")
    ]
    return [
        (sm, case)
        for case in cases
        for sm in (80, 90, 100)
        if (sm, case.head, case.format) != (80, (576, 512), "int4_zero")  # spills up to 40 bytes
        and (sm, case.kv_layout, case.format) != (80, "rows", "fp8_e4m3")  # refused
    ]


def _masks() -> list[tuple[int, Case]]:
    return [
        (sm, Case(head, kind, options=options, format=format))
        for head in gpu_cases.HEADS
        for kind in ("mixed", "speculative")
        for options in (*((mask,) for mask in gpu_cases.MASKS), DRAFTED)
        for format in ("bfloat16", "fp8_e4m3")
        for sm in (80, 90, 100)
        # Prefill of a tree with a relative bias spills more if columns are not a power of two.
        if (kind, options) != ("mixed", DRAFTED) or head[0] not in (80, 96)
        # This one spills 40 bytes.
        if (sm, head[0], kind, options) != (100, 96, "mixed", ("selected_blocks",))
    ]


def check(sm: int, case: Case, spills: int = 0) -> None:
    fn, arguments = case.function()
    kernels = gpu_report.report(fn, *arguments, sm=sm, xla=False)
    tiles = _tiles(sm, case)
    if case.kind != "extend":  # which may have enough rows for prefill with small tiles
        names = triton_launch.Kernels._fields
        assert tuple(tiles) == (names if case.kind == "mixed" else names[:2])
    assert sorted(kernel.name for kernel in kernels) == sorted(tiles)
    for kernel in kernels:
        said = f"{kernel}"
        assert kernel.kind == "triton"
        assert kernel.spill_bytes <= spills, said
        assert kernel.blocks_per_core >= tiles[kernel.name].per_core, said
        assert kernel.threads == 32 * tiles[kernel.name].warps
        units = {"mma", "wgmma", "tcgen05"} & set(kernel.instructions)
        if kernel.name == "merge_splits":
            assert not units
        elif "float32" in (case.query_dtype, case.format):
            assert not units, "float32 is multiplied in float32, not in TF32"
        else:
            assert units == {UNITS[sm][tiles[kernel.name].rows >= 64]}, said
        if kernel.name != "merge_splits":
            _check_offsets(kernel)
            limit = triton_tiles.registers(
                case.call(), gpu_targets.GPUS[sm].machine, tiles[kernel.name]
            )
            free = kernel.name == "prefill" or not limit
            assert re.findall(r"\.maxnreg (\d+)", kernel.ptx) == [str(limit)][free:], said
            if UNITS[sm] == ("mma", "mma"):
                counted = shared_memory.shared_bytes(case.call(), tiles[kernel.name])
                assert kernel.shared <= counted, said


def _tiles(sm: int, case: Case) -> dict[str, triton_tiles.Tiles]:
    """Return the tiles of a case's kernels, as the call would choose them."""
    call = case.call()
    gpu = gpu_targets.GPUS[sm].machine
    tiles = {"decode": triton_tiles.decode_tiles(call, gpu)}
    found = {launch.kernel: launch.tiles for launch in triton_launch.launches(call, gpu)}
    assert found["decode"] == tiles["decode"]
    return {**found, "merge_splits": triton_tiles.Tiles(16, 16, 4, 1, 1)}


def _check_offsets(kernel: gpu_report.Kernel) -> None:
    """Check that a block id is multiplied by the elements of a block in 64 bits.

    Block ids are clamped with 32-bit `min` and `max`, and must be widened right after.
    """
    wide = re.findall(r"\b(?:mul|mad)\.wide\.[su]32|\bmul\.lo\.s64|\bshl\.b64|cvt\.[su]64\.[su]32",
                      kernel.ptx)  # fmt: skip
    assert wide, "no 64-bit arithmetic"
    clamped = re.findall(r"min\.s32\s+(%r\d+), .*", kernel.ptx)
    widened = [
        register
        for register in clamped
        if re.search(rf"(?:wide\.[su]32|cvt\.[su]64\.[su]32)\s+%rd\d+, {register}\b", kernel.ptx)
    ]
    assert widened, "no clamped block id is widened to 64 bits"


def ids(x) -> str:
    return x.label if isinstance(x, Case) else f"sm{x}"


def _is_default(sm: int, case: Case) -> bool:
    """The largest head size on one architecture."""
    if case.kind == "extend" or case.query_dtype != "bfloat16" or case.block_size == 64:
        return False
    if case.format != "bfloat16":
        return False
    return sm == 90 and case.head[0] == 512 and case.options != EVERYTHING


@pytest.mark.parametrize(("sm", "case"), [x for x in _swept() if _is_default(*x)], ids=ids)
def test_compiled(sm, case):
    check(sm, case)


@pytest.mark.extended
@pytest.mark.parametrize("sm", [80, 90])
def test_a_logit_is_scaled_where_the_maximum_is_subtracted(sm):
    """In one instruction: if prefill masks nothing, only accumulators are multiplied."""
    case = Case((64, 64), "mixed")
    fn, arguments = case.function()
    *_, prefill = gpu_report.report(fn, *arguments, sm=sm, xla=False)
    tiles = triton_tiles.prefill_tiles(case.call(), machine.Machine(sm, 132))
    threads = 32 * tiles.warps
    logits, accumulators = tiles.rows * tiles.keys // threads, tiles.rows * 64 // threads
    loop = min(gpu_loops.loops_of(prefill), key=lambda loop: loop.instructions)
    assert loop.opcodes["MUFU.EX2"] >= logits
    assert loop.opcodes["FFMA"] >= logits
    assert loop.opcodes["FMUL"] < accumulators + 0.3 * logits


@pytest.mark.rotated
@pytest.mark.extended
@pytest.mark.parametrize(("sm", "case"), [x for x in _swept() if not _is_default(*x)], ids=ids)
def test_compiled_in_ci(sm, case):
    check(sm, case)


@pytest.mark.slow
@pytest.mark.parametrize(("sm", "case"), _more(), ids=ids)
def test_compiled_more(sm, case):
    check(sm, case)


@pytest.mark.slow
@pytest.mark.parametrize(("sm", "case"), _masks(), ids=ids)
def test_masks_compiled_more(sm, case):
    """ptxas may spill a few bytes of prefill, mostly to make room for a second program."""
    check(sm, case, spills=24)


@pytest.mark.slow
@pytest.mark.parametrize("sm", [86, 89, 120])
@pytest.mark.parametrize("head", gpu_cases.HEADS, ids=lambda head: f"head{head[0]}-{head[1]}")
@pytest.mark.parametrize("group", [8, 32])
@pytest.mark.parametrize("stored", ["bfloat16", "float32", "fp8_e5m2"])
def test_compiled_where_a_block_has_99_kib(sm, head, group, stored):
    """Shared memory is at most what we count.

    ptxas may spill a few bytes to make room for a second program, with 128 registers per thread
    instead of 255.
    """
    dtype = "float32" if stored == "float32" else "bfloat16"
    case = Case(head, "mixed", dtype, stored, heads=(4 * group, 4))
    fn, arguments = case.function()
    tiles = _tiles(sm, case)
    for kernel in gpu_report.report(fn, *arguments, sm=sm, xla=False):
        said = f"{kernel}"
        assert kernel.blocks_per_core >= 1, said
        assert kernel.spill_bytes == 0 or kernel.registers == 128, said
        assert kernel.spill_bytes <= 48, said
        if kernel.name != "merge_splits":
            counted = shared_memory.shared_bytes(case.call(), tiles[kernel.name])
            assert kernel.shared <= counted <= gpu_targets.GPUS[sm].block_shared, said


def lowered_on(sm: int, fn, *arguments):
    """Lower `fn` for a described GPU."""
    device = gpu_targets.device_for(sm)
    sharding = jax.sharding.SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda x: struct(x.shape, x.dtype, sharding=sharding), arguments)
    with jax.default_device(device):
        return jax.jit(fn).lower(*arguments)


SMALL = Case((64, 64), "decode", num_blocks=64, heads=(4, 2))


@pytest.mark.extended
def test_nothing_the_size_of_a_pool_is_copied():
    """According to XLA, the module's only temporaries are the partial results."""
    for format, plain in (("bfloat16", True), ("fp8_e5m2", False)):
        case = Case((128, 128), "mixed", format=format, plain=plain)
        fn, arguments = case.function()
        memory = lowered_on(90, fn, *arguments).compile().memory_analysis()
        pool = case.num_blocks * 4 * 16 * 128
        assert memory.argument_size_in_bytes > 2 * pool
        assert memory.temp_size_in_bytes < 64 * 2**20


def test_scan_over_layers_and_jit():
    """There is one custom call per kernel, in the body of one loop, for any number of layers."""
    _, (given,) = SMALL.function()

    def model(given):
        def layer(x, index):
            tables = given["block_tables"] + index
            out = jattn.paged_attention(
                x, *(given[k] for k in ("key_cache", "value_cache")), block_tables=tables,
                seq_lens=given["seq_lens"], implementation="triton",
            )  # fmt: skip
            return out, None

        return jax.lax.scan(layer, given["query"], jnp.arange(6, dtype=jnp.int32))[0]

    text = lowered_on(90, model, given).as_text()
    assert len(re.findall(r"custom_call @triton_kernel_call", text)) == 2
    assert "stablehlo.while" in text


@pytest.mark.parametrize("batched", [("query",), ("query", "key_cache", "value_cache")])
def test_vmap_takes_the_batch_one_by_one(batched):
    fn, (given,) = SMALL.function()
    axes = {name: 0 if name in batched else None for name in given}
    several = {name: struct((3, *given[name].shape), given[name].dtype) for name in batched}
    lowered = lowered_on(90, lambda given: jax.vmap(fn, in_axes=(axes,))(given), given | several)
    split, merge = re.findall(r"custom_call @triton_kernel_call.*", lowered.as_text())
    blocks = 64 * (3 if "key_cache" in batched else 1)  # pools are joined, and none is sliced
    assert split.count(f"tensor<{blocks}x2x16x64x") == 2
    assert "x2x16x64x" not in merge
    assert jax.tree.leaves(lowered.out_info)[0].shape == (3, 16, 4, 64)


@pytest.mark.extended
def test_gradients_are_xlas():
    """The kernels run forward; XLA's loops run backward and hold only gradients."""
    case = Case((64, 64), "mixed", num_blocks=64, heads=(4, 2), plain=True)
    fn, (given,) = case.function()

    def loss(floats, rest):
        return fn({**rest, **floats}).astype(jnp.float32).sum()

    floats = {name: given.pop(name) for name in ("query", "key_cache", "value_cache")}
    lowered = lowered_on(90, jax.grad(loss), floats, given)
    text = lowered.as_text()
    assert len(re.findall(r"custom_call @triton_kernel_call", text)) == 2
    assert "stablehlo.while" in text
    found = jax.tree.map(lambda x: (x.shape, x.dtype), lowered.out_info)
    assert found == jax.tree.map(lambda x: (x.shape, x.dtype), floats)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 16 * 2**20


def test_shard_map_over_kv_heads():
    """Each device runs the kernels over its own heads, and no communication is added."""
    devices = gpu_targets.devices_for(90, 2)
    mesh = jax.sharding.Mesh(np.array(devices), ("heads",))
    part = jax.sharding.PartitionSpec
    _, (given,) = SMALL.function()
    specs = {
        "query": part(None, "heads"),
        "key_cache": part(None, "heads"),
        "value_cache": part(None, "heads"),
        "block_tables": part(),
        "seq_lens": part(),
    }
    fn, _ = SMALL.function()
    sharded = jax.jit(
        jax.shard_map(
            fn, mesh=mesh, in_specs=(specs,), out_specs=part(None, "heads"), check_vma=False
        )
    )
    arguments = {
        name: jax.tree.map(
            lambda x, name=name: struct(
                x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, specs[name])
            ),
            value,
        )
        for name, value in given.items()
    }
    with jax.default_device(devices[0]):
        text = sharded.lower(arguments).as_text()
    assert len(re.findall(r"custom_call @triton_kernel_call", text)) == 2
    for name in ("all_reduce", "all_gather", "collective_permute"):
        assert name not in text


# --- Dispatch -------------------------------------------------------------------------------------


def explained(device: jax.Device | None, case: Case = SMALL, **arguments) -> jattn.Explanation:
    _, (given,) = case.function()
    with jax.default_device(device):
        return jattn.explain(**given, **arguments)


@pytest.mark.parametrize("sm", [80, 89, 90, 100])
def test_taken_on_gpus(sm):
    device = gpu_targets.device_for(sm)
    assert explained(device).refusals["triton"] == ()
    assert explained(device, implementation="triton").taken == "triton"


def test_refused_with_a_reason(monkeypatch):
    assert explained(None).refusals["triton"] == ("it runs on gpu, and this is cpu",)
    assert explained(None).taken in ("native", "xla")
    turing = machine.Machine(sm=75, cores=40)
    monkeypatch.setattr(machine, "here", lambda: turing)
    monkeypatch.setattr(jattn.device, "platform", lambda: "gpu")
    why = explained(None)
    assert why.refusals["triton"] == ("it takes sm_80 and up, and this is sm_75",)
    assert why.taken == "xla"


@pytest.mark.parametrize("format", formats.ALL, ids=lambda format: format.name)
def test_every_format_is_taken(format):
    """Formats added after the results from an H100 are taken with a note."""
    case = Case((64, 64), format=format.name, num_blocks=64)
    why = explained(gpu_targets.device_for(90), case)
    assert why.refusals["triton"] == ()
    assert why.taken in ("triton", "mosaic_gpu")
    untried = "triton: not yet run on hardware" in why.notes
    assert untried == format.chooses_scales
    assert why.taken == "triton" or not untried


def test_odd_block_sizes_go_to_xla():
    _, (given,) = Case((64, 64), block_size=12, num_blocks=64).function()
    with jax.default_device(gpu_targets.device_for(90)):
        why = jattn.explain(**given)
    assert why.refusals["triton"] == ("block size S is 12; it takes 8 to 1048576, multiples of 8",)
    assert why.taken == "xla"


def test_versions_here_are_the_tested_ones():
    assert importlib.metadata.version("jax-triton") in triton_needs.TRITON
    assert inspect.unwrap(implementations.BY_NAME["triton"].run) is triton_launch.run


@pytest.mark.extended
def test_no_setting_is_needed_to_compile():
    """Without `JAX_PLATFORMS` and a driver, JAX's CUDA plugin would otherwise fail to start."""
    settings = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    code = "from benchmarks.gpu import targets\nprint(targets.device_for(90).platform)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=settings,
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() in (["cuda"], ["gpu"])


def check_one_graph(thunks):
    """Check that all launches are commands of one buffer."""
    first, *rest = [line for line in thunks.split("\n") if line.strip()]
    assert "kCommandBuffer" in first
    assert all(line.startswith(" ") for line in rest)


@pytest.mark.extended
def test_layers_are_one_graph(tmp_path):
    """Kernels are launched together as commands of one buffer, not one by one."""
    fn, (given,) = Case((64, 64), "mixed").function()

    def layers(given):
        query = given["query"]
        for _ in range(3):
            found = fn({**given, "query": query})
            query = (found[0] if isinstance(found, tuple) else found).astype(query.dtype)
        return query

    with gpu_report.lowering(layers, given, sm=90) as lowered:
        thunks = gpu_report.thunks_of(lowered, tmp_path)
    assert thunks.count("kCustomCall ") == 9
    check_one_graph(thunks)


@pytest.mark.parametrize("starts", [False, True])
def test_one_launch_comes_ahead_of_the_kernels(tmp_path, starts):
    """It checks lengths and the caller's starts; the kernels read the table themselves."""
    w = gpu_workloads.workload("llama-8b", "4q1s8k")
    data = gpu_data.described(w)
    given = gpu_data.arguments(w, data, data.tables)
    bound = given.pop("max_query_len")
    if not starts:
        given.pop("query_start_loc")
    given = {name: x for name, x in given.items() if x is not None}

    def two(given):
        once = jattn.paged_attention(**given, max_query_len=bound, implementation="triton")
        again = given | {"query": once, "seq_lens": given["seq_lens"] + 1}
        return jattn.paged_attention(**again, max_query_len=bound, implementation="triton")

    with gpu_report.lowering(two, given, sm=90) as lowered:
        thunks = gpu_report.thunks_of(lowered, tmp_path)
    assert thunks.count("kCustomCall ") == 4
    assert thunks.count("kCustomKernel") <= 2, thunks
