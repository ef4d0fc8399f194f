"""Log-probabilities of sglang-jax for requests that share a batch with others.

A request asks for log-probabilities of its output only, or also of its prompt. The host handles the
two cases separately. If a batch has both kinds, or also requests that ask for neither, the host
crashes, or gives requests each other's lists:

- It computes log-probabilities of outputs only if every request of the batch asks for just these,
  and then sends all of them again with every chunk of an output.
- It updates the list of top-k counts only while a request of the batch asks for log-probabilities,
  and later indexes the list when it has become too short.
- Every request of a prefill has rows, but the host steps only over rows of requests that ask.
"""

from __future__ import annotations

import functools
from typing import Any

Rows = list[tuple[int, bool]]
# Lists of a request with an entry per token of the output.
OF_ANSWERS = [
    f"output_{kind}logprobs_{part}"
    for kind in ("token_", "top_", "token_ids_")
    for part in ("val", "idx")
]


def enable() -> None:
    """Give each request its own log-probabilities, whatever other requests of its batch ask for.

    Raises:
      ImportError: sglang-jax is not installed, or is another version.
    """
    from sgl_jax.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sgl_jax.srt.managers import scheduler_output_processor_mixin as processor
    from sgl_jax.srt.managers.schedule_batch import ScheduleBatch
    from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager

    mixin = processor.SchedulerOutputProcessorMixin
    mixin.stream_output_generation = _sent_once(mixin.stream_output_generation)
    processor._input_logprob_lens_per_dp = _rows_per_device
    processor._materialize_input_token_logprobs = _asked_for(
        processor._materialize_input_token_logprobs
    )
    ScheduleBatch.init_new = _marked(ScheduleBatch.init_new)
    ScheduleBatch.filter_batch = _filled(ScheduleBatch.filter_batch)
    ScheduleBatch.merge_batch = _filled(ScheduleBatch.merge_batch)
    TokenizerManager.convert_logprob_style = _complete(TokenizerManager.convert_logprob_style)
    OpenAIServingChat._process_logprobs_tokens = _by_token(
        OpenAIServingChat._process_logprobs_tokens
    )


def _rows_per_device(batch: Any) -> list[Rows] | None:
    """Return how many rows each request of a prefill has, and whether the host will read them.

    This replaces `_input_logprob_lens_per_dp`, which counts the rows of each device.
    """
    if not batch.forward_mode.is_extend():
        return None
    return [
        [
            (max(length - start, 0), _is_read(request))
            for request, length, start in zip(
                info.reqs or (),
                info.extend_lens or (),
                info.extend_logprob_start_lens or (),
                strict=False,  # the host leaves them out where a device has no request
            )
        ]
        for info in batch.reqs_info
    ]


def _is_read(request: Any) -> bool:
    return request.return_logprob and not (request.finished() or request.is_retracted)


def _asked_for(materialize: Any) -> Any:
    """Wrap the host's function that fetches rows from the device, without unread ones."""

    @functools.wraps(materialize)
    def materialize_and_drop(values: Any, devices: list[Rows] | None = None) -> tuple[float, ...]:
        found: tuple[float, ...] = materialize(values)
        if not devices:
            return found
        counted = sum(count for rows in devices for count, _ in rows)
        # The rows of each device are padded to the same number.
        is_padded = len(found) != counted and len(found) % len(devices) == 0
        kept: list[float] = []
        start = 0
        for device, rows in enumerate(devices):
            if is_padded:
                start = device * (len(found) // len(devices))
            for count, is_read in rows:
                if is_read:
                    kept += found[start : start + count]
                start += count
        return tuple(kept)

    return materialize_and_drop


def _mark(batch: Any) -> None:
    """Compute log-probabilities of outputs if any request of the batch asks for just these."""
    batch.return_output_logprob_only = any(
        request.return_output_logprob_only
        for info in batch.reqs_info
        for request in info.reqs or ()
    )


def _marked(make: Any) -> Any:
    """Wrap the host's class method that makes a batch, to `_mark` the batch."""

    @functools.wraps(make)
    def make_and_mark(cls: type, *arguments: Any, **options: Any) -> Any:
        batch = make.__func__(cls, *arguments, **options)
        _mark(batch)
        return batch

    return classmethod(make_and_mark)


def _filled(change: Any) -> Any:
    """Wrap the host's method that changes a batch, to give its lists an entry per request first."""

    @functools.wraps(change)
    def fill_and_change(batch: Any, *arguments: Any, **options: Any) -> None:
        batches = [one for one in (batch, *arguments) if hasattr(one, "reqs_info")]
        for info in [info for one in batches for info in one.reqs_info if info.reqs]:
            info.top_logprobs_nums = [request.top_logprobs_num for request in info.reqs]
            info.token_ids_logprobs = [request.token_ids_logprob for request in info.reqs]
        change(batch, *arguments, **options)
        _mark(batch)

    return fill_and_change


def _sent_once(send: Any) -> Any:
    """Wrap the host's method that sends chunks of outputs, to send each log-probability once.

    For requests that also ask for log-probabilities of the prompt, the host tracks what it has sent
    and gives each request its own lists. So all requests that ask pose as such during the call.
    """

    @functools.wraps(send)
    def send_once(
        scheduler: Any, requests: list[Any], of_prompts: bool, of_answers: bool, *more: Any,
        **options: Any,
    ) -> None:  # fmt: skip
        del of_answers
        for request in requests:
            if request.output_token_logprobs_val and request.finished_len is not None:
                for name in OF_ANSWERS:  # an output of no tokens has computed one
                    del getattr(request, name)[request.finished_len :]
        only = [request for request in requests if request.return_output_logprob_only]
        for request in only:
            request.return_logprob, request.return_output_logprob_only = True, False
            request.input_logprob_sent = True
        try:
            send(scheduler, requests, of_prompts or bool(only), False, *more, **options)
        finally:
            for request in only:
                request.return_logprob, request.return_output_logprob_only = False, True

    return send_once


def _complete(convert: Any) -> Any:
    """Wrap the host's method that formats log-probabilities, to add a list its server reads."""

    @functools.wraps(convert)
    def convert_and_complete(manager: Any, found: dict[str, Any], *arguments: Any) -> None:
        convert(manager, found, *arguments)
        if "output_token_logprobs" in found:
            found.setdefault("output_top_logprobs", [])

    return convert_and_complete


def _by_token(process: Any) -> Any:
    """Wrap the host's method for chats, to give each token its own top tokens in streams too."""

    @functools.wraps(process)
    def process_by_token(serving: Any, logprobs: Any, use_token_index: bool = True) -> Any:
        del use_token_index
        return process(serving, logprobs, use_token_index=True)

    return process_by_token
