"""Chat messages to a prompt: the checkpoint's own template, else plain text lines.

Default rule, which is also the trained form of the bundled model: system messages are text, earlier turns are lines
"Question: ..." and "Answer: ...", and the last user message is a document whose last line is the question:

    text of the document
    Question: last line
    Answer:

A message that brings its own "Question:" line keeps it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hisparse.errors import ConfigError, RequestError

Message = tuple[str, str]
"""(role, text)."""


class ChatTemplate:
    """How a checkpoint wants its chats written; compiled once.

    Args:
        source: Jinja source; None = the default rule. special_tokens: names that the source may use.
    Raises:
        ConfigError: the source does not compile.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None) -> None:
        self._special_tokens = dict(special_tokens or {})
        # A template that does not know developer messages would drop them in silence, or refuse them.
        self._renames = {"developer": "system"} if source is not None and "developer" not in source else {}
        try:
            self._template = None if source is None else _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the checkpoint's chat template has a syntax error in line {error.lineno}: {error.message}; "
                              "fix chat_template.jinja or tokenizer_config.json") from error

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt of a chat.

        Raises:
            RequestError: no messages, the last one is not the user's, or the template refuses them.
        """
        if not messages or not any(text for _, text in messages):
            raise RequestError("messages is empty; send at least one user message", field="messages")
        if self._template is None:
            return _plain(messages)
        try:
            return self._template.render(
                messages=[{"role": self._renames.get(role, role), "content": text} for role, text in messages],
                add_generation_prompt=True, tools=None, documents=None, **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}", field="messages") from error


def _plain(messages: Sequence[Message]) -> str:
    if messages[-1][0] != "user":
        raise RequestError(f"the last message must be the user's, got role {messages[-1][0]!r}", field="messages")
    if not messages[-1][1].strip():
        raise RequestError("the last user message is empty", field="messages")
    lines = [_line(role, text) for role, text in messages[:-1]]
    return "\n".join([*lines, _question(messages[-1][1])])


def _line(role: str, text: str) -> str:
    if role == "assistant":
        return f"Answer: {text.strip()}"
    return text if role in ("system", "developer") else f"Question: {text}"


def _question(text: str) -> str:
    text = text.rstrip("\n ")
    document, _, last = text.rpartition("\n")
    if last == "Answer:":
        return text
    if not last.startswith("Question:"):
        last = f"Question: {last}"
    return "\n".join([*([document] if document else []), last, "Answer:"])


class _Generation(Extension):
    """`{% generation %}`, which marks answers for training, is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    """What Hugging Face's templates expect to find, in a sandbox: a checkpoint is data, not code."""
    def refuse(message: str) -> Any:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
             sort_keys: bool = False) -> str:
    """Unlike Jinja's own filter it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
