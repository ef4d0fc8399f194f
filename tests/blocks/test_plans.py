"""Plans for hybrid caches: none pads more than vLLM's, and each can be cut for the kernels."""

import dataclasses
import math

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jattn
import jattn.blocks as jb
from tests.data.blocks.golden import golden

M16 = {"flash": [jb.MultipleOf(16)]}
LFM2 = jb.HybridModel(6, 10, bytes_per_token=2048, state_bytes=8192)
ZAMBA2 = jb.HybridModel(9, 54, bytes_per_token=20480, state_bytes=686848)
QWEN = jb.HybridModel(8, 24, bytes_per_token=4096, state_bytes=2146304)
NANO = jb.HybridModel(6, 23, bytes_per_token=1024, state_bytes=2134016)
# A state takes 100 bytes in pages.
ROUNDED = jb.HybridModel(1, 8, bytes_per_token=10, state_bytes=90, page_share_bytes=20)


def test_two_pools_pad_nothing_and_are_the_default():
    for model in (LFM2, ZAMBA2, QWEN, NANO):
        choice = jb.plan_hybrid_cache(model, M16)
        assert choice.plan.name == "two pools"
        assert choice.plan.padding_bytes == 0
        assert choice.plan.prefix_granularity == 16
        assert choice.plan.cost() < 0.001  # the lengths are multiples of 16
        assert choice.plan.held_bytes(1) > model.ideal_bytes(1)


def test_lfm2_pads_nothing_and_zamba2_little():
    vllm = jb.one_state_per_page(LFM2, M16)
    assert (vllm.block_size, round(vllm.padding_percent)) == (16, 75)
    plan = jb.plan_hybrid_cache(LFM2, M16, one_pool=True).plan
    assert (plan.states, plan.pages, plan.padding_percent) == (4, 1, 0.0)

    vllm = jb.one_state_per_page(ZAMBA2, M16)
    assert (vllm.block_size, round(vllm.padding_percent, 1)) == (48, 30.1)
    plan = jb.plan_hybrid_cache(ZAMBA2, M16, one_pool=True).plan
    assert plan.padding_percent <= 10
    assert (plan.states, plan.pages, round(plan.padding_percent, 1)) == (7, 15, 2.2)
    assert jb.states_in_pages(ZAMBA2, M16, max_pages=8).states == 3
    few = jb.states_in_pages(ZAMBA2, M16, max_padding_percent=10)
    assert (few.states, few.pages) == (4, 9)  # the fewest pages that pad at most 10 %
    few = jb.states_in_pages(ROUNDED, M16, max_padding_percent=10)
    assert (few.states, few.pages) == (8, 5)  # 3 in 2 would pad 15.6 %, or 6.3 % in page shares


def test_a_state_over_small_pages_keeps_prefixes_fine():
    vllm, paged = jb.one_state_per_page(QWEN, M16), jb.pages_per_state(QWEN, M16)
    assert (vllm.block_size, vllm.ids_per_state) == (528, 1)
    assert (paged.block_size, paged.ids_per_state) == (16, 33)
    assert paged.padding_bytes == vllm.padding_bytes == 16384
    assert paged.cost() < vllm.cost() / 10
    aligned = jb.one_state_per_page(QWEN, M16, mode="align")
    assert (aligned.block_size, aligned.state_block_size) == (528, 528)
    assert jb.pages_per_state(NANO, {"cpu": [jb.MultipleOf(32)]}).pages == 66


@pytest.mark.parametrize(("model", "most"), [(ZAMBA2, 3), (ROUNDED, 2)])
def test_ids_per_state_counts_the_pages_a_state_may_touch(model, most):
    plan = jb.states_in_pages(model, M16)
    page, size = plan.page_bytes, model.paged_state_bytes
    touched = [
        len(
            {
                byte // page
                for byte in (
                    i * size,
                    *range(i * size, (i + 1) * size, page // 2),
                    (i + 1) * size - 1,
                )
            }
        )
        for i in range(plan.states)
    ]
    assert plan.ids_per_state == max(touched) == most


@settings(max_examples=150, deadline=None)
@given(
    per_token=st.integers(1, 40).map(lambda n: 128 * n),
    state=st.integers(1, 5 * 10**6),
    attention=st.integers(1, 60),
    recurrent=st.integers(1, 60),
    kernels=st.lists(
        st.sampled_from(
            [
                (jb.MultipleOf(16),),
                (jb.MultipleOf(32),),
                (16, 32, 64),
                (64,),
                (128,),
                (1, jb.MultipleOf(16)),
                (jb.MultipleOf(64), 16),
            ]
        ),
        min_size=1,
        max_size=2,
    ),
)
def test_no_plan_pads_more_than_vllm_and_kernels_can_read_it(
    per_token, state, attention, recurrent, kernels
):
    model = jb.HybridModel(attention, recurrent, per_token, state)
    try:
        choices = [jb.plan_hybrid_cache(model, kernels, one_pool=one) for one in (False, True)]
    except ValueError as error:
        assert "no kernel block divides" in str(error)  # [64] with [128], say  # noqa: PT017
        return
    for choice in choices:
        for plan in choice.considered:
            divides = plan.block_size % plan.kernel_block_size == 0
            assert divides
            jb.select_kernel_block_size(plan.block_size, kernels)
            if plan.pages:
                assert plan.states * state <= plan.pages * plan.page_bytes
        try:
            vllm = jb.one_state_per_page(model, kernels)
        except ValueError:
            continue
        assert choice.plan.padding_percent <= vllm.padding_percent + 1e-9
        assert choice.plan.cost() <= vllm.cost() + 1e-12


def test_every_real_model_pads_no_more_than_vllm():
    seen = 0
    for case in golden("hybrid_alignment_models", "0.32.0")["cases"]:
        if case.get("mode") != "none" or case["user_block_size"] or len(case["kernel_sizes"]) > 1:
            continue
        if case["kernel_sizes"] != ["m16"] or "second_backend_kernel_sizes" in case:
            continue
        facts = golden("hybrid_alignment_models", "0.32.0")["models"][case["model"]]
        model = jb.HybridModel(
            facts["n_attn_layers"],
            facts["n_mamba_layers"],
            case["attn_bytes_per_token"],
            case["mamba_page_bytes"],
        )
        padding = (case["mamba_page_size_padded"] or model.state_bytes) - model.state_bytes
        page = case["block_size"] * model.bytes_per_token
        plan = jb.plan_hybrid_cache(model, M16, one_pool=True).plan
        assert plan.padding_percent <= 100 * padding / page + 1e-9
        assert plan.block_size <= case["block_size"]
        seen += 1
    assert seen >= 18


def test_vllms_plan_knows_mla_and_the_platform():
    kimi = jb.HybridModel(7, 20, 1152, 2170880, is_mla=True)
    assert jb.one_state_per_page(kimi, M16).block_size == 1920
    assert jb.one_state_per_page(dataclasses.replace(kimi, is_mla=False), M16).block_size == 1888
    assert jb.one_state_per_page(QWEN, M16, platform="cpu").block_size == 640
    choice = jb.plan_hybrid_cache(QWEN, M16, platform="cpu")
    assert [p.block_size for p in choice.considered if p.name == "one per page"] == [640]
    with pytest.raises(ValueError, match="platform: 'tpu', but must be one of"):
        jb.one_state_per_page(QWEN, M16, platform="tpu")


def test_states_that_share_a_page_are_of_one_sequence():
    plan = jb.states_per_page(jb.HybridModel(6, 2, 2048, 1024), M16)
    assert (plan.states, plan.pages) == (2, 1)
    assert plan.padding_bytes == plan.state_bytes_held() - 2 * 1024 == 32768 - 2048


def test_pages_with_scales_hold_states_in_their_words_only():
    state = jb.mamba2_state(
        intermediate_size=4096,
        num_groups=8,
        num_heads=64,
        head_dim=64,
        state_size=128,
        conv_kernel=4,
        dtypes=("bfloat16", "float32"),
    )
    for dtype, words in (
        ("fp8_per_token_head", jnp.uint8),
        (jattn.Fp8("e4m3", "token"), jnp.uint8),
        (jattn.Fp8("e4m3", "block"), jnp.uint8),
        ((jattn.Int4(True), jattn.Int4()), jnp.uint8),
        ("bfloat16", jnp.uint16),
    ):
        attention = jb.FullAttention(16, 2, 64, dtype=dtype)
        recurrent = jb.RecurrentState(2048, layout=state)
        model = jb.HybridModel.from_specs([attention] * 6 + [recurrent] * 23)
        plan = jb.pages_per_state(model, M16)
        packed = 2 if isinstance(dtype, tuple) else 1
        parts = tuple(jnp.zeros((4, 2, plan.block_size, 64 // packed), words) for _ in range(2))
        pool = jb.PagePool(parts, state)
        assert (plan.pages, plan.page_word_bytes) == (pool.pages_for(plan.states), pool.page_bytes)
        assert plan.page_bytes == dataclasses.replace(attention, block_size=16).page_bytes
        assert plan.padding_bytes == plan.pages * plan.page_bytes - state.nbytes
    with pytest.raises(ValueError, match="specs: attention layers of 2 kinds"):
        jb.HybridModel.from_specs([attention, jb.FullAttention(16, 4, 64), recurrent])
    with pytest.raises(ValueError, match=r"specs: 0 recurrent"):
        jb.HybridModel.from_specs([attention])
    with pytest.raises(ValueError, match="word_bytes_per_token: 5000, but must be at most 4096"):
        dataclasses.replace(QWEN, word_bytes_per_token=5000)


def test_a_plan_that_caches_prefixes_holds_states_to_resume_from():
    every = 1024
    choice = jb.plan_hybrid_cache(QWEN, M16, state_block_size=every)
    plan = choice.plan
    assert plan.name == "two pools"
    assert plan.state_block_size == plan.prefix_granularity == every
    assert plan.states_held(1023) == 24
    assert plan.states_held(4096) == 24 * 5  # four to resume from, and the current one
    pools = 8 * 4096 * 4096 + 24 * 5 * QWEN.state_bytes
    assert plan.held_bytes(4096) == pools == QWEN.ideal_bytes(4096, every)
    (vllm,) = (p for p in choice.considered if p.name == "one per page")
    assert vllm.state_block_size == vllm.block_size == vllm.prefix_granularity == 528
    assert vllm.states_held(4096) == 24 * 8
    assert jb.two_pools(QWEN, M16, state_block_size=100).state_block_size == 112  # whole blocks
    plan = jb.two_pools(QWEN, M16)
    assert plan.prefix_granularity == 16
    assert dataclasses.replace(plan, state_block_size=24).prefix_granularity == 48


def test_two_pools_are_sized_from_bytes_and_sequences():
    plan = jb.two_pools(QWEN, M16)
    sizes = plan.pool_sizes(8 * 2**30, max_num_seqs=64, max_model_len=4096)
    assert sizes.num_slots == 64
    slots = 64 * 24 * QWEN.state_bytes
    assert sizes.num_blocks == (8 * 2**30 - slots) // (8 * 16 * 4096)
    assert sizes.num_bytes <= 8 * 2**30 < sizes.num_bytes + 8 * 16 * 4096
    assert sizes.longest == sizes.num_blocks // 64 * 16
    assert f"{sizes.num_blocks} blocks of 16 tokens" in str(sizes)
    cached = jb.two_pools(QWEN, M16, state_block_size=1024)
    assert cached.pool_sizes(2**34, max_num_seqs=4, max_model_len=4096).num_slots == 4 * 5
    speculative = dataclasses.replace(QWEN, states_per_sequence=3)
    slots = jb.two_pools(speculative, M16).pool_sizes(2**34, max_num_seqs=4, max_model_len=4096)
    assert slots.num_slots == 12
    with pytest.raises(ValueError, match=r"memory_bytes: .* at least \d+, for one block"):
        plan.pool_sizes(2**30, max_num_seqs=64, max_model_len=4096)
    with pytest.raises(ValueError, match="plan: 'one per page', but must be 'two pools'"):
        jb.one_state_per_page(QWEN, M16).pool_sizes(2**34, max_num_seqs=1, max_model_len=64)


def test_waste_of_the_published_table():
    """The waste of one request of 1024 tokens, in percent of bytes, without groups' empty slots."""
    for model, plan, percent in (
        (NANO, jb.pages_per_state(NANO, M16), 0.5),
        (QWEN, jb.pages_per_state(QWEN, M16), 0.5),
        (ZAMBA2, jb.pages_per_state(ZAMBA2, M16), 6.6),
        (QWEN, jb.one_state_per_page(QWEN, M16), 1.7),
        (ZAMBA2, jb.one_state_per_page(ZAMBA2, M16), 8.8),
    ):
        waste = 100 * (1 - model.ideal_bytes(1024) / plan.held_bytes(1024))
        assert waste == pytest.approx(percent, abs=0.06)


def test_slots_past_int32_are_refused():
    plan = jb.two_pools(LFM2, M16)
    assert plan.num_blocks(2**30) == 2**30 // (6 * 32768)
    with pytest.raises(ValueError, match=r"slots, but must be at most 134217727 blocks"):
        plan.num_blocks(2**45)
    with pytest.raises(ValueError, match="no plan is possible") as error:
        jb.plan_hybrid_cache(LFM2, M16, memory_bytes=2**45)
    assert "two_pools" in str(error.value)
    # If only some plans fit, the others are left out.
    tiny = jb.HybridModel(1, 1, bytes_per_token=1, state_bytes=4096)
    choice = jb.plan_hybrid_cache(tiny, M16, memory_bytes=2**31 - 1)
    assert all(plan.num_blocks(2**31 - 1) for plan in choice.considered)


def test_no_plan_ends_in_a_block_that_no_kernel_can_split():
    with pytest.raises(ValueError, match="no kernel block divides") as error:
        jb.plan_hybrid_cache(QWEN, {"a": [64], "b": [128]})
    assert "a takes [64]" in str(error.value)
    with pytest.raises(ValueError, match=r"kernel_block_size: 32, but must be a divisor of .*=48"):
        jb.CachePlan("made up", QWEN, 48, 32, 1, 0, "")
    with pytest.raises(ValueError, match="5 states of 8192 bytes in 1 pages of 32768 bytes"):
        jb.CachePlan("made up", LFM2, 16, 16, 5, 1, "")


def test_a_choice_explains_itself():
    choice = jb.plan_hybrid_cache(ZAMBA2, M16, one_pool=True, lengths=(256, 1024))
    lines = str(choice).splitlines()
    assert lines[0].split() == [
        "plan",
        "block",
        "kernel",
        "states:pages",
        "padding",
        "%",
        "of",
        "page",
        "ids/state",
        "cost",
    ]
    assert lines[1].startswith("several over several *")
    assert "7:15" in lines[1]
    assert any(line.startswith("one per page") and "30.1" in line for line in lines)
    assert lines[-1].startswith("chosen: several over several, 7 state(s) fill 15 page(s)")
    assert "on average over 256, 1024 tokens" in lines[-1]


def test_bad_models_are_named():
    with pytest.raises(ValueError, match="2 wrong") as error:
        jb.HybridModel(0, 1, 1024, -5)
    assert "attention_layers: 0" in str(error.value)
    assert "state_bytes: -5" in str(error.value)
    with pytest.raises(ValueError, match="3 wrong"):
        jb.plan_hybrid_cache(LFM2, {}, lengths=(), block_sizes=(0,))


def test_a_plan_fits_the_pool_it_plans():
    """`PagePool` finds the same sizes in real pages as the planner computes from bytes."""
    layout = jb.short_conv_state(intermediate_size=256, conv_kernel=3, dtypes=("bfloat16",))
    model = jb.HybridModel(2, 6, jb.kv_bytes_per_token(2, 32), layout.nbytes)
    for plan in jb.plan_hybrid_cache(model, M16, one_pool=True).considered:
        parts = tuple(jnp.zeros((4, 2, plan.block_size, 32), jnp.uint16) for _ in range(2))
        pool = jb.PagePool(parts, layout)
        assert pool.page_bytes == plan.page_bytes
        assert pool.pages_for(plan.states) == plan.pages
        assert pool.states_in(plan.pages) >= plan.states
        assert math.isclose(
            plan.padding_bytes, plan.pages * pool.page_bytes - plan.states * layout.nbytes
        )


@pytest.mark.parametrize(
    ("value_dim", "dtype", "word", "state"),
    [
        (128, "bfloat16", "uint16", (8, 64)),
        (None, "bfloat16", "uint16", (511,)),
        (64, jattn.Int8(), "int8", (8, 64)),
        (None, jattn.Fp8("e4m3", "token"), "uint8", (5, 33)),
    ],
)
def test_plans_count_what_a_pool_holds(value_dim, dtype, word, state):
    """Including keys and values of different sizes, where a state takes parts of both."""
    layout = jb.StateLayout((state,), ("float32",))
    attention = jb.FullAttention(16, 1, 192, value_dim, dtype)
    recurrent = jb.RecurrentState(2048, layout=layout)
    model = jb.HybridModel.from_specs([attention, *[recurrent] * 8])
    plans = jb.plan_hybrid_cache(model, M16, one_pool=True).considered
    assert {plan.name for plan in plans} >= {"one per page", "several per page", "over pages"}
    for plan in plans:
        widths = (192, value_dim or 192)
        parts = tuple(jnp.zeros((4, 1, plan.block_size, width), word) for width in widths)
        pool = jb.PagePool(parts, layout)
        assert pool.states_in(plan.pages) >= plan.states, plan
        assert pool.pages_for(plan.states) <= plan.pages, plan
