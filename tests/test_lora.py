"""LoRA adapters: the tokens of merged weights, many adapters in one batch, and nothing compiled."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import shutil
import threading
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

from examples.engine.adapters import Adapters
from examples.engine.caches import group_layers
from examples.engine.engine import Engine
from examples.engine.mesh import Parameter
from examples.engine.model import Model, load_model
from examples.engine.request import Request
from examples.engine.scheduler import Limits
from examples.engine.speculation import Speculation
from examples.engine.statistics import count_compilations
from examples.engine.step import Bucket, pack
from examples.models.lora import TENSORS, Adapted, Lora, Room, read_lora
from examples.text import Bytes
from tests.support.drafts import Foresight
from tests.support.lora import merged, write_adapter
from tests.support.serving import openai_client, serving
from tests.support.tiny_model import tiny_model
from tests.test_mesh import on_eight_devices
from tests.test_models import CHECKPOINTS, MAX_ERROR, MODELS, some

ALL = (*MODELS, "gemma4-e2b-tiny", "gemma4-31b-tiny")
ROOM = Room(count=2, rank=6)
MIXED = Bucket(40, 8, 40)


def build(model: Model, speculation: Speculation | None = None, **loras) -> Engine:
    limits = Limits(group_layers(model.layers), 8, 40, 8, 96, adapters=ROOM)
    drafted = speculation and Bucket(40, 8, 1 + speculation.num_drafts, speculation.num_drafts)
    return Engine(
        model,
        limits,
        tokenizer=Bytes(),
        buckets=(MIXED, drafted) if drafted else (MIXED,),
        speculation=speculation,
        loras=loras,
        keep_logits=True,
    )


def restart(engine: Engine, *, base: Model | None = None, **changes) -> None:
    """Empty the caches; `base` has other weights, of the same shapes."""
    engine.reset(**changes)
    if base is not None:
        engine.adapters._base = base
        engine.adapters._place()


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 256, size=17).tolist()
    return [(*shared, *rng.integers(0, 256, size=int(n)).tolist()) for n in range(3, 3 + count)]


def run(engine: Engine, prompt, name: str | None, new: int = 12, **options):
    adapter = None if name is None else engine.adapters[name]
    return engine.generate([Request(prompt, new, adapter=adapter, **options)])[0]


def two_adapters(model: Model, folder: Path) -> dict[str, Path]:
    """One of every linear layer and one of some, of several ranks and scales."""
    patterns = {"alpha_pattern": {"o_proj": 9, ".*mlp.*": 7}}
    rslora = {"use_rslora": True, "lora_alpha": 3}
    some = "(q_proj|q_b_proj|v_proj|o_proj|out_proj)"
    return {
        "a": write_adapter(folder / "a", model, ranks={"q_proj": 6}, **patterns),
        "b": write_adapter(folder / "b", model, targets=some, rank=2, seed=1, size=0.9, **rslora),
    }


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Engine:
    model = load_model(CHECKPOINTS / "qwen3-tiny")
    return build(model, **two_adapters(model, tmp_path_factory.mktemp("adapters")))


@pytest.mark.parametrize("name", some(ALL, quick=("qwen3-tiny",), slow=("qwen3-next-tiny",)))
def test_a_batch_of_adapters_has_the_tokens_of_merged_weights(name, request, tmp_path):
    """Every linear layer of every family; ranks, scales and prefixes differ."""
    if name == "qwen3-tiny":
        engine = request.getfixturevalue("qwen3")
        restart(engine)
    else:
        model = load_model(CHECKPOINTS / name)
        engine = build(model, **two_adapters(model, tmp_path))
    model, names = engine.adapters._base, [None, "a", "b"]
    requests = [
        Request(prompt, 8, adapter=which and engine.adapters[which])
        for prompt in prompts(2)
        for which in names
    ]
    # The same prompts twice: with the adapter's own prefix the second time, and with no other's.
    first = engine.generate(requests)
    second = engine.generate(requests)
    assert [s.chosen for s in first] == [s.chosen for s in second]
    assert sum(s.num_reused == 0 for s in first) >= len(names)
    assert sum(s.num_reused > 0 for s in second) > 0  # states of some may be evicted by then
    engine.check_idle()
    chosen = [tuple(s.chosen) for s in first]
    assert all(len(set(chosen[i : i + 3])) == 3 for i in range(0, 6, 3)), "adapters do not bite"

    try:
        for which in names:
            directory = None if which is None else Path(engine.adapters[which].directory)
            restart(engine, base=model if directory is None else merged(model, directory))
            for sequence in first[names.index(which) :: 3]:
                alone = run(engine, sequence.request.prompt, None, 8)
                assert alone.chosen == sequence.chosen
                np.testing.assert_allclose(alone.logits, sequence.logits, atol=2 * MAX_ERROR)
    finally:
        restart(engine, base=model)


@pytest.mark.extended
def test_drafts_are_verified_with_the_adapter_of_each_sequence(qwen3):
    """Drafts that another adapter would choose are refused."""
    restart(qwen3)
    folders = {name: qwen3.adapters[name].directory for name in "ab"}
    engine = build(qwen3.adapters._base, Speculation(4, backs_off=False), **folders)
    wanted, coming = {}, {}
    for which, other in (("a", "b"), ("b", None), (None, "a")):
        for i, prompt in enumerate(prompts(2)):
            request = Request(prompt, 12, adapter=which and engine.adapters[which])
            wanted[request] = run(qwen3, prompt, which)
            coming[request] = run(qwen3, prompt, other if i else which).chosen
    engine._speculator.proposer = Foresight(coming, np.random.default_rng(0), wrong=0.2)
    for sequence in engine.generate(wanted):
        expected = wanted[sequence.request]
        assert sequence.chosen == expected.chosen
        np.testing.assert_allclose(sequence.logits, expected.logits, atol=2 * MAX_ERROR)
    done = engine.statistics
    assert 6 < done.num_accepted_tokens < done.num_drafted_tokens - 6
    engine.check_idle()


def test_a_new_adapter_compiles_nothing(qwen3, tmp_path):
    engine, prompt = qwen3, prompts(1)[0]
    restart(engine)
    before = {name: run(engine, prompt, name).chosen for name in (None, "a", "b")}
    c = write_adapter(tmp_path / "c", engine.adapters._base, seed=7, targets="proj")
    with pytest.raises(ValueError, match=r"room for 2, and all of it is taken"):
        engine.adapters.load("c", c)
    b = engine.adapters["b"]
    with count_compilations() as compilations:
        engine.adapters.unload("b", [engine.adapters["a"], None])
        engine.adapters.load("c", c)
        assert run(engine, prompt, "c").chosen not in before.values()
        assert run(engine, prompt, "a").chosen == before["a"]
        assert run(engine, prompt, None).chosen == before[None]
        with pytest.raises(ValueError, match=r"adapter 'b' is not loaded"):
            engine.add(Request(prompt, 2, adapter=b))
        engine.adapters.unload("c")
        engine.adapters.load("b", b.directory)
    assert compilations.count == 0
    again = run(engine, prompt, "b")
    assert (again.chosen, again.num_reused) == (before["b"], 16)  # its numbers are the same


def test_what_cannot_be_loaded_or_unloaded(qwen3, tmp_path):
    adapters = qwen3.adapters
    with pytest.raises(ValueError, match=r"used by requests that are not finished"):
        adapters.unload("a", [adapters["a"]])
    with pytest.raises(ValueError, match=r"adapter 'x' is not loaded"):
        adapters.unload("x")
    for name in ("a", adapters.model.name):
        with pytest.raises(ValueError, match=r"there is a model of this name"):
            adapters.load(name, tmp_path)
    large = write_adapter(tmp_path / "large", adapters._base, rank=7)
    small = Adapters(adapters._base, ROOM)
    with pytest.raises(ValueError, match=r"its rank is 7, but there is room for 6"):
        small.load("large", large)
    assert len(small) == 0
    with pytest.raises(ValueError, match=r"there is room for 0"):
        Adapters(adapters._base).load("a", large)
    with pytest.raises(ValueError, match=r"tiny has no linear layers"):
        Adapters(tiny_model(), ROOM)
    with pytest.raises(ValueError, match=r"both must be at least 1"):
        Room(0, 4)


@pytest.mark.extended
def test_texts_of_one_prompt_share_it_only_with_one_adapter(qwen3):
    """And with the prefix cache blind to adapters they would not be right."""
    restart(qwen3)
    prompt = prompts(1)[0]
    expected = {name: run(qwen3, prompt, name).chosen for name in (None, "a", "b")}
    restart(qwen3)
    which = [None, "a", "a", "b", None]
    sequences = qwen3.generate(
        Request(prompt, 12, adapter=name and qwen3.adapters[name]) for name in which
    )
    assert [s.chosen for s in sequences] == [expected[name] for name in which]
    assert [s.num_reused for s in sequences] == [0, 0, 19, 0, 19]
    qwen3.check_idle()


def _ids_of_the_first(plan, bucket, limits):
    inputs = pack(plan, bucket, limits)
    return dataclasses.replace(inputs, adapters=np.full_like(inputs.adapters, inputs.adapters[0]))


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        ("examples.engine.request.Request.salt", b""),
        ("examples.engine.engine.pack", _ids_of_the_first),
    ],
    ids=["prefixes-of-other-adapters", "one-adapter-for-all"],
)
def test_a_wrong_engine_is_found_out(qwen3, monkeypatch, where, wrong):
    restart(qwen3)
    prompt = prompts(1)[0]
    expected = [run(qwen3, prompt, name).chosen for name in ("a", "b")]
    monkeypatch.setattr(where, wrong)
    restart(qwen3)
    requests = [Request(tuple(prompt), 12, adapter=qwen3.adapters[name]) for name in ("a", "b")]
    if isinstance(wrong, bytes):
        found = [qwen3.generate([request])[0].chosen for request in requests]
    else:
        found = [sequence.chosen for sequence in qwen3.generate(requests)]
    assert found != expected


def test_without_room_nothing_is_different(qwen3):
    """The parameters, inputs and program of an engine that knows of no adapters."""
    model, limits = qwen3.adapters._base, dataclasses.replace(qwen3.limits, adapters=None)
    assert Adapters(model).model is model
    assert pack([], MIXED, limits).adapters is None


@pytest.mark.extended
def test_a_step_without_adapters_branches_around_them(qwen3):
    """A branch for each layer, taken on the device, and nothing else that there was not before."""
    steps, limits = qwen3.steps, dataclasses.replace(qwen3.limits, adapters=None)
    step = jax.jit(steps._step(qwen3.adapters._base, MIXED))
    bare = step.lower(qwen3.adapters._base.params, *steps._state[1:], pack([], MIXED, limits))
    texts = [steps._lower(MIXED).as_text(), bare.as_text()]
    branches, products = (
        [text.count(op) for text in texts] for op in ("stablehlo.case", "stablehlo.dot_general")
    )
    assert branches[0] - branches[1] == len(qwen3.model.linears)
    assert products[0] - products[1] == 2 * len(qwen3.model.linears)


# -- what is read ---------------------------------------------------------------------------------

LINEARS = {f"layers.0.{name}": (Parameter((6, 8)),) * 2 for name in ("q_proj", "mlp.up_proj")}
SMALL = dataclasses.replace(tiny_model(), linears=LINEARS)


def test_what_peft_says_is_heeded(tmp_path):
    """Which rank, and which scale: the last parts of a path, or a regular expression of it."""
    config = {"lora_alpha": 12, "ranks": {"q_proj": 2}}
    for rslora in (False, True):
        pattern = r"^model\.layers\.0\.mlp\.up_proj" if rslora else r".*\.up_proj"
        config["alpha_pattern"] = {pattern: 5}
        write_adapter(tmp_path, SMALL, use_rslora=rslora, **config)
        lora = read_lora(tmp_path, LINEARS, frozenset())
        write_adapter(tmp_path, SMALL, ranks={"q_proj": 2})
        plain = read_lora(tmp_path, LINEARS, frozenset())
        scales = {}
        for name, (down, up) in lora.factors.items():
            np.testing.assert_array_equal(down, plain.factors[name][0])
            other = plain.factors[name][1] / (2 if name.endswith("q_proj") else 1)
            scales[name] = float(np.mean(up / other))
        expected = (12 / 2**0.5, 5 / 4**0.5) if rslora else (12 / 2, 5 / 4)
        assert list(scales.values()) == pytest.approx([expected[1], expected[0]], rel=1e-5)
        assert lora.rank == 4
        assert lora.digest != plain.digest


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "LOHA"}, r"peft_type is 'LOHA', but must be 'LORA'"),
        ({"use_dora": True}, r"use_dora is True, which is not computed here"),
        ({"bias": "lora_only"}, r"bias is 'lora_only', but must be 'none'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights is 'pissa'"),
        ({"fan_in_fan_out": True, "lora_bias": True}, r"fan_in_fan_out is True.*lora_bias is True"),
        ({"target_parameters": ["experts.up_proj"]}, r"target_parameters is \['experts.up_proj'\]"),
        ({"a_field_of_next_year": 1}, r"a_field_of_next_year is 1"),
        ({"r": 0}, r"r is 0, but must be a number above 0"),
        ({"r": 3}, r"lora_A and lora_B are .*\(4, 8\).*but must be .*\(3, 8\)"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(config, words, tmp_path):
    write_adapter(tmp_path, SMALL, **config)
    with pytest.raises(ValueError, match=words):
        read_lora(tmp_path, LINEARS, frozenset())


@pytest.mark.parametrize("size", [np.inf, np.nan, 1e6])
def test_numbers_that_would_reach_other_requests_are_refused(size, tmp_path):
    with np.errstate(invalid="ignore"):
        write_adapter(tmp_path, SMALL, size=size)
    with pytest.raises(ValueError, match=r"q_proj: lora_A or lora_B has NaN or numbers above"):
        read_lora(tmp_path, LINEARS, frozenset())


def test_layers_that_are_not_there_are_refused_by_name(tmp_path):
    model = dataclasses.replace(
        SMALL, linears={**LINEARS, "layers.0.experts.3.up_proj": (Parameter((6, 8)),) * 2}
    )
    write_adapter(tmp_path, model)
    with pytest.raises(ValueError, match=r"layers.0.experts.3.up_proj.lora_A.weight is not of"):
        read_lora(tmp_path, LINEARS, frozenset())
    idle = frozenset({"layers.0.experts.3.up_proj.weight"})
    assert set(read_lora(tmp_path, LINEARS, idle).factors) == set(LINEARS)


def test_broken_files_are_told(tmp_path):
    with pytest.raises(ValueError, match=r"adapter_config.json cannot be read"):
        read_lora(tmp_path, LINEARS, frozenset())
    write_adapter(tmp_path, SMALL)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"adapter_model.safetensors cannot be read"):
        read_lora(tmp_path, LINEARS, frozenset())
    for text in ("{", "[]"):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"adapter_config.json is not"):
            read_lora(tmp_path, LINEARS, frozenset())
    write_adapter(tmp_path, SMALL)
    safetensors.save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"adapts nothing"):
        read_lora(tmp_path, LINEARS, frozenset())


# -- several devices ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3-tiny", marks=pytest.mark.extended),
        pytest.param("nemotron-h-tiny", marks=pytest.mark.slow),
        pytest.param("qwen3-next-tiny", marks=pytest.mark.slow),
    ],
)
def test_two_devices_have_the_tokens_of_one(name, tmp_path):
    """Parts of sums with parts of adapters' sums, sections of weights with those of adapters."""
    model = load_model(CHECKPOINTS / name)
    sources = {n: write_adapter(tmp_path / n, model, seed=i) for i, n in enumerate(("a", "b"))}
    engine = build(model, **sources)
    given = prompts(4)
    chosen = [run(engine, p, w).chosen for p in given for w in (None, "a", "b")]
    code = f"""
from tests.test_lora import *
model = load_model(CHECKPOINTS / {name!r}, mesh=make_mesh("tensor=2"))
engine = build(model, a={str(sources["a"])!r}, b={str(sources["b"])!r})
sequences = engine.generate(
    Request(p, 12, adapter=w and engine.adapters[w])
    for p in prompts(4) for w in (None, "a", "b"))
print([s.chosen for s in sequences])
bare = dataclasses.replace(engine.limits, adapters=None)
bare = Engine(engine.adapters._base, bare, buckets=(MIXED,))
def widths(engine):  # the last feed-forward part has all rows where tokens have adapters
    found = collectives(engine.steps.programs[MIXED])
    each = ((kind, shape.partition(",")[2]) for (kind, shape), n in found.items() for _ in range(n))
    return sorted(each)
assert widths(bare) == widths(engine)
"""
    assert json.loads(on_eight_devices(code)) == chosen


# -- over HTTP ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(qwen3):
    restart(qwen3)
    with serving(qwen3) as address:
        yield address


@pytest.mark.extended
def test_a_request_chooses_its_adapter_by_name(qwen3, url):
    import openai

    prompt = list(prompts(1)[0])
    with openai_client(url) as client:
        texts = {}
        for name in ("qwen3-tiny", "a", "b"):
            answer = client.completions.create(model=name, prompt=prompt, max_tokens=9, seed=1)
            assert answer.model == name
            texts[name] = answer.choices[0].text
        assert len(set(texts.values())) == 3
        cards = {card.id: card for card in client.models.list()}
        assert set(cards) == {"qwen3-tiny", "a", "b"}
        assert cards["qwen3-tiny"].parent is None
        assert cards["a"].parent == cards["b"].parent == "qwen3-tiny"
        assert {name: card.root for name, card in cards.items()} == {name: name for name in cards}
        assert client.models.retrieve("b").parent == "qwen3-tiny"
        for ask in (
            lambda: client.completions.create(model="c", prompt="x"),
            lambda: client.models.retrieve("c"),
        ):
            with pytest.raises(openai.NotFoundError, match=r"must be 'qwen3-tiny', 'a' or 'b'"):
                ask()


class _Client:
    """Requests for adapters to a server of an engine, and for tokens from them."""

    def __init__(self, http):
        self.http = http
        prompt = list(prompts(1)[0])
        self.body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True}

    def complete(self, model: str, **changes):
        return self.http.post("/completions", json={**self.body, "model": model, **changes})

    def text(self, model: str, **changes) -> str:
        answer = self.complete(model, **changes)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def change(self, which: str, name, path=None, **more):
        """The status and the message of a request to load or unload."""
        given = {"lora_name": name} | ({} if path is None else {"lora_path": str(path)}) | more
        answer = self.http.post(f"/{which}_lora_adapter", json=given)
        error = {} if answer.status_code == 200 else answer.json()["error"]
        return answer.status_code, error.get("message", answer.text)

    def models(self) -> set[str]:
        return {card["id"] for card in self.http.get("/models").json()["data"]}


@pytest.fixture
def adapter_folder(qwen3) -> Path:
    """The folder of adapters "a" and "b", with more: "c", and some that cannot be loaded."""
    restart(qwen3)
    folder = Path(qwen3.adapters["b"].directory).parent
    write_adapter(folder / "c", qwen3.adapters._base, seed=7, targets="proj")
    write_adapter(folder / "large", qwen3.adapters._base, rank=7)
    (folder / "empty").mkdir()
    shutil.copytree(folder / "c", folder / "no-tensors").joinpath(TENSORS).unlink()
    (folder / "link").symlink_to(folder.parent)
    return folder


@pytest.mark.extended
def test_adapters_come_and_go_over_http(qwen3, adapter_folder, monkeypatch):
    """A request keeps its adapter until it ends, and the adapter its place."""
    httpx = pytest.importorskip("httpx", reason="the server's tests need the serve extra")
    with (
        serving(qwen3, lora_folder=adapter_folder, api_key="key") as address,
        httpx.Client(
            base_url=f"{address}/v1", timeout=300, headers={"authorization": "Bearer key"}
        ) as http,
    ):
        client = _Client(http)
        before = client.text("b")
        others = {client.text(name, max_tokens=12) for name in ("qwen3-tiny", "b")}
        with monkeypatch.context() as patch:
            _check_unloading_in_use(client, qwen3, patch, before)
        assert client.change("load", "c", adapter_folder / "c")[0] == 200
        assert client.models() == {"qwen3-tiny", "a", "c"}
        assert len({client.text("c", max_tokens=12), *others}) == 3
        _check_refused_loads(client, adapter_folder)
        assert httpx.post(f"{address}/v1/unload_lora_adapter").status_code == 401
        assert client.change("unload", "c")[0] == 200
        assert client.change("load", "large", "large")[1].startswith("large: its rank is 7")
        assert client.change("load", "b", "b")[0] == 200
        assert client.text("b") == before
        assert client.models() == {"qwen3-tiny", "a", "b"}
    with serving(qwen3) as address:
        for which in ("load", "unload"):
            assert httpx.post(f"{address}/v1/{which}_lora_adapter", json={}).status_code == 404


def _check_unloading_in_use(
    client: _Client, engine: Engine, patch: pytest.MonkeyPatch, before: str
) -> None:
    """Unload "b" while a request for `before` runs: it ends as it would, and no other begins."""
    from examples.engine.protocol import ServedModel

    running, run_step = threading.Event(), engine.run

    def slow_step(*given):
        running.set()
        time.sleep(0.05)
        return run_step(*given)

    patch.setattr(engine, "run", slow_step)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.text, "b")
        assert running.wait(60)
        while not engine.scheduler.running:
            time.sleep(0.01)
        unloaded = engine.adapters["b"]
        removed = "Success: LoRA adapter 'b' removed successfully."
        assert client.change("unload", "b") == (200, removed)
        assert client.models() == {"qwen3-tiny", "a"}
        for was_read in (False, True):  # before the unload, by the request
            with pytest.MonkeyPatch.context() as reading:
                if was_read:
                    reading.setattr(ServedModel, "adapter", lambda *_: unloaded)
                refused = client.complete("b")
            code = refused.json()["error"]["code"]
            assert (refused.status_code, code) == (404, "model_not_found")
        status, words = client.change("load", "c", "c")
        assert (status, "1 unloaded but used until their requests end" in words) == (400, True)
        assert not asked.done()
        assert asked.result() == before


def _check_refused_loads(client: _Client, folder: Path) -> None:
    """With "a" and "c" loaded, refuse what cannot be loaded, and do not say where the folder is."""
    outside = "must be a directory below that of --lora-folder"
    for name, path, words in (
        ("d", "../a", outside),
        ("d", "/etc", outside),
        ("d", "link/x", outside),
        ("d", ".", outside),
        ("d", "nothing", outside),
        ("d", "a\0b", outside),
        ("d", "x" * 5000, outside),
        ("d", None, "lora_path is ''"),
        ("", "b", "lora_name is '', but must be 1 to 128 printable characters"),
        (3, "b", "lora_name is 3, but must be a string"),
        ("d", "empty", "empty: adapter_config.json cannot be read"),
        ("d", "no-tensors", "no-tensors: adapter_model.safetensors cannot be read"),
        ("d", "b", "there is room for 2, and all of it is taken"),
        ("a", "b", "there is a model of this name"),
        ("qwen3-tiny", "b", "there is a model of this name"),
    ):
        status, found = client.change("load", name, path)
        assert (status, words in found, str(folder) in found) == (400, True, False), found
    assert "load_inplace is True" in client.change("load", "d", "b", load_inplace=True)[1]
    no_such = "lora_name is 'd', but no such adapter is loaded"
    assert client.change("unload", "d") == (404, no_such)
    assert client.http.post("/load_lora_adapter", content=b"[").status_code == 400
    assert client.http.post("/load_lora_adapter", json=[]).status_code == 400


class _Group:
    """An engine's adapters, whose sequences have some of them, and what calls it between steps."""

    def __init__(self, room: Room):
        self.scheduler = types.SimpleNamespace(waiting=[], running=[])
        self.adapters, self.engine = Adapters(SMALL, room), self

    def use(self, name: str) -> None:
        request = Request((1,), 1, adapter=self.adapters[name])
        self.scheduler.running.append(types.SimpleNamespace(request=request))

    async def call(self, function):
        return function(self)


def test_groups_take_an_adapter_into_one_place_or_not_at_all(tmp_path):
    httpx = pytest.importorskip("httpx", reason="the server's tests need the serve extra")
    from starlette.applications import Starlette

    from examples.engine.access import Access
    from examples.engine.adapter_routes import AdapterRoutes

    for name in "abc":
        write_adapter(tmp_path / name, SMALL, rank=1, seed=ord(name))
    write_adapter(tmp_path / "large", SMALL, rank=3)
    groups = [_Group(Room(2, 4)), _Group(Room(2, 2))]
    app = Starlette(routes=AdapterRoutes(groups, Access(), tmp_path).routes())

    def change(which: str, name: str) -> tuple[int, str]:
        async def post() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
                given = {"lora_name": name} | ({"lora_path": name} if which == "load" else {})
                return await client.post(f"http://here/v1/{which}_lora_adapter", json=given)

        answer = asyncio.run(post())
        return answer.status_code, answer.text

    def names() -> list[set[str]]:
        return [set(group.adapters) for group in groups]

    assert [change("load", name)[0] for name in "ab"] == [200, 200]
    for group, name in zip(groups, "ab", strict=True):  # the first has place 2, the second place 1
        group.use(name)
        assert change("unload", name)[0] == 200
    status, words = change("load", "c")
    assert (status, "2 unloaded but used until their requests end" in words) == (400, True)
    assert names() == [set(), set()]
    groups[1].scheduler.running.clear()
    assert change("load", "c")[0] == 200
    assert groups[0].adapters["c"] == groups[1].adapters["c"]
    for group in groups:
        group.scheduler.running.clear()

    # A group that comes last refuses it, and one that comes first.
    for order in (groups, groups[::-1]):
        app = Starlette(routes=AdapterRoutes(order, Access(), tmp_path).routes())
        for _ in range(3):  # and it keeps no place
            assert "its rank is 3, but there is room for 2" in change("load", "large")[1]
            assert names() == [{"c"}, {"c"}]
    assert change("load", "a")[0] == 200
    groups[0].adapters.unload("a")
    assert [change("unload", "a")[0] for _ in range(2)] == [200, 404]
    assert names() == [{"c"}, {"c"}]


def test_adapters_may_go_while_they_are_looked_at():
    from examples.engine.protocol import ModelNotFoundError, ServedModel

    class Leaving(dict):
        def __contains__(self, name) -> bool:
            return super().pop(name, None) is not None

    adapters = Adapters(SMALL, ROOM)
    for name in "ab":
        adapters.load(
            name, Lora(Path(name), {next(iter(LINEARS)): (np.ones((1, 8)), np.ones((6, 1)))})
        )
    served = ServedModel(SMALL, Bytes(), 8, adapters=Leaving(adapters))
    assert served.adapter("b") == adapters["b"]
    with pytest.raises(ModelNotFoundError):
        served.adapter("c")
    seen = []
    for adapter in adapters.values():
        seen.append(adapter.name)
        if "b" in adapters:
            adapters.retire("b")
    assert seen == ["a", "b"]


def test_parameters_are_not_held_twice(qwen3):
    """The adapters' matrices are those of the engine's room, and the weights are the model's."""
    adapted, base = qwen3.model.params, qwen3.adapters._base.params
    assert isinstance(adapted, Adapted)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (adapted.base, base)), strict=True))
    rows = ROOM.count * ROOM.rank
    sizes = sum(sum(whole.shape) for whole, _ in qwen3.model.linears.values())
    assert sum(x.size for x in jax.tree.leaves(adapted.stacks)) == rows * sizes


# -- PEFT -----------------------------------------------------------------------------------------


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", ["qwen3-tiny", "gemma4-e2b-tiny", "qwen3-next-tiny"])
def test_adapters_that_peft_saves_give_its_logits(name, rslora, tmp_path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        CHECKPOINTS / name, dtype=torch.float32
    )
    # Of experts PEFT would adapt the stacked matrices.
    parts = "self_attn|linear_attn" if name == "qwen3-next-tiny" else "self_attn|mlp"
    config = peft.LoraConfig(
        r=4,
        lora_alpha=3,
        use_rslora=rslora,
        target_modules=rf".*({parts})\.[a-z_]*(proj|qkvz|ba)",
        rank_pattern={"q_proj": 6},
        alpha_pattern={r"layers\.1\..*": 7},
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(theirs, config).eval()
    with torch.no_grad():
        for parameter in (p for n, p in theirs.named_parameters() if "lora_" in n):
            parameter.normal_(std=0.1)
    theirs.save_pretrained(tmp_path)
    engine = build(load_model(CHECKPOINTS / name), peft=tmp_path)
    prompt = prompts(1)[0]
    alone = run(engine, prompt, "peft")
    with torch.no_grad():
        logits = theirs(torch.tensor([[*prompt, *alone.chosen[:-1]]])).logits
    wanted = logits[0, len(prompt) - 1 :].numpy()
    np.testing.assert_allclose(alone.logits, wanted, atol=2e-3)
    assert run(engine, prompt, None).chosen != alone.chosen
