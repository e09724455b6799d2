"""Recall documents: fixed by their seed, inside their budget, answerable in exactly one place."""

from __future__ import annotations

import re

import pytest

from hisparse.testing.recall_documents import (
    ATTRIBUTES,
    FACT_FORMS,
    NAMES,
    QUESTION_FORMS,
    RecallDocument,
    build_recall_document,
)

SEEDS = range(25)


def count_words(text: str) -> int:
    """A stand-in for a tokenizer that is not additive over lines: a run of blanks is one token."""
    return len(re.findall(r"\s+|\w+|[^\w\s]", text))


def build(seed: int) -> RecallDocument:
    return build_recall_document(seed, budget=6_000)


def test_the_vocabulary_is_what_the_checkpoint_was_trained_on() -> None:
    assert (len(NAMES), len(set(NAMES)), len(ATTRIBUTES), len(FACT_FORMS), len(QUESTION_FORMS)) == (194, 194, 8, 8, 3)


def test_a_seed_fixes_the_document() -> None:
    assert build(3) == build(3)
    assert len({build(seed).prompt for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize("measure", [len, count_words])
@pytest.mark.parametrize("budget", [800, 2_048, 20_000])
def test_the_prompt_fills_its_budget_and_never_exceeds_it(measure, budget: int) -> None:
    for seed in range(5):
        size = measure(build_recall_document(seed, budget=budget, measure=measure).prompt)
        assert budget - 200 <= size <= budget, f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_names_and_values_are_unique_within_a_document(seed: int) -> None:
    facts = build(seed).facts
    assert len({fact.name for fact in facts}) == len(facts)
    assert len({fact.value for fact in facts}) == len(facts)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_answer_occurs_once_as_the_value_of_the_fact_that_is_asked(seed: int) -> None:
    document = build(seed)
    assert re.fullmatch(r"\d{4}", document.answer)
    assert document.prompt.count(document.answer) == 1
    assert document.asked in document.facts and document.asked.value == document.answer
    lines = document.text.split("\n")
    assert [line for line in lines if document.answer in line] == [document.asked.text]
    assert all(fact.text in lines for fact in document.facts)
    for fact in document.facts:  # a value always follows its name
        assert fact.text.index(fact.name) < fact.text.index(fact.value)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_question_names_the_asked_fact_and_ends_the_prompt(seed: int) -> None:
    document = build(seed)
    forms = [form.format(attribute=document.asked.attribute, name=document.asked.name) for form in QUESTION_FORMS]
    assert document.question in forms
    assert document.prompt.endswith("\n" + document.question) and document.question.endswith("Answer:")


def test_only_the_exact_digits_are_the_answer() -> None:
    document = build(0)
    assert document.is_answer(f" {document.answer}")
    assert not document.is_answer(f" {document.answer}1")
    assert not document.is_answer("")


def test_the_number_and_form_of_facts_can_be_fixed() -> None:
    document = build_recall_document(1, budget=4_000, num_facts=3, facts_form=FACT_FORMS[0])
    assert len(document.facts) == 3
    assert all(fact.text == f"The {fact.attribute} of the {fact.name} is {fact.value}." for fact in document.facts)


@pytest.mark.parametrize(("budget", "num_facts"), [(100, 6), (1_000, 0), (1_000, 195)])
def test_an_impossible_request_says_so(budget: int, num_facts: int) -> None:
    with pytest.raises(ValueError, match="facts"):
        build_recall_document(0, budget=budget, num_facts=num_facts)
