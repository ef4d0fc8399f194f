"""Servers that are started again: what counts, what is passed on, and a group of two processes."""

# ruff: noqa: E402 (what is missing skips the file before it is imported)

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

httpx = pytest.importorskip("httpx", reason="the server's tests need the serve extra")
pytest.importorskip("uvicorn", reason="the server's tests need the serve extra")

from examples.engine.supervise import supervise
from tests.support import processes

# Notes each start in a file, and ends with the status, or the signal, that its number asks for.
SERVER = """
import os, pathlib, sys
log = pathlib.Path(sys.argv[1])
starts = log.read_text() if log.exists() else ""
log.write_text(starts + "x")
status = int(sys.argv[2].split(",")[len(starts)])
os.kill(os.getpid(), -status) if status < 0 else sys.exit(status)
"""


@pytest.mark.parametrize(
    ("statuses", "restarts", "last"),
    [
        ([0], 3, 0),
        ([1, -9, 0], 3, 0),
        ([1, 2], 3, 2),  # wrong arguments stay wrong
        ([1, 1, 1], 2, 1),
        ([-9], 0, 137),
    ],
)
def test_it_starts_again_what_dies(tmp_path, capfd, statuses, restarts, last):
    log = tmp_path / "starts"
    given = [str(log), ",".join(map(str, statuses))]
    assert supervise([sys.executable, "-Sc", SERVER, *given], restarts, pause=0.01) == last
    assert log.read_text() == "x" * len(statuses)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == len(statuses) - 1
    for i, line in enumerate(told):
        how = f"signal {-statuses[i]}" if statuses[i] < 0 else f"status {statuses[i]}"
        wanted = f"the server ended with {how}: restart {i + 1} of {restarts} in {0.01 * 2**i:g} s"
        assert line == wanted


def test_a_server_that_ran_for_long_is_as_good_as_new(tmp_path):
    log = tmp_path / "starts"
    command = [sys.executable, "-Sc", SERVER, str(log), "1,1,1,0"]
    assert supervise(command, 1, pause=0.01, steady=0) == 0
    assert log.read_text() == "xxxx"


@pytest.mark.parametrize("dead", [False, True], ids=["running", "dead"])
def test_it_ends_when_it_is_told_to(dead):
    server = "raise SystemExit(1)" if dead else "import time; time.sleep(60)"
    code = (
        "import sys; from examples.engine.supervise import supervise\n"
        f"sys.exit(supervise([sys.executable, '-Sc', 'print(1, flush=True); {server}'], 9))"
    )
    with subprocess.Popen(
        [sys.executable, "-Sc", code],
        cwd=processes.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as supervisor:
        assert supervisor.stdout.readline() == b"1\n"
        if dead:
            assert b"restart 1 of 9" in supervisor.stderr.readline()
        supervisor.terminate()
        assert supervisor.wait(30) == (0 if dead else 128 + signal.SIGTERM)


def servers_of(supervisor: int) -> list[int]:
    """The processes that a supervisor has started and that run."""
    children = pathlib.Path(f"/proc/{supervisor}/task/{supervisor}/children")
    return [int(child) for child in children.read_text().split()]


@pytest.mark.extended
def test_a_group_of_two_processes_serves_again_when_one_has_died(tmp_path):
    """With a supervisor each: the other process ends as well, and both join again."""
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        address, port = f"127.0.0.1:{one.getsockname()[1]}", two.getsockname()[1]
    sizes = ["--max-seqs=2", "--token-budget=4", "--max-len=128", "--restarts=9"]
    command = [sys.executable, "-m", "examples.engine.serve", "--model=qwen3-tiny", *sizes]
    command += [f"--port={port}", "--mesh=tensor=2", f"--coordinator={address}"]
    environment = {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)}
    group = [
        subprocess.Popen(
            [*command, "--num-processes=2", f"--process-id={rank}"],
            env={**os.environ, **environment},
            cwd=processes.ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    body = {"prompt": [1, 2, 3], "max_tokens": 100, "temperature": 0, "ignore_eos": True}

    def complete() -> dict | None:
        """A whole answer, or None while there is none to be had."""
        try:
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=300)
        except httpx.TransportError:
            answer = None
        if answer is not None and answer.status_code == 200:
            return answer.json()
        time.sleep(0.5)

    try:
        while (first := complete()) is None:
            assert all(supervisor.poll() is None for supervisor in group)
        (follower,) = servers_of(group[1].pid)
        lines, cut = [], False
        try:
            with httpx.stream(
                "POST", f"http://127.0.0.1:{port}/v1/completions", json={**body, "stream": True}
            ) as stream:
                for line in stream.iter_lines():
                    if not lines:
                        os.kill(follower, signal.SIGKILL)
                    lines += [line] if line else []
        except httpx.RemoteProtocolError:
            cut = True  # JAX's runtime noticed first, and aborted
        assert cut or '"type":"engine_error"' in lines[-1]
        while (again := complete()) is None:
            assert all(supervisor.poll() is None for supervisor in group)
        assert again["choices"] == first["choices"]
        assert servers_of(group[1].pid) != [follower]
    finally:
        for supervisor in group:
            supervisor.terminate()
        told = [supervisor.communicate(timeout=60)[1] for supervisor in group]
    assert "the server ended with signal 9: restart 1 of 9 in 1 s" in told[1]
    how = "signal 6" if cut else "status 1"
    assert f"the server ended with {how}: restart 1 of 9 in 1 s" in told[0]
