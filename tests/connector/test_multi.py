"""MultiConnector: routing by name, and joining the loads of several children for one request."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from hisparse.connector.base import LoadEvents
from hisparse.connector.multi import MultiSchedulerConnector, MultiWorkerConnector
from hisparse.errors import ConfigError, InvariantError


class Child:
    """A scheduler half driven by the test: `next` is what its next update reports."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loads: set[str] = set()
        self.draining: set[str] = set()
        self.next = LoadEvents()
        self.metadata: Any = None
        self.seen: list[Any] = []
        self.pending = False

    def build_metadata(self, step: int) -> Any:
        return self.metadata

    def update(self, outputs: Sequence[Any]) -> LoadEvents:
        self.seen.append(list(outputs))
        events, self.next = self.next, LoadEvents()
        self.loads -= {*events.loaded, *events.failed}
        return events

    def request_closed(self, request_id: str) -> None:
        if request_id in self.loads:
            self.loads.discard(request_id)
            self.draining.add(request_id)

    def has_pending_work(self) -> bool:
        return self.pending

    def check(self) -> None:
        pass

    def loading(self) -> set[str]:
        return self.loads


class Plain(Child):
    """A child that never loads."""

    loading = None  # type: ignore[assignment]


def make() -> tuple[MultiSchedulerConnector, Child, Child]:
    a, b = Child("a"), Child("b")
    return MultiSchedulerConnector([a, b]), a, b


def test_metadata_and_outputs_are_routed_by_name() -> None:
    multi, a, b = make()
    assert multi.build_metadata(1) is None
    b.metadata = "work"
    assert multi.build_metadata(2) == {"b": "work"}
    multi.update([{"a": 1, "b": 2}, {"b": 3}])
    assert (a.seen, b.seen) == ([[1]], [[2, 3]])
    multi.update([])
    assert a.seen[-1] == [] and b.seen[-1] == [], "every child is updated: time passes there"
    b.pending = True
    assert multi.has_pending_work()
    with pytest.raises(ConfigError, match="unique"):
        MultiSchedulerConnector([Child("a"), Child("a")])


def test_request_is_loaded_when_its_last_child_is() -> None:
    multi, a, b = make()
    a.loads, b.loads = {"r", "only-a"}, {"r"}
    assert multi.loading() == {"r", "only-a"}
    a.next = LoadEvents(loaded=frozenset({"r", "only-a"}))
    assert multi.update([]).loaded == {"only-a"}
    multi.check()
    b.next = LoadEvents(loaded=frozenset({"r"}))
    assert multi.update([]).loaded == {"r"}
    assert multi.loading() == frozenset()
    multi.check()


def test_both_in_one_update() -> None:
    multi, a, b = make()
    a.loads, b.loads = {"r"}, {"r"}
    a.next = b.next = LoadEvents(loaded=frozenset({"r"}))
    assert multi.update([]).loaded == {"r"}


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("failing", [{"a"}, {"b"}, {"a", "b"}])
def test_failure_is_reported_once_and_only_after_all_drained(first: str, failing: set[str]) -> None:
    multi, a, b = make()
    children = {"a": a, "b": b}
    a.loads, b.loads = {"r"}, {"r"}
    order = [first, "b" if first == "a" else "a"]
    for i, name in enumerate(order):
        children[name].next = (LoadEvents(failed={"r": f"bad {name}"}) if name in failing
                               else LoadEvents(loaded=frozenset({"r"})))
        events = multi.update([])
        assert not events.loaded
        if i == 0:
            assert not events.failed, "the other child may still write the blocks"
        else:
            assert events.failed == {"r": "; ".join(f"{n}: bad {n}" for n in order if n in failing)}
    assert multi.update([]) == LoadEvents()
    multi.check()


def test_completions_nobody_waits_for_are_ignored_and_counted() -> None:
    multi, a, _ = make()
    a.next = LoadEvents(loaded=frozenset({"ghost"}), failed={"other": "x"}, drained=("third",))
    assert multi.update([]) == LoadEvents()
    assert multi.late_completions == 3
    a.loads = {"r"}
    a.next = LoadEvents(loaded=frozenset({"r"}))
    assert multi.update([]).loaded == {"r"}
    a.next = LoadEvents(loaded=frozenset({"r"}))
    assert multi.update([]) == LoadEvents() and multi.late_completions == 4


@pytest.mark.parametrize("order", list(itertools.permutations(["a", "b", "close"])))
def test_b17_closed_request_is_drained_once_when_its_last_child_is(order: tuple[str, ...]) -> None:
    multi, a, b = make()
    children = {"a": a, "b": b}
    a.loads, b.loads = {"r"}, {"r"}
    loaded: list[str] = []
    drained: list[str] = []
    for event in order:
        if event == "close":
            multi.request_closed("r")
            multi.request_closed("r")
            continue
        child = children[event]
        child.next = LoadEvents(drained=("r",)) if "r" in child.draining else LoadEvents(loaded=frozenset({"r"}))
        events = multi.update([])
        loaded += events.loaded
        drained += events.drained
        multi.check()
    assert (loaded, drained) == ((["r"], []) if order[-1] == "close" else ([], ["r"]))
    assert multi.loading() == frozenset()


def test_readmitted_request_is_told_apart_from_its_old_load() -> None:
    multi, a, b = make()
    a.loads = {"r"}
    multi.request_closed("r")
    a.loads, b.loads = {"r"}, {"r"}
    a.next = LoadEvents(drained=("r",))
    events = multi.update([])
    assert events.drained == ("r",) and not events.loaded
    a.next = b.next = LoadEvents(loaded=frozenset({"r"}))
    assert multi.update([]).loaded == {"r"}
    assert multi.late_completions == 0


def test_released_blocks_pass_through_and_children_without_loads_are_fine() -> None:
    plain, a = Plain("hisparse"), Child("a")
    multi = MultiSchedulerConnector([plain, a])
    plain.next = LoadEvents(released_device_blocks=(3,))
    a.next = LoadEvents(released_device_blocks=(4, 5))
    assert multi.update([{}]).released_device_blocks == (3, 4, 5)


class Half:
    """A worker half that logs its calls."""

    def __init__(self, name: str, log: list[tuple[str, Any]], *, broken: bool = False) -> None:
        self.name, self.log, self.broken, self.word = name, log, broken, None

    def start_step(self, metadata: Any) -> None:
        self.log.append((f"{self.name}.start", metadata))

    def end_step(self) -> None:
        self.log.append((f"{self.name}.end", None))

    def output(self) -> Any:
        return self.word

    def shutdown(self) -> None:
        self.log.append((f"{self.name}.shutdown", None))
        if self.broken:
            raise RuntimeError(f"{self.name} is broken")


def test_worker_halves_run_in_order_and_all_shut_down() -> None:
    log: list[tuple[str, Any]] = []
    first, second = Half("hisparse", log), Half("pd", log, broken=True)
    multi = MultiWorkerConnector([first, second])
    multi.start_step({"pd": "import"})
    multi.end_step()
    assert log == [("hisparse.start", None), ("pd.start", "import"), ("hisparse.end", None), ("pd.end", None)]
    multi.start_step(None)
    assert log[-1] == ("pd.start", None)
    assert multi.output() is None
    second.word = 0
    assert multi.output() == {"pd": 0}
    with pytest.raises(InvariantError, match="ofloading"):
        multi.start_step({"ofloading": "typo"})
    with pytest.raises(RuntimeError, match="pd is broken"):
        multi.shutdown()
    assert [name for name, _ in log[-2:]] == ["pd.shutdown", "hisparse.shutdown"]
    with pytest.raises(ConfigError):
        MultiWorkerConnector([first, Half("hisparse", log)])
