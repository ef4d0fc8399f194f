"""Structured output: texts that follow a JSON schema or a regular expression.

    grammar = Grammars(tokenizer, ...).from_schema({"type": "object", ...})
    request = Request(prompt, 100, grammar=grammar)

Before each token of such a sequence, the host finds the tokens with which its text can go on, as a
bit mask, and sends it to the device, where the step chooses among them. The text ends when nothing
can follow. llguidance (extra `serve`) does the finding; it is imported with the first grammar.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.text import Tokenizer

NO_TOKEN = "the grammar allows no token"


class Grammars:
    """Compiles grammars for a model's tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_tokens: Sequence[int] = (),
        path: Path | None = None,
    ):
        """Take the tokens from a tokenizer.

        Args:
          tokenizer: says which bytes a token stands for, unless there is a `path`.
          vocab_size: logits of the model.
          stop_tokens: what ends a text; if there are none, a text ends where nothing can follow.
          path: of a `tokenizer.json`, which is read instead, if there are stop tokens: llguidance
            takes no further token than the file has.
        """
        import llguidance

        ends = list(stop_tokens) or [vocab_size]  # the one more is never chosen
        size = max(vocab_size, *(end + 1 for end in ends))
        source = None if path and stop_tokens else _Source(tokenizer, size, ends)
        self._sizes = vocab_size, size
        self._matcher = llguidance.LLMatcher
        self._tokenizer = llguidance.LLTokenizer(
            str(path) if source is None else llguidance.TokenizerWrapper(source),
            n_vocab=size,
            eos_token=ends,
        )

    def from_schema(self, schema: dict[str, Any]) -> Grammar:
        """The texts that are JSON of a schema, without spaces between.

        Raises:
          ValueError: it is no schema, or has what llguidance does not know.
        """
        options = {"whitespace_flexible": False}
        return self.compile(self._matcher.grammar_from_json_schema(schema, options))

    def from_regex(self, pattern: str) -> Grammar:
        """The texts that a regular expression (of Rust's kind) matches from end to end.

        Raises:
          ValueError: it is none.
        """
        return self.compile(self._matcher.grammar_from_regex(pattern))

    def compile(self, source: str) -> Grammar:
        """The texts of a grammar in llguidance's own language, such as `Grammar.source`.

        Raises:
          ValueError: it is none, no text of a token or more follows it, or it is too complex.
        """
        matcher = self._matcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        grammar = Grammar(matcher, self._sizes, source)
        try:
            # Here rather than in a step, for it may take seconds. Matchers share what is found and
            # how much more may be: the second one fails if nothing is left.
            for _ in range(2):
                grammar.matcher().allowed()
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        return grammar


class Grammar:
    """A compiled grammar. Sequences that follow it have a matcher each."""

    def __init__(self, matcher: Any, sizes: tuple[int, int], source: str):
        self._matcher, self._sizes = matcher, sizes
        self.source = source  # for another process to compile

    def matcher(self) -> Matcher:
        """A text that begins."""
        return Matcher(self._matcher.deep_copy(), self._sizes)


class Matcher:
    """A text that follows a grammar, as far as it goes."""

    def __init__(self, matcher: Any, sizes: tuple[int, int]):
        self._matcher, self._sizes = matcher, sizes  # tokens of the model, and of the grammar

    def allowed(self) -> np.ndarray:
        """The tokens that may follow: int32 [ceil(vocabulary / 32)], the lowest bit first.

        Raises:
          RuntimeError: there are none, or finding them takes too much.
        """
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        words = allocate_token_bitmask(1, self._sizes[1])
        fill_next_token_bitmask(self._matcher, words)
        self._check()
        words = words[0, : -(-self._sizes[0] // 32)]
        if not words.any():  # the text is complete, and the model has no token that says so
            raise RuntimeError(NO_TOKEN)
        return words

    def accept(self, token: int) -> bool:
        """Take the token that was chosen; whether the text is complete, and nothing can follow.

        Raises:
          RuntimeError: it is none of those allowed, or finding out takes too much.
        """
        self._matcher.consume_token(token)
        self._check()  # a matcher that has failed has stopped, too
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]  # all of its state follows
            if reason.startswith("NoExtension"):
                raise RuntimeError(NO_TOKEN)
            raise RuntimeError(f"the grammar failed: {reason}")


class _Source:
    """A tokenizer as llguidance reads it."""

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Sequence[int]):
        self.eos_token_id, self.bos_token_id = ends[0], None
        self.special_token_ids = list(ends)
        self.tokens = [
            b"<end>" if token in ends else tokenizer.token_bytes(token) for token in range(size)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, special_tokens=False)


def load_grammars(
    directory: Path, tokenizer: Tokenizer, vocab_size: int, stop_tokens: Sequence[int]
) -> Grammars | None:
    """The compiler of grammars for a checkpoint, or None without llguidance."""
    if importlib.util.find_spec("llguidance") is None:
        return None
    path = directory / "tokenizer.json"
    return Grammars(tokenizer, vocab_size, stop_tokens, path if path.is_file() else None)
