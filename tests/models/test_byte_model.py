"""The bundled model that writes English: its training, and that serving computes the same."""

import collections
import contextlib
import importlib.util
import io
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import byte_text, dense_rows, generate, narrow_products, verify
from examples.engine.sampling import SamplingRows, sample
from examples.models import gemma4
from examples.models.checkpoint import open_checkpoint
from examples.models.gemma4_config import Gemma4Config
from examples.options import BUNDLED, CHECKPOINTS, SPEAKING

if not importlib.util.find_spec("optax"):
    pytest.skip("training needs optax: pip install -e '.[train]'", allow_module_level=True)

from examples import train_byte_model as training

SPEAKER = CHECKPOINTS / SPEAKING


def loaded(directory: Path) -> gemma4.Gemma4:
    """Load a checkpoint's modules in float32."""
    checkpoint = open_checkpoint(directory)
    config = Gemma4Config.from_hf(checkpoint.config)
    shapes = nnx.eval_shape(lambda: gemma4.Gemma4(config, jnp.dtype("float32")))
    return nnx.merge(nnx.split(shapes)[0], gemma4.load(checkpoint, "float32").params)


def rows_of(sequences, length: int) -> np.ndarray:
    rows = np.zeros((len(sequences), length), np.int32)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return rows


def dense_logits(model: gemma4.Gemma4, rows: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda rows: dense_rows.dense_logits(model, rows))(rows))


# --- Training and serving compute the same -------------------------------------------------------


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "length", "in_bands"),
    [(BUNDLED[0], 144, True), pytest.param(BUNDLED[1], 133, False, marks=pytest.mark.extended)],
)
def test_dense_logits_match_the_references(name, length, in_bands, monkeypatch):
    """Paged logits match them too: shared pages, one projection for keys and values, windows."""
    model = loaded(CHECKPOINTS / name)
    assert (length % model.config.layers[0].heads.window == 0) == in_bands
    reference = verify.Reference.load(CHECKPOINTS / name / "reference.npz")
    whole = [(*p, *t) for p, t in zip(reference.prompts, reference.tokens.tolist(), strict=True)]

    def largest_error() -> float:
        logits = dense_logits(model, rows_of(whole, length))
        errors = [
            np.abs(row[len(prompt) - 1 :][: len(right)] - right).max()
            for row, prompt, right in zip(logits, reference.prompts, reference.logits, strict=True)
        ]
        return max(errors)

    assert largest_error() <= verify.MAX_LIMIT
    if not in_bands:  # the limit would notice a window that is one too long
        right = dense_rows.attend
        monkeypatch.setattr(
            dense_rows, "attend", lambda q, k, v, w, p: right(q, k, v, w and w + 1, p)
        )
        assert largest_error() > verify.MAX_LIMIT


@pytest.fixture(scope="module")
def paragraphs():
    """The prose that comes with this Python."""
    return byte_text.paragraphs()


@pytest.fixture(scope="module")
def speaker():
    """A function of six rows of 256 bytes: the model's dense logits. All tests compile it once."""
    model = loaded(SPEAKER)
    return jax.jit(lambda rows: dense_rows.dense_logits(model, rows))


@pytest.fixture(scope="module")
def spoken():
    """The requests and outputs of the README's first command, and what it printed."""
    reports, output, original = [], io.StringIO(), generate.serve

    def serve(*args, **options):
        reports.append(original(*args, **options))
        return reports[-1]

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(generate, "serve", serve)
        status = generate.main([])
    assert status == 0
    return reports[0], output.getvalue()


@pytest.mark.extended
def test_every_served_byte_is_drawn_from_the_dense_logits(spoken, speaker):
    """Pages, chunks and other sequences change nothing, over texts many windows long.

    A draw is an argmax of logits plus noise. Rounding may change one in tens of thousands, where
    the two largest are that close; a wrong window changes one in a few.
    """
    report, _ = spoken
    assert report.statistics.peak.rows >= 4
    whole = [list(sequence.tokens) for sequence in report.sequences]
    assert max(map(len, whole)) > 3 * training.CONFIG["sliding_window"]

    def share_equal(logits: np.ndarray) -> float:
        chosen, kept, drawn = [], [], []
        for row, done in zip(logits, report.sequences, strict=True):
            first, count, sampling = (
                len(done.request.prompt),
                len(done.chosen),
                done.request.sampling,
            )
            assert sampling.temperature > 0
            chosen += done.chosen
            kept.append(row[first - 1 :][:count])
            drawn += [(sampling.temperature, sampling.seed, first + k) for k in range(count)]
        temperature, seed, length = map(np.array, zip(*drawn, strict=True))
        rows = SamplingRows(
            temperature=temperature.astype(np.float32),
            top_p=np.ones(len(drawn), np.float32),
            top_k=np.zeros(len(drawn), np.int32),
            min_p=np.zeros(len(drawn), np.float32),
            seed=seed.astype(np.uint32),
            count=length.astype(np.int32),
        )
        return float(np.mean(np.asarray(sample(jnp.concatenate(kept), rows)) == np.array(chosen)))

    logits = np.asarray(speaker(rows_of(whole, 256)))
    assert share_equal(logits) >= 0.997
    assert share_equal(np.roll(logits, 1, axis=1)) < 0.6  # logits of the byte before


# --- What it says --------------------------------------------------------------------------------


@pytest.mark.extended
def test_it_writes_words(spoken, paragraphs):
    """Nine in ten of its words occur in its training text, and they are not always the same."""
    report, output = spoken
    train, _ = byte_text.split(paragraphs)
    known = set(re.findall(r"[a-z]+", train.decode().lower()))
    texts = [bytes(done.chosen).decode() for done in report.sequences]
    words = [word for text in texts for word in re.findall(r"[a-z]+", text.lower())]
    assert len(words) > 60
    assert sum(word in known for word in words) >= 0.9 * len(words)
    assert max(collections.Counter(words).values()) < 0.25 * len(words)
    for prompt in (SPEAKER / "prompts.txt").read_text().splitlines():
        assert f"  {prompt}|" in output


def test_checkpoint_is_small_and_says_what_it_is():
    assert (SPEAKER / "model.safetensors").stat().st_size <= 6e6
    assert json.loads((SPEAKER / "config.json").read_text()) == training.CONFIG
    checkpoint = open_checkpoint(SPEAKER)
    assert checkpoint.stop_tokens == (ord("\n"),)
    words = (SPEAKER / "README.md").read_text()
    for needed in ("examples/train_byte_model.py", "PSF", "bits per byte"):
        assert needed in words


@pytest.mark.extended
def test_its_loss_is_as_stated(speaker, paragraphs):
    """Over part of the held-out text, which differs somewhat between versions of Python."""
    stated = re.search(r"([\d.]+) bits per byte", (SPEAKER / "README.md").read_text())
    _, held_out = byte_text.split(paragraphs)
    rows = training.validation_rows(np.frombuffer(held_out, np.uint8), 256)
    rows = rows[:: len(rows) // 24][:24]

    def bits_per_byte(rows: np.ndarray) -> float:
        logits = np.concatenate([speaker(part[:, :-1]) for part in rows.reshape(-1, 6, 257)])
        logits -= logits.max(axis=-1, keepdims=True)
        nats = np.log(np.exp(logits).sum(axis=-1))
        nats -= np.take_along_axis(logits, rows[:, 1:, None], axis=-1)[..., 0]
        return float(nats.mean() / np.log(2))

    found = bits_per_byte(rows)
    assert abs(found - float(stated[1])) < 0.15
    shuffled = np.random.default_rng(0).permuted(rows, axis=1)
    assert bits_per_byte(shuffled) > found + 1  # it has learned the order


# --- How it was made -----------------------------------------------------------------------------


@pytest.mark.extended
def test_text_is_english_and_held_out_text_is_not_read(paragraphs):
    assert len(set(paragraphs)) == len(paragraphs) > 3000
    train, held_out = byte_text.split(paragraphs)
    assert 0.04 < len(held_out) / (len(train) + len(held_out)) < 0.06
    assert not set(train.splitlines()) & set(held_out.splitlines())
    words = collections.Counter(train.decode().lower().split())
    assert {"the", "a", "is", "of", "to"} <= {word for word, _ in words.most_common(8)}


def test_text_of_documentation_is_what_its_paragraphs_say(tmp_path):
    words = "a paragraph of the documentation says what a function returns"
    (tmp_path / "one.html").write_text(
        f"<nav><p>{words} to navigate</p></nav><p>Here\u2019s <em>{words}</em>.\n It ends.</p>"
        f"<pre><p>{words} in code</p></pre><p>Too short.</p><p>Here\u2019s {words}. It ends.</p>"
        f"</nav><p>{words} that nothing closes. <p>It ends, and {words}."
    )
    assert byte_text.documentation(tmp_path) == [
        f"Here's {words}. It ends.",
        f"{words} that nothing closes.",
        f"It ends, and {words}.",
    ]
    with pytest.raises(FileNotFoundError, match=r"docs: .*empty has no HTML"):
        byte_text.documentation(tmp_path / "empty")


def test_no_training_line_repeats_a_held_out_one():
    held_out = b"one two three four five six seven eight nine ten\nmuch too short to matter here\n"
    eight = "Three, four -- five six SEVEN eight `nine` ten."
    seven = "two three four five six seven eight and then something else"
    assert byte_text.without([eight, seven], held_out) == [seven]
    short = ["Much too short to matter here", "much too short to matter there"]
    assert byte_text.without(short, held_out) == short[1:]


def test_the_learning_rate_rises_stays_and_falls():
    def share(step, done):
        return training.share_of_rate(step, done, fall=0.25, warmup=50)

    assert [share(25, 0.1), share(400, 0.5), share(700, 0.875), share(900, 1.0)] == [0.5, 1, 0.5, 0]
    assert training.share_of_rate(800, 0.9, fall=0.0) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes is 0.0, but must be more than 0"),
        (["--fall", "1.5"], "--fall is 1.5, but must be from 0 to 1"),
        (["--docs", "nowhere"], "--docs: nowhere is not a directory"),
        (["--docs", str(Path(__file__).parents[1] / "support")], "support has no HTML file"),
        (["--resume"], "state.npz does not exist"),
    ],
)
def test_training_refuses_what_it_cannot_do(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        training.main(["--out", str(tmp_path / "out"), *arguments])
    assert message in capsys.readouterr().err


def test_every_second_row_begins_with_a_paragraph():
    text = np.frombuffer(b"".join(b"%d begins a line of text\n" % i for i in range(99)), np.uint8)
    rows = training.sample_rows(text, np.random.default_rng(0), 64, 40)
    assert rows.shape == (64, 41)
    begins = [bytes(row.astype(np.uint8))[:4].strip(b" begin").isdigit() for row in rows]
    assert all(begins[::2])
    assert sum(begins[1::2]) < 16
    assert all(bytes(row.astype(np.uint8)) in text.tobytes() for row in rows)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_narrow_products_and_their_derivatives_round_operands_only(batch):
    rng = np.random.default_rng(0)
    a, b, c = (  # numbers that bfloat16 holds
        np.asarray(rng.normal(size=(*batch, *shape)), jnp.bfloat16).astype(np.float32)
        for shape in ((128, 24), (24, 40), (128, 40))  # more rows than are transposed together
    )

    @jax.jit
    def everything(a, b, c):
        out, pull = jax.vjp(narrow_products.batched if batch else narrow_products.linear, a, b)
        return out, *pull(c)

    right = (a @ b, c @ b.swapaxes(-1, -2), a.swapaxes(-1, -2) @ c)
    rounded = 2.0**-12  # relative to a number: too little to change how it rounds
    b = b * (1 - rounded)
    found = everything(a * (1 + rounded), b if batch else b.T, c * (1 + rounded))
    found = found if batch else (*found[:2], found[2].T)
    for x, y in zip(found, right, strict=True):
        assert x.dtype == jnp.float32
        # Only the order of sums differs; unrounded operands would be 25 times as far off.
        np.testing.assert_allclose(x, y, rtol=rounded / 25, atol=1e-4)


@pytest.mark.extended
def test_training_learns_and_writes_a_checkpoint_that_loads(tmp_path, monkeypatch, capsys):
    small = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "global_head_dim": 32,
    }
    monkeypatch.setattr(training, "CONFIG", {**training.CONFIG, **small})
    lines = [f"the quick brown fox jumps over the lazy dog {i}" for i in range(400)]
    monkeypatch.setattr(byte_text, "paragraphs", lambda: lines)
    arguments = ["--out", str(tmp_path), "--rows", "4", "--length", "32", "--fall", "0.2"]
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        assert training.main([*arguments, "--steps", "60", "--every", "60"]) == 0
    bits = float(re.search(r"byte, ([\d.]+) held out", capsys.readouterr().out)[1])
    assert bits < 4  # untrained it would be 8; from the frequencies of letters, more than 4
    model = loaded(tmp_path)
    assert model.embed_tokens.weight.shape == (256, 32)
    assert training.main([*arguments, "--steps", "60", "--resume"]) == 0
    assert "step" not in capsys.readouterr().out  # nothing was left to do
    more = ["--start", str(tmp_path), "--steps", "1", "--rate", "0"]
    with jax.numpy_dtype_promotion("standard"):
        assert training.main(["--out", str(tmp_path / "more"), *arguments[2:], *more]) == 0
    begun = float(re.search(r"byte, ([\d.]+) held out", capsys.readouterr().out)[1])
    assert abs(begun - bits) < 0.05
