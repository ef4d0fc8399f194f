"""The serving benchmarks: what the HTTP client reads, and no figures where results are wrong."""

from __future__ import annotations

import argparse
import http.server
import itertools
import json
import threading
import time

import numpy as np
import pytest

from benchmarks.neighbours import Neighbours
from benchmarks.serving import __main__ as serving
from benchmarks.serving import client, experts, products, rollback, scan, servers
from benchmarks.serving import http as benchmark

PAUSE = 0.02  # before a token


class Fake(http.server.BaseHTTPRequestHandler):
    """Continues a prompt with its last token + 1, + 2, ...; `server.off` is added to the third.

    Log-probabilities of the next token: 0 for the right one, -`server.gap` for the wrong one.
    """

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        answers = {
            "/v1/models": json.dumps({"data": [{"id": "fake"}]}),
            "/metrics": "# HELP coming\ncoming 0\n",
        }
        self._send(200 if self.path in answers else 404, answers.get(self.path, "no such path"))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert (asked["model"], asked["temperature"]) == ("fake", 0)
        last, off = asked["prompt"][-1], self.server.off
        if not asked.get("stream"):
            chances = {f"t{last + 1}": 0.0, f"t{last + 1 + 7}": -self.server.gap}
            self._send(200, json.dumps({"choices": [{"logprobs": {"top_logprobs": [chances]}}]}))
            return
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for i in range(1, asked["max_tokens"] + 1 - self.server.lost):
            time.sleep(PAUSE)
            text = f" t{last + i + (off if i == 3 else 0)}"
            event = json.dumps({"choices": [{"text": text}]})
            self._chunk(f"data: {event}\n\n")
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _chunk(self, text):
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())
        self.wfile.flush()

    def _send(self, status, text):
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def fake():
    """Starts servers, with `off`, `gap` and `lost` saying what is wrong with each."""
    running = []

    def start(off=0, gap=0.0, lost=0):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fake)
        server.off, server.gap, server.lost = off, gap, lost
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        running.append(server)
        return client.Client(f"http://127.0.0.1:{server.server_port}")

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_tokens_and_their_times_are_read_from_a_stream(fake):
    one = fake()
    answer = one.ask([5, 9], 4)
    assert answer.tokens == (10, 11, 12, 13)
    assert answer.first - answer.asked >= PAUSE
    assert answer.last - answer.asked >= 4 * PAUSE  # the first may be read late
    found = client.figures([answer])
    assert found["first_ms"] == pytest.approx((answer.first - answer.asked) * 1e3)
    assert found["each_ms"] == pytest.approx((answer.last - answer.first) / 3 * 1e3)
    assert found["tokens_per_s"] == pytest.approx(4 / (answer.last - answer.asked))
    assert one.next_tokens([5]) == {6: 0.0, 13: -0.0}
    assert one.metric("coming") == 0


def test_errors_and_missing_tokens_are_refused(fake):
    with pytest.raises(client.RefusedError, match="4 tokens were requested, but 3 arrived"):
        fake(lost=1).ask([5], 4)
    with (
        pytest.raises(client.RefusedError, match="404 b'no such path'"),
        fake().send("/nothing"),
    ):
        pass
    with pytest.raises(client.RefusedError, match="has no other"):
        fake().metric("other")


def test_requests_are_sent_when_due_or_as_many_at_once_as_asked(fake):
    one, prompts = fake(), [[i] for i in range(4)]
    arrivals = np.array([0.0, 0.1, 0.1, 0.2])
    answers = client.drive(one, prompts, [2] * 4, arrivals=arrivals)
    due = np.array([answer.asked for answer in answers])
    np.testing.assert_allclose(due - due[0], arrivals, atol=1e-9)
    assert all(answer.first > answer.asked for answer in answers)
    in_turn = client.drive(one, prompts, [2] * 4, concurrent=1)
    assert all(a.last <= b.asked for a, b in itertools.pairwise(in_turn))


def test_the_capacity_is_the_most_that_the_slower_server_manages(monkeypatch):
    speeds = {1: (2.0, 9.0), 16: (9.0, 8.0), 64: (5.0, 6.0), None: (1.0, 1.0)}

    def measured(case, contenders, *_):
        pairs = zip(contenders, speeds[case.concurrent], strict=True)
        return {name: {"requests_per_s": speed} for name, speed in pairs}

    monkeypatch.setattr(benchmark, "measure", measured)
    monkeypatch.setattr(benchmark.client, "drive", lambda *_, **__: None)
    options = argparse.Namespace(concurrent=[1, 16, 64], rates=[0.5], arriving=4, turns=1)
    contenders = {name: benchmark.Contender(None) for name in ("jattn", "vLLM")}
    load = benchmark.Load(64, 64, shared=0, own=(1, 2), new=(1, 2))
    *_, arriving = benchmark.run(contenders, load, 100, options, "float32")
    assert arriving["rate"] == 0.5 * 8


@pytest.mark.extended
def test_only_nearly_equal_choices_may_differ(fake):
    case = benchmark.Case([[5], [50]], [4, 4], concurrent=2)

    def row(gap, off=7):
        contenders = {
            "jattn": benchmark.Contender(fake(gap=gap)),
            "other": benchmark.Contender(fake(off=off)),
        }
        return benchmark.measure(case, contenders, 2, 1e-3, Neighbours([], patience=0))

    found = row(gap=5e-4)
    assert found["other"]["same_requests"] == 0
    assert found["other"]["same_tokens"] == 0.5  # two of four tokens
    assert found["other"]["widest_gap"] == 5e-4
    low, high = found["other"]["range"]["first_ms"]
    assert low < high
    assert found["other"]["first_ms"] == pytest.approx((low + high) / 2)
    assert benchmark.spread(found["other"], "first_ms", 6) == f"({low:.6f} to {high:.6f})"
    assert benchmark.spread({"first_ms": 1.0}, "first_ms", 0) == ""  # an older record
    assert "50.0%" in [*benchmark.lines({**found, "dtype": "float32"}, ["jattn", "other"])][1]
    with pytest.raises(SystemExit, match=r"1 \+ 2 tokens.*8, another 15, .* 0\.01 below.*no fig"):
        row(gap=1e-2)
    with pytest.raises(SystemExit, match="inf below"):
        row(gap=5e-4, off=9)


def test_a_server_that_ends_says_why(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    python = "import sys; sys.exit('the reason is here')"
    with (
        servers.Server(["python3", "-c", python], 1) as server,
        pytest.raises(servers.ServerError, match=r"ended with 1[\s\S]*the reason is here"),
    ):
        server.wait()


def test_the_tokenizer_writes_every_token_as_one_word(tmp_path):
    client.write_words(tmp_path, 300)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    space = tokenizer["decoder"]["decoders"][0]["pattern"]["String"]
    words = [word.replace(space, " ") for word in tokenizer["model"]["vocab"]]
    assert client.tokens_of("".join(words)) == [*range(300)]


def test_missing_packages_are_named_before_the_checkpoint_is_made(monkeypatch, capsys):
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        benchmark.parse(["--peer-python", "python"])
    assert "pip install tokenizers" in capsys.readouterr().err
    assert benchmark.parse(["--peer-python", "python", "--keep", "here"]).keep is not None


def test_the_list_names_every_benchmark_of_serving(capsys):
    serving.main(["--list"])
    text = capsys.readouterr().out
    for name in ("experts", "http", "mesh", "products", "rollback", "scan", "speculation"):
        assert f"python -m benchmarks.serving.{name}\n" in text
    assert "python -m benchmarks.serving\n" in text


@pytest.mark.extended
def test_experts_are_compared_before_they_are_timed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(experts, "MIXTURES", {"small": experts.Mixture(4, 2, 16, 8)})
    monkeypatch.setattr(experts.ceilings, "read_rate", lambda: 1e9)
    monkeypatch.setattr(experts.native, "load", lambda: None)
    monkeypatch.setitem(experts.WAYS, "native", experts.by_jax)  # tests of its own compile it
    asked = ["--mixture", "small", "--dtype", "bfloat16", "--tokens", "5", "--turns", "1"]
    experts.main([*asked, "--json", str(tmp_path / "found")])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("| small | bfloat16 | 5 |")
    run, row = map(json.loads, (tmp_path / "found").read_text().splitlines())
    assert run["read"] == 1e9
    expected = 4 * 16 * 8 * 2 / row["grouped_ms"] * 1e3 / 1e9
    assert row["grouped_of_read"] == pytest.approx(expected)
    wrong = lambda *given: experts.by_jax(*given).at[-1, 0].add(1)  # noqa: E731
    monkeypatch.setitem(experts.WAYS, "grouped", wrong)
    with pytest.raises(SystemExit, match="grouped, small, bfloat16, 5 tokens: off by"):
        experts.main(asked)


@pytest.mark.extended
def test_products_are_compared_before_they_are_timed(monkeypatch):
    by_xla = products.WAYS["xla"]
    monkeypatch.setattr(products, "NUM_LAYERS", 2)
    monkeypatch.setattr(products, "SHAPES", ((64, 32), (32, 64)))
    monkeypatch.setitem(products.WAYS, "native", by_xla)
    rows = products.measure("bfloat16", [2, 3], turns=1)
    head, line = products.table(rows).splitlines()
    assert head.split() == ["tokens", "2", "3"]
    assert line.split() == ["bfloat16", *(f"{row['ms']:.3g}" for row in rows)]
    wrong = lambda x, w, dtype: by_xla(x, w, dtype).at[0, 0].set(0)  # noqa: E731
    monkeypatch.setitem(products.WAYS, "native", wrong)
    with pytest.raises(SystemExit, match="native, bfloat16, 2 tokens: off by"):
        products.measure("bfloat16", [2], turns=1)


@pytest.mark.extended
def test_states_after_accepted_drafts_are_compared_before_they_are_timed(monkeypatch):
    monkeypatch.setattr(rollback, "HEADS", 2)
    monkeypatch.setattr(rollback, "SIZE", 8)
    rows = rollback.measure(2, calls=1)
    assert [row["way"] for row in rows] == ["once", "again", "kept"]
    monkeypatch.setitem(rollback.WAYS, "again", rollback.once)  # as if no draft had been refused
    with pytest.raises(SystemExit, match="2 sequences: two ways differ by"):
        rollback.measure(2, calls=1)


def test_expected_tokens_of_a_step_with_drafts():
    assert (
        rollback.brought(0.0, in_next_step=False) == rollback.brought(0.0, in_next_step=True) == 1
    )
    assert (
        rollback.brought(1.0, in_next_step=False) == rollback.brought(1.0, in_next_step=True) == 5
    )
    assert rollback.brought(0.5, in_next_step=False) == 1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16
    assert 1 < rollback.brought(0.5, in_next_step=True) < rollback.brought(0.5, in_next_step=False)


@pytest.mark.extended
def test_layers_in_a_loop_are_compared_before_they_are_timed(monkeypatch):
    monkeypatch.setattr(scan, "SHAPES", ((64, 32), (32, 48), (96, 32), (32, 48)))
    monkeypatch.setattr(scan, "NUM_LAYERS", 2)
    rows = scan.measure([2], turns=1)
    assert [row["way"] for row in rows] == ["scan", "unrolled"]
    monkeypatch.setattr(scan, "unrolled", lambda x, layers: scan.layer(x, layers[0]))
    with pytest.raises(SystemExit, match="2 tokens: the results of the two ways differ"):
        scan.measure([2], turns=1)
