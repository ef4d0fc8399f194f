"""A server that is started again when it dies: `python -m examples.engine.serve --restarts 5`.

    supervisor    starts ----> server    loads the model, serves, dies     status 1, or a signal
                  pauses 1 s
                  starts ----> server    ...                               2, 4, ... 60 s

Clients are connected to the supervisor (`examples/engine/http/front.py`), so that their requests
outlive the server.

A server of several processes has a supervisor for each, on its host. Where one process dies, the
others end too (`examples/engine/hosts.py`), so that all supervisors start theirs again, and the new
ones join: it takes no word between the hosts. systemd, Kubernetes and Slurm do the same.
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

FIRST_PAUSE = 1.0  # seconds before the first restart; each is twice as long as the one before
LONGEST_PAUSE = 60.0
STEADY = 600.0  # a server that has run for so many seconds is as good as new: counts begin again
WRONG_ARGUMENTS = 2  # the status of a server that would only die again


def supervise(
    command: Sequence[str],
    restarts: int,
    *,
    pause: float = FIRST_PAUSE,
    steady: float = STEADY,
    front: Front | None = None,
) -> int:
    """Run a command until it ends well; SIGTERM and SIGINT are passed on to it.

    Args:
      command: what to run.
      restarts: how often to start it again.
      pause: seconds before the first restart.
      steady: seconds of running after which restarts and pauses are counted from the first again.

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
            # In a group of its own, so that a terminal's interrupt comes once.
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
