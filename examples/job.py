"""Turn a command line and a checkpoint directory into requests to serve."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from examples.engine.caches import group_layers
from examples.engine.mesh import make_mesh
from examples.engine.model import Model, load_model
from examples.engine.request import Request, Sampling, Sequence
from examples.engine.scheduler import Limits
from examples.engine.statistics import Statistics
from examples.options import SPEAKING, checkpoint_directory
from examples.text import Bytes, Tokenizer, load_tokenizer
from examples.verify import RMS_LIMITS, Reference


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that follows from the options and a checkpoint."""

    name: str
    model: Model
    kv_format: str
    limits: Limits
    requests: list[tuple[int, Request]]  # each with the step it arrives at
    tokenizer: Tokenizer
    reference: Reference | None  # what to compare with, with --verify


@dataclasses.dataclass(frozen=True)
class Report:
    """The figures of a run."""

    sequences: list[Sequence]  # in the order of the requests
    arrivals: list[int]  # the step each arrived at
    num_steps: int
    seconds: float
    statistics: Statistics
    bytes_per_token: int  # in the caches of all attention layers
    state_bytes: int  # of a sequence, in all recurrent layers

    @property
    def longest(self) -> int:
        """The length of the longest sequence."""
        return max(len(sequence.tokens) for sequence in self.sequences)

    @property
    def dense_kv_bytes(self) -> int:
        """The size of dense caches: as many rows, each as long as the longest sequence."""
        row = self.longest * self.bytes_per_token + self.state_bytes
        return self.statistics.peak.rows * row


def prepare(name: str, options: argparse.Namespace) -> Job:
    """Read a checkpoint and turn the options into requests and limits.

    Raises:
      ValueError: options that do not fit each other or the checkpoint.
    """
    directory = checkpoint_directory(name)
    mesh = None if options.mesh is None else make_mesh(options.mesh)
    model = load_model(directory, options.dtype, mesh)
    dtype = model.dtype
    kv_format = options.kv_format or dtype
    tokenizer = load_tokenizer(directory, model.vocab_size)
    reference = None
    if options.temperature is None:  # decoding greedily, so small a model falls into a loop
        options.temperature = 0.4 if model.name == SPEAKING else 0.0
    texts = options.prompt or _bundled_prompts(directory)
    if options.verify or not texts:
        reference = _reference(directory, options, dtype, kv_format)
    requests = _requests(options, texts, reference, tokenizer, model.stop_tokens, kv_format)
    longest = max(request.max_len for _, request in requests)
    if longest > model.max_positions:
        raise ValueError(
            f"the longest request may reach {longest} tokens, but {directory.name} was made for "
            f"{model.max_positions}"
        )
    groups = group_layers(model.layers)
    wanted = {True: options.sliding_blocks, False: options.global_blocks}  # True: with a window
    counts = {g.name: wanted[g.window is not None] for g in groups if not g.is_state}
    limits = Limits(
        groups=groups,
        max_seqs=options.max_seqs,
        token_budget=options.token_budget,
        block_size=options.block_size,
        max_len=longest,
        num_blocks={name: count for name, count in counts.items() if count},
        prefix_caching=not options.no_prefix_cache,
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


def _bundled_prompts(directory: Path) -> list[str]:
    """Return the lines of a checkpoint's prompts.txt, if it has one."""
    path = directory / "prompts.txt"
    return path.read_text().splitlines() if path.is_file() else []


def _reference(
    directory: Path, options: argparse.Namespace, dtype: str, kv_format: str
) -> Reference:
    """Load the checkpoint's reference, after checking that the options allow the comparison."""
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
        raise ValueError(f"{directory}: give it a text to continue with --prompt TEXT") from None
    available = reference.tokens.shape[1]
    if options.verify and (options.max_new_tokens or 0) > available:
        raise ValueError(
            f"--max-new-tokens is {options.max_new_tokens}, but must be at most {available} with "
            "--verify, the tokens per prompt in the reference"
        )
    return reference


def _requests(
    options: argparse.Namespace,
    texts: list[str],
    reference: Reference | None,
    tokenizer: Tokenizer,
    stop_tokens: tuple[int, ...],
    kv_format: str,
) -> list[tuple[int, Request]]:
    """Turn the given prompts, or the reference's, into requests that arrive one after another."""
    if reference is not None:
        count = options.max_new_tokens or reference.tokens.shape[1]
        forced = options.verify and kv_format != "float32"
        return reference.requests(count, options.arrive_every, forced=forced)
    requests = []
    count = options.max_new_tokens or (192 if isinstance(tokenizer, Bytes) else 32)
    for i, text in enumerate(texts):
        tokens = tokenizer.encode(text)
        if not tokens:
            raise ValueError(f"--prompt {text!r} has no tokens")
        request = Request(
            tuple(tokens),
            count,
            sampling=Sampling(
                options.temperature, options.top_k, options.top_p, seed=options.seed + i
            ),
            stop_tokens=stop_tokens,
        )
        requests.append((i * options.arrive_every, request))
    return requests
