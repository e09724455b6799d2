"""A Serve instance that runs is refused; one that is just ending gets its time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from hisparse.errors import HiSparseError
from hisparse.serve import instance


def play(monkeypatch: pytest.MonkeyPatch, *answers: object) -> list[float]:
    """Serve's status gives these answers in turn, the last one for good; returns the waits."""
    waits: list[float] = []
    left = list(answers)

    def status() -> object:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(instance.serve, "status", status)
    monkeypatch.setattr(instance, "time", SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append))
    return waits


NONE = SimpleNamespace(proxies={}, applications={})
ENDING = SimpleNamespace(proxies={"node": "HEALTHY"}, applications={})
OTHER = SimpleNamespace(proxies={"node": "HEALTHY"}, applications={"other": object()})


def test_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert play(monkeypatch, NONE) == []
    instance.check_no_other_serve()


@pytest.mark.parametrize("end", [NONE, RayActorError()])
def test_an_ending_instance_is_waited_for(monkeypatch: pytest.MonkeyPatch, end: object) -> None:
    waits = play(monkeypatch, ENDING, ENDING, end)
    instance.check_no_other_serve()
    assert waits == [0.5, 0.5]


def test_an_instance_with_an_application_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = play(monkeypatch, OTHER)
    with pytest.raises(HiSparseError, match=r"already runs on this cluster \(other\)"):
        instance.check_no_other_serve()
    assert waits == []


def test_an_instance_that_stays_is_refused_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = play(monkeypatch, ENDING)
    with pytest.raises(HiSparseError, match=r"\(no application\)"):
        instance.check_no_other_serve()
    assert instance.ENDING_S <= sum(waits) < instance.ENDING_S + 2
