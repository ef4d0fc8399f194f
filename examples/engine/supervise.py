"""Restart a server when it dies: `python -m examples.engine.serve --restarts 5`.

    supervisor    starts ----> server    loads the model, serves, dies     status 1, or a signal
                  pauses 1 s
                  starts ----> server    ...                               2, 4, ... 60 s

Clients are connected to the supervisor (`examples/engine/http/front.py`), so that their requests
outlive the server.

In a server of several processes, each has its own supervisor on its host. If one process dies, the
others end as well (`examples/engine/hosts.py`). All supervisors then restart theirs, and the new
processes join, without messages between supervisors. systemd, Kubernetes and Slurm do the same.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from examples.engine.http.front import Front

FIRST_PAUSE = 1.0  # seconds before the first restart, doubled with each
LONGEST_PAUSE = 60.0
STEADY = 600.0  # once a server has run for this many seconds, restarts are counted from 0 again
WRONG_ARGUMENTS = 2  # the status of a server that would only die again


def supervise(
    command: Sequence[str],
    restarts: int,
    *,
    pause: float = FIRST_PAUSE,
    steady: float = STEADY,
    front: Front | None = None,
) -> int:
    """Run a command until it succeeds, forwarding SIGTERM and SIGINT to it.

    Args:
      command: the command.
      restarts: how often to restart it.
      pause: seconds before the first restart.
      steady: seconds of running after which restarts and pauses are counted from 0 again.
      front: the proxy that its clients are connected to, if there is one.

    Returns: the command's last status; 0 if it was told to end and did, 128 + n if signal n ended
      it.
    """
    told = threading.Event()
    server: subprocess.Popen | None = None

    def pass_on(number: int, _: object) -> None:
        told.set()
        if front is not None:
            front.drain()
        if server is not None:
            server.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        count = 0
        while True:
            began = time.monotonic()
            # In its own process group, so that a terminal's interrupt reaches it only once.
            server = subprocess.Popen(command, process_group=0)
            if told.is_set():
                server.terminate()
            status = server.wait()
            if time.monotonic() - began > steady:
                count = 0
            if told.is_set() or status in (0, WRONG_ARGUMENTS) or count == restarts:
                return 128 - status if status < 0 else status
            seconds = min(pause * 2**count, LONGEST_PAUSE)
            count += 1
            how = f"signal {-status}" if status < 0 else f"status {status}"
            what = f"the server ended with {how}: restart {count} of {restarts} in {seconds:g} s"
            print(what, file=sys.stderr, flush=True)
            if front is not None:
                front.lost(what)
            if told.wait(seconds):
                return 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
