"""Chat templates, which write a conversation as the text of one prompt.

A template is a Jinja program that comes with the checkpoint. It is rendered as in transformers'
`apply_chat_template`: in a sandbox, with `messages`, `tools`, `documents`, `add_generation_prompt`,
the special tokens (`bos_token`...), the variables that a request adds, and the functions
`raise_exception` and `strftime_now`. It needs jinja2, which is imported with the first template.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.models.checkpoint import read_json, read_text

DEFAULT, WITH_TOOLS = "default", "tool_use"  # names of a checkpoint's templates


class ChatTemplate:
    """A checkpoint's template."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str] = {}):
        """Compile the template.

        Args:
          sources: the templates by name: "default", and perhaps "tool_use" for requests with tools.
          special_tokens: by name, such as `bos_token`.

        Raises:
          ValueError: it is not a valid template.
        """
        import jinja2

        environment = _environment()
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {n: environment.from_string(text) for n, text in sources.items()}
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template cannot be read: {error}") from None

    def render(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render the text of a conversation.

        Args:
          messages: the messages, each with its `role`.
          tools: what the model may call, as described in OpenAI's API.
          add_generation_prompt: end with the beginning of the assistant's message.
          variables: further variables for the template.

        Raises:
          ValueError: the template rejects the messages.
        """
        name = WITH_TOOLS if tools and WITH_TOOLS in self._templates else DEFAULT
        given = {**self._special_tokens, **variables}
        given |= {"messages": messages, "tools": tools or None}
        given["add_generation_prompt"] = add_generation_prompt
        try:
            return self._templates[name].render({"documents": None, **given})
        except Exception as error:  # a checkpoint's program may raise anything
            raise ValueError(f"messages: the chat template rejects them: {error}") from None


def load_chat_template(directory: Path, path: str | None = None) -> ChatTemplate | None:
    """Load a checkpoint's template; None if it has none.

    It comes from `chat_template.jinja`, with further ones in `additional_chat_templates`, or else
    from `tokenizer_config.json`.

    Args:
      directory: the checkpoint's directory.
      path: a file to read instead.

    Raises:
      ValueError: it cannot be read, or jinja2 is missing.
    """
    config = _read_json(directory / "tokenizer_config.json")
    if path is not None:
        try:
            sources = {DEFAULT: Path(path).read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--chat-template: {path}: {error}") from None
    elif (file := directory / "chat_template.jinja").is_file():
        more = directory.glob("additional_chat_templates/*.jinja")
        sources = {one.stem: read_text(one) for one in more}
        sources[DEFAULT] = read_text(file)
    else:
        sources = _named_templates(config.get("chat_template") or [])
        if sources is None:
            raise ValueError(
                f"{directory}: chat_template in tokenizer_config.json must be a string, or a "
                'list of {"name": ..., "template": ...}'
            )
    if not sources:
        return None
    if importlib.util.find_spec("jinja2") is None:
        raise ValueError(f"{directory}: its chat template needs jinja2: pip install jinja2")
    names = {**_read_json(directory / "special_tokens_map.json"), **config}
    special = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in names.items()
        if name.endswith("_token") and (isinstance(token, str) or _has_content(token))
    }
    return ChatTemplate(sources, special)


def _named_templates(given: Any) -> dict[str, str] | None:
    """Return a configuration's templates by name, or None if they are in another format."""
    if isinstance(given, str):
        return {DEFAULT: given}
    try:
        pairs = [(one["name"], one["template"]) for one in given]
    except (KeyError, TypeError):
        return None
    are_texts = all(isinstance(part, str) for pair in pairs for part in pair)
    return dict(pairs) if are_texts else None


def _has_content(token: Any) -> bool:
    return isinstance(token, dict) and isinstance(token.get("content"), str)


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _environment() -> Any:
    """Set up Jinja as transformers does."""
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's text for training; here it has no effect."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(format: str) -> str:
        return datetime.datetime.now().strftime(format)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment
