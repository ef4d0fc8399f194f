"""Layer specs, page unification and grouping: vLLM's own results, and better ones."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jattn
import jattn.blocks as jb
from jattn.blocks.planning.patterns import least_padding_multiple
from tests.data.blocks.golden import VERSIONS, golden

QUANT = {"NVFP4": "nvfp4", "INT8_PER_TOKEN_HEAD": "int8_per_token_head", "FP8_PER_TENSOR": "fp8"}


def spec_of(case):
    """Return the layer that a golden case describes."""
    kind, block = case["kind"], case["block_size"]
    padded = {"padded_page_bytes": case.get("page_size_padded")}
    if kind == "mamba":
        return jb.RecurrentState(
            block,
            layout=jb.StateLayout(case["shapes"], case["dtypes"]),
            mode=case.get("mode", "none"),
            num_speculative_blocks=case.get("num_speculative_blocks", 0),
            **padded,
        )
    dtype = QUANT.get(case.get("kv_quant_mode"), case["dtype"])
    if kind == "mla":
        return jb.LatentAttention(block, head_dim=case["head_size"], dtype=dtype, **padded)
    arguments = (block, case["num_kv_heads"], case["head_size"], case.get("head_size_v"), dtype)
    if kind == "sliding":
        return jb.SlidingWindow(*arguments, window=case["sliding_window"], **padded)
    if kind == "chunked":
        return jb.ChunkedLocal(*arguments, chunk=case["attention_chunk_size"], **padded)
    return {"full": jb.FullAttention, "cross": jb.CrossAttention}[kind](*arguments, **padded)


@pytest.mark.parametrize("version", VERSIONS)
def test_pages_and_bounds_of_vllm(version):
    for case in golden("page_sizes", version)["cases"]:
        limits = jb.Limits(
            case["max_model_len"],
            case["max_num_batched_tokens"],
            case["max_num_encoder_input_tokens"],
            case["dcp"],
        )
        if "error" in case and case["spec"].get("page_size_padded"):
            with pytest.raises(ValueError, match=r"padded_page_bytes: .* an integer of at least"):
                spec_of(case["spec"])
            continue
        spec = spec_of(case["spec"])
        assert spec.page_bytes == case["page_size_bytes"]
        if isinstance(spec, jb.SlidingWindow) and case["dcp"] > 1:
            assert "max_memory_usage_bytes" not in case  # vLLM supports no window there
        elif isinstance(spec, jb.ChunkedLocal) and case["dcp"] > 1:
            # vLLM does not split the tokens of chunks over ranks.
            assert spec.max_blocks(limits) * spec.page_bytes < case["max_memory_usage_bytes"]
        else:
            assert spec.max_blocks(limits) * spec.page_bytes == case["max_memory_usage_bytes"]
        if "max_num_blocks_per_req" in case:
            rows = case["max_num_blocks_per_req"]
            if isinstance(spec, jb.CrossAttention):
                # vLLM's runner uses the longer of the two sequences.
                rows = max(rows, spec.max_blocks(limits))
            assert spec.row_width(limits) == rows


KINDS = {
    "FullAttentionSpec": jb.FullAttention,
    "SlidingWindowSpec": jb.SlidingWindow,
    "ChunkedLocalAttentionSpec": jb.ChunkedLocal,
    "CrossAttentionSpec": jb.CrossAttention,
    "MLAAttentionSpec": jb.LatentAttention,
    "MambaSpec": jb.RecurrentState,
}
PACKED = ("BLHNC", "BLNHC")


def check_unified(case, specs, rules):
    if "unify_error" in case:
        with pytest.raises(ValueError, match=r"page of \d+ bytes, but must be"):
            jb.unify_page_sizes(specs, rules=rules)
        return
    unified = jb.unify_page_sizes(specs, rules=rules)
    if isinstance(case["unified"], dict):
        assert list(case["unified"].values()) == [
            [spec.block_size, spec.page_bytes, spec.padded_page_bytes] for spec in unified
        ]
    else:
        assert case["unified"] == sorted(
            [list(x) for x in {(spec.block_size, spec.page_bytes) for spec in unified}]
        )


def check_groups(case, found):
    assert len(found.groups) == len(case["groups"])
    for group, expected in zip(found.groups, case["groups"], strict=True):
        spec = expected["spec"]
        assert list(group.layers) == expected["layers"]
        assert group.block_size == spec["block_size"]
        if spec["kind"] == "uniform_type":
            per_layer = [
                [name, one.block_size, one.page_bytes]
                for one in group.specs
                for name, kind in KINDS.items()
                if type(one) is kind
            ]
            assert per_layer == list(spec["per_layer"].values())
            assert sum(one.page_bytes for one in group.specs) == spec["page_size_bytes"]
            continue
        assert {type(one) for one in group.specs} == {KINDS[spec["kind"]]}
        assert {one.page_bytes for one in group.specs} == {spec["page_size_bytes"]}
        assert {one.padded_page_bytes for one in group.specs} == {spec["page_size_padded"]}
        assert getattr(group.specs[0], "window", None) == spec["sliding_window"]


@pytest.mark.parametrize("version", VERSIONS)
def test_groups_of_vllm(version):
    rules, seen = version.removesuffix(".0"), 0
    for case in golden("kv_cache_grouping", version)["cases"]:
        if case.get("layout") in PACKED:
            continue
        specs = [spec_of(case["specs"][kind]) for kind in case["layer_pattern"]]
        keep = case["disable_hybrid_kv_cache_manager"]
        if "unify_error" in case or case.get("unified"):
            check_unified(case, specs, rules)
        seen += 1
        if "groups" not in case:
            with pytest.raises(ValueError, match=r"page of|keep_everything: True with"):
                jb.group_layers(specs, rules=rules, keep_everything=keep)
            continue
        found = jb.group_layers(specs, rules=rules, keep_everything=keep)
        check_groups(case, found)
        if not specs:
            continue
        assert found.num_blocks(case["available_memory"]) == case["num_blocks"]
        if len(found.groups) > 1:
            assert found.scheduler_block_size == case["scheduler_and_hash_block_size"][0]
    assert seen >= 35


@pytest.mark.parametrize("version", VERSIONS)
def test_least_padding_of_vllm(version):
    for values, at_least, expected in golden("kv_cache_grouping", version)["approximate_gcd"]:
        assert least_padding_multiple(values, at_least or 1) == expected


LOCAL = jb.SlidingWindow(16, 8, 128, window=1024)
FULL = jb.FullAttention(16, 8, 128)


def test_exact_patterns_leave_no_slot_empty():
    layers = ([LOCAL] * 3 + [FULL] * 2) * 10  # 30 sliding, 20 full
    vllm, exact = jb.group_layers(layers), jb.group_layers_exactly(layers)
    assert (len(vllm.groups), vllm.empty_slots) == (3, 10)
    assert (len(exact.groups), exact.empty_slots) == (5, 0)
    assert {len(group.layers) for group in exact.groups} == {10}
    assert sorted(sum((group.layers for group in exact.groups), ())) == list(range(50))
    memory = 2**32
    # A sequence with one block per group holds the 50 pages it needs, not 60.
    assert vllm.num_blocks(memory) // 3 < exact.num_blocks(memory) // 5
    assert "0 of 50 slots empty" in str(exact)
    # Gemma 3 27B: 52 sliding, 10 full.
    assert jb.exact_group_size([52, 10], max_groups=8) == 13
    assert jb.exact_group_size([52, 10], max_groups=31) == 2
    assert jb.exact_group_size([1, 1, 1], max_groups=1) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("SFM"), min_size=1, max_size=60), st.integers(3, 20))
def test_exact_groups_are_never_worse(pattern, max_groups):
    state = jb.RecurrentState(2048, layout=jb.StateLayout(((32768,),), ("bfloat16",)))
    layers = [{"S": LOCAL, "F": FULL, "M": state}[kind] for kind in pattern]
    vllm, exact = jb.group_layers(layers), jb.group_layers_exactly(layers, max_groups=max_groups)
    assert len(exact.groups) <= max(max_groups, len(set(pattern)))
    if len(vllm.groups) <= max_groups:
        assert exact.empty_slots <= vllm.empty_slots
    assert sorted(sum((group.layers for group in exact.groups), ())) == list(range(len(layers)))
    for group in exact.groups:
        assert len({layers[i] for i in group.layers}) == 1


# Sliding and global layers with a cache; KV heads of both; window; bytes per token of both.
GEMMA4 = {
    "E2B": (12, 3, 1, 1, 512, 1024, 2048),
    "E4B": (20, 4, 2, 2, 512, 2048, 4096),
    "12B": (40, 8, 8, 1, 1024, 8192, 2048),
    "26B-A4B": (25, 5, 8, 2, 1024, 8192, 4096),
    "31B": (50, 10, 16, 4, 1024, 16384, 8192),
}


@pytest.mark.parametrize("size", GEMMA4)
def test_gemma4_in_one_pool(size):
    sliding, full, kv_sliding, kv_full, window, bytes_sliding, bytes_full = GEMMA4[size]
    local = jb.SlidingWindow(16, kv_sliding, 256, window=window)
    everything = jb.FullAttention(16, kv_full, 512)
    assert (local.bytes_per_token, everything.bytes_per_token) == (bytes_sliding, bytes_full)
    period = sliding // full
    layers = ([local] * period + [everything]) * full
    groups = jb.group_layers(layers)
    # Pages are equal if block sizes are inversely proportional to the bytes per token.
    pages = {spec.page_bytes for group in groups.groups for spec in group.specs}
    assert pages == {16 * max(bytes_sliding, bytes_full)}
    blocks = {type(g.specs[0]): g.block_size for g in groups.groups}
    ratio = blocks[jb.FullAttention] / blocks[jb.SlidingWindow]
    assert ratio == bytes_sliding / bytes_full
    assert min(blocks.values()) == 16
    assert groups.empty_slots == 0
    assert jb.group_layers_exactly(layers) == groups


def test_unification_pads_only_what_cannot_be_scaled():
    state = jb.RecurrentState(
        2048, layout=jb.StateLayout(((3, 8192), (32, 128, 128)), ("bfloat16", "bfloat16"))
    )
    small = jb.FullAttention(16, 2, 256)
    padded = jb.unify_page_sizes([state, small])
    assert [spec.page_bytes for spec in padded] == [1097728, 1097728]
    assert padded[1].padded_page_bytes == 1097728
    with pytest.raises(ValueError, match=r"specs\[1\]: FullAttention's page of 32768 bytes"):
        jb.unify_page_sizes([state, small], rules="0.23")
    latent = jb.LatentAttention(64, head_dim=576)
    with pytest.raises(ValueError, match=r"specs\[0\]: LatentAttention's page of 73728 bytes"):
        jb.unify_page_sizes([latent, jb.SlidingWindow(64, 4, 128, window=9)])


def test_unified_pages_are_equal_where_not_all_of_a_page_grows():
    """A page may have fixed padding, or scales that its block shares."""
    padded = jb.FullAttention(16, 1, 64, padded_page_bytes=8192)
    fp8 = jattn.Fp8(scale_per="block")
    for specs in (
        [padded, jb.SlidingWindow(16, 4, 64, window=9)],
        [jb.FullAttention(16, 4, 64, dtype=fp8), jb.SlidingWindow(16, 2, 64, dtype=fp8, window=9)],
    ):
        largest = max(spec.page_bytes for spec in specs)
        assert {spec.page_bytes for spec in jb.unify_page_sizes(specs)} == {largest}


def test_bounds_of_layers_that_need_not_start_at_a_block():
    """With chunks of 24, 8 new tokens at 41 to 48 see keys 24 to 48: three blocks of 16."""
    chunked = jb.ChunkedLocal(16, 2, 64, chunk=24)
    assert chunked.max_blocks(jb.Limits(4096, 8)) == 3
    assert chunked.max_blocks(jb.Limits(32, 8)) == 2
    cross = jb.CrossAttention(16, 2, 64)
    limits = jb.Limits(448, 64, 1500)
    assert cross.row_width(limits) == cross.max_blocks(limits) == 94
    empty = jb.StateLayout(((0, 64, 64),), ("float32",))
    with pytest.raises(ValueError, match=r"layout: .* a state of one byte or more"):
        jb.RecurrentState(16, layout=empty)


def test_a_window_and_chunks_do_not_merge():
    layers = (dataclasses.replace(FULL, window=64), dataclasses.replace(FULL, chunk=32))
    (group,) = jb.group_layers(layers).groups
    assert group.specs == layers


def test_states_of_two_page_sizes_are_two_groups_in_vllm():
    small = jb.RecurrentState(
        2048, layout=jb.StateLayout(((3, 1024),), ("bfloat16",)), padded_page_bytes=131072
    )
    large = jb.RecurrentState(2048, layout=jb.StateLayout(((3, 4096),), ("bfloat16",)))
    groups = jb.group_layers([small, large])
    assert [group.layers for group in groups.groups] == [(0,), (1,)]
    assert groups.num_blocks(2**32) == 32768
    # A single group with different page sizes holds more; its rules have another name.
    mixed = jb.group_layers([small, large], rules="mixed")
    assert [group.layers for group in mixed.groups] == [(0, 1)]
    assert mixed.num_blocks(2**32) == 2**32 // (131072 + 24576)
    assert jb.group_layers([small, small]).groups[0].layers == (0, 1)
    assert jb.group_layers([small, large], rules="0.23") == mixed


@pytest.mark.parametrize("rules", ["0.23", "0.32", "mixed"])
def test_states_whose_rows_differ_in_width_are_two_groups(rules):
    layout = jb.StateLayout(((3, 1024),), ("bfloat16",))
    layers = [jb.RecurrentState(16, layout=layout, mode=mode) for mode in ("none", "align", "none")]
    groups = jb.group_layers(layers, rules=rules).groups
    assert {group.layers for group in groups} == {(0,), (1,), (2,)}  # of one layer, as "align" has
    for group in groups:
        assert len({spec.row_width(jb.Limits(64, 8)) for spec in group.specs}) == 1


def test_groups_say_how_much_padding_they_have():
    state = jb.gated_delta_net_state(
        num_k_heads=16,
        num_v_heads=32,
        head_k_dim=128,
        head_v_dim=128,
        conv_kernel=4,
        dtypes=("bfloat16", "float32"),
    )
    layers = [jb.RecurrentState(2048, layout=state)] * 3 + [jb.FullAttention(16, 4, 256)]
    groups = jb.group_layers(layers * 8)  # Qwen3.5-4B
    *states, attention = groups.groups
    assert attention.padding_bytes == 8 * (2146304 - 65536)
    assert round(attention.padding_percent, 1) == 96.9
    assert all(group.padding_bytes == 0 for group in states)
    assert "padding 16646144 bytes (96.9 %)" in str(groups)
    assert "align first: a state needs the page of 524 tokens" in str(groups)
    aligned = jb.align_hybrid_block_size(
        bytes_per_token=4096,
        state_bytes=state.nbytes,
        kernel_sizes={"flash": [jb.MultipleOf(16)]},
        max_model_len=2048,
    )
    layers = [jb.RecurrentState(2048, layout=state)] * 3
    layers += [jb.FullAttention(aligned.block_size, 4, 256)]
    groups = jb.group_layers(layers * 8)
    assert max(group.padding_percent for group in groups.groups) < 1
    assert "align first" not in str(groups)


@pytest.mark.parametrize(("interleave", "ranks", "block"), [(24, 2, 16), (16, 2, 16), (5, 3, 4)])
def test_rows_are_as_wide_as_the_fullest_rank_needs(interleave, ranks, block):
    context = jb.ContextParallel(ranks, 0, interleave)
    group = jb.BlockGroup(block, 1000, context=context)
    for length in range(1, 400):
        limits = jb.Limits(length, 8, context_parallel=ranks, interleave=interleave)
        for spec in (jb.FullAttention(block, 2, 64), jb.LatentAttention(block, head_dim=64)):
            assert spec.row_width(limits) == spec.max_blocks(limits) == group.blocks_for(length)


@pytest.mark.parametrize(("ranks", "interleave"), [(4, 1), (2, 24), (3, 5)])
def test_windows_on_several_ranks_fit_their_rows(ranks, interleave):
    """The bound holds at every position, and a row is never shorter."""
    window, step, block = 40, 9, 4
    spec = jb.SlidingWindow(block, 2, 64, window=window)
    chunked = jb.ChunkedLocal(block, 2, 64, chunk=window)
    for length in (1, 33, 48, 200):
        limits = jb.Limits(length, step, context_parallel=ranks, interleave=interleave)
        context, most = jb.ContextParallel(ranks, 0, interleave), 0
        for end in range(1, length + 1):
            for rank in range(ranks):
                first = context.local_length(max(0, end - (window - 1 + step)), rank)
                last = context.local_length(end, rank)
                most = max(most, -(-last // block) - first // block if last > first else 0)
        assert most <= spec.max_blocks(limits) <= spec.row_width(limits)
        assert chunked.max_blocks(limits) <= chunked.row_width(limits)
    limits = jb.Limits(4096, 512, context_parallel=4)
    wide = jb.SlidingWindow(16, 2, 64, window=4096)
    assert (wide.max_blocks(limits), wide.row_width(limits)) == (64, 64)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("interleave", [1, 3, 16])
def test_chunks_on_several_ranks_fit_their_bound(ranks, interleave):
    block, length = 16, 200
    for chunk, step in itertools.product((16, 24, 32, 48, 96), (1, 8, 30)):
        limits = jb.Limits(length, step, context_parallel=ranks, interleave=interleave)
        spec = jb.ChunkedLocal(block, 1, 64, chunk=chunk)
        context, most = jb.ContextParallel(ranks, 0, interleave), 0
        for query in range(length - step + 1):
            for rank in range(ranks):
                first = context.local_length(query // chunk * chunk, rank)
                end = context.local_length(query + step, rank)
                most = max(most, -(-end // block) - first // block if end > first else 0)
        assert most <= spec.max_blocks(limits) <= min(most + 1, spec.row_width(limits))


def test_bad_layers_are_named():
    with pytest.raises(ValueError, match="3 wrong") as error:
        jb.SlidingWindow(0, 8, 0, window=0)
    for argument in ("block_size: 0", "head_dim: 0", "window: 0"):
        assert argument in str(error.value)
    for reach in ({"window": -3}, {"chunk": 0}, {"window": True}):
        ((argument, value),) = reach.items()
        with pytest.raises(ValueError, match=f"{argument}: {value}, but must be an integer of at"):
            jb.FullAttention(16, 8, 128, **reach)
    with pytest.raises(ValueError, match="mode: 'some', but must be one of"):
        jb.RecurrentState(16, layout=jb.StateLayout(((1,),), ("float32",)), mode="some")
    with pytest.raises(ValueError, match="2 wrong"):
        jb.group_layers([FULL, "full"], rules="1.0")
    with pytest.raises(ValueError, match=r"keep_everything: True with .*'RecurrentState'"):
        jb.group_layers(
            [FULL, jb.RecurrentState(16, layout=jb.StateLayout(((1,),), ("float32",)))],
            keep_everything=True,
        )
    with pytest.raises(ValueError, match=r"bucket_sizes\[1\]: 0"):
        jb.exact_group_size([1, 0])
    assert dataclasses.is_dataclass(jb.LayerSpec)
