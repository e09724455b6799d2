from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from hisparse.errors import ConfigError, RequestError
from hisparse.serve.chat import ChatTemplate, Message
from hisparse.testing.recall_documents import build_recall_document

PLAIN = ChatTemplate(None)
BLOCKS = """{{ bos_token }}{% for m in messages %}
    {%- if m.role == 'system' %}{{ '<|system|>' + m['content'] }}{% continue %}{% endif %}
    {%- if m.role == 'assistant' %}
{% generation %}<|bot|>{{ m.content | trim }}{{ eos_token }}{% endgeneration %}
    {%- else %}<|{{ m.role }}|>{{ m.content }}
{% endif %}
{% endfor %}
{% set ns = namespace(last='') %}{% for m in messages[::-1] %}{% set ns.last = m.content[:3] %}{% break %}{% endfor %}
{{ {'a': '<é>', 'last': ns.last} | tojson }}{% if tools is defined and tools is not none %}tools{% endif %}
{% if add_generation_prompt %}<|bot|>{% endif %}"""


def test_a_document_with_its_question_becomes_the_trained_form() -> None:
    document = build_recall_document(3, budget=2000)
    assert PLAIN.render([("user", document.prompt)]) == document.prompt
    without_frame = document.text + "\n" + document.question.removeprefix("Question: ").removesuffix("\nAnswer:")
    assert PLAIN.render([("user", without_frame)]) == document.prompt
    assert PLAIN.render([("user", document.prompt.removesuffix("\nAnswer:") + "\n")]) == document.prompt


@pytest.mark.parametrize(("messages", "prompt"), [
    ([("user", "Why?")], "Question: Why?\nAnswer:"),
    ([("system", "Be short."), ("user", "Why?")], "Be short.\nQuestion: Why?\nAnswer:"),
    ([("user", "a"), ("assistant", " b "), ("user", "text\nc")], "Question: a\nAnswer: b\ntext\nQuestion: c\nAnswer:"),
    ([("user", "text\n\nc")], "text\n\nQuestion: c\nAnswer:"),
])
def test_plain_lines(messages: list[Message], prompt: str) -> None:
    assert PLAIN.render(messages) == prompt


@pytest.mark.parametrize("messages", [[], [("user", "")], [("user", "a"), ("assistant", "b")], [("user", "  \n")]])
def test_refused(messages: list[Message]) -> None:
    with pytest.raises(RequestError) as caught:
        PLAIN.render(messages)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("messages", [
    [("user", "a")], [("system", "be short"), ("user", "é\n x"), ("assistant", " b "), ("user", "<c> & \"d\"")],
])
def test_the_checkpoints_own_template_gives_what_transformers_gives(messages: list[Message]) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    said: Any = [[{"role": role, "content": text} for role, text in messages]]
    expected, *_ = render_jinja_template(said, chat_template=BLOCKS, add_generation_prompt=True, **tokens)
    assert ChatTemplate(BLOCKS, tokens).render(messages) == "".join(expected)


def test_developer_messages_are_system_messages_to_a_template_that_does_not_know_them() -> None:
    plain = "{% for m in messages %}<{{ m.role }}>{% endfor %}"
    assert ChatTemplate(plain).render([("developer", "a")]) == "<system>"
    assert ChatTemplate(plain + "{# developer #}").render([("developer", "a")]) == "<developer>"


def test_a_template_that_refuses_is_a_bad_request_and_it_is_sandboxed() -> None:
    for bad in ("{{ raise_exception('no system') }}", "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}",
                "{{ messages[7].content.x }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ 1 + 'a' }}"):
        with pytest.raises(RequestError, match="template"):
            ChatTemplate(bad).render([("user", "a")])


def test_a_broken_template_stops_the_start_not_each_request() -> None:
    with pytest.raises(ConfigError, match="line 2.*tokenizer_config"):
        ChatTemplate("x\n{% if %}")
