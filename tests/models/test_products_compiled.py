"""The example engine's matrix products in C++: compiled, exact, with padding, in models.

`tests/models/test_products.py` tests when they are used and how the library is found.
"""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import native
from examples.engine.caches import group_layers
from examples.engine.drafts import mtp
from examples.engine.drafts.speculation import Speculation
from examples.engine.engine import Engine
from examples.engine.model import load_model
from examples.engine.request import Request
from examples.engine.scheduler import Limits
from examples.engine.step import Bucket
from examples.models import layers, padding
from examples.options import CHECKPOINTS
from tests.models import test_models, test_mtp
from tests.support import checkpoints, products
from tests.support.engines import MAX_SEQS
from tests.support.native import sanitize as native_sanitize

pytestmark = pytest.mark.extended

nothing_taken = products.nothing_taken  # the fixture


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The folder of the compiled library, which all workers of a session share."""
    base = tmp_path_factory.getbasetemp()
    found = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "products"
    before, native._taken[:] = native._taken[:], []
    reason = native.load(found)
    native._taken[:] = before
    if reason is not None:
        pytest.skip(f"no products in C++: {reason}")
    return found


@pytest.fixture
def loaded(folder, nothing_taken):
    """Load the library, which computes products only where a test says so."""
    assert native.load(folder) is None
    taken = native._taken[:]
    native._taken.clear()
    return taken


@pytest.fixture(
    params=[
        "float32",
        "pairs",
        "tiles",
        "float32 by AVX2",
        "bfloat16 by AVX2",
    ]
)
def dtype(request, folder, loaded, monkeypatch):
    """float32, and bfloat16 with and without the matrix unit; both also with AVX2 only."""
    if request.param == "float32":
        return "float32"
    if request.param.endswith("AVX2"):
        monkeypatch.setattr(native, "processor_features", lambda: native.LEAST)
        monkeypatch.setattr(native, "_instructions", "")
        monkeypatch.setattr(native, "_tiles", False)
        assert native.load(folder) is None
        native._taken.clear()
        assert native.target().endswith("avx2")
        return request.param.split()[0]
    if "bfloat16" not in loaded:
        pytest.skip("this processor has AVX-512, but not for bfloat16")
    if request.param == "tiles" and not native._tiles:
        pytest.skip("this processor has no matrix unit (AMX)")
    monkeypatch.setattr(native, "_tiles", request.param == "tiles")
    return "bfloat16"


def test_products_are_exact_where_they_can_be(dtype):
    rng = np.random.default_rng(0)
    # Few and many tokens, several groups of tokens, and weights so small that one thread is used.
    sizes = (
        (1, 64, 32),
        (2, 32, 64),
        (4, 1024, 256),
        (5, 96, 64),
        (7, 2080, 32),
        (8, 3072, 128),
        (9, 2048, 64),
    )
    more = (16, 1024, 256), (33, 2048, 128), (48, 64, 4096), (100, 3072, 32), (530, 3072, 256)
    for num_tokens, num_in, num_out in (*sizes, *more):
        x, weight = (
            jnp.asarray(rng.integers(-8, 9, size=(n, num_in)).astype(jnp.dtype(dtype)))
            for n in (num_tokens, num_out)
        )
        exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
        y = jax.jit(lambda x, w: native.product(x, w, jnp.dtype(dtype)))(x, weight)
        np.testing.assert_array_equal(y, exact.astype(np.float32).astype(jnp.dtype(dtype)))
        columns = jax.jit(lambda x, w: native.product(x, w, jnp.float32, columns=True))(x, weight)
        np.testing.assert_array_equal(columns, exact.astype(np.float32))
        if num_tokens in (7, 8) and native._instructions == "avx512":  # sums as for one token
            real = [
                jnp.asarray(rng.normal(size=(n, num_in)).astype(jnp.dtype(dtype)))
                for n in (num_tokens, num_out)
            ]
            some = jax.jit(lambda x, w: native.product(x, w, jnp.float32))
            of_one = some(jnp.pad(real[0][:1], ((0, 1), (0, 0))), real[1])
            np.testing.assert_array_equal(some(*real)[0], of_one[0])
        several = jax.jit(jax.vmap(lambda x, w=weight: native.product(x, w, jnp.float32)))
        found = np.asarray(several(np.asarray(x)[None]))[0]
        np.testing.assert_array_equal(found, exact.astype(np.float32))


def test_rows_that_are_padding_are_zeros(dtype):
    rng = np.random.default_rng(2)
    weight = jnp.asarray(rng.integers(-1, 2, size=(64, 96)), dtype)  # sums that no dtype rounds
    for most, counts in ((1, (0, 1)), (8, (0, 3, 9, -1)), (60, (0, 1, 5, 8, 9, 33, 59, 60))):
        x = rng.integers(-1, 2, size=(most, 96))
        for columns in (False, True):
            out = jnp.dtype("float32" if columns else dtype)
            product = jax.jit(
                lambda x, w, n, d=out, c=columns: native.product(x, w, d, columns=c, rows=n)
            )
            for count in counts:
                exact = np.zeros((most, 64))
                used = max(min(count, most), 0)
                exact[:used] = x[:used] @ np.asarray(weight, np.float64).T
                given = np.where(np.arange(most)[:, None] < used, x, np.nan)
                y = product(jnp.asarray(given, dtype), weight, np.int32(count))
                np.testing.assert_array_equal(np.asarray(y, np.float64), exact)


def test_runs_of_rows_have_matrices_of_their_own(dtype):
    rng = np.random.default_rng(3)
    weights = jnp.asarray(rng.integers(-1, 2, size=(5, 96, 128)), dtype)
    x = rng.integers(-1, 2, size=(40, 128))
    product = jax.jit(lambda *given: native.grouped_product(*given, jnp.dtype(dtype)))
    for counts in ((1, 0, 3, 20, 2), (0, 0, 0, 0, 0), (40, 0, 0, 0, 0), (2, -5, 9, 100, 7)):
        exact, begin, ends = np.zeros((40, 96)), 0, []
        for matrix, count in zip(np.asarray(weights, np.float64), counts, strict=True):
            ends.append(min(begin + max(count, 0), 40))  # impossible counts are cut
            exact[begin : ends[-1]] = x[begin : ends[-1]] @ matrix.T
            begin = ends[-1]
        given = np.where(np.arange(40)[:, None] < begin, x, np.nan)
        y = product(jnp.asarray(given, dtype), weights, jnp.asarray(counts, jnp.int32))
        np.testing.assert_array_equal(np.asarray(y, np.float64), exact)


def test_products_of_nothing_are_zeros(loaded):
    for shape, columns in (((3, 32), False), ((32, 3), True)):
        given = jnp.zeros((3, 0)), jnp.zeros((32, 0))
        for _ in range(4):
            ones = jnp.ones(shape).block_until_ready()
            del ones  # XLA may use this memory next
            y = native.product(*given, jnp.float32, columns=columns)
            np.testing.assert_array_equal(y, np.zeros((3, 32)))
    assert native.product(jnp.zeros((0, 16)), jnp.zeros((32, 16)), jnp.float32).shape == (0, 32)


@pytest.mark.parametrize(
    ("x", "weight", "dtype", "wrong"),
    [
        ((2, 16), (40, 16), "float32", "w has O = 40 outputs, but must have a multiple of 32"),
        ((2, 8), (32, 8), "float32", "x has I = 8 inputs, but must have a multiple of 16"),
        ((2, 16), (32, 32), "float32", "w has I = 32 inputs, but must have x's 16"),
        ((2, 16), (32, 16), "bfloat16", "y is bfloat16, but must be float32"),
        ((2, 16), (32, 16, 1), "float32", r"w is \[32, 16, 1\], but must be \[O, I\]"),
        ((2, 8), (40, 8), "float32", "x has I = 8 inputs.*; w has O = 40 outputs"),
    ],
)
def test_wrong_arguments_are_named(loaded, x, weight, dtype, wrong):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"x w\\^T: {wrong}"):
        native.product(jnp.zeros(x), jnp.zeros(weight), jnp.dtype(dtype)).block_until_ready()


@pytest.mark.parametrize(
    ("weights", "counts", "wrong"),
    [
        ((32, 16), (2,), r"w is \[32, 16\], but must be \[E, O, I\]"),
        ((3, 40, 16), (3,), "w has O = 40 outputs, but must have a multiple of 32"),
        ((3, 32, 16), (2,), "counts has 2 runs, but must have one for each of w's 3 matrices"),
    ],
)
def test_wrong_arguments_of_runs_are_named(loaded, weights, counts, wrong):
    given = jnp.zeros((2, 16)), jnp.zeros(weights), jnp.zeros(counts, jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"x w_e\\^T: {wrong}"):
        native.grouped_product(*given, jnp.dtype("float32")).block_until_ready()


@pytest.mark.parametrize("dtype", ["float16", "int32"])
def test_wrong_dtypes_are_named(loaded, dtype):
    x, weight = jnp.zeros((2, 32), dtype), jnp.zeros((32, 32))
    wrong = "x is of XLA's type .*, but must be float32 or bfloat16; w is float32, but must be"
    with pytest.raises(jax.errors.JaxRuntimeError, match=wrong):
        native.product(x, weight, jnp.dtype("float32")).block_until_ready()


SANITIZED = """
import sys
from pathlib import Path
import jax.numpy as jnp
import numpy as np
from examples import native

native.FLAGS += ("-g1", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
assert native.load(Path(sys.argv[1])) is None
ways = [(dtype, False) for dtype in native._taken] + [("bfloat16", True)] * native._tiles
for dtype, native._tiles in ways:
    for num_tokens, num_in in ((1, 64), (3, 1024), (7, 2048), (9, 32), (50, 1024), (100, 3072)):
        x, weight = jnp.ones((num_tokens, num_in), dtype), jnp.ones((96, num_in), dtype)
        for columns, used in ((False, None), (True, None), (False, num_tokens // 2), (True, 1)):
            rows = None if used is None else jnp.int32(used)
            y = native.product(x, weight, jnp.dtype("float32"), columns=columns, rows=rows)
            exact = np.full((num_tokens, 96), num_in)
            exact[used:] = exact[used:] if used is None else 0
            np.testing.assert_array_equal(y, exact)
        weights, counts = jnp.stack([weight, 2 * weight]), jnp.asarray([1, num_tokens // 2])
        y = native.grouped_product(x, weights, counts.astype(jnp.int32), jnp.dtype("float32"))
        exact = num_in * np.r_[1, np.full(num_tokens // 2, 2), np.zeros(num_tokens)][:num_tokens]
        np.testing.assert_array_equal(y, np.repeat(exact[:, None], 96, axis=1))
print("all sums are right")
"""


def test_under_sanitizers(folder, tmp_path):
    names = [native_sanitize.located(f"lib{name}.so") for name in ("asan", "stdc++")]
    if not os.path.isabs(names[0]):
        pytest.skip("the C++ compiler has no AddressSanitizer")
    options = {
        "LD_PRELOAD": " ".join(names),
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:allow_user_segv_handler=1",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", SANITIZED, str(tmp_path / "products")]
    done = subprocess.run(
        command, env={**os.environ, **options}, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.endswith("all sums are right\n"), done.stderr[-3000:]


def test_sums_round_as_little_as_those_of_xla(dtype):
    rng = np.random.default_rng(1)
    x, weight = (jnp.asarray(rng.normal(size=(n, 3072)), dtype) for n in (96, 512))
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    ours = native.product(x, weight, jnp.float32)
    xla = layers.product(x, weight, jnp.float32)
    ours, xla = (np.sqrt(np.mean(np.square(y - exact))) for y in (ours, xla))
    assert ours <= 2 * xla


def test_a_model_computes_the_same_with_them(loaded, monkeypatch, dtype):
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


def counted_rows():
    """Wrap `padding.used_rows`; return it and the set of its calls: `(count, logits, known)`."""
    known, counted = padding.used_rows, set()

    def used_rows(count, *, logits=False):
        rows = known(count, logits=logits)
        counted.add((count, logits, rows is not None))
        return rows

    return used_rows, counted


@pytest.mark.parametrize("name", [*checkpoints.MODELS, *checkpoints.SLIDING])
def test_models_leave_padding_out(loaded, monkeypatch, name):
    """In tokens, in experts, and in logits of drafts, which have as many rows in another order."""
    monkeypatch.setattr(native, "_taken", loaded)
    experts = Mock(wraps=native.grouped_product)
    monkeypatch.setattr(native, "grouped_product", experts)
    used_rows, counted = counted_rows()
    monkeypatch.setattr(padding, "used_rows", used_rows)
    test_models.test_drafts_change_neither_tokens_nor_logits(name)
    assert {(40, False, True), (40, True, True)} <= counted  # T, and 8 x 5 rows
    # The small Nemotron-H has none.
    assert experts.called == (name in ("gpt-oss-tiny", "qwen3-next-tiny", "deepseek-v3-tiny"))


def test_draft_models_leave_padding_out(loaded, monkeypatch):
    """A model that is its own draft model has every draft accepted."""
    monkeypatch.setattr(native, "_taken", loaded)
    wanted = checkpoints.reference("qwen3-tiny")
    model = load_model(CHECKPOINTS / "qwen3-tiny")
    speculation = Speculation(4, draft=model, backs_off=False)
    buckets = (checkpoints.MIXED, Bucket(40, 8, 5, 4))
    engine = checkpoints.make_engine(model, buckets=buckets, speculation=speculation)
    tokens, error = checkpoints.serve(engine, wanted)
    np.testing.assert_array_equal(tokens, wanted["tokens"])
    assert error.max() <= checkpoints.MAX_ERROR
    assert engine.statistics.num_accepted_tokens == engine.statistics.num_drafted_tokens > 0


@pytest.mark.parametrize("family", checkpoints.some(test_mtp.FAMILIES, slow=("qwen3-next",)))
def test_mtp_layers_leave_padding_out(loaded, monkeypatch, tmp_path, family):
    """The layer drafts as published; all of its tokens have logits."""
    monkeypatch.setattr(native, "_taken", loaded)
    experts = Mock(wraps=native.grouped_product)
    run = mtp.MtpGuesser._run
    used_rows, counted = counted_rows()

    def traced(*given):
        with monkeypatch.context() as patches:
            patches.setattr(padding, "used_rows", used_rows)
            patches.setattr(native, "grouped_product", experts)
            return run(*given)

    monkeypatch.setattr(mtp.MtpGuesser, "_run", traced)
    test_mtp.test_a_family_guesses_as_published(*test_mtp.FAMILIES[family], tmp_path, monkeypatch)
    assert counted == {(MAX_SEQS, False, True), (MAX_SEQS, True, True)}
    assert experts.called


def broken_libraries(tmp_path):
    """Return two broken libraries: an empty file, and one without the symbols we need."""
    source, other = tmp_path / "other.cc", tmp_path / "other.so"
    source.write_text("int other() { return 1; }\n")
    command = [*native.compiler(), "-shared", "-fPIC", str(source), "-o", str(other)]
    subprocess.run(command, check=True)
    return {"empty": b"", "without symbols": other.read_bytes()}


@pytest.mark.parametrize("how", ["empty", "without symbols"])
@pytest.mark.parametrize("helps", [True, False])
def test_a_broken_library_is_compiled_again_once(folder, monkeypatch, tmp_path, how, helps):
    good = native.build(folder)
    broken = broken_libraries(tmp_path)[how]
    path = tmp_path / "cache" / good.name
    path.parent.mkdir(mode=0o700)
    path.write_bytes(broken)
    path.chmod(0o700)
    made = []

    def compile_it(command, **_):
        made.append(command)
        Path(command[-1]).write_bytes(good.read_bytes() if helps else broken)

    monkeypatch.setattr(native.subprocess, "run", compile_it)
    if helps:
        assert native._open(path.parent).examples_product
    else:
        with pytest.raises((AttributeError, OSError), match=path.name):
            native._open(path.parent)
    assert len(made) == 1
