"""Train the byte-level, Gemma-4-shaped model in `examples/checkpoints/byte-gemma`.

    python examples/train_byte_model.py --out DIR

reads English that comes with CPython, and with `--docs DIR` also Python's documentation
(`examples/byte_text.py`), and writes a checkpoint directory in Hugging Face's layout. The model is
`examples/models/gemma4.py` itself: training replaces its paged caches with short dense rows, which
have the same mathematics (`examples/dense_rows.py`), and its products
(`examples/narrow_products.py`). Matrices are trained with Muon, vectors and the embedding with
AdamW, both from optax. The learning rate rises, stays constant, and falls to zero over the last
part of the run, which ends after `--steps` or `--minutes`. `--resume` continues from the last saved
state, `--start` from a checkpoint's weights:

    python examples/train_byte_model.py --out DIR --minutes 60 --fall 0
    python examples/train_byte_model.py --out DIR --resume --minutes 20

trains at the highest rate for an hour and lets it fall for 20 minutes.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make `examples` and `jattn` importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if _missing := [n for n in ("flax", "optax", "safetensors") if not importlib.util.find_spec(n)]:
    sys.exit(f"this example needs {', '.join(_missing)}: pip install -e '.[train]'")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from safetensors import numpy as safetensors

from examples import byte_text, narrow_products
from examples.dense_rows import dense_logits
from examples.models import gemma4
from examples.models.checkpoint import open_checkpoint
from examples.models.gemma4 import Gemma4
from examples.models.gemma4_config import Gemma4Config
from examples.models.layers import Linear

CONFIG = {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


def initial_params(config: Gemma4Config, seed: int) -> tuple[nnx.GraphDef, nnx.State]:
    """Make random parameters with logits of size 1, and attention neither sharp nor flat."""
    graphdef, params = nnx.split(Gemma4(config, jnp.dtype("float32")))
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        name, shape = jax.tree_util.keystr(path), leaf.shape
        if len(shape) == 2:
            value = rng.normal(0, shape[1] ** -0.5, shape)
        elif "q_norm" in name or "k_norm" in name:
            value = np.full(shape, shape[0] ** -0.25)  # q . k of unit rms, over sqrt(D)
        elif "post_" in name:
            value = np.full(shape, (2 * len(config.layers)) ** -0.5)
        else:
            value = np.ones(shape)
        return jnp.asarray(value, jnp.float32)

    return graphdef, jax.tree_util.tree_map_with_path(fill, params)


def optimizer() -> optax.GradientTransformation:
    """Use Muon for matrices, AdamW for the embedding and vectors, at a learning rate of one."""

    def matrices(params):
        def spec(path, leaf):
            if leaf.ndim == 2 and "embed" not in jax.tree_util.keystr(path):
                return optax.contrib.MuonDimensionNumbers()
            return None

        return jax.tree_util.tree_map_with_path(spec, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            1.0,
            adam_learning_rate=0.4,
            weight_decay=0.05,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=matrices,
        ),
    )


def share_of_rate(step: int, done: float, *, fall: float, warmup: int = 50) -> float:
    """Return the learning rate over its highest value: it rises, stays, and falls to zero.

    `done` is the fraction of all steps or minutes that is over; the rate falls during the last
    fraction, `fall`.
    """
    return min(1.0, step / warmup, (1 - done) / fall if fall else 1.0)


def bits_per_byte(model: Gemma4, rows: jax.Array, *, narrow: bool = False) -> jax.Array:
    """Compute the mean of -log2 p(byte) over all but the first byte of rows [R, n + 1].

    With `narrow`, products round their operands to bfloat16 (`examples/narrow_products.py`).
    """
    if narrow:
        for _, module in nnx.iter_modules(model):
            if isinstance(module, Linear):  # the product that this replaces is never computed
                weight = module.weight[...]
                module.change = lambda x, y, weight=weight: narrow_products.linear(x, weight)
    product = narrow_products.batched if narrow else jnp.matmul
    logits = dense_logits(model, rows[:, :-1], product)
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
    return losses.mean() / jnp.log(2.0)


def sample_rows(text: np.ndarray, rng: np.random.Generator, num_rows: int, n: int) -> np.ndarray:
    """Sample chunks of n + 1 bytes of a text, int32 [num_rows, n + 1].

    Every second one begins where a paragraph does, as a prompt will; the others begin anywhere.
    """
    starts = rng.integers(0, len(text) - n - 1, num_rows)
    firsts = 1 + np.flatnonzero(text[: len(text) - n - 1] == ord("\n"))
    if len(firsts):
        starts[::2] = rng.choice(firsts, len(starts[::2]))
    return text[starts[:, None] + np.arange(n + 1)[None, :]].astype(np.int32)


def validation_rows(text: np.ndarray, n: int) -> np.ndarray:
    """Cut a whole text into chunks of n + 1 bytes that overlap by one, int32 [R, n + 1]."""
    count = (len(text) - 1) // n
    starts = np.arange(count)[:, None] * n
    return text[starts + np.arange(n + 1)[None, :]].astype(np.int32)


def save_checkpoint(directory: Path, params: nnx.State, config: dict) -> None:
    """Write config.json and model.safetensors with bfloat16 tensors under Hugging Face's names."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        "model." + ".".join(map(str, path)): np.asarray(v.get_value()).astype(jnp.bfloat16)
        for path, v in nnx.to_flat_state(params)
    }
    safetensors.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    # A newline ends a paragraph, and the model was trained to write paragraphs.
    generation = {"eos_token_id": ord("\n")}
    (directory / "generation_config.json").write_text(json.dumps(generation) + "\n")


def save_state(path: Path, state) -> None:
    """Write atomically everything that training needs to continue."""
    leaves = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    partial = path.with_name("partial.npz")
    np.savez(partial, **leaves)
    partial.replace(path)


def load_state(path: Path, like):
    """Load what `save_state` wrote, in the structure of `like`."""
    with np.load(path) as file:
        leaves = [jnp.asarray(file[str(i)]) for i in range(len(file.files))]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def read_texts(docs: Path | None) -> tuple[bytes, list[bytes]]:
    """Return the training text and held-out texts: CPython's own prose, and that of `docs`.

    Training paragraphs that share a run of words with a held-out one are left out.
    """
    sources = [byte_text.paragraphs()]
    if docs is not None:
        sources.append(byte_text.documentation(docs))
    learned, held_out = zip(*map(byte_text.split, sources), strict=True)
    lines = dict.fromkeys(b"".join(learned).decode().splitlines())
    if docs is not None:
        lines = byte_text.without(lines, b"".join(held_out))
    return "".join(f"{line}\n" for line in lines).encode(), list(held_out)


def load_params(directory: Path) -> nnx.State:
    """Load the parameters of a checkpoint in float32."""
    return gemma4.load(open_checkpoint(directory), "float32").params


def train(options: argparse.Namespace) -> None:
    """Train as the options say, saving regularly."""
    learned, held_out = read_texts(options.docs)
    text = np.frombuffer(learned, np.uint8)
    graphdef, params = initial_params(Gemma4Config.from_hf(CONFIG), options.seed)
    if options.start is not None:
        params = load_params(options.start)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    sizes = " and ".join(f"{len(part):,}" for part in held_out)
    print(f"{size:,} parameters, {len(text):,} bytes to learn, {sizes} held out", flush=True)
    rule = optimizer()

    def loss(params, rows):
        return bits_per_byte(nnx.merge(graphdef, params), rows, narrow=True)

    def update(state, rows, rate):
        params, moments, step = state
        value, gradient = jax.value_and_grad(loss)(params, rows)
        change, moments = rule.update(gradient, moments, params)
        change = jax.tree.map(lambda leaf: rate * leaf, change)
        return (optax.apply_updates(params, change), moments, step + 1), value

    update, validate = jax.jit(update, donate_argnums=0), jax.jit(loss)
    state = (params, rule.init(params), jnp.int32(0))
    saved = options.out / "state.npz"
    options.out.mkdir(parents=True, exist_ok=True)
    if options.resume:
        state = load_state(saved, state)
    first, start, losses = int(state[2]), time.perf_counter(), []
    batches = [
        rows[: len(rows) // options.rows * options.rows].reshape(-1, options.rows, rows.shape[1])
        for rows in (validation_rows(np.frombuffer(t, np.uint8), options.length) for t in held_out)
    ]

    def done(step: int) -> float:
        """Return the fraction of the run that is over before a step."""
        if options.minutes:
            return min((time.perf_counter() - start) / 60 / options.minutes, 1.0)
        return (step - 1) / options.steps

    step, over = first, done(first + 1)
    while over < 1:
        step += 1
        rng = np.random.default_rng([options.seed, step])
        rows = sample_rows(text, rng, options.rows, options.length)
        rate = options.rate * share_of_rate(step, over, fall=options.fall)
        state, value = update(state, rows, jnp.float32(rate))
        losses.append(float(value))
        over = done(step + 1)
        if step % options.every == 0 or over >= 1:
            save_state(saved, state)
            save_checkpoint(options.out, state[0], CONFIG)
            parts = [part if over >= 1 else part[:: max(len(part) // 4, 1)] for part in batches]
            held = [np.mean([float(validate(state[0], x)) for x in part]) for part in parts]
            seconds = time.perf_counter() - start
            speed = (step - first) * options.rows * options.length / seconds
            print(
                f"step {step:>6}  {np.mean(losses):.3f} bits per byte, "
                f"{' and '.join(f'{bits:.3f}' for bits in held)} held out, "
                f"rate {rate:.4f}, {speed:,.0f} bytes/s, {seconds:,.0f} s",
                flush=True,
            )
            losses.clear()


def main(arguments: list[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(
        prog="train_byte_model.py",
        description="Train a byte-level, Gemma-4-shaped model on English about Python.",
    )
    add = functools.partial(parser.add_argument, type=int, metavar="N")
    add("--out", type=Path, metavar="DIR", required=True, help="where to write the checkpoint")
    add("--docs", type=Path, metavar="DIR", help="also read Python's documentation, in HTML")
    add("--start", type=Path, metavar="DIR", help="begin with the parameters of a checkpoint")
    add("--steps", default=1200, help="steps to train for, counted from the first (%(default)s)")
    add("--minutes", type=float, metavar="X", help="minutes to train for, instead of --steps")
    add(
        "--fall",
        type=float,
        metavar="X",
        default=1.0,
        help="fraction of the run, at its end, in which the rate falls to zero (%(default)s)",
    )
    add("--rows", default=8, help="rows in a step (%(default)s)")
    add("--length", default=256, help="bytes in a row (%(default)s)")
    add("--rate", type=float, metavar="X", default=8e-3, help="highest learning rate (%(default)s)")
    add("--seed", default=0, help="seed of the parameters and of the rows (%(default)s)")
    add("--every", default=100, help="steps between two saves (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue from DIR/state.npz")
    options = parser.parse_args(arguments)
    if options.resume and not (options.out / "state.npz").is_file():
        parser.error(f"--resume: {options.out / 'state.npz'} does not exist")
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes is {options.minutes}, but must be more than 0")
    if not 0 <= options.fall <= 1:
        parser.error(f"--fall is {options.fall}, but must be from 0 to 1")
    for name in ("docs", "start"):
        path = getattr(options, name)
        if path is not None and not path.is_dir():
            parser.error(f"--{name}: {path} is not a directory")
    if options.docs is not None and not any(options.docs.rglob("*.html")):
        parser.error(f"--docs: {options.docs} has no HTML file")
    train(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
