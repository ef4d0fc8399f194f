"""Text to tokens and back, for the two kinds of checkpoint there are here."""

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
        """The text that a further token makes certain."""
        ...

    def finish(self) -> str:
        """The text that is left when no token follows."""
        ...


class Tokenizer(Protocol):
    """The methods of a tokenizer that the program needs."""

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The tokens of a prompt, with those that begin and end one or without."""
        ...

    def decode(self, tokens: Sequence[int], *, special_tokens: bool = False) -> str:
        """The text of some tokens, with the names of special ones or without."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether it is in no text, as one that ends a turn, unless special ones are asked for."""
        ...

    def piece(self, token: int) -> str:
        """The text of a token, or a special one's name; bytes that are no text as `\\x..`."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of it in UTF-8, which may be a part of a character's."""
        ...

    def decoder(self, *, special_tokens: bool = False) -> Decoder:
        """Decodes a text as it grows."""
        ...


class Bytes:
    """Tokens are bytes of UTF-8: for models with a vocabulary of 256."""

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The bytes of `text`; there are no special tokens."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text, with bytes that are none written as `\\\\x..`."""
        return bytes(tokens).decode(errors="backslashreplace")

    def is_special(self, token: int) -> bool:
        """There are none."""
        return False

    def piece(self, token: int) -> str:
        """The character, or `\\x..` for a byte that is none."""
        return self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        """The one byte."""
        return bytes([token])

    def decoder(self, *, special_tokens: bool = False) -> Decoder:
        """Holds back the first bytes of a character."""
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

    Decodes a few tokens before the new ones with them, since what a token means may depend on the
    one before it, and holds back an incomplete character, which decodes as U+FFFD.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._tokens: list[int] = []
        self._start = self._given = 0  # tokens decoded for context, tokens whose text was returned

    def push(self, token: int) -> str:
        """The text of a token, once it ends in a whole character."""
        self._tokens.append(token)
        text = self._new_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._start, self._given = self._given, len(self._tokens)
        return text

    def finish(self) -> str:
        """The text that is left, complete or not."""
        return self._new_text()

    def _new_text(self) -> str:
        before = self._decode(self._tokens[self._start : self._given])
        return self._decode(self._tokens[self._start :])[len(before) :]


def _bytes_by_character() -> dict[str, int]:
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in shown)
    return {chr(byte): byte for byte in shown} | {chr(256 + i): b for i, b in enumerate(others)}


# Vocabularies of bytes, as GPT-2's, write each as a character: itself, or the next after 255.
BYTES = _bytes_by_character()


class Subwords:
    """A tokenizer of another package: tokens are parts of words.

    `encode` adds the tokens that the checkpoint puts around a prompt, unless it is told not to;
    `decode` drops special ones, unless it is told to keep them.
    """

    def __init__(
        self,
        encode: Callable[[str, bool], list[int]],
        decode: Callable[[Sequence[int], bool], str],
        name: Callable[[int], str | None],
    ):
        """Take the package's functions.

        Args:
          encode: is told whether to keep special tokens.
          decode: likewise.
          name: a token as the vocabulary writes it, or None.
        """
        self._encode, self._decode, self._name = encode, decode, name

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """The tokens of a prompt, with those that begin and end one or without.

        Raises:
          UnicodeEncodeError: it has half of a surrogate pair, which is no character.
        """
        text.encode()  # the packages raise a TypeError
        return self._encode(text, special_tokens)

    def decode(self, tokens: Sequence[int], *, special_tokens: bool = False) -> str:
        """The text of some tokens, with the names of special ones or without."""
        return self._decode(tokens, special_tokens)

    def is_special(self, token: int) -> bool:
        """Whether only special tokens' names show it."""
        return not self._decode([token], False) and bool(self._decode([token], True))

    def piece(self, token: int) -> str:
        """The text of one token, or `\\x..` for bytes of a character that it does not complete."""
        return self.token_bytes(token).decode(errors="backslashreplace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token, of one that is a part of a character, too."""
        text = self._decode([token], True)
        name = self._name(token) if "\ufffd" in text else None
        if name is None:
            return text.encode()
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", name):  # as SentencePiece falls back to bytes
            return bytes.fromhex(byte[1])
        if set(name) <= BYTES.keys():
            return bytes(BYTES[character] for character in name)
        return text.encode()

    def decoder(self, *, special_tokens: bool = False) -> Decoder:
        """Decodes a text as it grows."""
        return WholeTextDecoder(lambda tokens: self._decode(tokens, special_tokens))

    @classmethod
    def from_tokenizers(cls, path: Path) -> Subwords:
        """A `tokenizer.json`, read by the `tokenizers` package.

        Raises:
          ValueError: it cannot be read.
        """
        from tokenizers import Tokenizer as Loaded

        try:
            loaded = Loaded.from_file(str(path))
        except Exception as error:  # the package has none of its own
            raise ValueError(f"{path}: the tokenizers package cannot read it: {error}") from error
        return cls(
            lambda text, special: loaded.encode(text, add_special_tokens=special).ids,
            lambda tokens, special: loaded.decode(list(tokens), skip_special_tokens=not special),
            loaded.id_to_token,
        )

    @classmethod
    def from_transformers(cls, directory: Path) -> Subwords:
        """A tokenizer directory, read by the `transformers` package."""
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        return cls(
            lambda text, special: loaded.encode(text, add_special_tokens=special),
            lambda tokens, special: loaded.decode(list(tokens), skip_special_tokens=not special),
            loaded.convert_ids_to_tokens,
        )


class TextStream:
    """The text of a growing sequence, up to the first of some stop strings.

    What is given out never changes: a character waits until it is complete, and the beginning of a
    stop string until it turns out to be none. A stop string itself is not given out.
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
        """The text that further tokens make certain, and whether a stop string ended it.

        Args:
          tokens: what came.
          end: nothing will follow.
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
        """Characters at the end of a text with which some stop string begins."""
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
    """The tokenizer of a checkpoint.

    Raises:
      ValueError: there is none, it cannot be read, or the package that reads it is not installed.
    """
    path = directory / "tokenizer.json"
    if path.is_file():
        if importlib.util.find_spec("tokenizers"):
            return Subwords.from_tokenizers(path)
        if importlib.util.find_spec("transformers"):
            return Subwords.from_transformers(directory)
        raise ValueError(f"{path}: reading it takes the tokenizers package: pip install tokenizers")
    if vocab_size == 256:
        return Bytes()
    raise ValueError(
        f"{directory}: there is no tokenizer.json, and a vocabulary of {vocab_size} is not bytes"
    )
