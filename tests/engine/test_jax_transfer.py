"""JAX's transfer server, and why prompts do not go through it (docs/disaggregation.md)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.support.processes import ROOT

START = """
import sys
import jax
import jax.numpy as jnp
from jax.experimental import transfer

(device,) = jax.devices()[:1]
server = transfer.start_transfer_server(device.client, "127.0.0.1:0", ["127.0.0.1:0"])
"""
SENDER = """
server.await_pull(7, [jnp.arange(1000.0)])
print(server.address(), flush=True)
sys.stdin.read()
"""
RECEIVER = """
where = jax.sharding.SingleDeviceSharding(device)
wanted = jax.ShapeDtypeStruct((1000,), jnp.float32, sharding=where)
(found,) = server.connect(sys.argv[1]).pull(7, [wanted])
print(bool((found == jnp.arange(1000.0)).all()))
"""


@pytest.mark.extended
def test_jax_moves_arrays_between_processes_and_crashes_on_foreign_bytes(tmp_path):
    """If it survives them, the page's reason for not using it no longer holds."""
    try:
        from jax.experimental import transfer  # noqa: F401
    except (ImportError, AttributeError):
        pytest.skip("this JAX has no transfer server")
    given = {
        "env": {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        "cwd": tmp_path,  # a core dump would land here
        "text": True,
    }
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(
            [sys.executable, "-c", START + SENDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            **given,
        ) as sender,
    ):
        try:
            address = sender.stdout.readline().strip()
            receiver = [sys.executable, "-c", START + RECEIVER, address]
            pulled = subprocess.run(receiver, capture_output=True, timeout=300, **given)
            assert pulled.stdout == "True\n", pulled.stderr
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(bytes(4096))
                try:
                    status = sender.wait(60)
                except subprocess.TimeoutExpired:
                    pytest.fail("the server survives 4,096 zero bytes: correct the page")
        finally:
            sender.kill()
    assert status == -signal.SIGABRT
    assert "socket-server.cc" in (tmp_path / "log").read_text()
