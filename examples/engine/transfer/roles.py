"""The roles of servers with disaggregated prefill: one reads prompts, another one decodes.

    python -m examples.engine.serve --role prefill --port 8001
    python -m examples.engine.serve --role decode --prefill-server http://127.0.0.1:8001

Clients talk to the second one. Both serve the same checkpoint in the same cache format, which the
second one checks when it starts, and the first one with every prompt.
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
    """Add the options of servers with disaggregated prefill."""
    add = parser.add_argument
    add(
        "--role",
        choices=("prefill", "decode"),
        help="read prompts for other servers, or decode prompts that others have read",
    )
    add(
        "--prefill-server",
        metavar="URL",
        action="append",
        default=[],
        help="a server that reads prompts for this one, and is sent its --api-key; may be repeated",
    )
    for name, default, words in (
        ("--prefill-timeout", 30, "seconds in which a prompt must be read and arrive"),
        ("--prefill-tokens", 64, "prompts with fewer uncached tokens are read here"),
        ("--transfer-memory", 1024, "MiB of host memory for contents in transfer"),
    ):
        add(name, metavar="N", type=integer(1), default=default, help=f"{words} (%(default)s)")


def check_role(options: argparse.Namespace) -> None:
    """Check that options fit each other, before the model is loaded.

    Raises:
      ValueError: they do not.
    """
    if (options.role == "decode") != bool(options.prefill_server):
        raise ValueError("--role decode and --prefill-server URL go together")
    if options.role == "prefill" and options.draft is not None:
        raise ValueError(
            f"--draft is {options.draft!r}, but must be absent: --role prefill decodes nothing"
        )
    if options.role == "prefill" and not (options.speculate or "mtp").startswith("mtp"):
        raise ValueError(
            f"--speculate is {options.speculate!r}, but --role prefill decodes nothing: it must be "
            "mtp=N if the server that decodes uses mtp, and absent otherwise"
        )


def check_engines(options: argparse.Namespace, engines: Sequence[Engine]) -> None:
    """Check that engines can transfer prompts, if the role needs it.

    Raises:
      ValueError: they cannot.
    """
    role = f"--role {options.role}"
    if options.role == "prefill" and len(engines) > 1:
        raise ValueError(
            f"{role} is for one group, but --mesh is {options.mesh}: run a server for each"
        )
    if options.role and engines[0].transfer is None:
        raise ValueError(
            f"{role} cannot transfer blocks that have one scale (--kv-format {options.kv_format}) "
            f"if context spreads their tokens over several devices: --mesh is {options.mesh}"
        )


def offers_of(options: argparse.Namespace) -> Offers | None:
    """Make the store of prompts that this server reads for others, if it does."""
    return Offers(options.transfer_memory * MIB) if options.role == "prefill" else None


def remote_of(options: argparse.Namespace, engine: Engine) -> Remote | None:
    """Make the client of the servers that read this one's prompts, if others do.

    Raises:
      ValueError: one of them has a different model, dtype or cache format.
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
            # It may be starting; it also checks every prompt that it is sent.
            words = "%s does not respond yet (%s): until it does, prompts are read here"
            logging.getLogger(__name__).warning(words, url, error)
        servers.append(server)
    return Remote(
        servers,
        least_tokens=options.prefill_tokens,
        most_bytes=options.transfer_memory * MIB,
    )
