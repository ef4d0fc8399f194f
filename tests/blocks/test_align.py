"""State shapes, bytes and hybrid alignment: exactly vLLM's, on every real model."""

import inspect
import re

import pytest

import jattn.blocks as jb
from tests.data.blocks.golden import VERSIONS, golden, kernel_size

M16 = {"flash": [jb.MultipleOf(16)]}
STATES = {
    "mamba1_state_shape": jb.mamba1_state,
    "mamba2_state_shape": jb.mamba2_state,
    "gated_delta_net_state_shape": jb.gated_delta_net_state,
    "kda_state_shape": jb.kda_state,
    "short_conv_state_shape": jb.short_conv_state,
    "linear_attention_state_shape": jb.linear_attention_state,
}
RENAMED = {
    "tp_world_size": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "n_groups": "num_groups",
    "conv_kernel_size": "conv_kernel",
    "num_spec": "num_speculative_tokens",
}


@pytest.mark.parametrize("version", VERSIONS)
def test_state_shapes_of_vllm(version):
    data = golden("state_shapes", version)
    for case in data["shapes"]:
        layout = STATES[case["fn"]]
        arguments = {RENAMED.get(k, k): v for k, v in case["args"].items()}
        if "channels_first" in inspect.signature(layout).parameters:
            arguments["channels_first"] = case["conv_layout"] == "DS"
        if version == "0.23.0" and case["fn"] == "kda_state_shape":
            arguments["num_speculative_tokens"] = 0  # vLLM forgets it
        one = case["fn"].startswith(("short", "linear"))
        arguments["dtypes"] = ("float32",) if one else ("bfloat16", "float32")
        if "error" in case:
            size, tensor_parallel = case["error"][1].split(" is not divisible by ")
            with pytest.raises(
                ValueError, match=rf"{size}, but must be divisible by .*={tensor_parallel}"
            ):
                layout(**arguments)
        else:
            assert [list(shape) for shape in layout(**arguments).shapes] == case["shapes"]


@pytest.mark.parametrize("version", VERSIONS)
def test_state_dtypes_of_vllm(version):
    for kind, model, cache, *state, expected in golden("state_shapes", version)["dtypes"]:
        arguments = {"cache_dtype": cache} | ({"state_dtype": state[0]} if state else {})
        kind = kind.removesuffix("_state_dtype")
        if expected[0] == "ValueError":
            with pytest.raises(ValueError, match="state_dtype: 'float16'"):
                jb.state_dtypes(kind, model, **arguments)
        else:
            assert list(jb.state_dtypes(kind, model, **arguments)) == expected


def align_as(case, version):
    """Call `align_hybrid_block_size` as a golden case describes."""
    backends = {"A": [kernel_size(size) for size in case["kernel_sizes"]]}
    if second := case.get("second_backend_kernel_sizes"):
        backends["S"] = [kernel_size(size) for size in second]
    return jb.align_hybrid_block_size(
        bytes_per_token=case["attn_bytes_per_token"],
        state_bytes=case["mamba_page_bytes"],
        kernel_sizes=backends,
        max_model_len=2048,
        mode=case["mode"],
        block_size=case["user_block_size"],
        state_block_size=case["user_mamba_block_size"],
        chunk_size=case["mamba_chunk_size"],
        is_mla=case["use_mla"],
        default_block_size=128 if case.get("cpu_platform") else 16,
        unsplit_backends=("S",) if "second_backend_exact_sizes" in case else (),
        rules=version.removesuffix(".0"),
    )


def check_alignment(case, version):
    if "kernel_block_size_error" in case:  # vLLM finds it later, in the worker
        with pytest.raises(ValueError, match=f"no kernel block divides {case['block_size']} "):
            align_as(case, version)
        return
    found = align_as(case, version)
    assert found.block_size == case["block_size"]
    assert found.state_block_size == case["mamba_block_size"]
    assert found.kernel_block_size == case["kernel_block_size"]
    assert found.page_bytes == case["block_size"] * case["attn_bytes_per_token"]
    padded = case["mamba_page_size_padded"]
    assert (found.page_bytes if found.padding_bytes else None) == padded
    asked = {
        "block_size": (case["user_block_size"], found.block_size),
        "state_block_size": (case["user_mamba_block_size"], found.state_block_size),
    }
    replaced = {f"{k}={a}" for k, (a, got) in asked.items() if a is not None and a != got}
    assert {ask.what for ask in found.overridden} == replaced


@pytest.mark.parametrize("version", VERSIONS)
def test_alignment_of_made_up_models(version):
    for case in golden("hybrid_alignment_grid", version)["cases"]:
        assert case["mamba_page_bytes"] == layout_of(case).nbytes
        check_alignment(case, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_alignment_of_real_models(version):
    for case in golden("hybrid_alignment_models", version)["cases"]:
        if "attn_bytes_per_token" not in case:
            if "S." not in case["error"][1]:
                assert "is not divisible by" in case["error"][1]
                continue  # tested in test_state_shapes_of_vllm
            case = case | sizes_of(case, version)
            with pytest.raises(ValueError, match="after alignment, but must be one of"):
                align_as(case, version)
            continue
        assert case["mamba_page_bytes"] == layout_of(case).nbytes
        check_alignment(case, version)


def layout_of(case):
    return jb.StateLayout(case["state_shapes"], case["state_dtypes"])


def sizes_of(case, version):
    """Return sizes that a failed case lacks, from another case of the same model and ranks."""
    same = ("model", "tp")
    other = next(
        c
        for c in golden("hybrid_alignment_models", version)["cases"]
        if "attn_bytes_per_token" in c and all(c[key] == case[key] for key in same)
    )
    dtype = "bfloat16" if case["cache_dtype"] == "auto" else case["cache_dtype"]
    per_token = jb.kv_bytes_per_token(
        other["num_kv_heads"], other["head_size"], dtype=dtype, is_mla=other["use_mla"]
    )
    kept = ("mamba_page_bytes", "mamba_chunk_size", "use_mla")
    mode = "align" if case["prefix_caching"] else "none"
    return {key: other[key] for key in kept} | {"attn_bytes_per_token": per_token, "mode": mode}


@pytest.mark.parametrize("version", VERSIONS)
def test_bytes_per_token_of_vllm(version):
    for topic in ("hybrid_alignment_grid", "hybrid_alignment_models"):
        for case in golden(topic, version)["cases"]:
            if "attn_bytes_per_token" not in case:
                continue
            model = case.get("model_dtype", "bfloat16")
            dtype = model if case["cache_dtype"] == "auto" else case["cache_dtype"]
            if case["use_mla"] and dtype not in ("bfloat16", "float16", "float32"):
                dtype = "uint8"
            per_token = jb.kv_bytes_per_token(
                case["num_kv_heads"], case["head_size"], dtype=dtype, is_mla=case["use_mla"]
            )
            assert per_token == case["attn_bytes_per_token"], case


GDN = {"head_k_dim": 128, "head_v_dim": 128, "conv_kernel": 4}
FP32 = ("bfloat16", "float32")
BF16 = ("bfloat16", "bfloat16")


def gdn(k_heads, v_heads, dtypes=FP32):
    return jb.gated_delta_net_state(num_k_heads=k_heads, num_v_heads=v_heads, dtypes=dtypes, **GDN)


def mamba2(inner, groups, heads, head_dim, state, dtypes):
    return jb.mamba2_state(
        intermediate_size=inner,
        num_groups=groups,
        num_heads=heads,
        head_dim=head_dim,
        state_size=state,
        conv_kernel=4,
        dtypes=dtypes,
    )


KDA = jb.kda_state(num_heads=32, head_dim=128, conv_kernel=4, dtypes=FP32)
JAMBA = jb.mamba1_state(intermediate_size=8192, state_size=16, conv_kernel=4, dtypes=BF16)
MINIMAX = jb.linear_attention_state(num_heads=64, head_dim=128, dtypes=("float32",))
LFM2 = jb.short_conv_state(intermediate_size=2048, conv_kernel=3, dtypes=("bfloat16",))
LFM3 = jb.short_conv_state(intermediate_size=2048, conv_kernel=7, dtypes=("bfloat16",))
OLMO = jb.gated_delta_net_state(
    num_k_heads=30, num_v_heads=30, head_k_dim=96, head_v_dim=192, conv_kernel=4, dtypes=BF16
)
LAYOUTS = {
    "Qwen3-Next-80B-A3B": gdn(16, 32, BF16),
    "Qwen3.5-9B": gdn(16, 32),
    "Qwen3.5-27B": gdn(16, 48),
    "Qwen3.5-35B-A3B": gdn(16, 32),
    "Qwen3.5-397B-A17B": gdn(16, 64),
    "Nemotron-3-Nano float32": mamba2(4096, 8, 64, 64, 128, FP32),
    "Nemotron-3-Nano float16": mamba2(4096, 8, 64, 64, 128, ("float16", "float16")),
    "Nemotron-Nano-9B-v2 bfloat16": mamba2(10240, 8, 128, 80, 128, BF16),
    "Nemotron-Nano-9B-v2 float32": mamba2(10240, 8, 128, 80, 128, FP32),
    "Nemotron-H-8B": mamba2(8192, 8, 128, 64, 128, FP32),
    "Bamba-9.8B": mamba2(8192, 1, 128, 64, 256, BF16),
    "Granite-4.0-H-Small": mamba2(8192, 1, 128, 64, 128, BF16),
    "Granite-4.0-H-Tiny": mamba2(3072, 1, 48, 64, 128, BF16),
    "Zamba2-2.7B": mamba2(5120, 1, 8, 640, 64, BF16),
    "Jamba-v0.1": JAMBA,
    "Kimi-Linear-48B": KDA,
    "MiniMax-Text-01": MINIMAX,
    "LFM2-1.2B": LFM2,
    "LFM3-1.7B": LFM3,
    "Olmo-Hybrid-7B": OLMO,
    "Falcon-H1-1.5B-Deep": mamba2(1024, 1, 128, 8, 256, BF16),
}
# KV heads, head size (576 is MLA's latent), state bytes, block sizes with kernel blocks of 16, 64
# and 128, padding in percent of the state, and the block size with an 8-bit cache.
PUBLISHED = """
Qwen3-Next-80B-A3B           |  2 256 1097728  544  576  640   1.49 1072
Qwen3.5-9B                   |  4 256 2146304  528  576  640   0.76 1056
Qwen3.5-27B                  |  4 256 3207168  784  832  896   0.13 1568
Qwen3.5-35B-A3B              |  2 256 2146304 1056 1088 1152   0.76 2096
Qwen3.5-397B-A17B            |  2 256 4268032 2096 2112 2176   0.58 4176
Nemotron-3-Nano float32      |  2 128 2134016 2096 2112 2176   0.58 4176
Nemotron-3-Nano float16      |  2 128 1085440 1072 1088 1152   1.13 2128
Nemotron-Nano-9B-v2 bfloat16 |  8 128 2695168  672  704  768   2.13 1328
Nemotron-Nano-9B-v2 float32  |  8 128 5316608 1312 1344 1408   1.08 2608
Nemotron-H-8B                |  8 128 4255744 1040 1088 1152    0.1 2080
Bamba-9.8B                   |  8 128 4246528 1040 1088 1152   0.31 2080
Granite-4.0-H-Small          |  8 128 2147840  528  576  640   0.69 1056
Granite-4.0-H-Tiny           |  4 128  806400  400  448  512   1.59  800
Zamba2-2.7B                  | 32 160  686848   48   64  128  43.12   80
Jamba-v0.1                   |  8 128  311296   80  128  128   5.26  160
Kimi-Linear-48B              |  1 576 2170880 1888 1920 1920   0.19 3776
MiniMax-Text-01              |  8 128 4194304 1024 1024 1024    0.0 2048
LFM2-1.2B                    |  8  64    8192   16   64  128  300.0   16
LFM3-1.7B                    |  4 128   24576   16   64  128  33.33   32
Olmo-Hybrid-7B               | 30 128 1175040   80  128  128   4.58  160
Falcon-H1-1.5B-Deep          |  8 128  533504  144  192  256  10.56  272
"""
REAL_MODELS = dict(re.split(" +[|] +", line) for line in PUBLISHED.strip().splitlines())


@pytest.mark.parametrize("model", REAL_MODELS)
def test_published_block_sizes(model):
    layout, numbers = LAYOUTS[model], REAL_MODELS[model].split()
    heads, head_dim, nbytes, at16, at64, at128 = map(int, numbers[:6])
    percent, at16_fp8 = float(numbers[6]), int(numbers[7])
    mla = head_dim == 576
    assert layout.nbytes == nbytes
    for granularity, dtype, block in (
        (16, "bfloat16", at16),
        (64, "bfloat16", at64),
        (128, "bfloat16", at128),
        (16, "fp8_e4m3", at16_fp8),
    ):
        found = jb.align_hybrid_block_size(
            bytes_per_token=jb.kv_bytes_per_token(heads, head_dim, dtype=dtype, is_mla=mla),
            state_bytes=layout.nbytes,
            kernel_sizes=[[jb.MultipleOf(granularity)]],
            max_model_len=8192,
        )
        assert found.block_size == block
        if block == at16 and granularity == 16 and dtype == "bfloat16":
            assert round(found.padding_percent_of_state, 2) == pytest.approx(percent, abs=0.011)


def test_an_alignment_explains_itself_and_names_what_it_overrode():
    found = jb.align_hybrid_block_size(
        bytes_per_token=1024,
        state_bytes=2134016,
        kernel_sizes=M16,
        max_model_len=8192,
        mode="align",
        block_size=64,
        state_block_size=256,
    )
    assert [ask.what for ask in found.overridden] == ["block_size=64", "state_block_size=256"]
    text = str(found)
    assert "user: block_size=64 -> 2112, so that a state fits the page" in text
    assert "user: state_block_size=256 -> 2112, the mode 'align' decides" in text
    assert "flash: kernel blocks of [MultipleOf(16)]" in text
    assert "state: 2134016 bytes, as much as 2084 tokens of 1024 bytes" in text
    assert "padding 28672 bytes per state (1.33 % of the page, 1.34 % of the state)" in text
    assert not jb.align_hybrid_block_size(
        bytes_per_token=1024, state_bytes=1024, kernel_sizes=M16, max_model_len=8192, block_size=64
    ).overridden


def test_an_aligned_block_that_no_kernel_can_read_is_refused_at_once():
    """vLLM 0.23 grows 48 to 4848 here, and then fails in the worker."""
    with pytest.raises(ValueError, match="no kernel block divides 4848") as error:
        jb.align_hybrid_block_size(
            bytes_per_token=440,
            state_bytes=2134016 - 4096,
            kernel_sizes={"cpu": [jb.MultipleOf(32)]},
            max_model_len=8192,
            block_size=48,
            rules="0.23",
        )
    assert "cpu takes [MultipleOf(32)]: none of them divides 4848" in str(error.value)


def test_bad_arguments_are_all_named_at_once():
    with pytest.raises(ValueError, match="5 wrong") as error:
        jb.align_hybrid_block_size(
            bytes_per_token=0,
            state_bytes=-1,
            kernel_sizes=[],
            max_model_len=1,
            mode="some",
            rules="0.9",
        )
    for argument in ("bytes_per_token: 0", "state_bytes: -1", "mode: 'some'", "kernel_sizes"):
        assert argument in str(error.value)
    mamba2 = dict(num_groups=8, head_dim=64, state_size=128, conv_kernel=4, dtypes=FP32)
    with pytest.raises(ValueError, match="2 wrong"):
        jb.mamba2_state(intermediate_size=4098, num_heads=63, tensor_parallel=4, **mamba2)
    for ranks in (0, "2"):
        with pytest.raises(ValueError, match=f"tensor_parallel: {ranks!r}, but must be an integer"):
            jb.mamba2_state(intermediate_size=4096, num_heads=64, tensor_parallel=ranks, **mamba2)
    with pytest.raises(ValueError, match="num_groups: '8', but must be an integer"):
        jb.mamba2_state(intermediate_size=4096, num_heads=64, **{**mamba2, "num_groups": "8"})
    with pytest.raises(ValueError, match="head_dim: 24 with nvfp4"):
        jb.kv_bytes_per_token(1, 24, dtype="nvfp4")
    with pytest.raises(ValueError, match="dtype: 'int3', but must be a cache format"):
        jb.kv_bytes_per_token(1, 64, dtype="int3")
