"""Text to tokens and back, for the two kinds of checkpoint there are here."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Tokenizer(Protocol):
    """What the program needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""
        ...


class Bytes:
    """Tokens are bytes of UTF-8: for models with a vocabulary of 256."""

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Text, with bytes that are none written as `\\\\x..`."""
        return bytes(tokens).decode(errors="backslashreplace")


class FromTokenizers:
    """A `tokenizer.json`, read by the `tokenizers` package."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Loaded

        self._tokenizer = Loaded.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        """Tokens, with those the file puts around a prompt."""
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(tokens))


class FromTransformers:
    """A tokenizer directory, read by the `transformers` package."""

    def __init__(self, directory: Path):
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)

    def encode(self, text: str) -> list[int]:
        """Tokens, with those the tokenizer puts around a prompt."""
        return self._tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


def load_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
      ValueError: there is none, or the package that reads it is not installed.
    """
    path = directory / "tokenizer.json"
    if path.is_file():
        if importlib.util.find_spec("tokenizers"):
            return FromTokenizers(path)
        if importlib.util.find_spec("transformers"):
            return FromTransformers(directory)
        raise ValueError(f"{path}: reading it takes the tokenizers package: pip install tokenizers")
    if vocab_size == 256:
        return Bytes()
    raise ValueError(
        f"{directory}: there is no tokenizer.json, and a vocabulary of {vocab_size} is not bytes"
    )
