from __future__ import annotations

import pytest

from hisparse.errors import RequestError
from hisparse.serve.chat import render
from hisparse.testing.recall_documents import build_recall_document


def test_a_document_with_its_question_becomes_the_trained_form() -> None:
    document = build_recall_document(3, budget=2000)
    assert render([("user", document.prompt)], None) == document.prompt
    without_frame = document.text + "\n" + document.question.removeprefix("Question: ").removesuffix("\nAnswer:")
    assert render([("user", without_frame)], None) == document.prompt
    assert render([("user", document.prompt.removesuffix("\nAnswer:") + "\n")], None) == document.prompt


@pytest.mark.parametrize(("messages", "prompt"), [
    ([("user", "Why?")], "Question: Why?\nAnswer:"),
    ([("system", "Be short."), ("user", "Why?")], "Be short.\nQuestion: Why?\nAnswer:"),
    ([("user", "a"), ("assistant", " b "), ("user", "text\nc")], "Question: a\nAnswer: b\ntext\nQuestion: c\nAnswer:"),
    ([("user", "text\n\nc")], "text\n\nQuestion: c\nAnswer:"),
])
def test_plain_lines(messages: list[tuple[str, str]], prompt: str) -> None:
    assert render(messages, None) == prompt


@pytest.mark.parametrize("messages", [[], [("user", "")], [("user", "a"), ("assistant", "b")], [("user", "  \n")]])
def test_refused(messages: list[tuple[str, str]]) -> None:
    with pytest.raises(RequestError) as caught:
        render(messages, None)
    assert caught.value.field == "messages"


def test_the_checkpoints_own_template_wins_and_is_sandboxed() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    assert render([("user", "a")], template) == "<user>a<bot>"
    for bad in ("{{ raise_exception('no system') }}", "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", "{% if %}"):
        with pytest.raises(RequestError, match="template"):
            render([("user", "a")], bad)
