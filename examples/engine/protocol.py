"""The body of `POST /v1/completions`, checked field by field."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from examples.engine.model import Model
from examples.engine.request import Request, Sampling, cut
from examples.text import Tokenizer

# What OpenAI's API has and this server does not, with the values that ask for nothing.
NOTHING = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None,),
    "presence_penalty": (None, 0),
    "suffix": (None, ""),
}
KNOWN = {
    *("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop"),
    *("stop_token_ids", "stream", "stream_options", "user", "ignore_eos"),
}
MOST_CHOICES = 128
MOST_STOPS, STOP_CHARACTERS = 16, 256
MOST_STOP_TOKENS = 256
MOST_CHARACTERS = 64  # for each token that fits: longer prompts are refused before they are encoded
MOST_PROBLEMS = 8  # in an answer


@dataclasses.dataclass(frozen=True)
class Completions:
    """A checked body: a request for each choice, in order."""

    requests: tuple[Request, ...]
    num_prompts: int
    stream: bool
    include_usage: bool


def read_completions(
    body: Any, model: Model, tokenizer: Tokenizer, max_len: int, next_seed: itertools.count
) -> Completions:
    """Turn a parsed body into requests.

    Args:
      body: what was sent, parsed.
      model, tokenizer: what serves it.
      max_len: tokens of the longest sequence the engine was built for.
      next_seed: gives a seed to requests that name none.

    Raises:
      ValueError: everything that is wrong with it.
    """
    if not isinstance(body, Mapping):
        raise ValueError("the body must be a JSON object")
    read = _Reader(body)
    for name in body:
        if name in NOTHING and body[name] not in NOTHING[name]:
            read.problems.append(f"{name} is {cut(body[name])}, which this server cannot do")
        elif name not in NOTHING and name not in KNOWN:
            read.problems.append(f"{name[:60]} is not a field this server knows")
    if (asked := read.get("model", str, model.name)) != model.name:
        read.problems.append(f"model is {cut(asked)}, but must be {model.name!r}")
    prompts = _prompts(read, tokenizer, max_len)
    max_tokens = read.get("max_tokens", int, 16)
    count = read.get("n", int, 1)
    seed = read.get("seed", int, None)
    stops = read.body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not (
        isinstance(stops, list)
        and len(stops) <= MOST_STOPS
        and all(isinstance(s, str) and 0 < len(s) <= STOP_CHARACTERS for s in stops)
    ):
        read.problems.append(
            f"stop is {cut(stops)}, but must be a string or a list of strings, at most "
            f"{MOST_STOPS} of at most {STOP_CHARACTERS} characters"
        )
    ids = read.body.get("stop_token_ids") or []
    if not (
        isinstance(ids, list) and len(ids) <= MOST_STOP_TOKENS and all(_is(i, int) for i in ids)
    ):
        read.problems.append(
            f"stop_token_ids is {cut(ids)}, but must be a list of at most {MOST_STOP_TOKENS} "
            "integers"
        )
    sampling = {
        "temperature": read.get("temperature", float, 1.0),
        "top_p": read.get("top_p", float, 1.0),
        "top_k": read.get("top_k", int, 0),
    }
    options = read.get("stream_options", dict, {})
    stream, ignore_eos = read.get("stream", bool, False), read.get("ignore_eos", bool, False)
    if not 1 <= count <= MOST_CHOICES // max(len(prompts), 1):
        read.problems.append(
            f"n is {cut(count)} for {len(prompts)} prompts, but must give 1..{MOST_CHOICES} choices"
        )
    for prompt in prompts:
        if len(prompt) + max_tokens > max_len:
            read.problems.append(
                f"prompt has {len(prompt)} tokens and max_tokens is {cut(max_tokens)}, but "
                f"together they must be at most {max_len}"
            )
    read.finish()

    stop_tokens = (*ids, *(() if ignore_eos else model.stop_tokens))
    seeds = next_seed if seed is None else itertools.count(seed)
    try:
        requests = tuple(
            Request(
                tuple(prompt),
                max_tokens,
                Sampling(**sampling, seed=next(seeds) % 2**32),
                stop_tokens,
                tuple(stops),
            )
            for prompt in prompts
            for _ in range(count)
        )
    except ValueError as error:
        raise ValueError(str(error).replace("max_new_tokens", "max_tokens")) from None
    return Completions(requests, len(prompts), stream, bool(options.get("include_usage")))


class _Reader:
    """Reads fields, and collects what is wrong with them."""

    def __init__(self, body: Mapping[str, Any]):
        self.body = body
        self.problems: list[str] = []

    def get(self, name: str, kind: type, default: Any) -> Any:
        """A field of a type, or its default; null counts as not given."""
        value = self.body.get(name)
        if value is None:
            return default
        if not _is(value, kind):
            self.problems.append(f"{name} is {cut(value)}, but must be {_WORDS[kind]}")
            return default
        return value

    def finish(self) -> None:
        """Raise if anything was wrong."""
        if self.problems:
            rest = len(self.problems) - MOST_PROBLEMS
            more = [f"and {rest} more"] if rest > 0 else []
            raise ValueError("; ".join([*self.problems[:MOST_PROBLEMS], *more]))


_WORDS = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    dict: "an object",
}


def _is(value: Any, kind: type) -> bool:
    """Whether a JSON value is of a type: true is no integer, and an integer is a number."""
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _prompts(read: _Reader, tokenizer: Tokenizer, max_len: int) -> list[list[int]]:
    """One list of tokens per prompt: strings are encoded, lists of integers are tokens."""
    prompt = read.body.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is(prompt[0], int)):
        prompt = [prompt]
    prompts = prompt if isinstance(prompt, list) else [None]
    if len(prompts) > MOST_CHOICES:
        read.problems.append(
            f"prompt has {len(prompts)} prompts, but must have at most {MOST_CHOICES}"
        )
        return []
    tokens = []
    for one in prompts:
        most = max_len * (MOST_CHARACTERS if isinstance(one, str) else 1)
        if isinstance(one, (str, list)) and len(one) > most:
            words = "characters" if isinstance(one, str) else "tokens"
            read.problems.append(f"prompt has {len(one)} {words}, but must have at most {most}")
        elif isinstance(one, str):
            tokens.append(tokenizer.encode(one))
        elif isinstance(one, list) and all(_is(token, int) for token in one):
            tokens.append(one)
        else:
            read.problems.append("prompt must be a string, a list of tokens, or a list of those")
            break
    if not tokens and not read.problems:
        read.problems.append("prompt is an empty list")
    return tokens
