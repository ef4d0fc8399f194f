"""The example server's products in C++: when they are taken, and what they compute."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import native
from examples.engine.caches import group_layers
from examples.engine.engine import Engine
from examples.engine.model import load_model
from examples.engine.request import Request
from examples.engine.scheduler import Limits
from examples.engine.step import Bucket
from examples.models import layers

CHECKPOINTS = Path(__file__).resolve().parents[1] / "examples" / "checkpoints"
TEXT = "the processor has no AVX-512, or this is not Linux on x86-64"


@pytest.fixture
def nothing_taken():
    """As in a process that never asked for them."""
    before = native._taken[:]
    native._taken.clear()
    yield
    native._taken[:] = before


@pytest.fixture(scope="module")
def loaded():
    """Products are taken where a test says so, and XLA's elsewhere."""
    reason = native.load()
    taken = native._taken[:]
    native._taken.clear()
    if reason is not None:
        pytest.skip(f"no products in C++: {reason}")
    return taken


def zeros(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_nothing_is_taken_before_it_is_loaded(nothing_taken):
    assert not native.takes(jnp.zeros((128, 64)), jnp.zeros((32, 64)))
    text = jax.jit(layers.product).lower(zeros(128, 64), zeros(32, 64)).as_text()
    assert native.TARGET not in text


@pytest.mark.parametrize(
    ("x", "weight", "taken"),
    [
        ((1, 32, "bfloat16"), (32, 32, "bfloat16"), True),
        ((65, 16, "float32"), (32, 16, "float32"), True),
        ((64, 16, "float32"), (32, 16, "float32"), False),  # XLA is faster
        ((65, 8, "float32"), (32, 8, "float32"), False),
        ((65, 16, "float32"), (40, 16, "float32"), False),
        ((65, 32, "bfloat16"), (32, 32, "float32"), False),
        ((65, 32, "float16"), (32, 32, "float16"), False),
    ],
)
def test_what_is_taken(nothing_taken, x, weight, taken):
    native._taken.extend(["float32", "bfloat16"])
    x, weight = (jnp.zeros(size, dtype) for *size, dtype in (x, weight))
    assert native.takes(x, weight) == taken


@pytest.mark.parametrize(
    ("features", "compiler", "reason"),
    [
        (set(), None, TEXT),
        (native.LANES, "no-such-compiler", "there is no C++ compiler"),
        (native.LANES, f"{sys.executable} -c 'import sys; sys.exit(sys.argv[-1])'", "failed: /"),
    ],
)
def test_a_library_that_cannot_be_had(
    nothing_taken, monkeypatch, tmp_path, features, compiler, reason
):
    monkeypatch.setattr(native, "processor_features", lambda: features)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", compiler or "")
    assert reason in native.load(tmp_path)
    assert not native._taken
    assert not list(tmp_path.iterdir())


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_exact_where_they_can_be(loaded, dtype):
    if dtype not in loaded:
        pytest.skip("this processor has no matrix unit (AMX)")
    rng = np.random.default_rng(0)
    # Few and many tokens, several groups of them, small weights that one thread multiplies.
    sizes = ((1, 64, 32), (5, 96, 64), (16, 1024, 256), (33, 2048, 128), (100, 3072, 32))
    for num_tokens, num_in, num_out in (*sizes, (48, 64, 4096), (530, 3072, 256)):
        x, weight = (
            jnp.asarray(rng.integers(-8, 9, size=(n, num_in)), dtype) for n in (num_tokens, num_out)
        )
        exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
        y = jax.jit(native.product, static_argnums=2)(x, weight, dtype)
        np.testing.assert_array_equal(y, jnp.asarray(exact, jnp.float32).astype(dtype))
        columns = jax.jit(lambda x, w: native.product(x, w, jnp.float32, columns=True))(x, weight)
        np.testing.assert_array_equal(columns, exact.astype(np.float32))
        several = jax.vmap(lambda x, w=weight: native.product(x, w, jnp.float32))(x[None])
        np.testing.assert_array_equal(several[0], exact.astype(np.float32))


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_round_as_little_as_xlas(loaded, dtype):
    if dtype not in loaded:
        pytest.skip("this processor has no matrix unit (AMX)")
    rng = np.random.default_rng(1)
    x, weight = (jnp.asarray(rng.normal(size=(n, 3072)), dtype) for n in (96, 512))
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    own = native.product(x, weight, jnp.float32)
    xla = layers.product(x, weight, jnp.float32)
    own, xla = (np.sqrt(np.mean(np.square(y - exact))) for y in (own, xla))
    assert own <= 2 * xla


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_computes_the_same_with_them(loaded, monkeypatch, dtype):
    if dtype not in loaded:
        pytest.skip("this processor has no matrix unit (AMX)")
    model = load_model(CHECKPOINTS / "byte-gemma", dtype, join=True)
    limits = Limits(group_layers(model.layers), 2, 96, 16, 128)
    prompts = np.random.default_rng(3).integers(model.vocab_size, size=(2, 70)).tolist()
    found, texts = [], []
    for taken in ([], loaded):
        monkeypatch.setattr(native, "_taken", list(taken))
        engine = Engine(model, limits, buckets=[Bucket(96, 2, 96)], keep_logits=True)
        texts.append(next(iter(engine.steps.programs.values())).as_text())
        sequences = engine.generate([Request(tuple(prompt), 1) for prompt in prompts])
        found.append(np.stack([sequence.logits for sequence in sequences]))
    assert [native.TARGET in text for text in texts] == [False, True]
    spread = np.std(found[0])
    np.testing.assert_allclose(*found, atol=spread * (1e-4 if dtype == "float32" else 0.1))


@pytest.mark.extended
def test_the_server_says_what_multiplies(tmp_path):
    """A first start compiles the library, in the user's cache directory."""
    features = native.processor_features()
    if not features >= native.LANES:
        pytest.skip(f"no products in C++: {TEXT}")
    command = "from examples import native; print(native.load(), native.load(), native._taken)"
    done = subprocess.run(
        [sys.executable, "-c", command],
        env={"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    if "there is no C++ compiler" in done.stdout:
        pytest.skip("no products in C++: there is no C++ compiler")
    assert done.stdout.startswith("None None ['float32'"), done
    assert [path.suffix for path in (tmp_path / "jattn").iterdir()] == [".so"]
