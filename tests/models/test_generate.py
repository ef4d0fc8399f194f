"""`examples/generate.py`: Gemma-4-shaped models on paged attention, compared with references."""

import collections
import contextlib
import io
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jattn
from examples import generate, verify
from examples.engine.model import load_model
from examples.engine.request import Sequence
from examples.engine.statistics import count_compilations
from examples.engine.step import pack
from examples.models import gemma4
from examples.models.gemma4_config import Gemma4Config
from examples.options import BUNDLED, CHECKPOINTS
from examples.text import Subwords, load_tokenizer
from jattn import implementations

ROOT = Path(__file__).resolve().parents[2]
E2B, B31 = (CHECKPOINTS / name for name in BUNDLED)
ONE_AT_A_TIME = ("--max-seqs", "1", "--token-budget", "1")  # compiles one step instead of two

Run = collections.namedtuple("Run", "status output jobs engines reports num_compilations")


def run_program(*arguments: str) -> Run:
    """Run `generate.py` and return its results, output, jobs and engines."""
    jobs, engines, reports, output = [], [], [], io.StringIO()
    original = generate.serve

    def serve(job, engine, **options):
        report = original(job, engine, **options)
        jobs.append(job)
        engines.append(engine)
        reports.append(report)
        return report

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(generate, "serve", serve)
        with (
            jax.numpy_dtype_promotion("strict"),
            jax.numpy_rank_promotion("raise"),
            count_compilations() as compilations,
        ):
            status = generate.main([*arguments])
    return Run(status, output.getvalue(), jobs, engines, reports, compilations.count)


@pytest.fixture(
    scope="module", params=["gemma4-e2b-tiny", pytest.param("both", marks=pytest.mark.extended)]
)
def default_run(request) -> Run:
    """`generate.py --verify`, as a newcomer runs it: in float32, with both checkpoints."""
    return run_program("--verify", *(() if request.param == "both" else ("--model", request.param)))


def test_tokens_and_logits_match_the_references(default_run):
    assert default_run.status == 0
    count = len(default_run.reports)
    assert default_run.output.count("PASS") == count
    for directory, report in zip((E2B, B31)[:count], default_run.reports, strict=True):
        with np.load(directory / "reference.npz") as reference:
            tokens = np.array([done.chosen for done in report.sequences])
            np.testing.assert_array_equal(tokens, reference["tokens"])
            logits = np.stack([np.stack(done.logits) for done in report.sequences])
            assert np.abs(logits - reference["logits"]).max() <= 2e-4


def test_three_compilations_per_model_and_none_while_serving(default_run):
    """Caches and tables, a decode step and a mixed one; checking every step adds none."""
    count = len(default_run.engines)
    assert [engine.num_compilations for engine in default_run.engines] == [3] * count
    assert default_run.num_compilations == 3 * count
    assert default_run.output.count("3 in all") == count


def test_every_block_is_freed(default_run):
    for engine in default_run.engines:
        engine.check_idle()


def test_it_says_what_it_did(default_run):
    for report in default_run.reports:
        assert report.statistics.num_new_tokens == 256
        assert report.statistics.num_prompt_tokens == 239
        assert report.statistics.peak.rows == 8
        assert report.statistics.peak.cache_bytes < report.dense_kv_bytes
    for words in ("tokens/s", "KV at peak", "a dense cache of 8 x 132 tokens", "D=512"):
        assert default_run.output.count(words) == len(default_run.reports)


def test_reported_bytes_match_the_arrays(default_run):
    for engine, report in zip(default_run.engines, default_run.reports, strict=True):
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.caches))
        assert engine.cache_bytes == held
        peak = report.statistics.peak
        assert peak.cache_bytes <= held
        assert peak.ids["sliding"] < peak.ids["global"]  # blocks behind the window were freed


def test_caches_are_written_in_place(default_run):
    for engine in default_run.engines:
        before = jax.tree.leaves(engine.caches)
        bucket = engine.steps.buckets[0]
        engine.run(bucket, pack([], bucket, engine.limits))
        assert all(leaf.is_deleted() for leaf in before)
        largest = max(leaf.nbytes for leaf in before)
        for program in engine.steps.programs.values():
            memory = program.memory_analysis()
            assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in before)
            assert memory.temp_size_in_bytes < 8 * largest


@pytest.mark.extended
def test_bf16_caches_and_too_few_blocks():
    """Preempted sequences start over and still end with the right tokens."""
    run = run_program(
        *("--model", "gemma4-e2b-tiny", "--verify", "--kv-format", "bfloat16", "--quiet"),
        *("--sliding-blocks", "9", "--global-blocks", "12"),
    )
    assert run.status == 0, run.output
    assert run.num_compilations <= 3
    assert run.reports[0].statistics.num_preemptions > 0
    verdict = verify.compare(run.jobs[0].reference, run.reports[0].sequences, "bfloat16")
    assert 1e-3 < verdict.rms_error <= 0.04


@pytest.mark.extended
def test_a_window_off_by_one_does_not_pass(monkeypatch):
    right = jattn.paged_attention

    def wrong(*args, sliding_window, **kwargs):
        sliding_window = None if sliding_window is None else sliding_window + 1
        return right(*args, sliding_window=sliding_window, **kwargs)

    monkeypatch.setattr(jattn, "paged_attention", wrong)
    run = run_program(
        *("--model", "gemma4-31b-tiny", "--verify", "--quiet", "--max-new-tokens", "2"),
        *ONE_AT_A_TIME,
    )
    assert run.status == 1
    assert "FAIL" in run.output


def test_a_verdict_needs_every_token_and_every_logit():
    reference = verify.Reference.load(E2B / "reference.npz")

    def judge(tokens, logits, kv_format="float32"):
        rows = zip(reference.requests(32, 0, forced=False), tokens, logits, strict=True)
        done = [Sequence(r, chosen=t.tolist(), logits=list(x)) for (_, r), t, x in rows]
        return verify.compare(reference, done, kv_format).passed

    def changed(array, value):
        array = array.copy()
        array[3, 7] = value
        return array

    right = (reference.tokens, reference.logits)
    assert judge(*right)
    assert not judge(changed(reference.tokens, 300), reference.logits)
    assert not judge(reference.tokens, changed(reference.logits, reference.logits[3, 7] + 3e-4))
    assert not judge(reference.tokens, changed(reference.logits, np.nan))
    assert not judge(reference.tokens, changed(reference.logits, np.nan), "bfloat16")
    assert not judge(reference.tokens, reference.logits + np.float32(0.05), "bfloat16")


# -- checkpoints and configs ----------------------------------------------------------------------

REAL = {  # hidden, layers, q heads, sliding and global KV heads, window, shared, k_eq_v
    "E2B": (1536, 35, 8, 1, 1, 512, 20, False),
    "E4B": (2560, 42, 8, 2, 2, 512, 18, False),
    "12B": (3840, 48, 16, 8, 1, 1024, 0, True),
    "31B": (5376, 60, 32, 16, 4, 1024, 0, True),
}


def real_config(name: str, **changes) -> dict:
    """Return the text part of a published config.json."""
    hidden, count, heads, sliding, global_, window, shared, k_eq_v = REAL[name]
    period = 5 if name == "E2B" else 6
    text = {
        "model_type": "gemma4_text",
        "vocab_size": 262144,
        "hidden_size": hidden,
        "num_hidden_layers": count,
        "num_attention_heads": heads,
        "num_key_value_heads": sliding,
        "num_global_key_value_heads": global_ if k_eq_v else None,
        "head_dim": 256,
        "global_head_dim": 512,
        "intermediate_size": 4 * hidden,
        "sliding_window": window,
        "layer_types": [
            "sliding_attention" if (i + 1) % period else "full_attention" for i in range(count)
        ],
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": k_eq_v,
        "use_double_wide_mlp": name == "E2B",
        "hidden_size_per_layer_input": 256 if shared else 0,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": None if shared else "vision",
        "dtype": "bfloat16",
    }
    return {**text, **changes}


@pytest.mark.parametrize(
    ("name", "owners", "bytes_per_token"),
    [
        ("E2B", (12, 3), (1024, 2048)),
        ("E4B", (20, 4), (2048, 4096)),
        ("12B", (40, 8), (8192, 2048)),
        ("31B", (50, 10), (16384, 8192)),
    ],
)
@pytest.mark.parametrize("spelling", ["global_head_dim", "per_layer_config"])
def test_published_geometries(name, owners, bytes_per_token, spelling):
    text = real_config(name)
    if spelling == "per_layer_config":
        override = {"head_dim": text.pop("global_head_dim")}
        if heads := text.pop("num_global_key_value_heads"):
            override["num_key_value_heads"] = heads
        full = [i for i, t in enumerate(text["layer_types"]) if t == "full_attention"]
        text["per_layer_config"] = {str(i): override for i in full}
    config = Gemma4Config.from_hf({"model_type": "gemma4", "text_config": text})
    kept = config.caches("bfloat16")
    for kind, count, size in zip(("sliding", "global"), owners, bytes_per_token, strict=True):
        caches = [cache for i, cache in kept.items() if config.layers[i].kind == kind]
        assert len(caches) == count
        assert {2 * 2 * cache.num_kv_heads * cache.head_dim for cache in caches} == {size}
        assert {cache.window for cache in caches} == {
            text["sliding_window"] if kind == "sliding" else None
        }
    assert list(kept) == list(range(len(kept)))
    for layer in config.layers[len(kept) :]:
        assert layer.heads.reads_layer == max(
            index for index in kept if config.layers[index].kind == layer.kind
        )
        assert layer.intermediate_size == text["intermediate_size"] * (2 if name == "E2B" else 1)


def test_real_models_have_the_parameters_their_names_say():
    """From shapes only: nothing is allocated."""
    for name, least, most in (("E2B", 4.5e9, 5.5e9), ("31B", 28e9, 34e9)):
        config = Gemma4Config.from_hf(real_config(name, intermediate_size=4 * REAL[name][0]))
        model = jax.eval_shape(lambda c=config: gemma4.nnx.split(gemma4.Gemma4(c, jnp.bfloat16))[1])
        size = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(model))
        assert least < size < most, f"{name}: {size:,}"


def test_proportional_rope_turns_64_pairs_of_512():
    rope = Gemma4Config.from_hf(real_config("31B")).layers[-1].heads.rope
    frequencies = np.array(rope.frequencies)
    assert frequencies.shape == (256,)
    assert (frequencies[:64] > 0).all()
    assert (frequencies[64:] == 0).all()
    np.testing.assert_allclose(frequencies[1], 1e6 ** (-2 / 512), rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_moe_block": True}, "mixture-of-experts"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"num_kv_shared_layers": 60}, "no pages to attend to"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type"),
    ],
)
def test_unsupported_models_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        Gemma4Config.from_hf(real_config("31B", **changes))


def copy_checkpoint(source: Path, target: Path, tensors: dict, shards: int) -> Path:
    """Write a checkpoint with the same config and other tensors, in one file or several."""
    target.mkdir()
    shutil.copy(source / "config.json", target)
    if shards == 1:
        safetensors.save_file(tensors, target / "model.safetensors")
        return target
    weight_map = {}
    for i in range(shards):
        names = sorted(tensors)[i::shards]
        safetensors.save_file({n: tensors[n] for n in names}, target / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(names, f"model-{i}.safetensors")
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return target


def load(directory: Path) -> list[jax.Array]:
    return jax.tree.leaves(load_model(directory, "bfloat16").params)


def test_shards_and_whole_models_load_alike(tmp_path):
    tensors = safetensors.load_file(E2B / "model.safetensors")
    renamed = {n.replace("model.", "model.language_model.", 1): x for n, x in tensors.items()}
    renamed["model.vision_tower.layers.0.weight"] = np.ones(3, np.float32)
    renamed["model.language_model.layers.5.self_attn.k_norm.weight"] = np.ones(512, np.float32)
    there = copy_checkpoint(E2B, tmp_path / "sharded", renamed, shards=3)
    for ours, theirs in zip(load(there), load(E2B), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_tensors_that_do_not_fit_are_named(tmp_path):
    tensors = safetensors.load_file(E2B / "model.safetensors")
    broken = {n: x for n, x in tensors.items() if n != "model.layers.1.mlp.up_proj.weight"}
    broken["model.norm.weight"] = np.ones(7, np.float32)
    where = copy_checkpoint(E2B, tmp_path / "broken", broken, shards=1)
    with pytest.raises(ValueError, match=r"up_proj.weight is missing; norm.weight is \[7\]"):
        load(where)
    more = {**tensors, "model.layers.0.mlp.router.weight": np.ones(3, np.float32)}
    where = copy_checkpoint(E2B, tmp_path / "more", more, shards=1)
    with pytest.raises(ValueError, match=r"no place for layers\.0\.mlp\.router\.weight"):
        load(where)


# -- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/no/such/place"], "/no/such/place: no such directory"),
        (["--model", str(ROOT / "tests")], "config.json is missing"),
        (["--block-size", "0"], "'0' is not an integer of at least 1"),
        (["--max-new-tokens", "many"], "'many' is not an integer"),
        (["--token-budget", "4"], "at least max_seqs (8)"),
        (["--global-blocks", "3"], "3 global blocks of 16 tokens are too few"),
        (["--sliding-blocks", "1"], "1 sliding blocks of 16 tokens are too few"),
        (["--max-new-tokens", "5000"], "made for 1024"),
        (["--prompt", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["--verify", "--prompt", "hello"], "leave out --prompt"),
        (["--verify", "--dtype", "bfloat16"], "--verify needs --dtype float32"),
        (["--verify", "--kv-format", "e5m2"], "cannot judge --kv-format e5m2"),
        (["--verify", "--max-new-tokens", "33"], "must be at most 32 with --verify"),
        (["--kv-format", "int3"], "invalid choice: 'int3'"),
        (["--prompt", ""], "--prompt '' has no tokens"),
        (["--implementation", "mosaic_gpu", *ONE_AT_A_TIME], "--implementation: "),
    ],
)
def test_wrong_arguments_are_reported(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit:
        generate.main(arguments)
    assert exit.value.code == 2
    assert words in capsys.readouterr().err


def test_a_checkpoint_without_reference_or_tokenizer_says_so(tmp_path, capsys):
    tensors = safetensors.load_file(E2B / "model.safetensors")
    bare = copy_checkpoint(E2B, tmp_path / "bare", tensors, shards=1)
    for arguments, words in (
        ([], "with --prompt TEXT"),
        (["--verify"], "--verify: "),
    ):
        with pytest.raises(SystemExit):
            generate.main(["--model", str(bare), *arguments])
        assert words in capsys.readouterr().err
    with pytest.raises(ValueError, match="its vocabulary of 300 tokens is not bytes"):
        load_tokenizer(bare, 300)


def test_every_implementation_can_be_named():
    for name in implementations.BY_NAME:
        arguments = ["--implementation", name]
        assert generate.options_parser().parse_args(arguments).implementation == name


def test_a_broken_tokenizer_is_reported(tmp_path, monkeypatch):
    def from_file(path):
        raise Exception("expected value at line 1 column 1")  # as the tokenizers package does

    stub = types.ModuleType("tokenizers")
    stub.Tokenizer = types.SimpleNamespace(from_file=from_file)
    monkeypatch.setitem(sys.modules, "tokenizers", stub)
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match=f"{path}: the tokenizers package cannot read it: expec"):
        Subwords.from_tokenizers(path)


@pytest.mark.extended
@pytest.mark.parametrize("how", [["examples/generate.py"], ["-m", "examples.generate"]])
def test_it_starts_as_a_file_and_as_a_module(how):
    done = subprocess.run(
        [sys.executable, *how, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--kv-format" in done.stdout
