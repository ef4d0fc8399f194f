"""Measure the accuracy and memory of each cache format on the examples' checkpoints.

    python -m benchmarks.cpu.formats [--format NAME ...] [--model NAME ...] [--rows R] [--json FILE]

Every text is read one token at a time, as in decoding, with caches of each format, so the first
token of a block sets its scale. The trained model, `byte-gemma`, reads held-out English;
checkpoints with random weights read their reference's prompts with the tokens that followed.
Calibrated scales, one per KV head, come from other text: English it learned from, or random bytes.

A line gives, relative to float32 caches: the root mean square of the logits' error, how many greedy
choices are the same, the bits per byte of held-out text, and the bytes of a token in the caches of
all layers. Before anything is printed, the logits over float32 caches must match those of another
computation: the reference's, or one without pages.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
from benchmarks.machine import run_record
from benchmarks.options import add_json, positive
from benchmarks.serving.records import append
from examples import byte_text
from examples.dense_rows import dense_logits
from examples.engine.caches import Caches, group_layers, init_caches
from examples.engine.model import AttentionCache, Batch, Model, load_model
from examples.models.gemma4 import Gemma4
from examples.options import BUNDLED, CHECKPOINTS, SPEAKING
from examples.verify import MAX_LIMIT, Reference

BLOCK = 16
LENGTH = 256  # of a row of English, as in training
FORMATS = {
    "float32": jattn.Dense("float32"),
    "float16": jattn.Dense("float16"),
    "bfloat16": jattn.Dense("bfloat16"),
    **{f"e4m3{end}": jattn.Fp8("e4m3", s) for end, s in (("-token", "token"), ("-block", "block"))},
    "e4m3-calibrated": jattn.Fp8("e4m3"),
    "e4m3": jattn.Fp8("e4m3"),
    **{f"e5m2{end}": jattn.Fp8("e5m2", s) for end, s in (("-token", "token"), ("-block", "block"))},
    "e5m2-calibrated": jattn.Fp8("e5m2"),
    "e5m2": jattn.Fp8("e5m2"),
    "int8-zero": jattn.Int8(zero_point=True),
    "int8": jattn.Int8(),
    "int8-int4": (jattn.Int8(), jattn.Int4(zero_point=True)),  # keys, values
    "int4-int8": (jattn.Int4(zero_point=True), jattn.Int8()),
    "int4-zero": jattn.Int4(zero_point=True),
    "int4": jattn.Int4(),
    "nvfp4-calibrated": jattn.Nvfp4(),
    "nvfp4": jattn.Nvfp4(),
}
MODELS = (SPEAKING, *BUNDLED, "gpt-oss-tiny", "qwen3-tiny")  # without recurrent layers


class WrongLogitsError(Exception):
    """The logits over float32 caches do not match those of another computation."""


@dataclasses.dataclass(frozen=True)
class Texts:
    """The tokens that a model reads, and what is known about them."""

    tokens: np.ndarray  # int32 [R, n], zeros past a text's end
    lens: np.ndarray  # int32 [R]
    other: np.ndarray  # int32 [R, n], to calibrate on
    is_english: bool

    @property
    def real(self) -> np.ndarray:
        """bool [R, n]: which tokens belong to a text."""
        return np.arange(self.tokens.shape[1])[None] < self.lens[:, None]


@dataclasses.dataclass(frozen=True)
class Cost:
    """One line of the table."""

    model: str
    format: str
    rms_error: float
    equal_tokens: int
    num_tokens: int  # after which there was a choice
    bits_per_byte: float | None  # None: the text is noise
    bytes_per_token: int  # in the caches of all layers

    def line(self) -> str:
        """Format the line in Markdown."""
        bits = "" if self.bits_per_byte is None else f"{self.bits_per_byte:.4f}"
        share = f"{self.equal_tokens / self.num_tokens:.1%}"
        cells = (self.model, self.format, bits, f"{self.rms_error:.4f}", share)
        return "| " + " | ".join((*cells, str(self.bytes_per_token))) + " |"


def english(num_rows: int) -> Texts:
    """Return rows from all over the held-out text, and as many that training read."""
    rows = []
    for part in byte_text.split(byte_text.paragraphs())[::-1]:
        text = np.frombuffer(part, np.uint8)
        starts = np.linspace(0, len(text) - LENGTH, num_rows).astype(int)
        rows.append(text[starts[:, None] + np.arange(LENGTH)[None]].astype(np.int32))
    return Texts(rows[0], np.full(num_rows, LENGTH), rows[1], is_english=True)


def noise(reference: Reference, vocab_size: int) -> Texts:
    """Return a reference's prompts, each with the tokens that followed."""
    rows = [(*p, *t) for p, t in zip(reference.prompts, reference.tokens.tolist(), strict=True)]
    lens = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), lens.max()), np.int32)
    for row, text in zip(tokens, rows, strict=True):
        row[: len(text)] = text
    other = np.random.default_rng(0).integers(0, vocab_size, tokens.shape, np.int32)
    return Texts(tokens, lens, other, is_english=False)


class Reader:
    """A model that reads rows of tokens, one token of each row per step."""

    def __init__(self, model: Model, num_rows: int, length: int):
        if not all(isinstance(cache, AttentionCache) for cache in model.layers.values()):
            raise ValueError(f"{model.name} keeps recurrent states, which have no format")
        self.model = model
        self.groups = [group.name for group in group_layers(model.layers)]
        width = -(-length // BLOCK)
        self.num_blocks = num_rows * width
        ids = np.random.default_rng(0).permutation(self.num_blocks)
        self.tables = jnp.asarray(ids.reshape(num_rows, width), jnp.int32)
        self.read = jax.jit(self._read, donate_argnums=1)

    def empty(self, kv_format) -> Caches:
        """Make empty caches; formats of one kind share a compilation."""
        ids = dict.fromkeys(self.groups, self.num_blocks)
        return init_caches(self.model.layers, ids, BLOCK, kv_format)

    def __call__(self, caches: Caches, tokens: np.ndarray) -> tuple[np.ndarray, Caches]:
        """Return `(logits [R, n, vocabulary], caches)`; the given `caches` are donated."""
        logits, caches = self.read(self.model.params, caches, jnp.asarray(tokens))
        return np.asarray(logits).swapaxes(0, 1), caches

    def _read(self, params, caches: Caches, tokens: jax.Array):
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)

        def step(caches: Caches, position: jax.Array):
            block = self.tables[:, position // BLOCK]
            lens = jnp.full_like(rows, position + 1)
            starts = jnp.arange(len(rows) + 1, dtype=jnp.int32)
            slots = block * BLOCK + position % BLOCK
            metadata = jattn.AttentionMetadata(self.tables, lens, starts, slots, 1)
            batch = Batch(
                tokens=tokens[:, position],
                positions=jnp.full_like(rows, position),
                query_start_loc=starts,
                logit_tokens=rows,
                attention=dict.fromkeys(self.groups, metadata),
                states={},
                max_query_len=1,
            )
            logits, caches = self.model.step(params, caches, batch)
            return caches, logits

        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        caches, logits = jax.lax.scan(step, caches, steps)
        return logits, caches


def calibrated(caches: Caches, full: Caches) -> Caches:
    """Return empty `caches` with scales from the numbers in `full` caches of floats."""
    pools = []
    for pair, seen in zip(caches.pools, full.pools, strict=True):
        key, value = (x.numbers().swapaxes(1, 2) for x in seen)  # [N, S, K, D]
        key, value = (x.reshape(-1, *x.shape[2:]) for x in (key, value))
        found = jattn.calibrate(key, value, jnp.arange(key.shape[0], dtype=jnp.int32))
        scales = found.scales(tuple(x.format for x in pair))
        pools.append(tuple(x.replace(scale=s) for x, s in zip(pair, scales, strict=True)))
    return dataclasses.replace(caches, pools=tuple(pools))


def bits_per_byte(logits: np.ndarray, tokens: np.ndarray) -> float:
    """Return the mean of -log2 p(byte) over all but the first byte of rows [R, n]."""
    logits = logits[:, :-1].astype(np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    right = np.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return float((np.log(np.exp(logits).sum(axis=-1)) - right).mean() / np.log(2))


def check(model: Model, logits: np.ndarray, texts: Texts, reference: Reference | None) -> None:
    """Check that logits over float32 caches match those of another computation.

    Raises:
      WrongLogitsError: they do not.
    """
    if reference is not None:
        errors = [
            np.abs(row[len(prompt) - 1 :][: len(right)] - right).max()
            for row, prompt, right in zip(logits, reference.prompts, reference.logits, strict=True)
        ]
    else:
        shapes = nnx.eval_shape(lambda: Gemma4(model.config, jnp.dtype("float32")))
        module = nnx.merge(nnx.split(shapes)[0], model.params)
        right = jax.jit(lambda rows: dense_logits(module, rows))(texts.tokens[:2])
        errors = [np.abs(logits[:2] - right).max()]
    if not max(errors) <= MAX_LIMIT:  # also where it is NaN
        raise WrongLogitsError(f"{model.name}: logits are off by {max(errors)}")


def measure(name: str, formats: Sequence[str], num_rows: int) -> Iterator[Cost]:
    """Yield the cost of each format on a checkpoint."""
    model = load_model(CHECKPOINTS / name, "float32")
    reference = None
    if name == SPEAKING:
        texts = english(num_rows)
    else:
        reference = Reference.load(CHECKPOINTS / name / "reference.npz")
        texts = noise(reference, model.vocab_size)
    reader = Reader(model, *texts.tokens.shape)
    exact, _ = reader(reader.empty(FORMATS["float32"]), texts.tokens)
    check(model, exact, texts, reference)
    _, full = reader(reader.empty(FORMATS["float32"]), texts.other)
    real = texts.real
    for format in formats:
        caches = reader.empty(FORMATS[format])
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(caches))
        if format.endswith("-calibrated"):
            caches = calibrated(caches, full)
        logits, _ = reader(caches, texts.tokens)
        error = np.where(np.isfinite(logits), logits - exact, np.inf)[real].astype(np.float64)
        equal = (logits.argmax(axis=-1) == exact.argmax(axis=-1))[real]
        yield Cost(
            name,
            format,
            float(np.sqrt(np.square(error).mean())),
            int(equal.sum()),
            equal.size,
            bits_per_byte(logits, texts.tokens) if texts.is_english else None,
            size // (reader.num_blocks * BLOCK),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.formats", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument(
        "--model", nargs="+", choices=MODELS, default=[SPEAKING, *BUNDLED], metavar="NAME"
    )
    parser.add_argument("--rows", type=positive, default=32, help="of English (%(default)s)")
    add_json(parser)
    args = parser.parse_args(arguments)
    print("| checkpoint | format | bits per byte | logit rms | tokens equal | bytes a token |")
    print("|---|---|---|---|---|---|", flush=True)
    begin, count = time.perf_counter(), 0
    append(args.json, run_record())
    for model in args.model:
        for cost in measure(model, args.format, args.rows):
            print(cost.line(), flush=True)
            append(args.json, {"kind": "row", **dataclasses.asdict(cost)})
            count += 1
    print(f"\n{count} lines in {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
