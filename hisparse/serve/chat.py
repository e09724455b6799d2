"""Chat messages to a prompt: the checkpoint's own template, else plain text lines.

Default rule, which is also the trained form of the bundled model: system messages are text, earlier turns are lines
"Question: ..." and "Answer: ...", and the last user message is a document whose last line is the question:

    text of the document
    Question: last line
    Answer:

A message that brings its own "Question:" line keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hisparse.errors import RequestError

Message = tuple[str, str]
"""(role, text)."""


def render(messages: Sequence[Message], template: str | None) -> str:
    """The prompt of a chat.

    Raises:
        RequestError: no messages, the last one is not the user's, or the template refuses them.
    """
    if not messages or not any(text for _, text in messages):
        raise RequestError("messages is empty; send at least one user message", field="messages")
    if template is not None:
        return _render_template(messages, template)
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


def _render_template(messages: Sequence[Message], template: str) -> str:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> Any:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(template).render(
            messages=[{"role": role, "content": text} for role, text in messages],
            add_generation_prompt=True, tools=None,
        )
    except (TemplateError, TypeError) as error:
        raise RequestError(f"the model's chat template refuses these messages: {error}", field="messages") from error
