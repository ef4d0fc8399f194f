"""Which test files of which project run, and why some of their tests do not apply."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI that has the tests."""

    project: str
    version: str
    title: str


@dataclasses.dataclass(frozen=True)
class SourceArchive:
    """A source distribution on PyPI that has the tests."""

    project: str
    version: str
    title: str


@dataclasses.dataclass(frozen=True)
class Checkout:
    """A repository whose distributions on PyPI leave the tests out."""

    name: str
    url: str
    title: str

    @property
    def variable(self) -> str:
        """The environment variable that names a checkout's folder."""
        return "JATTN_PEERS_" + self.name.upper().replace("-", "_")


@dataclasses.dataclass(frozen=True)
class Suite:
    """Test files of a peer.

    Attributes:
      name: of the suite, and of the function in `plugin` that replaces the peer's kernel.
      source: where the files come from.
      files: their paths in the source.
      select: pytest's `-k`, which selects the tests that apply.
      leaves_out: what does not apply and why, for docs/peer-tests.md.
      at_least: how many tests must pass, so that a suite that collects nothing fails.
      every: 1 runs all that applies, n a sample of about one test in n, always the same.
      plugin: the module of `tests.peers` that replaces the kernel.
      needs: modules that the files import.
    """

    name: str
    source: Wheel | SourceArchive | Checkout
    files: tuple[str, ...]
    select: str
    leaves_out: str
    at_least: int
    every: int = 1
    plugin: str = "kernels"
    needs: tuple[str, ...] = ()


JAX = Checkout("jax", "https://github.com/jax-ml/jax", "JAX")
FLASHINFER = Checkout("flashinfer", "https://github.com/flashinfer-ai/flashinfer", "FlashInfer")
TPU_INFERENCE = Wheel("tpu-inference", "0.32.0", "tpu-inference")
VLLM = SourceArchive("vllm", "0.32.0", "vLLM")
VLLM_WITH_CASCADES = SourceArchive("vllm", "0.9.2", "vLLM")
FLASH_ATTENTION = SourceArchive("flash-attn", "2.8.3", "FlashAttention")
FLASHINFER_PAGED = ("append_paged_kv_cache", "batch_attention_run", "multi_level_cascade_run")
FLASHINFER_MERGES = ("merge_state", "merge_states", "merge_state_in_place")

SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "jax_gpu_paged_attention",
            JAX,
            ("tests/pallas/gpu_paged_attention_test.py",),
            "Interpret",
            "cases without interpret mode, which need a GPU; those of `sample_product` that "
            "quantize neither keys nor values skip themselves",
            17,
        ),
        Suite(
            "jax_tpu_paged_attention",
            JAX,
            ("tests/pallas/tpu_paged_attention_kernel_test.py",),
            "PagedAttentionKernelTest",
            "`megacore_mode`, which divides work between the cores of a TPU; tests that cover only "
            "the reference",
            280,
        ),
        Suite(
            "jax_tpu_ragged_paged_attention",
            JAX,
            ("tests/pallas/tpu_ragged_paged_attention_test.py",),
            "not int4 and not int8",
            "pages of int4 and int8, with scales or without: `tpu_ragged_paged_attention` takes "
            "only floats",
            150,
        ),
        Suite(
            "rpa_v3",
            TPU_INFERENCE,
            ("tests/kernels/ragged_paged_attention_kernel_v3_test.py",),
            "",
            "",
            5,
            every=8,
        ),
        Suite(
            "rpa_v3_hd64",
            TPU_INFERENCE,
            ("tests/kernels/ragged_paged_attention_kernel_v3_hd64_test.py",),
            "",
            "",
            5,
            every=8,
        ),
        Suite(
            "rpa_v2",
            TPU_INFERENCE,
            ("tests/kernels/ragged_paged_attention_kernel_v2_test.py",),
            "",
            "",
            150,
        ),
        Suite(
            "rpa_v2_update",
            TPU_INFERENCE,
            ("tests/kernels/ragged_kv_cache_update_v2_test.py",),
            "not invalid_inputs",
            "tests of the original's error messages",
            40,
        ),
        Suite(
            "mla_v2",
            TPU_INFERENCE,
            ("tests/kernels/mla_v2_test.py",),
            "basic or only or attention_mixed or should or cannot or shape or _bs",
            "contexts of 4096 tokens and more, and pools of 10,240 pages, which take gigabytes",
            70,
        ),
        Suite(
            "vllm_unified_attention",
            VLLM,
            ("tests/kernels/attention/test_triton_unified_attention.py",),
            "not 32768 and not seq_lens3 and not clamped_mm and not softcap_does_not",
            "unit tests of a Triton kernel's tile bounds and soft cap; images inside chunks; "
            "533 sequences of 533 tokens, and pools of gigabytes",
            30,
            every=24,
            plugin="torch_kernels",
            needs=("torch",),
        ),
        Suite(
            "vllm_merge_attn_states",
            VLLM,
            ("tests/kernels/attention/test_merge_attn_states.py",),
            "not stand_in and not 1536 and not 4096",
            "the largest sizes, which take minutes each because every call is repeated 22 times. "
            "The file compares with another kernel, which its formula in PyTorch replaces here",
            20,
            every=72,
            plugin="torch_kernels",
            needs=("torch",),
        ),
        Suite(
            "vllm_cascade",
            VLLM_WITH_CASCADES,
            ("tests/kernels/attention/test_cascade_flash_attn.py",),
            "not 3-2048",
            "the cases of FlashAttention 3, which are the same for jattn. The file compares "
            "cascades with a GPU kernel, which causal attention in PyTorch, float32, replaces here",
            40,
            every=3,
            plugin="torch_kernels",
            needs=("torch",),
        ),
        Suite(
            "flash_attention_combine",
            FLASH_ATTENTION,
            ("hopper/test_flash_attn.py",),
            "combine and not 1024 and not 640 and not 133 and not 97",
            "the largest sizes, which take gigabytes",
            30,
            every=24,
            plugin="torch_kernels",
            needs=("torch", "einops"),
        ),
        Suite(
            "flash_attention_kvcache",
            FLASH_ATTENTION,
            ("hopper/test_flash_attn.py",),
            "kvcache and (False-None-0.0 or False-1-0.0 or False-4-0.0 or False-128-0.0) and not "
            "(False-True-False-m or False-True-False-g or False-True-True-m or False-True-True-g) "
            "and not 3577 and not 20000",
            "caches with padding on the left; windows of different lengths to the left and to the "
            "right; rotary embeddings, which a step applies before the call; the two longest "
            "caches, which take minutes each",
            30,
            every=300,
            plugin="torch_kernels",
            needs=("torch", "einops"),
        ),
        Suite(
            "flashinfer",
            FLASHINFER,
            tuple(
                f"tests/trace/test_{name}_reference_correctness.py"
                for name in FLASHINFER_MERGES + FLASHINFER_PAGED
            ),
            "",
            "tests that compare with another kernel of FlashInfer",
            10,
            plugin="torch_kernels",
            needs=("torch",),
        ),
    )
}

# Files about attention in tpu-inference's wheel that are not run, and why.
NOT_RUN = {
    "kernels/rpa_v3_cp/ragged_paged_attention_kernel_cp_test.py": (
        "arguments of one rank of a context-parallel prefill (`cp_rank`, `q_pos_offsets`, "
        "`kv_cache_lens`) and caches interleaved over ranks, which `jattn.integrations.rpa` does "
        "not take"
    ),
    "kernels/stacked_rpa/stacked_rpa_kv_writeback_test.py": (
        "caches with the tokens of a page along the last axis, a layout that jattn does not take"
    ),
    "kernels/stacked_rpa/stacked_rpa_test.py": "block sizes and masks inside a TPU kernel",
    "kernels/flash_attention_kernel_test.py": (
        "the memory that a TPU kernel needs, without computing attention"
    ),
    "kernels/mla_tuned_vs_baseline_test.py": (
        "timings of one TPU kernel with two tunings, on TPU version 7 or newer"
    ),
    "kernels/deepseek_v4/*_test.py": (
        "kernels of one model with special arguments, for which `jattn.integrations.rpa` has no "
        "functions"
    ),
    "layers/common/test_attention_backend.py": (
        "how backends are found, with fake ones; `pytest -m hosts` finds and runs jattn's backend"
    ),
}
