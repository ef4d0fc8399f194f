"""Convert text to tokens and back: as bytes, or with a checkpoint's tokenizer."""

from __future__ import annotations

import codecs
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol


class Decoder(Protocol):
    """Turns tokens into text one at a time, each character once it is complete."""

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain."""
        ...

    def finish(self) -> str:
        """Return the remaining text when no token follows."""
        ...


class Tokenizer(Protocol):
    """The methods of a tokenizer that the program needs."""

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return a prompt's tokens, with or without the special ones around a prompt."""
        ...

    def decode(self, tokens: Sequence[int], *, special_tokens: bool = False) -> str:
        """Return the text of some tokens, with or without the names of special tokens."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether texts omit the token by default, such as one that ends a turn."""
        ...

    def piece(self, token: int) -> str:
        """Return a token's text, or a special token's name; invalid bytes become `\\x..`."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes in UTF-8, which may be only part of a character."""
        ...

    def decoder(self, *, special_tokens: bool = False) -> Decoder:
        """Return a decoder for a text that grows."""
        ...


class Bytes:
    """Tokens are bytes of UTF-8: for models with a vocabulary of 256."""

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the bytes of `text`; there are no special tokens."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int], *, special_tokens: bool = False) -> str:
        """Return the text, with invalid bytes written as `\\\\x..`."""
        return bytes(tokens).decode(errors="backslashreplace")

    def is_special(self, token: int) -> bool:
        """Return False: there are no special tokens."""
        return False

    def piece(self, token: int) -> str:
        """Return the character, or `\\x..` for a byte that is not one."""
        return self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        """Return the one byte."""
        return bytes([token])

    def decoder(self, *, special_tokens: bool = False) -> Decoder:
        """Return a decoder that holds back an incomplete character."""
        return _ByteDecoder()


class _ByteDecoder:
    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WholeTextDecoder:
    """For tokenizers that can only decode whole texts.

    It decodes new tokens together with a few before them, since a token's text may depend on the
    one before it, and holds back an incomplete character, which decodes as U+FFFD.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._tokens: list[int] = []
        self._start = self._given = 0  # tokens decoded for context, tokens whose text was returned

    def push(self, token: int) -> str:
        """Add a token; return new text once it ends in a whole character."""
        self._tokens.append(token)
        text = self._new_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._start, self._given = self._given, len(self._tokens)
        return text

    def finish(self) -> str:
        """Return the remaining text, complete or not."""
        return self._new_text()

    def _new_text(self) -> str:
        before = self._decode(self._tokens[self._start : self._given])
        return self._decode(self._tokens[self._start :])[len(before) :]


def _bytes_by_character() -> dict[str, int]:
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in shown)
    return {chr(byte): byte for byte in shown} | {chr(256 + i): b for i, b in enumerate(others)}


# Byte-level vocabularies such as GPT-2's write each byte as a character: itself if printable,
# else the next unused one from 256 on.
BYTES = _bytes_by_character()


class Subwords:
    """Another package's tokenizer, whose tokens are parts of words.

    By default, `encode` adds the tokens that the checkpoint puts around a prompt, and `decode`
    drops special tokens.
    """

    def __init__(
        self,
        encode: Callable[[str, bool], list[int]],
        decode: Callable[[Sequence[int], bool], str],
        name: Callable[[int], str | None],
    ):
        """Wrap the package's functions.

        Args:
          encode: takes a text, and whether to add special tokens.
          decode: takes tokens, and whether to keep special ones.
          name: returns a token as the vocabulary writes it, or None.
        """
        self._encode, self._decode, self._name = encode, decode, name

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return a prompt's tokens, with or without the special ones around a prompt.

        Raises:
          UnicodeEncodeError: the text has a lone surrogate, which is not a character.
        """
        text.encode()  # the packages would raise a TypeError
        return self._encode(text, special_tokens)

    def decode(self, tokens: Sequence[int], *, special_tokens: bool = False) -> str:
        """Return the text of some tokens, with or without the names of special tokens."""
        return self._decode(tokens, special_tokens)

    def is_special(self, token: int) -> bool:
        """Whether the token has text only when special tokens are kept."""
        return not self._decode([token], False) and bool(self._decode([token], True))

    def piece(self, token: int) -> str:
        """Return a token's text, with bytes of an incomplete character as `\\x..`."""
        return self.token_bytes(token).decode(errors="backslashreplace")

    def token_bytes(self, token: int) -> bytes:
        """Return a token's bytes, even if they are only part of a character."""
        text = self._decode([token], True)
        name = self._name(token) if "\ufffd" in text else None
        if name is None:
            return text.encode()
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", name):  # SentencePiece's byte fallback
            return bytes.fromhex(byte[1])
        if set(name) <= BYTES.keys():
            return bytes(BYTES[character] for character in name)
        return text.encode()

    def decoder(self, *, special_tokens: bool = False) -> Decoder:
        """Return a decoder for a text that grows."""
        return WholeTextDecoder(lambda tokens: self._decode(tokens, special_tokens))

    @classmethod
    def from_tokenizers(cls, path: Path) -> Subwords:
        """Read a `tokenizer.json` with the `tokenizers` package.

        Raises:
          ValueError: the package cannot read it.
        """
        from tokenizers import Tokenizer as Loaded

        try:
            loaded = Loaded.from_file(str(path))
        except Exception as error:  # the package defines no exception of its own
            raise ValueError(f"{path}: the tokenizers package cannot read it: {error}") from error
        return cls(
            lambda text, special: loaded.encode(text, add_special_tokens=special).ids,
            lambda tokens, special: loaded.decode(list(tokens), skip_special_tokens=not special),
            loaded.id_to_token,
        )

    @classmethod
    def from_transformers(cls, directory: Path) -> Subwords:
        """Read a tokenizer directory with the `transformers` package."""
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        return cls(
            lambda text, special: loaded.encode(text, add_special_tokens=special),
            lambda tokens, special: loaded.decode(list(tokens), skip_special_tokens=not special),
            loaded.convert_ids_to_tokens,
        )


class TextStream:
    """The text of a growing sequence, up to the first stop string.

    Text that was returned never changes: a character is held back until it is complete, and a
    possible beginning of a stop string until it proves not to be one. The stop string itself is
    never returned.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        *,
        special_tokens: bool = False,
    ):
        self._decoder = tokenizer.decoder(special_tokens=special_tokens)
        self._stops = tuple(stop_strings)
        self._held = ""

    def push(self, tokens: Sequence[int], *, end: bool = False) -> tuple[str, bool]:
        """Add tokens; return the text that is now certain, and whether a stop string ended it.

        Args:
          tokens: the new tokens.
          end: whether they are the last.
        """
        text = self._held + "".join(map(self._decoder.push, tokens))
        if end:
            text += self._decoder.finish()
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            return text[: min(found)], True
        sure = len(text) if end else len(text) - self._longest_beginning(text)
        self._held = text[sure:]
        return text[:sure], False

    def _longest_beginning(self, text: str) -> int:
        """Return how many characters at the end of a text could begin a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        return next(
            (
                n
                for n in range(min(longest, len(text)), 0, -1)
                if any(stop.startswith(text[-n:]) for stop in self._stops)
            ),
            0,
        )


def load_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """Load a checkpoint's tokenizer.

    Raises:
      ValueError: there is none, it cannot be read, or the package to read it is not installed.
    """
    path = directory / "tokenizer.json"
    if path.is_file():
        if importlib.util.find_spec("tokenizers"):
            return Subwords.from_tokenizers(path)
        if importlib.util.find_spec("transformers"):
            return Subwords.from_transformers(directory)
        raise ValueError(f"{path}: reading it needs the tokenizers package: pip install tokenizers")
    if vocab_size == 256:
        return Bytes()
    raise ValueError(
        f"{directory} has no tokenizer.json, and its vocabulary of {vocab_size} tokens is not bytes"
    )
