"""What one tenant can find out about another's prompts by asking: nothing, neither from counts nor from time.

Time is counted in engine steps and computed tokens, which a busy machine does not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from hisparse.config import load_config
from hisparse.serve.keys import tenant_salt
from hisparse.testing.local_engine import LocalEngine
from hisparse.types import SamplingParams

CHUNK = 64
VICTIM = [(7 * i) % 250 + 5 for i in range(5 * CHUNK + 9)]
GREEDY = SamplingParams(max_tokens=2, ignore_eos=True)


@dataclass(frozen=True)
class Seen:
    """All that an asker sees or can time."""

    steps: int
    cached_tokens: int
    token_ids: tuple[int, ...]


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine(load_config({
        "model": {"path": "recall", "max_model_len": 1024},
        "cache": {"device_blocks": 320, "host_pool_gib": 0.06},
        "scheduler": {"prefill_chunk_tokens": CHUNK, "max_step_tokens": CHUNK}, "serve": {"prefill_replicas": 0},
    }, environ={}))
    ask(engine, VICTIM, tenant_salt("red", "s"))
    yield engine
    engine.close()


def ask(engine: LocalEngine, prompt: list[int], salt: str | None) -> Seen:
    before = engine.core.stats().steps
    (answer,) = engine.generate([prompt], GREEDY, cache_salt=salt)
    steps = engine.core.stats().steps - before
    engine.drain()
    assert answer.stats is not None
    return Seen(steps, answer.stats.cached_tokens, tuple(answer.token_ids))


_NOBODY = itertools.count()


def cold(engine: LocalEngine, prompt: list[int]) -> Seen:
    """The prompt under a salt that nobody else has."""
    return ask(engine, prompt, f"nobody {next(_NOBODY)}")


def test_the_owner_is_served_faster_so_the_measure_can_tell(engine: LocalEngine) -> None:
    own, new = ask(engine, VICTIM, tenant_salt("red", "s")), cold(engine, VICTIM)
    assert own.cached_tokens == 5 * CHUNK and own.steps < new.steps and own.token_ids == new.token_ids
    wrong_guess = ask(engine, [9, *VICTIM[1:]], tenant_salt("red", "s"))
    assert wrong_guess.cached_tokens == 0 and wrong_guess.steps == new.steps


@pytest.mark.parametrize("salt", [
    None, "s", "red\ns ", tenant_salt("blue", "s"), tenant_salt("blue", "red\ns"), tenant_salt("red", None),
    tenant_salt("red", "t"),
])
def test_another_salt_sees_a_prompt_that_nobody_asked(engine: LocalEngine, salt: str | None) -> None:
    hits = engine.core.stats().cache["prefix_hit_tokens"]
    assert ask(engine, VICTIM, salt) == cold(engine, VICTIM)
    assert engine.core.stats().cache["prefix_hit_tokens"] == hits


@pytest.mark.parametrize("known", [CHUNK, 3 * CHUNK, 5 * CHUNK])
def test_guessing_page_by_page_gets_nowhere(engine: LocalEngine, known: int) -> None:
    """The attack: extend a guessed prefix by a page and see whether the answer comes sooner."""
    salt = tenant_salt("blue", f"guess {known}")
    right, wrong = [*VICTIM[:known], 11, 12, 13], [*VICTIM[: known - 1], VICTIM[known - 1] + 1, 11, 12, 13]
    seen = [(guess.steps, guess.cached_tokens) for guess in (ask(engine, right, salt), ask(engine, wrong, f"{salt}'"))]
    assert seen[0] == seen[1] and seen[0][1] == 0
    owners = ask(engine, right, tenant_salt("red", "s"))
    assert owners.cached_tokens == known, "the same guess with the owner's salt would have told"
