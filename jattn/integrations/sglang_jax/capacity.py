"""How many requests and tokens an engine of sglang-jax has room for.

- The host compiles for at most as many requests as a chunk of prompts has tokens, and crashes when
  more run. jattn lowers `--max-running-requests` to that number.
- It splits each batch size that it compiles for over `--dp-size` devices, divisible or not. jattn
  drops sizes that are not divisible.
- It admits a request once the pages of layers with sliding windows have room for about two windows
  and for each chunk of its prompt. If they never have, the request waits forever. jattn refuses
  such an engine at the start.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from jattn import checks
from jattn.integers import ceil_div

logger = logging.getLogger(__name__)


def enable() -> None:
    """Run no more requests than are compiled for, and refuse pools too small for a request.

    Raises:
      ImportError: sglang-jax is not installed, or is another version.
    """
    from sgl_jax.srt.managers.tp_worker import ModelWorker
    from sgl_jax.srt.model_executor.compilation_manager import CompilationManager
    from sgl_jax.srt.model_executor.model_runner import ModelRunner

    pad, divide = ModelWorker.get_max_padded_size, ModelRunner.set_num_token_hybrid
    choose = CompilationManager._compute_bs_buckets

    @functools.wraps(pad)
    def pad_and_lower(worker: Any) -> tuple[int, int]:
        requests, tokens = pad(worker)
        if requests < worker.max_running_requests:
            logger.info(
                "--max-running-requests is now %d, the tokens in a chunk of prompts", requests
            )
            worker.max_running_requests = requests
        return requests, tokens

    @functools.wraps(divide)
    def divide_and_check(runner: Any) -> None:
        divide(runner)
        if runner.is_hybrid and not runner.is_draft_worker:
            _check_windows(runner)

    @functools.wraps(choose)
    def choose_whole(manager: Any, paddings: list[int] | None) -> list[int]:
        return [size for size in choose(manager, paddings) if size % manager.dp_size == 0]

    CompilationManager._compute_bs_buckets = choose_whole
    ModelWorker.get_max_padded_size = pad_and_lower
    ModelRunner.set_num_token_hybrid = divide_and_check


def _check_windows(runner: Any) -> None:
    """Raise if the pages of layers with windows would never have room for a request.

    Args:
      runner: `sgl_jax.srt.model_executor.model_runner.ModelRunner`.

    Raises:
      ValueError: says how many tokens they hold, and how many they must hold.
    """
    from sgl_jax.srt.managers.schedule_batch import swa_eviction_peak_tokens

    arguments, length = runner.server_args, runner.model_config.context_len
    chunk = arguments.chunked_prefill_size
    peak = swa_eviction_peak_tokens(runner.sliding_window_size, runner.page_size)
    # While one chunk of a prompt is computed, the one before it still has its pages.
    longest = min(chunk + peak, length) if chunk and chunk > 0 else length
    needed = ceil_div(max(longest, peak), runner.page_size) * runner.page_size
    found = runner.swa_max_total_num_tokens // max(arguments.dp_size, 1)
    with checks.checking("jattn.integrations.sglang_jax") as problems:
        problems.require(
            found > needed,
            "--max-total-tokens (--mem-fraction-static)",
            f"room for {found} tokens in layers with windows",
            f"room for more than {needed}, or long prompts never start: "
            "--swa-full-tokens-ratio also sets the room, a smaller --chunked-prefill-size needs "
            "less of it, and --disable-hybrid-swa-memory lifts the limit",
        )
