"""Reading the results that vLLM's own code gave, which lie next to this file."""

import functools
import gzip
import json
import pathlib

VERSIONS = ("0.23.0", "0.32.0")


@functools.cache
def golden(topic, version):
    """The content of `<topic>.v<version>.json.gz`; README.md says what is in it."""
    path = pathlib.Path(__file__).parent / f"{topic}.v{version}.json.gz"
    return json.loads(gzip.decompress(path.read_bytes()))


def kernel_size(text):
    """A supported kernel size: "m16" is any multiple of 16, 16 is 16."""
    from jattn.blocks import MultipleOf

    return MultipleOf(int(text[1:])) if isinstance(text, str) else text
