"""Check the bodies of clients' requests field by field, and turn them into engine requests."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from examples.engine.adapters import Adapter
from examples.engine.http.chat import ChatTemplate
from examples.engine.http.fields import Fields, is_a
from examples.engine.likelihoods import MOST_ALTERNATIVES
from examples.engine.model import Model
from examples.engine.request import Request, Sampling, cut
from examples.engine.structure import Grammar, Grammars
from examples.text import Tokenizer

# Fields of OpenAI's API that this server lacks, with the values that request nothing.
NOTHING_OF_COMPLETIONS: dict[str, tuple] = {"suffix": (None, "")}
NOTHING_OF_CHAT: dict[str, tuple] = {
    "audio": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "parallel_tool_calls": (None, True, False),  # there are no calls: models write text
    "prediction": (None,),
    "prompt_cache_options": (None, {}),
    "prompt_cache_retention": (None, "in_memory"),
    "reasoning_effort": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
NOTHING_OF_STREAMS: dict[str, tuple] = {
    "continuous_usage_stats": (None, False),
    "include_obfuscation": (None, False),
}
KNOWN = {
    *("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop", "user"),
    *("stop_token_ids", "stream", "stream_options", "ignore_eos", "metadata", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs"),
    *("response_format", "structured_outputs", "skip_special_tokens"),
}
OF_A_PROMPT = {"prompt", "add_special_tokens"}
OF_MESSAGES = {
    *("messages", "tools", "tool_choice", "add_generation_prompt", "chat_template_kwargs"),
}
OF_COMPLETIONS = KNOWN | OF_A_PROMPT | {"echo", "best_of"}
OF_CHAT = KNOWN | OF_MESSAGES | {"max_completion_tokens", "top_logprobs"}
OF_CHAT |= {"prompt_cache_key", "safety_identifier"}  # these replaced `user`
NAMED_OF_SCHEMAS = {"name", "description", "strict"}  # these change nothing: schemas always hold
MOST_CHOICES = 128
MOST_MESSAGES = 4096
MOST_STOPS, STOP_CHARACTERS = 16, 256
MOST_STOP_TOKENS = 256
MOST_CHARACTERS = 64  # per token that fits: longer prompts are refused before they are encoded


class ModelNotFoundError(ValueError):
    """A request names a model that this server does not have."""


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A model, with its tokenizer, chat template and adapters, for which requests are read."""

    model: Model
    tokenizer: Tokenizer
    max_len: int  # length of the longest sequence
    chat_template: ChatTemplate | None = None
    grammars: Grammars | None = None  # None: no structured output
    adapters: Mapping[str, Adapter] = dataclasses.field(default_factory=dict)  # by name
    # Seeds for requests without one.
    seeds: Iterator[int] = dataclasses.field(default_factory=lambda: seeds_from(None))

    def adapter(self, name: Any) -> Adapter | None:
        """Return the adapter of this name; None for the model's own name, or for no name.

        Raises:
          ModelNotFoundError: there is neither a model nor an adapter of this name.
        """
        if name is None or name == self.model.name:
            return None
        # Read once, because the engine's thread may unload it at any time.
        if isinstance(name, str) and (adapter := self.adapters.get(name)) is not None:
            return adapter
        *names, last = map(repr, (self.model.name, *self.adapters))
        known = f"{', '.join(names)} or {last}" if names else last
        raise ModelNotFoundError(f"model is {cut(name)}, but must be {known}")


@dataclasses.dataclass(frozen=True)
class CheckedBody:
    """A checked body."""

    requests: tuple[Request, ...]  # candidates of the first prompt, of the second...
    num_prompts: int
    num_choices: int  # returned per prompt: its likeliest candidates
    stream: bool
    include_usage: bool
    shows_logprobs: bool = False
    echoes: tuple[str, ...] | None = None  # each prompt's text, which comes first
    only_echo: bool = False  # the model's text is not returned

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of all requests."""
        return self.requests[0].adapter

    @property
    def num_candidates(self) -> int:
        """How many texts are generated for each prompt."""
        return len(self.requests) // self.num_prompts


def seeds_from(first: int | None) -> Iterator[int]:
    """Return seeds for requests without one, counting from `first`, or from a random number."""
    return itertools.count(secrets.randbelow(2**32) if first is None else first)


def read_completions(body: Any, served: ServedModel) -> CheckedBody:
    """Turn the parsed body of `/v1/completions` into requests.

    Raises:
      ModelNotFoundError: this server does not have its model.
      ValueError: it is invalid; the error lists every problem.
    """
    fields = Fields(body, OF_COMPLETIONS, NOTHING_OF_COMPLETIONS)
    served.adapter(fields.body.get("model"))
    prompts = _prompts(fields, served)
    max_tokens = fields.get("max_tokens", int, 16)
    echo = fields.get("echo", bool, False)
    logprobs = fields.within("logprobs", None, 0, MOST_ALTERNATIVES)
    only_echo = echo and max_tokens == 0
    asked = _asked(fields, served, prompts, max_tokens + only_echo, logprobs, echo)
    return dataclasses.replace(asked, only_echo=only_echo)


def read_chat(body: Any, served: ServedModel) -> CheckedBody:
    """Turn the parsed body of `/v1/chat/completions` into requests.

    Raises:
      ModelNotFoundError: this server does not have its model.
      ValueError: it is invalid; the error lists every problem.
    """
    fields = Fields(body, OF_CHAT, NOTHING_OF_CHAT)
    served.adapter(fields.body.get("model"))
    prompts = _conversation(fields, served)
    room = served.max_len - max(map(len, prompts), default=0)
    max_tokens = fields.get("max_tokens", int, max(room, 1))  # as many as fit
    max_tokens = fields.get("max_completion_tokens", int, max_tokens)
    alternatives = fields.within("top_logprobs", None, 0, MOST_ALTERNATIVES)
    logprobs = (alternatives or 0) if fields.get("logprobs", bool, False) else None
    if logprobs is None and alternatives:
        fields.problems.append(f"top_logprobs is {alternatives}, but needs logprobs")
    return _asked(fields, served, prompts, max_tokens, logprobs)


def read_tokenize(body: Any, served: ServedModel) -> list[int]:
    """Return the tokens that the parsed body of `/tokenize` asks for: of a prompt or of messages.

    Raises:
      ModelNotFoundError: this server does not have its model.
      ValueError: it is invalid; the error lists every problem.
    """
    fields = Fields(body, {"model"} | OF_A_PROMPT | OF_MESSAGES, {})
    served.adapter(fields.body.get("model"))
    if fields.body.get("messages") is not None:
        fields.refuse(OF_A_PROMPT, "belongs to a prompt, but there are messages")
        prompts = _conversation(fields, served)
    else:
        fields.refuse(OF_MESSAGES, "belongs to messages, but there are none")
        if not isinstance(fields.body.get("prompt"), str):
            fields.problems.append("prompt must be a string")
        prompts = _prompts(fields, served)
    fields.finish()
    return prompts[0]


def read_detokenize(body: Any, served: ServedModel) -> str:
    """Return the text of the tokens in the parsed body of `/detokenize`.

    Raises:
      ModelNotFoundError: this server does not have its model.
      ValueError: it is invalid; the error lists every problem.
    """
    fields = Fields(body, {"model", "tokens"}, {})
    served.adapter(fields.body.get("model"))
    tokens = fields.get("tokens", list, [])
    size = served.model.vocab_size
    if not all(is_a(token, int) and 0 <= token < size for token in tokens):
        fields.problems.append(f"tokens is {cut(tokens)}, but must be integers in 0..{size - 1}")
    fields.finish()
    return served.tokenizer.decode(tokens, special_tokens=True)


def _asked(
    fields: Fields,
    served: ServedModel,
    prompts: list[list[int]],
    max_tokens: int,
    logprobs: int | None,
    echo: bool = False,
) -> CheckedBody:
    """Make a request per candidate from the fields that all kinds of completions share."""
    count = fields.get("n", int, 1)
    candidates = fields.get("best_of", int, count)
    seed = fields.get("seed", int, None)
    special = not fields.get("skip_special_tokens", bool, True)
    stops, stop_tokens = _stops(fields, served, special)
    sampling = _sampling(fields)
    grammar = _grammar(fields, served)
    adapter = served.adapter(fields.body.get("model"))
    stream = fields.get("stream", bool, False)
    include_usage = _includes_usage(fields, stream)
    if not 1 <= count <= MOST_CHOICES // max(len(prompts), 1):
        fields.problems.append(
            f"n is {cut(count)} for {len(prompts)} prompts, but must give 1..{MOST_CHOICES} choices"
        )
    elif not count <= candidates <= MOST_CHOICES // max(len(prompts), 1):
        fields.problems.append(
            f"best_of is {cut(candidates)}, but must be at least n ({count}), and give at most "
            f"{MOST_CHOICES} texts"
        )
    elif stream and candidates > count:
        fields.problems.append(
            f"best_of is {candidates}, but must equal n ({count}) in a stream, which cannot take "
            "back what it sent"
        )
    for prompt in prompts:
        if len(prompt) + max_tokens > served.max_len:
            fields.problems.append(
                f"prompt has {len(prompt)} tokens and max_tokens is {cut(max_tokens)}, but "
                f"together they must be at most {served.max_len}"
            )
    fields.finish()
    kept = 0 if logprobs is None and candidates > count else logprobs

    def seed_of(choice: int) -> int:  # with a seed, independent of the other prompts
        return (next(served.seeds) if seed is None else seed + choice) % 2**32

    try:
        requests = tuple(
            Request(
                prompt,
                max_tokens,
                Sampling(**sampling, seed=seed_of(choice)),
                stop_tokens,
                stops,
                special_tokens=special,
                logprobs=kept,
                prompt_logprobs=echo and logprobs is not None,
                grammar=grammar,
                adapter=adapter,
            )
            for prompt in map(tuple, prompts)
            for choice in range(candidates)
        )
    except ValueError as error:
        raise ValueError(str(error).replace("max_new_tokens", "max_tokens")) from None
    decode = functools.partial(served.tokenizer.decode, special_tokens=special)
    return CheckedBody(
        requests,
        len(prompts),
        count,
        stream,
        include_usage,
        shows_logprobs=logprobs is not None,
        echoes=tuple(map(decode, prompts)) if echo else None,
    )


def _includes_usage(fields: Fields, stream: bool) -> bool:
    """Whether a stream ends with its token counts."""
    given = fields.get("stream_options", dict, {})
    if given and not stream:
        fields.problems.append(f"stream_options is {cut(given)}, but needs stream")
    options = Fields(given, {"include_usage"}, NOTHING_OF_STREAMS)
    found = options.get("include_usage", bool, False)
    fields.problems += [f"stream_options: {problem}" for problem in options.problems]
    return found


def _grammar(fields: Fields, served: ServedModel) -> Grammar | None:
    """Compile the text's grammar: OpenAI's `response_format` or vLLM's `structured_outputs`."""
    format = fields.get("response_format", dict, {})
    other = fields.get("structured_outputs", dict, {})
    schema, pattern = None, None
    match format:
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **named}, **rest}:
            schema = None if rest or named.keys() - NAMED_OF_SCHEMAS else schema
        case {"type": "json_object", **rest} if not rest:
            schema = {"type": "object"}
    if format and schema is None and format != {"type": "text"}:
        fields.problems.append(
            f"response_format is {cut(format)}, but its type must be text, json_object, or "
            "json_schema with a schema, without other fields"
        )
    where = "structured_outputs" if other else "response_format"
    if schema is not None and other:
        fields.problems.append(
            f"structured_outputs is {cut(other)}, but must be absent if response_format is given"
        )
    match other:
        case {"json": dict(schema), **rest} if not rest:
            pass
        case {"regex": str(pattern), **rest} if not rest:
            pass
        case _ if other:
            fields.problems.append(
                f"structured_outputs is {cut(other)}, but must have either json, a schema, or regex"
            )
    if (schema is None and pattern is None) or fields.problems:
        return None
    if served.grammars is None:
        fields.problems.append("structured output needs llguidance: pip install llguidance")
        return None
    try:
        if pattern is not None:
            return served.grammars.from_regex(pattern)
        return served.grammars.from_schema(schema)
    except ValueError as error:
        fields.problems.append(f"{where}: {str(error)[:400]}")
        return None


def _sampling(fields: Fields) -> dict[str, Any]:
    """Read how tokens are chosen; `Sampling` checks the ranges."""
    bias = fields.get("logit_bias", dict, {})
    biases = []
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10 and is_a(value, float)):
            fields.problems.append(
                f"logit_bias is {cut(bias)}, but must have token ids as names and numbers as values"
            )
            break
        biases.append((int(token), value))
    numbers = {
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }
    return {
        **{name: fields.get(name, float, default) for name, default in numbers.items()},
        "top_k": fields.get("top_k", int, 0),
        "logit_bias": tuple(biases),
    }


def _stops(
    fields: Fields, served: ServedModel, special: bool
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Read the strings and tokens that end a text, which may or may not show special tokens."""
    model = served.model
    stops = fields.body.get("stop")
    stops = [] if stops is None or stops == "" else [stops] if isinstance(stops, str) else stops
    if not (
        isinstance(stops, list)
        and len(stops) <= MOST_STOPS
        and all(isinstance(s, str) and 0 < len(s) <= STOP_CHARACTERS for s in stops)
    ):
        fields.problems.append(
            f"stop is {cut(stops)}, but must be a string or a list of strings, at most "
            f"{MOST_STOPS} of at most {STOP_CHARACTERS} characters"
        )
        stops = []
    ids = fields.get("stop_token_ids", list, [])
    last = model.vocab_size - 1
    if len(ids) > MOST_STOP_TOKENS or not all(is_a(i, int) and 0 <= i <= last for i in ids):
        fields.problems.append(
            f"stop_token_ids is {cut(ids)}, but must be a list of at most {MOST_STOP_TOKENS} "
            f"integers in 0..{last}"
        )
        ids = []
    named = {stop: _special_token(fields, served, stop, special) for stop in stops}
    ids = [*ids, *(token for token in named.values() if token is not None)]
    ends = () if fields.get("ignore_eos", bool, False) else model.stop_tokens
    return tuple(stop for stop in stops if named[stop] is None), (*ids, *ends)


def _special_token(fields: Fields, served: ServedModel, stop: str, special: bool) -> int | None:
    """Return the special token that a stop string names, if any; other strings match the text."""
    tokenizer = served.tokenizer
    tokens = tokenizer.encode(stop, special_tokens=False)
    found = [token for token in tokens if tokenizer.is_special(token)]
    if len(found) == 1 and tokenizer.decode(found, special_tokens=True) == stop:
        return found[0]
    if found and not special:
        fields.problems.append(
            f"stop is {cut(stop)}, but must be a single special token or contain none, unless "
            "skip_special_tokens is false, since texts have no special tokens"
        )
    return None


def _prompts(fields: Fields, served: ServedModel) -> list[list[int]]:
    """Return a list of tokens per prompt: strings are encoded, lists of integers are tokens."""
    prompt = fields.body.get("prompt")
    special_tokens = fields.get("add_special_tokens", bool, True)
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and is_a(prompt[0], int)):
        prompt = [prompt]
    prompts = prompt if isinstance(prompt, list) else [None]
    if len(prompts) > MOST_CHOICES:
        fields.problems.append(
            f"prompt has {len(prompts)} prompts, but must have at most {MOST_CHOICES}"
        )
        return []
    tokens = []
    for one in prompts:
        if isinstance(one, str):
            if _is_short(fields, "prompt", one, served):
                tokens.append(served.tokenizer.encode(one, special_tokens=special_tokens))
        elif isinstance(one, list) and len(one) > served.max_len:
            fields.problems.append(
                f"prompt has {len(one)} tokens, but must have at most {served.max_len}"
            )
        elif isinstance(one, list) and all(is_a(token, int) for token in one):
            if outside := [token for token in one if not 0 <= token < served.model.vocab_size]:
                fields.problems.append(
                    f"prompt has tokens {cut(outside)}, but must be in "
                    f"0..{served.model.vocab_size - 1}"
                )
            tokens.append(one)
        else:
            fields.problems.append("prompt must be a string, a list of tokens, or a list of these")
            break
    if not tokens and not fields.problems:
        fields.problems.append("prompt is an empty list")
    return tokens


def _is_short(fields: Fields, name: str, text: str, served: ServedModel) -> bool:
    """Whether a text is short enough to encode; note the problem if not."""
    most = MOST_CHARACTERS * served.max_len
    if len(text) > most:
        fields.problems.append(f"{name} has {len(text)} characters, but must have at most {most}")
    return len(text) <= most


def _conversation(fields: Fields, served: ServedModel) -> list[list[int]]:
    """Return the single prompt that a conversation makes, or none if it is invalid."""
    messages = fields.get("messages", list, [])
    tools = fields.get("tools", list, [])
    choice = fields.body.get("tool_choice")
    variables = fields.get("chat_template_kwargs", dict, {})
    begins_answer = fields.get("add_generation_prompt", bool, True)
    if reserved := variables.keys() & {"messages", "tools", "add_generation_prompt"}:
        fields.problems.append(
            f"chat_template_kwargs has {', '.join(sorted(reserved))}, but must have only other "
            "variables: these are fields of the request"
        )
    if not 1 <= len(messages) <= MOST_MESSAGES:
        fields.problems.append(
            f"messages has {len(messages)} messages, but must have 1..{MOST_MESSAGES}"
        )
    read = [_message(fields, i, one) for i, one in enumerate(messages[:MOST_MESSAGES])]
    if not all(isinstance(tool, dict) for tool in tools):
        fields.problems.append(f"tools is {cut(tools)}, but must be a list of objects")
    if choice not in (None, "none", "auto"):
        fields.problems.append(
            f"tool_choice is {cut(choice)}, but must be 'none' or 'auto': tools are part of the "
            "prompt, and the model answers in text"
        )
    if served.chat_template is None:
        fields.problems.append(
            f"{served.model.name} has no chat template (--chat-template gives one)"
        )
    if fields.problems:
        return []
    text = served.chat_template.render(
        read,
        **{
            **variables,
            "tools": None if choice == "none" else tools,
            "add_generation_prompt": begins_answer,
        },
    )
    if not _is_short(fields, "the conversation", text, served):
        return []
    return [served.tokenizer.encode(text, special_tokens=False)]


def _message(fields: Fields, index: int, message: Any) -> dict[str, Any]:
    """Convert a message for templates: its content is text, and arguments of calls are objects."""
    where = f"messages[{index}]"
    if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
        fields.problems.append(f"{where} is {cut(message)}, but must be an object with a role")
        return {}
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        if all(map(_is_text, content)):
            message["content"] = "\n".join(part["text"] for part in content)
        else:
            fields.problems.append(
                f"{where}.content is {cut(content)}, but its parts must have the type text"
            )
    elif content is None and message.get("tool_calls"):
        message["content"] = ""  # templates concatenate it with other text
    elif not isinstance(content, str):
        fields.problems.append(f"{where}.content is {cut(content)}, but must be a string")
    if calls := message.get("tool_calls"):
        try:
            message["tool_calls"] = [_call(call) for call in calls]
        except (TypeError, KeyError, ValueError):
            fields.problems.append(
                f"{where}.tool_calls is {cut(calls)}, but must be function calls with a name and "
                "a JSON object as arguments"
            )
    return message


def _is_text(part: Any) -> bool:
    """Whether a part of a message's content is text."""
    return (
        isinstance(part, Mapping)
        and isinstance(part.get("text"), str)
        and part.get("type", "text") == "text"
    )


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function["name"], str):
        raise TypeError
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": dict(arguments)}}
