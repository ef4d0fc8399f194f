"""How a server starts: two programs first, others in the background, all cached for next time."""

# ruff: noqa: E402 (a missing package skips the file before the imports below)

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support import extras

httpx = extras.serve()

import jattn
from benchmarks.serving.servers import free_port
from examples import native
from examples.engine import hosts, serve, starting
from examples.engine import programs as programs_module
from examples.engine.engine import Engine
from examples.engine.programs import first_buckets
from examples.engine.request import Request
from examples.engine.step import Bucket, make_buckets
from tests.support.engines import limits
from tests.support.processes import ROOT
from tests.support.serving import wait_for
from tests.support.tiny_model import tiny_model


def test_the_first_buckets_hold_everything():
    bounds = limits(budget=16)
    buckets = make_buckets(bounds, [1, 2], [4, 8], num_drafts=2)
    assert set(first_buckets(buckets)) == {Bucket(4, 4, 1), Bucket(16, 4, 16)}


@pytest.mark.extended
def test_an_engine_serves_while_it_compiles(monkeypatch):
    go, compiled = threading.Event(), []
    one = programs_module.Programs._one

    def held(self, bucket, *more):
        assert go.wait(60)
        one(self, bucket, *more)
        compiled.append(bucket)

    monkeypatch.setattr(programs_module.Programs, "_one", held)
    bounds = limits(budget=16)
    buckets = make_buckets(bounds, [1, 4], [16])
    engine = Engine(tiny_model(), bounds, buckets=buckets, behind=True)
    run, used = engine.run, []
    monkeypatch.setattr(engine, "run", lambda bucket, *a: used.append(bucket) or run(bucket, *a))
    request = Request(tuple(range(20)), 6)
    (first,) = engine.generate([request])
    assert set(engine.steps.programs) == set(used) == {Bucket(4, 4, 1), Bucket(16, 4, 16)}
    assert engine.steps.num_coming == 2
    go.set()
    scored = Request(request.prompt, 6, logprobs=0, prompt_logprobs=True)
    (scoring,) = engine.generate([scored])  # compiled at once, before its turn
    while engine.steps.num_coming:
        time.sleep(0.01)
    assert compiled == [Bucket(1, 1, 1)]
    assert Bucket(16, 4, 16, scores=True) in engine.steps.programs
    used.clear()
    engine.reset()
    (second,) = engine.generate([request])
    assert Bucket(1, 1, 1) in used
    assert first.chosen == scoring.chosen == second.chosen


@pytest.mark.extended
def test_a_program_that_fails_in_the_background_fails_where_it_is_needed(monkeypatch):
    def broken(self, bucket, *more):
        raise OverflowError("too large")

    monkeypatch.setattr(programs_module.Programs, "_one", broken)
    bounds = limits(budget=16)
    engine = Engine(tiny_model(), bounds, buckets=make_buckets(bounds, [4], [16]), behind=True)
    engine.add(Request((1, 2, 3), 1, logprobs=0, prompt_logprobs=True))
    with pytest.raises(OverflowError, match="too large") as caught:
        engine.step()
    (failed,) = engine.recover(caught.value)
    assert failed.finish_reason == "error"
    (fine,) = engine.generate([Request((1, 2, 3), 2)])
    assert len(fine.chosen) == 2


def test_programs_are_kept_in_the_users_cache(monkeypatch, tmp_path):
    set_to = {}
    monkeypatch.setattr(serve.jax.config, "update", set_to.__setitem__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    parse = serve.options_parser().parse_args
    serve.keep_compiled(parse([]))
    assert set_to.pop("jax_compilation_cache_dir") == f"{tmp_path}/jattn/compiled"
    serve.keep_compiled(parse(["--compilation-cache", "/there"]))
    assert set_to.pop("jax_compilation_cache_dir") == "/there"
    set_to.clear()
    serve.keep_compiled(parse(["--no-compilation-cache"]))
    assert set_to == {"jax_enable_compilation_cache": False}
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    set_to.clear()
    serve.keep_compiled(parse([]))
    assert set_to == {}


def test_only_origins_that_browsers_send_are_accepted(capsys):
    parse = serve.options_parser().parse_args
    for text in ("*", "null", "https://example.com", "http://localhost:8000", "app://page"):
        assert parse(["--cors", text]).cors == [text]
    for text in ("", "nonsense", "https://example.com/", "https://a.com,https://b.com"):
        with pytest.raises(SystemExit):
            parse(["--cors", text])
        assert f"{text!r} must be an origin" in capsys.readouterr().err


def test_a_user_without_a_home_is_served(monkeypatch):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    for name in ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    set_to = {}
    monkeypatch.setattr(serve.jax.config, "update", set_to.__setitem__)
    serve.keep_compiled(serve.options_parser().parse_args([]))
    assert set_to == {"jax_enable_compilation_cache": False}
    monkeypatch.setattr(native, "processor_features", lambda: native.LEAST)
    monkeypatch.setattr(native, "_taken", [])
    assert native.load() == "Could not determine home directory."


@pytest.mark.extended
def test_a_server_starts_from_its_cache_and_ends_in_order(tmp_path):
    """Run the command twice; terminated during a request, it finishes the request first."""
    port = free_port()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "examples.engine.serve", "--port", str(port)]
    command += ["--max-seqs", "1", "--token-budget", "4"]  # two shapes of steps
    body = {"prompt": "The function", "max_tokens": 40, "temperature": 0, "stream": True}
    texts, kept = [], []
    for _ in range(2):
        with subprocess.Popen(command, env=environment) as server:
            wait_for(port, server)
            url = f"http://127.0.0.1:{port}/v1/completions"
            with httpx.stream("POST", url, json=body, timeout=300) as response:
                lines = filter(None, response.iter_lines())
                texts.append([next(lines)])
                server.send_signal(signal.SIGTERM)
                texts[-1] += lines
            assert server.wait(120) == 0
        assert texts[-1].pop() == "data: [DONE]"
        kept.append({path.name for path in (tmp_path / "jattn" / "compiled").iterdir()})
    first, second = (
        [json.loads(line.removeprefix("data: "))["choices"] for line in one] for one in texts
    )
    assert first == second
    assert kept[0] <= kept[1]
    # No program is kept twice. Programs that compile very quickly are not kept at all.
    assert sum(name.startswith("jit_step") for name in kept[1]) == 2


# -- what goes wrong before it serves --------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, jattn.UnsupportedError])
def test_engines_stop_compiling_when_the_start_fails(monkeypatch, error):
    """The host cache's memory is divided among the engines."""
    engines, given = [Mock(followers=None), Mock(followers=Mock())], []

    def build(options, mesh):
        given.append((options.host_cache, mesh))
        return engines[len(given) - 1], None, None

    monkeypatch.setattr(serve, "make_meshes", lambda text: [text + " 0", text + " 1"])
    monkeypatch.setattr(serve, "build", build)
    monkeypatch.setattr(serve, "check_engines", Mock(side_effect=error("not this one")))
    options = serve.options_parser().parse_args(["--mesh", "data=2", "--host-cache", "4"])
    with pytest.raises(error, match="not this one"):
        serve.start(options)
    assert given == [(2.0, "data=2 0"), (2.0, "data=2 1")]
    for engine in engines:
        engine.close.assert_called_once_with()
    engines[1].followers.tell.assert_called_once_with(hosts.END)
    assert options.host_cache == 4.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_starting_server_ends_when_it_is_told_to(number):
    """It ends at once, with one sentence, even during a call that Python cannot interrupt."""
    code = """
import ctypes
from examples.engine.starting import ends_when_told
with ends_when_told("the server"):
    print("starting", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time it waits for itself
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "starting\n"
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert error == f"the server: ended by {number.name} before it was ready\n"


def test_signals_only_call_the_given_function():
    before, calls = [signal.getsignal(number) for number in starting.SIGNALS], []
    with starting.on_signals(lambda: calls.append(1)):
        for number in starting.SIGNALS:
            signal.raise_signal(number)
    assert len(calls) == 2
    assert [signal.getsignal(number) for number in starting.SIGNALS] == before


def test_signal_handlers_are_restored_after_the_start():
    before = [signal.getsignal(number) for number in starting.SIGNALS]
    with starting.ends_when_told("the server"):
        assert [signal.getsignal(number) for number in starting.SIGNALS] != before
    assert [signal.getsignal(number) for number in starting.SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert "signals" not in {thread.name for thread in threading.enumerate()}


def test_half_a_program_is_removed_and_reported(tmp_path):
    """JAX would warn about it at every start, and never write it again."""
    whole = zlib.compress(bytes(1000))
    files = {"jit_step-1-cache": whole, "jit_step-2-cache": whole[:9], "jit_other-3-cache": b""}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    told = []
    take = starting.tells_of_cache(tmp_path, told.append)
    assert not take("something else")
    for what in ("reading", "reading", "writing"):
        assert take(f"Error {what} persistent compilation cache entry for 'jit_step': OSError: no")
    assert {path.name for path in tmp_path.iterdir()} == {"jit_step-1-cache", "jit_other-3-cache"}
    assert told == [
        f"compiled programs cannot be {done} {tmp_path}: OSError: no"
        for done in ("read from", "kept in")
    ]


@pytest.mark.extended
@pytest.mark.parametrize("wrong", ["half", "full"])
def test_warnings_of_jax_are_still_understood(tmp_path, wrong):
    """About half a program, and about a full disk."""
    code = f"""
import resource, sys, warnings
import jax, jax.numpy as jnp
from examples.engine import starting
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
starting.watch_cache({str(tmp_path)!r})
if sys.argv[1:] == ["full"]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
print([jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((n, n))) for n in (2, 3)])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        return done.stderr

    if wrong == "full":
        told = run("full")
        assert told.count("\n") == 1, told
        assert f"compiled programs cannot be kept in {tmp_path}: OSError: [Errno 27]" in told
        assert not list(tmp_path.glob("*-cache"))
        return
    assert run() == ""
    kept = {path: path.read_bytes() for path in tmp_path.glob("jit__lambda*-cache")}
    for path, data in kept.items():
        path.write_bytes(data[: len(data) // 2])
    told = run()
    assert told.count("\n") == 1, told
    assert f"compiled programs cannot be read from {tmp_path}: " in told
    assert kept
    assert run() == ""
