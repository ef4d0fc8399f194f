"""The text of sglang-jax's outputs, in chunks.

The host's detokenizer gets these wrong, and jattn fixes them:

- A character may need several tokens. The host sends U+FFFD, which the first of them decode to, and
  then never sends the character, because the new text is no longer than what was sent.
- It sends the ids of such a character's tokens again with every chunk.
- It decodes a whole batch with the settings of the batch's first request.
- It continues the text of an earlier request with the same id.
- It trims the token that ended an output, but not if that is token 0.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

INCOMPLETE = "\ufffd"
SETTINGS = ("skip_special_tokens", "spaces_between_special_tokens")
# Fields with an entry per request, which the host's detokenizer reads.
PER_REQUEST = (
    "rids",
    "finished_reasons",
    "decoded_texts",
    "decode_ids",
    "read_offsets",
    "no_stop_trim",
    *SETTINGS,
)


def enable() -> None:
    """Decode each request with its own settings, and send each character once it is complete.

    Raises:
      ImportError: sglang-jax is not installed, or is another version.
    """
    from sgl_jax.srt.managers import detokenizer_manager

    manager = detokenizer_manager.DetokenizerManager
    if hasattr(manager.handle_batch_token_id_out, "__wrapped__"):
        return  # already enabled
    detokenizer_manager.find_printable_text = complete
    handle_once = _sent_once(
        manager.handle_batch_token_id_out, detokenizer_manager.process_special_tokens_spaces
    )
    manager.handle_batch_token_id_out = _by_settings(handle_once)
    manager.trim_matched_stop = _first_token_too(manager.trim_matched_stop)


def complete(text: str) -> str:
    """Return a text without an incomplete character at its end."""
    return text.rstrip(INCOMPLETE)


def _by_settings(handle: Any) -> Any:
    """Wrap the host's method that decodes a batch, to call it for requests of equal settings."""

    @functools.wraps(handle)
    def handle_by_settings(manager: Any, received: Any) -> Any:
        groups: dict[tuple[bool, bool], list[int]] = {}
        for row, settings in enumerate(
            zip(*(getattr(received, name) for name in SETTINGS), strict=True)
        ):
            groups.setdefault(settings, []).append(row)
        if len(groups) < 2:
            return handle(manager, received)
        texts: dict[int, str] = {}
        tokens: dict[int, list[int]] = {}
        for rows in groups.values():
            fields = {name: [getattr(received, name)[row] for row in rows] for name in PER_REQUEST}
            sent = handle(manager, dataclasses.replace(received, **fields))
            texts |= dict(zip(rows, sent.output_strs, strict=True))
            tokens |= dict(zip(rows, sent.output_ids, strict=True))
        count = range(len(received.rids))
        return dataclasses.replace(
            sent,
            rids=received.rids,
            finished_reasons=received.finished_reasons,
            output_strs=[texts[row] for row in count],
            output_ids=[tokens[row] for row in count],
            output_routed_experts=manager._extract_routed_experts(received),
        )

    return handle_by_settings


def _sent_once(handle: Any, without_special: Any) -> Any:
    """Wrap the host's method that decodes a batch, to send each token once.

    Also drop the state of finished requests, because another request may reuse the id.
    """

    @functools.wraps(handle)
    def handle_once(manager: Any, received: Any) -> Any:
        again = []  # how many tokens of each request the host sends again
        for rid, skips in zip(received.rids, received.skip_special_tokens, strict=True):
            status = manager.decode_status.get(rid)
            waiting = status.decode_ids[status.read_offset :] if status else []
            if waiting:
                waiting = without_special(waiting, skips, manager.tokenizer.all_special_ids)
            again.append(len(waiting))
        sent = handle(manager, received)
        sent.output_ids = [
            tokens[count:] for tokens, count in zip(sent.output_ids, again, strict=True)
        ]
        for rid, finished in zip(received.rids, received.finished_reasons, strict=True):
            if finished is not None:
                manager.decode_status.pop(rid, None)
        return sent

    return handle_once


def _first_token_too(trim: Any) -> Any:
    """Wrap the host's method that trims the token that ended an output, to trim token 0 too."""

    @functools.wraps(trim)
    def trim_any(manager: Any, output: Any, reason: Any, no_stop_trim: bool) -> Any:
        is_first = bool(reason) and reason.get("matched") == 0 and isinstance(output, list)
        if is_first and not no_stop_trim:
            return output[:-1]
        return trim(manager, output, reason, no_stop_trim)

    return trim_any
