"""Requests that go away, wherever they stand: nothing leaks, and those beside them get their tokens."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hisparse.connector.offloading_worker import OffloadingWorker
from hisparse.engine.request import RequestState
from hisparse.types import FinishReason, Landing
from tests.parity.failures import TOKENS, MakePair, evict_indexer_pages
from tests.parity.rig import Rig, engine_config, prompt_of


def state(rig: Rig, name: str, *, prefill: bool = False) -> RequestState | None:
    engine = rig.prefill if prefill else rig.decode
    assert engine is not None
    request = engine.core.requests.get(name)
    return request.state if request is not None else None


STAGES: dict[str, Callable[[Rig], bool]] = {
    "prefill waiting": lambda rig: state(rig, "victim", prefill=True) is RequestState.WAITING,
    "prefill running": lambda rig: rig.prefill.core.requests["victim"].computed > 0,
    "held": lambda rig: state(rig, "victim", prefill=True) is RequestState.HELD,
    "waiting": lambda rig: state(rig, "victim") is RequestState.WAITING,
    "importing": lambda rig: state(rig, "victim") is RequestState.LOADING,
    "first token": lambda rig: len(rig.answer("victim").token_ids) >= 1 if "victim" in rig.decode.answers else False,
    "decoding": lambda rig: len(rig.answer("victim").token_ids) >= 6 if "victim" in rig.decode.answers else False,
}


@pytest.mark.parametrize("landing", list(Landing))
@pytest.mark.parametrize("stage", STAGES)
def test_abort(pair: MakePair, stage: str, landing: Landing) -> None:
    rig = pair(landing=landing, seats=1 if stage == "waiting" else 8)
    hang = [stage == "importing"]
    rig.faults.hang = lambda number: hang[0]
    if stage == "held":
        rig.tamper = lambda name, params: None if name == "victim" else params
    rig.put("early", prompt_of(70, 3), 40)
    rig.put("victim", prompt_of(150, 1), 40)
    rig.until(lambda: STAGES[stage](rig))
    rig.abort("victim")
    rig.abort("victim")
    rig.step()
    rig.abort("victim")
    if "victim" in rig.decode.answers:
        assert rig.answer("victim").finish_reason is FinishReason.ABORT
    hang[0] = False
    rig.put("twin", prompt_of(150, 1), 20)
    rig.run()
    rig.check("early", "twin")
    rig.check_aborted()


def test_abort_of_a_hanging_import_is_drained_by_the_deadline(pair: MakePair) -> None:
    rig = pair(deadline_s=0.3)
    rig.faults.hang = lambda number: number == 0
    rig.put("victim", prompt_of(150, 1), 20)
    rig.until(lambda: STAGES["importing"](rig))
    rig.abort("victim")
    rig.put("other", prompt_of(80, 2), 8)
    rig.run()
    rig.check("other")


def test_abort_at_random_steps(pair: MakePair) -> None:
    """The same id may come again while the first one's import still drains."""
    draw = random.Random(5)
    rig = pair(slack=20)
    rig.faults.delay_polls = 3
    for turn in range(12):
        name = f"r{turn % 3}"
        rig.put(name, prompt_of(60 + 10 * turn, turn), 6)
        for _ in range(draw.randrange(12)):
            rig.step()
        rig.abort(name)
        rig.until(lambda name=name: name not in rig.at_prefill and name not in rig.decode.core.requests
                  and name not in rig.prefill.core.requests)
    rig.put("last", prompt_of(140, 99), TOKENS)
    rig.run()
    rig.check("last")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Indexer loads wait for it."""
    event = threading.Event()
    run = OffloadingWorker._copy

    def copy_later(self: OffloadingWorker, job: Any, *, load: bool) -> Any:
        if load:
            assert event.wait(30)
        return run(self, job, load=load)

    monkeypatch.setattr(OffloadingWorker, "_copy", copy_later)
    yield event
    event.set()


@pytest.mark.parametrize("with_import", [False, True])
def test_abort_during_an_indexer_load(make_rig: Callable[..., Rig], tiny_checkpoints: dict[str, Path],
                                      gate: threading.Event, with_import: bool) -> None:
    path = tiny_checkpoints["glm52"]
    rig = make_rig(engine_config(path, "decode" if with_import else "colocated", slack=10),
                   engine_config(path, "prefill") if with_import else None)
    evict_indexer_pages(rig)
    if with_import:
        rig.faults.hang = lambda number: True
    prompt = (*rig.served["first"].prompt, *prompt_of(40, 77)) if with_import else rig.served["first"].prompt
    rig.put("victim", prompt, TOKENS)
    rig.until(lambda: state(rig, "victim") is RequestState.LOADING)
    assert rig.decode.core.stats().indexer_loads == 1
    rig.abort("victim")
    rig.abort("victim")
    rig.step()
    gate.set()
    rig.step()
    if with_import:
        rig.faults.hang = lambda number: False
    rig.put("twin", prompt, TOKENS)
    rig.run()
    rig.check("twin")
