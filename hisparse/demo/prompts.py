"""The demo's requests: long real text with planted facts and a question; two share a long prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hisparse.testing.recall_documents import QUESTION_FORMS, build_recall_document

BUDGETS_TOKENS = (560, 720, 900, 1300, 1800, 2300, 3000, 3900)
"""Prompt lengths."""
SHARED_IDX = 5
"""The last request asks this document a second question: it shares its long prefix."""
LONG_ANSWERS = 3
LONG_TOKENS, SHORT_TOKENS = 192, 64
"""The shortest prompts write long answers: they start with every page on the device and then grow into the others' room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPrompt:
    """One request and what a right answer is. `shares_with`: name of the prompt whose long prefix it repeats."""

    name: str
    text: str
    answer: str
    max_tokens: int
    shares_with: str | None = None

    def is_right(self, completion: str) -> bool:
        """The completion starts with the planted value (whatever the model was made to write after its end)."""
        return completion.strip().startswith(self.answer)


def demo_prompts(count_tokens: Callable[[str], int]) -> list[DemoPrompt]:
    """Nine prompts of about 500 to 4,000 tokens, the same at every call.

    Args:
        count_tokens: tokens of a text in the served checkpoint's tokenizer.
    """
    prompts = []
    for i, budget in enumerate(BUDGETS_TOKENS):
        document = build_recall_document(1000 + i, budget=budget, measure=count_tokens)
        prompts.append(DemoPrompt(name=f"doc-{i + 1}", text=document.prompt, answer=document.answer,
                                  max_tokens=LONG_TOKENS if i < LONG_ANSWERS else SHORT_TOKENS))
        if i == SHARED_IDX:
            other = next(fact for fact in document.facts if fact.name != document.asked.name)
            question = QUESTION_FORMS[0].format(attribute=other.attribute, name=other.name)
            shared = DemoPrompt(name=f"doc-{i + 1}b", text=f"{document.text}\n{question}", answer=other.value,
                                max_tokens=SHORT_TOKENS, shares_with=f"doc-{i + 1}")
    return [*prompts, shared]
