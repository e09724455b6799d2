"""Recall documents: long text with a few planted facts and one question about them.

A document is Python source text in which lines such as "The access code of the harbor is 4921." are planted, followed
by one question. Whoever can copy the right four digits has read the right place of a long context, so exact match is a
sharp end-to-end test of sparse attention. The bundled recall checkpoint is trained on this distribution: same names,
attributes and surface forms, values after their names. Other names or forms are outside what it has seen.

Pure Python: the text comes from the standard library of the running interpreter, from modules that the training data
leaves out. A seed fixes a document only for one Python version, since that text differs between versions.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import random
from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "ATTRIBUTES",
    "FACT_FORMS",
    "HELD_OUT_MODULES",
    "NAMES",
    "QUESTION_FORMS",
    "Fact",
    "RecallDocument",
    "build_recall_document",
    "held_out_text",
]

NAMES: tuple[str, ...] = tuple(
    """
    harbor tower bridge castle garden museum library station factory hospital airport bakery cinema theater stadium
    market temple chapel palace prison school college hotel tavern cottage cabin barn stable windmill lighthouse quarry
    mine tunnel canal dam reservoir orchard vineyard meadow forest desert island lagoon glacier volcano canyon valley
    plateau mountain river lake ocean reef beach cliff cave swamp prairie jungle tundra anchor compass lantern candle
    mirror piano violin trumpet guitar drum flute banjo cello harp organ robot rocket satellite telescope microscope
    camera clock printer scanner antenna turbine engine tractor wagon carriage bicycle scooter ferry yacht canoe
    submarine helicopter glider balloon parachute train trolley bus taxi truck crane forklift elevator escalator furnace
    boiler kettle oven freezer toaster blender hammer chisel saw drill wrench pliers shovel rake ladder bucket barrel
    crate basket chest locker vault cabinet drawer shelf desk sofa carpet curtain pillow blanket jacket helmet glove
    boot scarf umbrella wallet suitcase backpack parcel envelope falcon eagle raven owl parrot penguin pelican heron
    swan turtle lizard cobra dolphin whale shark salmon lobster oyster tiger lion panther leopard wolf fox badger otter
    beaver rabbit squirrel hedgehog camel donkey zebra giraffe elephant buffalo moose reindeer walrus kangaroo koala
    gorilla
    """.split()  # noqa: SIM905
)
ATTRIBUTES: tuple[str, ...] = (
    "access code",
    "serial number",
    "room number",
    "badge number",
    "locker number",
    "ticket number",
    "secret key",
    "pass code",
)
FACT_FORMS: tuple[str, ...] = (
    "The {attribute} of the {name} is {value}.",
    "The {attribute} for the {name} is {value}.",
    "Note that the {name} has the {attribute} {value}.",
    "The {name} uses the {attribute} {value}.",
    "Remember: the {attribute} of the {name} is {value}.",
    "For the {name}, the {attribute} is {value}.",
    "In the {name} the {attribute} was set to {value}.",
    "{name} {attribute}: {value}.",
)
QUESTION_FORMS: tuple[str, ...] = (
    "Question: What is the {attribute} of the {name}?\nAnswer:",
    "Question: Which {attribute} does the {name} have?\nAnswer:",
    "Question: Tell me the {attribute} of the {name}.\nAnswer:",
)
HELD_OUT_MODULES: tuple[str, ...] = ("uuid", "warnings", "wave", "weakref", "webbrowser", "zipapp", "zipfile")
"""Standard library modules whose source is document text here and is kept out of the training data."""

_MAX_FACTS = 40
_MIN_FACTS = 6
_TOKENS_PER_FACT = 64  # at most one fact in so many tokens, as in training
_CHARS_PER_TOKEN = 2.4  # of the bundled tokenizer on source text; only scales the number of facts of a char budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One planted line: `text` says that `attribute` of `name` is `value` (four digits)."""

    name: str
    attribute: str
    value: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallDocument:
    """A document, one question about it and the right answer.

    `answer` is the bare digits; a model that continues `prompt` writes " " + answer and then ends.
    """

    seed: int
    text: str
    question: str
    answer: str
    asked: Fact
    facts: tuple[Fact, ...]

    @property
    def prompt(self) -> str:
        """What the model is given: the document, a line break and the question."""
        return f"{self.text}\n{self.question}"

    def is_answer(self, completion: str) -> bool:
        """Whether a decoded completion (special tokens skipped) is exactly the answer."""
        return completion.strip() == self.answer


@functools.cache
def held_out_text() -> str:
    """Return the source text of `HELD_OUT_MODULES`, joined; modules this interpreter lacks are skipped.

    Raises:
        RuntimeError: the interpreter ships without the sources.
    """
    parts = []
    for module in HELD_OUT_MODULES:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None and pathlib.Path(spec.origin).is_file():
            parts.append(pathlib.Path(spec.origin).read_text(encoding="utf-8"))
    if not parts:
        raise RuntimeError(f"no source file found for any of {HELD_OUT_MODULES}: this Python ships without its library")
    return "\n".join(parts)


@functools.cache
def _held_out_lines() -> tuple[str, ...]:
    return tuple(held_out_text().split("\n"))


def build_recall_document(
    seed: int,
    *,
    budget: int,
    measure: Callable[[str], int] = len,
    num_facts: int | None = None,
    facts_form: str | None = None,
) -> RecallDocument:
    """Build one document whose prompt measures at most `budget`, filled to within one line of it.

    Does not tokenise: `measure` gives the size of a string in the budget's unit, characters by default, tokens with
    `lambda text: len(tokenizer(text).input_ids)`. Sources longer than the library text repeat it.

    Args:
        seed: fixes everything, for one Python version and one `measure`.
        budget: upper bound of `measure(document.prompt)`.
        measure: size of a string; roughly additive over lines.
        num_facts: planted facts; drawn from 6..40, at most one in 64 tokens, when omitted.
        facts_form: one of `FACT_FORMS` for all facts; drawn per fact when omitted.

    Returns:
        A document with distinct names and distinct values, none of which occurs in the surrounding text.

    Raises:
        ValueError: `num_facts` is out of range or the budget cannot hold the facts and the question.

    Example:
        >>> document = build_recall_document(7, budget=2_000)
        >>> len(document.prompt) <= 2_000, document.text.count(document.answer)
        (True, 1)
    """
    rng = random.Random(seed)
    if num_facts is None:
        budget_tokens = budget / _CHARS_PER_TOKEN if measure is len else budget
        most = max(1, min(_MAX_FACTS, int(budget_tokens) // _TOKENS_PER_FACT))
        num_facts = rng.randint(min(_MIN_FACTS, most), most)
    if not 1 <= num_facts <= len(NAMES):
        raise ValueError(f"num_facts must be in 1..{len(NAMES)}, got {num_facts}")

    # Everything of variable size is drawn first; the values last, so that they can avoid the text around them.
    names = rng.sample(NAMES, num_facts)
    attributes = [rng.choice(ATTRIBUTES) for _ in names]
    forms = [facts_form or rng.choice(FACT_FORMS) for _ in names]
    asked_idx = rng.randrange(num_facts)
    question = rng.choice(QUESTION_FORMS).format(attribute=attributes[asked_idx], name=names[asked_idx])

    drafts = [f.format(attribute=a, name=n, value="0000") for f, a, n in zip(forms, attributes, names, strict=True)]
    fixed = "\n".join([*drafts, question])
    if measure(fixed) > budget:
        raise ValueError(f"a budget of {budget} cannot hold {num_facts} facts and a question: they take {measure(fixed)}")
    filler = _filler(rng, lambda lines: budget - measure("\n".join([*lines, fixed])), measure)
    values = _distinct_values(rng, num_facts, avoid="\n".join(filler))
    facts = tuple(
        Fact(name=n, attribute=a, value=v, text=f.format(attribute=a, name=n, value=v))
        for f, a, n, v in zip(forms, attributes, names, values, strict=True)
    )

    lines: list[tuple[str, bool]] = [(line, False) for line in filler]
    for fact in facts:
        lines.insert(rng.randint(0, len(lines)), (fact.text, True))
    text = "\n".join(line for line, _ in lines)
    while measure(f"{text}\n{question}") > budget:  # `measure` was not quite additive: give up filler from the front
        first = next((i for i, (_, planted) in enumerate(lines) if not planted), None)
        if first is None:
            raise ValueError(f"a budget of {budget} cannot hold {num_facts} facts and a question")
        del lines[first]
        text = "\n".join(line for line, _ in lines)
    return RecallDocument(
        seed=seed, text=text, question=question, answer=values[asked_idx], asked=facts[asked_idx], facts=facts
    )


def _filler(rng: random.Random, room: Callable[[list[str]], int], measure: Callable[[str], int]) -> list[str]:
    """Consecutive library lines from a random place, as many as there is `room` for after them.

    A tokenizer counts joined lines lower than their sum, so what is left is measured again until no line fits.
    """
    source = _held_out_lines()
    filler: list[str] = []
    position = rng.randrange(len(source))
    while True:
        left, before = room(filler), len(filler)
        while (left := left - measure(source[position % len(source)] + "\n")) >= 0:
            filler.append(source[position % len(source)])
            position += 1
        if len(filler) == before:
            return filler


def _distinct_values(rng: random.Random, count: int, *, avoid: str) -> list[str]:
    values: list[str] = []
    while len(values) < count:
        value = f"{rng.randrange(10_000):04d}"
        if value not in values and value not in avoid:
            values.append(value)
    return values
