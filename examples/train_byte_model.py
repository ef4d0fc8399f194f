"""Train the byte-level, Gemma-4-shaped model in `examples/checkpoints/byte-gemma`.

    python examples/train_byte_model.py --out DIR

reads English that comes with CPython (`examples/byte_text.py`) and writes a checkpoint directory in
Hugging Face's layout. The model is `examples/models/gemma4.py` itself: training swaps only its
caches, from pages to short dense rows of the same mathematics (`examples/dense_rows.py`). Matrices
are trained with Muon, vectors and the embedding with AdamW, both from optax, with a learning rate
that falls linearly to zero. `--resume` goes on from the last saved state.
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

from examples import byte_text
from examples.dense_rows import dense_logits
from examples.models.gemma4 import Gemma4
from examples.models.gemma4_config import Gemma4Config

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
    """Random parameters: with them logits are of size 1, and attention neither sharp nor flat."""
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


def optimizer(rate: float, num_steps: int, warmup: int = 50) -> optax.GradientTransformation:
    """Muon for matrices, AdamW for the embedding and vectors; the rate falls to zero."""
    schedule = optax.schedules.join_schedules(
        [
            optax.schedules.linear_schedule(0.0, rate, warmup),
            optax.schedules.linear_schedule(rate, 0.0, max(num_steps - warmup, 1)),
        ],
        [warmup],
    )

    def matrices(params):
        def spec(path, leaf):
            if leaf.ndim == 2 and "embed" not in jax.tree_util.keystr(path):
                return optax.contrib.MuonDimensionNumbers()
            return None

        return jax.tree_util.tree_map_with_path(spec, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            schedule,
            adam_learning_rate=lambda step: 0.4 * schedule(step),
            weight_decay=0.05,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=matrices,
        ),
    )


def bits_per_byte(model: Gemma4, rows: jax.Array) -> jax.Array:
    """Mean of -log2 p(byte) over all but the first byte of rows [R, n + 1]."""
    logits = dense_logits(model, rows[:, :-1])
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
    return losses.mean() / jnp.log(2.0)


def sample_rows(text: np.ndarray, rng: np.random.Generator, num_rows: int, n: int) -> np.ndarray:
    """Pieces of n + 1 bytes from anywhere in a text, int32 [num_rows, n + 1]."""
    starts = rng.integers(0, len(text) - n - 1, num_rows)
    return text[starts[:, None] + np.arange(n + 1)[None, :]].astype(np.int32)


def validation_rows(text: np.ndarray, n: int) -> np.ndarray:
    """All of a text in pieces of n + 1 bytes that overlap by one, int32 [R, n + 1]."""
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
    # A line ends a paragraph, and a paragraph is what the model was taught to write.
    generation = {"eos_token_id": ord("\n")}
    (directory / "generation_config.json").write_text(json.dumps(generation) + "\n")


def save_state(path: Path, state) -> None:
    """Write everything training needs to go on, whole or not at all."""
    leaves = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    partial = path.with_name("partial.npz")
    np.savez(partial, **leaves)
    partial.replace(path)


def load_state(path: Path, like):
    """What `save_state` wrote, in the structure of `like`."""
    with np.load(path) as file:
        leaves = [jnp.asarray(file[str(i)]) for i in range(len(file.files))]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def train(options: argparse.Namespace) -> None:
    """Train as the options say, saving now and then."""
    text, held_out = (
        np.frombuffer(part, np.uint8) for part in byte_text.split(byte_text.paragraphs())
    )
    graphdef, params = initial_params(Gemma4Config.from_hf(CONFIG), options.seed)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{size:,} parameters, {len(text):,} bytes to learn, {len(held_out):,} held out")
    rule = optimizer(options.rate, options.steps)

    def loss(params, rows):  # computed in the precision that is saved; float32 takes the updates
        narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        return bits_per_byte(nnx.merge(graphdef, narrow), rows)

    def update(state, rows):
        params, moments, step = state
        value, gradient = jax.value_and_grad(loss)(params, rows)
        change, moments = rule.update(gradient, moments, params)
        return (optax.apply_updates(params, change), moments, step + 1), value

    update, validate = jax.jit(update, donate_argnums=0), jax.jit(loss)
    state = (params, rule.init(params), jnp.int32(0))
    saved = options.out / "state.npz"
    options.out.mkdir(parents=True, exist_ok=True)
    if options.resume:
        state = load_state(saved, state)
    first, start, losses = int(state[2]), time.perf_counter(), []
    batches = validation_rows(held_out, options.length)
    batches = batches[: len(batches) // options.rows * options.rows]
    batches = batches.reshape(-1, options.rows, options.length + 1)
    for step in range(first + 1, options.steps + 1):
        rng = np.random.default_rng([options.seed, step])
        state, value = update(state, sample_rows(text, rng, options.rows, options.length))
        losses.append(float(value))
        is_last = step == options.steps
        if step % options.every == 0 or is_last:
            looks = batches if is_last else batches[::8]
            held = np.mean([float(validate(state[0], batch)) for batch in looks])
            seconds = time.perf_counter() - start
            speed = (step - first) * options.rows * options.length / seconds
            print(
                f"step {step:>6}  {np.mean(losses):.3f} bits per byte, {held:.3f} held out, "
                f"{speed:,.0f} bytes/s, {seconds:,.0f} s",
                flush=True,
            )
            losses.clear()
            save_state(saved, state)
            save_checkpoint(options.out, state[0], CONFIG)


def main(arguments: list[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(
        prog="train_byte_model.py",
        description="Train a byte-level, Gemma-4-shaped model on English that ships with CPython.",
    )
    add = functools.partial(parser.add_argument, type=int, metavar="N")
    add("--out", type=Path, metavar="DIR", required=True, help="where to write the checkpoint")
    add("--steps", default=1200, help="after which the learning rate is zero (%(default)s)")
    add("--rows", default=8, help="rows in a step (%(default)s)")
    add("--length", default=256, help="bytes in a row (%(default)s)")
    add("--rate", type=float, metavar="X", default=8e-3, help="highest learning rate (%(default)s)")
    add("--seed", default=0, help="of the parameters and of the rows (%(default)s)")
    add("--every", default=100, help="steps between two savings (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from DIR/state.npz")
    options = parser.parse_args(arguments)
    if options.resume and not (options.out / "state.npz").is_file():
        parser.error(f"--resume: {options.out / 'state.npz'} is not there")
    train(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
