"""Which files of which project, and why some of their tests do not apply."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Suite:
    """A test file of a peer.

    Attributes:
      name: of the suite, and of the function in `kernels` that replaces the peer's kernel.
      file: its path in the wheel, or in the checkout.
      wheel: what pip downloads; None for a checkout of JAX.
      select: `-k` of pytest: what applies.
      leaves_out: why the others do not.
      at_least: tests that must pass, so that a suite which collects nothing fails.
    """

    name: str
    file: str
    wheel: str | None
    select: str
    leaves_out: str
    at_least: int


TPU_INFERENCE = "tpu-inference==0.32.0"
SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "jax_gpu_paged_attention",
            "tests/pallas/gpu_paged_attention_test.py",
            None,
            "Interpret",
            "the same cases without interpret mode, which want a GPU; cases of `sample_product` "
            "that quantize neither keys nor values skip themselves",
            10,
        ),
        Suite(
            "jax_tpu_paged_attention",
            "tests/pallas/tpu_paged_attention_kernel_test.py",
            None,
            "PagedAttentionKernelTest",
            "tests of the reference alone; `megacore_mode`, which divides work between the cores "
            "of a TPU",
            70,
        ),
        Suite(
            "jax_tpu_ragged_paged_attention",
            "tests/pallas/tpu_ragged_paged_attention_test.py",
            None,
            "not int4 and not int8",
            "integer pages without scales",
            10,
        ),
        Suite(
            "rpa_v3",
            "tests/kernels/ragged_paged_attention_kernel_v3_test.py",
            TPU_INFERENCE,
            "",
            "",
            17,
        ),
        Suite(
            "rpa_v3_hd64",
            "tests/kernels/ragged_paged_attention_kernel_v3_hd64_test.py",
            TPU_INFERENCE,
            "",
            "",
            10,
        ),
        Suite(
            "rpa_v2",
            "tests/kernels/ragged_paged_attention_kernel_v2_test.py",
            TPU_INFERENCE,
            "",
            "",
            10,
        ),
    )
}
