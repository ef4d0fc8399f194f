"""From a command line and a checkpoint directory to what there is to serve."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from examples.engine.caches import group_layers
from examples.engine.model import Model, load_model
from examples.models.gemma4_config import GLOBAL, SLIDING
from examples.options import BUNDLED
from examples.serving.scheduler import Limits, Request
from examples.text import Tokenizer, load_tokenizer
from examples.verify import RMS_LIMITS, Reference

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"


@dataclasses.dataclass(frozen=True)
class Job:
    """What to serve and on what: everything the options and a checkpoint decide."""

    name: str
    model: Model
    kv_format: str
    limits: Limits
    requests: list[Request]
    tokenizer: Tokenizer
    reference: Reference | None  # what to compare with, if asked


def prepare(name: str, options: argparse.Namespace) -> Job:
    """Read a checkpoint and turn the options into requests and limits.

    Raises:
      ValueError: options that do not fit each other or the checkpoint.
    """
    directory = CHECKPOINTS / name if name in BUNDLED else Path(name)
    model = load_model(directory, options.dtype)
    dtype = model.dtype
    kv_format = options.kv_format or dtype
    tokenizer = load_tokenizer(directory, model.vocab_size)
    reference = None
    if options.verify or not options.prompt:
        reference = _reference(directory, options, dtype, kv_format)
    requests = _requests(options, reference, tokenizer, model.stop_tokens, kv_format)
    longest = max(request.max_len for request in requests)
    if longest > model.max_positions:
        raise ValueError(
            f"the longest request may reach {longest} tokens, but {directory.name} was made for "
            f"{model.max_positions}"
        )
    windows = {group.name: group.window for group in group_layers(model.layers)}
    counts = {SLIDING: options.sliding_blocks, GLOBAL: options.global_blocks}
    limits = Limits(
        max_seqs=options.max_seqs,
        token_budget=options.token_budget,
        block_size=options.block_size,
        max_len=longest,
        windows=windows,
        num_blocks={kind: n for kind, n in counts.items() if n and kind in windows},
    )
    return Job(
        name=directory.name,
        model=model,
        kv_format=kv_format,
        limits=limits,
        requests=requests,
        tokenizer=tokenizer,
        reference=reference if options.verify else None,
    )


def _reference(
    directory: Path, options: argparse.Namespace, dtype: str, kv_format: str
) -> Reference:
    """The checkpoint's reference, after checking that the options let a run be compared with it."""
    if options.verify and options.prompt:
        raise ValueError("--verify serves the reference's prompts: leave out --prompt")
    if options.verify and dtype != "float32":
        raise ValueError(f"--verify needs --dtype float32, not {dtype}")
    if options.verify and kv_format != "float32" and kv_format not in RMS_LIMITS:
        raise ValueError(
            f"--verify cannot judge --kv-format {kv_format}: its rounding moves logits about as "
            f"far as a fault would; it can judge float32, {', '.join(RMS_LIMITS)}"
        )
    try:
        reference = Reference.load(directory / "reference.npz")
    except ValueError as error:
        if options.verify:
            raise ValueError(f"--verify: {error}") from None
        raise ValueError(f"{directory}: give it something to continue with --prompt TEXT") from None
    available = reference.tokens.shape[1]
    if options.verify and (options.max_new_tokens or 0) > available:
        raise ValueError(
            f"--max-new-tokens is {options.max_new_tokens}, but the reference to --verify with has "
            f"{available} per prompt"
        )
    return reference


def _requests(
    options: argparse.Namespace,
    reference: Reference | None,
    tokenizer: Tokenizer,
    stop_tokens: tuple[int, ...],
    kv_format: str,
) -> list[Request]:
    """The prompts of the command line or of the reference, one arriving after another."""
    if reference is not None:
        count = options.max_new_tokens or reference.tokens.shape[1]
        forced = options.verify and kv_format != "float32"
        return reference.requests(count, options.arrive_every, forced=forced)
    requests = []
    for i, text in enumerate(options.prompt):
        tokens = tokenizer.encode(text)
        if not tokens:
            raise ValueError(f"--prompt {text!r} has no tokens")
        requests.append(
            Request(
                tuple(tokens),
                options.max_new_tokens or 32,
                arrival=i * options.arrive_every,
                stop_tokens=stop_tokens,
            )
        )
    return requests
