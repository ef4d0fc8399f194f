"""Which version of a host is installed, and whether jattn was tested with it."""

from __future__ import annotations

import importlib.metadata
import os

from jattn import checks

# Set to 1 to try a host version that the integration was not tested with.
ANY_VERSION = "JATTN_ANY_HOST_VERSION"


def installed(host: str) -> str:
    """The version of an installed package."""
    return importlib.metadata.version(host)


def is_taken(host: str, tested: str) -> bool:
    """Whether a host has the version that jattn was tested with, or any version is allowed."""
    return installed(host) == tested or os.environ.get(ANY_VERSION) == "1"


def check(problems: checks.Problems, host: str, tested: str) -> None:
    """Report a host version that jattn was not tested with, unless any version is allowed."""
    problems.require(
        is_taken(host, tested),
        host,
        f"version {installed(host)}",
        f"{tested}, which this jattn was tested with (set {ANY_VERSION}=1 to try another)",
    )
