"""Structured output: texts that follow a JSON schema or a regular expression.

    grammar = Grammars(tokenizer, ...).from_schema({"type": "object", ...})
    request = Request(prompt, 100, grammar=grammar)

Before each token of such a sequence, the host computes a bit mask of the tokens that its text
allows next, and sends it to the device, where the step chooses among them. The text ends when
nothing can follow. llguidance (extra `serve`) computes the masks; it is imported with the first
grammar.
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
        """Read a tokenizer's tokens.

        Args:
          tokenizer: says which bytes a token stands for, unless there is a `path`.
          vocab_size: the number of the model's logits.
          stop_tokens: tokens that end a text; without any, a text ends where nothing can follow.
          path: a `tokenizer.json` to read instead, if there are stop tokens: llguidance accepts no
            tokens other than the file's.
        """
        import llguidance

        ends = list(stop_tokens) or [vocab_size]  # this extra token is never chosen
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
        """Compile the grammar of a schema's JSON texts, without spaces between tokens.

        Raises:
          ValueError: it is not a schema, or has features that llguidance does not support.
        """
        options = {"whitespace_flexible": False}
        return self.compile(self._matcher.grammar_from_json_schema(schema, options))

    def from_regex(self, pattern: str) -> Grammar:
        """Compile the grammar of the texts that a regular expression (Rust's) matches entirely.

        Raises:
          ValueError: it is not a regular expression.
        """
        return self.compile(self._matcher.grammar_from_regex(pattern))

    def compile(self, source: str) -> Grammar:
        """Compile a grammar in llguidance's own language, such as `Grammar.source`.

        Raises:
          ValueError: it is invalid, too complex, or allows no text of at least one token.
        """
        matcher = self._matcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        grammar = Grammar(matcher, self._sizes, source)
        try:
            # Here rather than in a step, because it may take seconds. Matchers share both the
            # results and the budget for more: the second one fails if no budget is left.
            for _ in range(2):
                grammar.matcher().allowed()
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        return grammar


class Grammar:
    """A compiled grammar. Each sequence that follows it has its own matcher."""

    def __init__(self, matcher: Any, sizes: tuple[int, int], source: str):
        self._matcher, self._sizes = matcher, sizes
        self.source = source  # so that another process can compile it

    def matcher(self) -> Matcher:
        """Make a matcher for a new text."""
        return Matcher(self._matcher.deep_copy(), self._sizes)


class Matcher:
    """The state of a text that follows a grammar."""

    def __init__(self, matcher: Any, sizes: tuple[int, int]):
        self._matcher, self._sizes = matcher, sizes  # tokens of the model, and of the grammar

    def allowed(self) -> np.ndarray:
        """Return the tokens that may follow: int32 [ceil(vocabulary / 32)], the lowest bit first.

        Raises:
          RuntimeError: there are none, or computing them is too expensive.
        """
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        words = allocate_token_bitmask(1, self._sizes[1])
        fill_next_token_bitmask(self._matcher, words)
        self._check()
        words = words[0, : -(-self._sizes[0] // 32)]
        if not words.any():  # the text is complete, but the model has no stop token
            raise RuntimeError(NO_TOKEN)
        return words

    def accept(self, token: int) -> bool:
        """Accept the chosen token; return whether the text is complete, so that nothing can follow.

        Raises:
          RuntimeError: the token is not allowed, or checking it is too expensive.
        """
        self._matcher.consume_token(token)
        self._check()  # a failed matcher also counts as stopped
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]  # its whole state follows
            if reason.startswith("NoExtension"):
                raise RuntimeError(NO_TOKEN)
            raise RuntimeError(f"the grammar failed: {reason}")


class _Source:
    """A tokenizer with the interface that llguidance expects."""

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
    """Make the compiler of grammars for a checkpoint; None without llguidance."""
    if importlib.util.find_spec("llguidance") is None:
        return None
    path = directory / "tokenizer.json"
    return Grammars(tokenizer, vocab_size, stop_tokens, path if path.is_file() else None)
