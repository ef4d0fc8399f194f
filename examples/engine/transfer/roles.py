"""The roles of servers that share the work: one reads prompts, another one decodes.

    python -m examples.engine.serve --role prefill --port 8001
    python -m examples.engine.serve --role decode --prefill-server http://127.0.0.1:8001

Clients talk to the second one. Both serve the same checkpoint in the same cache format, which is
checked when the second one starts and with every prompt.
"""

from __future__ import annotations

import argparse
import http.client
import logging
from collections.abc import Sequence

from examples.engine.engine import Engine
from examples.engine.transfer.description import description_of
from examples.engine.transfer.offers import Offers
from examples.engine.transfer.remote import PrefillServer, Remote, TransferError
from examples.options import integer

MIB = 1 << 20


def add_role_options(parser: argparse.ArgumentParser) -> None:
    """The options of servers that share the work."""
    add = parser.add_argument
    add("--role", choices=("prefill", "decode"), help="read prompts for others, or have them read")
    add(
        "--prefill-server",
        metavar="URL",
        action="append",
        default=[],
        help="reads prompts for this server, which is sent its --api-key; may be repeated",
    )
    for name, default, words in (
        ("--prefill-timeout", 30, "seconds in which a prompt must be read and arrive"),
        ("--prefill-tokens", 64, "shorter prompts are read here, the cached part aside"),
        ("--transfer-memory", 1024, "MiB of host memory for what is handed over"),
    ):
        add(name, metavar="N", type=integer(1), default=default, help=f"{words} (%(default)s)")


def check_role(options: argparse.Namespace) -> None:
    """See that options fit each other, before the model is loaded.

    Raises:
      ValueError: they do not.
    """
    if (options.role == "decode") != bool(options.prefill_server):
        raise ValueError("--role decode and --prefill-server URL go together")
    if options.role == "prefill" and options.draft is not None:
        raise ValueError(
            f"--draft is {options.draft!r}, but --role prefill decodes nothing: it must be absent"
        )
    if options.role == "prefill" and not (options.speculate or "mtp").startswith("mtp"):
        raise ValueError(
            f"--speculate is {options.speculate!r}, but --role prefill decodes nothing: it must be "
            "mtp=N, if the server that decodes guesses with that layer, or absent"
        )


def check_engines(options: argparse.Namespace, engines: Sequence[Engine]) -> None:
    """See that engines can hand prompts over, if the role asks for it.

    Raises:
      ValueError: they cannot.
    """
    role = f"--role {options.role}"
    if options.role == "prefill" and len(engines) > 1:
        raise ValueError(
            f"{role} is for one group, but --mesh is {options.mesh}: run a server each"
        )
    if options.role and engines[0].transfer is None:
        raise ValueError(
            f"{role} cannot hand over blocks that have one scale (--kv-format {options.kv_format}) "
            f"where context deals their tokens to several devices: --mesh is {options.mesh}"
        )


def offers_of(options: argparse.Namespace) -> Offers | None:
    """The store of prompts that this server reads for others, if it does."""
    return Offers(options.transfer_memory * MIB) if options.role == "prefill" else None


def remote_of(options: argparse.Namespace, engine: Engine) -> Remote | None:
    """The client of the servers that read this one's prompts, if others do.

    Raises:
      ValueError: one of them has another model, dtype or cache format.
    """
    if options.role != "decode":
        return None
    description = description_of(engine)
    servers = []
    for url in options.prefill_server:
        server = PrefillServer(
            url,
            engine.transfer,
            description,
            api_key=options.api_key,
            seconds=options.prefill_timeout,
        )
        try:
            server.check()
        except (TransferError, OSError, http.client.HTTPException) as error:
            # It may be starting; it compares what it is asked for, too.
            words = "%s does not answer yet (%s): until it does, prompts are read here"
            logging.getLogger(__name__).warning(words, url, error)
        servers.append(server)
    return Remote(
        servers,
        least_tokens=options.prefill_tokens,
        most_bytes=options.transfer_memory * MIB,
    )
