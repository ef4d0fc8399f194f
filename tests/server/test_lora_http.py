"""LoRA adapters over HTTP: requests choose them by name, and they are loaded and unloaded."""

from __future__ import annotations

import asyncio
import concurrent.futures
import shutil
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest

from examples.engine.adapters import Adapters
from examples.engine.engine import Engine
from examples.engine.request import Request
from examples.models.lora import TENSORS, Lora, Room
from examples.text import Bytes
from tests.support import lora as support
from tests.support.lora import LINEARS, ROOM, prompts, restart, small_model, write_adapter
from tests.support.serving import http_client, openai_client, serving

qwen3 = support.qwen3  # the fixture


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
    """A client that loads and unloads adapters and generates with them."""

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
        """Load or unload an adapter; return the status and the message."""
        given = {"lora_name": name} | ({} if path is None else {"lora_path": str(path)}) | more
        answer = self.http.post(f"/{which}_lora_adapter", json=given)
        error = {} if answer.status_code == 200 else answer.json()["error"]
        return answer.status_code, error.get("message", answer.text)

    def models(self) -> set[str]:
        return {card["id"] for card in self.http.get("/models").json()["data"]}


@pytest.fixture
def adapter_folder(qwen3) -> Path:
    """The folder of adapters "a" and "b", with "c" added, and some that cannot be loaded."""
    restart(qwen3)
    folder = Path(qwen3.adapters["b"].directory).parent
    write_adapter(folder / "c", qwen3.adapters._base, seed=7, targets="proj")
    write_adapter(folder / "large", qwen3.adapters._base, rank=7)
    (folder / "empty").mkdir()
    shutil.copytree(folder / "c", folder / "no-tensors").joinpath(TENSORS).unlink()
    (folder / "link").symlink_to(folder.parent)
    return folder


@pytest.mark.extended
def test_adapters_are_loaded_and_unloaded_over_http(qwen3, adapter_folder, monkeypatch):
    """A request keeps its adapter until it ends, and until then the adapter keeps its place."""
    httpx = pytest.importorskip("httpx", reason="the server's tests need the serve extra")
    with (
        serving(qwen3, lora_folder=adapter_folder, api_key="key") as address,
        http_client(f"{address}/v1", timeout=300, headers={"authorization": "Bearer key"}) as http,
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
    """Unload "b" while a request runs: it still returns `before`, and no other one starts."""
    from examples.engine.http.protocol import ServedModel

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
        for was_read in (False, True):  # by the request, before the adapter was unloaded
            with pytest.MonkeyPatch.context() as reading:
                if was_read:
                    reading.setattr(ServedModel, "adapter", lambda *_: unloaded)
                refused = client.complete("b")
            code = refused.json()["error"]["code"]
            assert (refused.status_code, code) == (404, "model_not_found")
        status, words = client.change("load", "c", "c")
        assert (status, "1 unloaded but in use until their requests end" in words) == (400, True)
        assert not asked.done()
        assert asked.result() == before


def _check_refused_loads(client: _Client, folder: Path) -> None:
    """With "a" and "c" loaded, wrong loads are refused, and no message shows the folder's path."""
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
        ("a", "b", "a model of this name exists"),
        ("qwen3-tiny", "b", "a model of this name exists"),
    ):
        status, found = client.change("load", name, path)
        assert (status, words in found, str(folder) in found) == (400, True, False), found
    assert "load_inplace is True" in client.change("load", "d", "b", load_inplace=True)[1]
    no_such = "lora_name is 'd', but no such adapter is loaded"
    assert client.change("unload", "d") == (404, no_such)
    assert client.http.post("/load_lora_adapter", content=b"[").status_code == 400
    assert client.http.post("/load_lora_adapter", json=[]).status_code == 400


class _Group:
    """Stands in for an engine and its thread: adapters, sequences that use them, and `call`."""

    def __init__(self, room: Room):
        self.scheduler = types.SimpleNamespace(waiting=[], running=[])
        self.adapters, self.engine = Adapters(small_model(), room, used=self.used), self

    def used(self) -> set:
        return {sequence.request.adapter for sequence in self.scheduler.running}

    def use(self, name: str) -> None:
        request = Request((1,), 1, adapter=self.adapters[name])
        self.scheduler.running.append(types.SimpleNamespace(request=request))

    async def call(self, function):
        return function(self)


def test_an_adapter_gets_the_same_place_in_all_groups_or_none(tmp_path):
    httpx = pytest.importorskip("httpx", reason="the server's tests need the serve extra")
    from starlette.applications import Starlette

    from examples.engine.http.access import Access
    from examples.engine.http.adapter_routes import AdapterRoutes

    for name in "abc":
        write_adapter(tmp_path / name, small_model(), rank=1, seed=ord(name))
    write_adapter(tmp_path / "large", small_model(), rank=3)
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
    for group, name in zip(groups, "ab", strict=True):  # the first has 2 free, the other 1
        group.use(name)
        assert change("unload", name)[0] == 200
    status, words = change("load", "c")
    assert (status, "2 unloaded but in use until their requests end" in words) == (400, True)
    assert names() == [set(), set()]
    groups[1].scheduler.running.clear()
    assert change("load", "c")[0] == 200
    assert groups[0].adapters["c"] == groups[1].adapters["c"]
    for group in groups:
        group.scheduler.running.clear()

    # Whether the group that refuses it comes last or first.
    for order in (groups, groups[::-1]):
        app = Starlette(routes=AdapterRoutes(order, Access(), tmp_path).routes())
        for _ in range(3):  # it takes up no place
            assert "its rank is 3, but there is room for 2" in change("load", "large")[1]
            assert names() == [{"c"}, {"c"}]
    assert change("load", "a")[0] == 200
    groups[0].adapters.unload("a")
    assert [change("unload", "a")[0] for _ in range(2)] == [200, 404]
    assert names() == [{"c"}, {"c"}]


def test_adapters_may_be_unloaded_while_others_read_them():
    from examples.engine.http.protocol import ModelNotFoundError, ServedModel

    class Leaving(dict):
        def __contains__(self, name) -> bool:
            return super().pop(name, None) is not None

    adapters = Adapters(small_model(), ROOM)
    for name in "ab":
        adapters.load(
            name, Lora(Path(name), {next(iter(LINEARS)): (np.ones((1, 8)), np.ones((6, 1)))})
        )
    served = ServedModel(small_model(), Bytes(), 8, adapters=Leaving(adapters))
    assert served.adapter("b") == adapters["b"]
    with pytest.raises(ModelNotFoundError):
        served.adapter("c")
    seen = []
    for adapter in adapters.values():
        seen.append(adapter.name)
        if "b" in adapters:
            adapters.unload("b")
    assert seen == ["a", "b"]
