"""Seeded faults of connectors that work together: each breaks one rule in one place. The lives in tests/connector find each.

A fault is a function of a MonkeyPatch whose docstring names the broken rule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hisparse.connector.multi import MultiSchedulerConnector
from hisparse.connector.offloading import OffloadingScheduler
from hisparse.pd.connector import PDConnectorScheduler
from tests.mutations.faults import Fault, Patch, failed_import_believed, import_without_pins, wrap


def a_failure_does_not_wait_for_the_others(patch: Patch) -> None:
    """A failed load is reported when every child has drained."""
    def finish(original: Any, self: MultiSchedulerConnector, name: str, request_id: str, reason: str | None, loaded: set[str],
               failed: dict[str, str]) -> None:
        if reason is not None:
            self._waiting[request_id] = {name}
        original(self, name, request_id, reason, loaded, failed)
    wrap(patch, MultiSchedulerConnector, "_finish", finish)


def one_child_speaks_for_all(patch: Patch) -> None:
    """A request is loaded when every child that was loading for it has said so."""
    def finish(original: Any, self: MultiSchedulerConnector, name: str, request_id: str, *more: Any) -> None:
        if request_id in self._waiting:
            self._waiting[request_id] &= {name}
        original(self, name, request_id, *more)
    wrap(patch, MultiSchedulerConnector, "_finish", finish)


def an_earlier_failure_is_forgotten(patch: Patch) -> None:
    """A load is ok when no child failed, whoever was last."""
    def finish(original: Any, self: MultiSchedulerConnector, name: str, request_id: str, *more: Any) -> None:
        self._failures.pop(request_id, None)
        original(self, name, request_id, *more)
    wrap(patch, MultiSchedulerConnector, "_finish", finish)


def loads_are_not_noticed(patch: Patch) -> None:
    """Whoever is loading for a request is asked before its end can be heard."""
    patch.setattr(MultiSchedulerConnector, "_note_loads", lambda self: None)


def the_words_of_one_rank_are_enough(patch: Patch) -> None:
    """Each child hears every rank."""
    wrap(patch, MultiSchedulerConnector, "update", lambda original, self, outputs: original(self, outputs[:RANKS_HEARD]))


def a_closed_request_drains_with_its_first_child(patch: Patch) -> None:
    """A closed load is drained when every child that was loading for it has drained."""
    def drain(original: Any, self: MultiSchedulerConnector, name: str, request_id: str) -> Any:
        self._closed = [(other, waiting & {name} if other == request_id and name in waiting else waiting)
                        for other, waiting in self._closed]
        return original(self, name, request_id)
    wrap(patch, MultiSchedulerConnector, "_drain", drain)


def a_closed_request_is_told_to_one_child(patch: Patch) -> None:
    """Every child hears that a request was closed."""
    def closed(original: Any, self: MultiSchedulerConnector, request_id: str) -> None:
        children, self.children = self.children, self.children[:2]
        original(self, request_id)
        self.children = children
    wrap(patch, MultiSchedulerConnector, "request_closed", closed)


def released_pins_are_lost_on_the_way(patch: Patch) -> None:
    """Pins that a child releases reach the cache."""
    wrap(patch, MultiSchedulerConnector, "update", lambda original, self, outputs:
         replace(original(self, outputs), released_device_blocks=()))


def an_end_that_was_not_heard_is_dropped(patch: Patch) -> None:
    """A load that had failed, but was closed before that was reported, is drained."""
    def closed(original: Any, self: OffloadingScheduler, request_id: str) -> None:
        self._failed_at_once.pop(request_id, None)
        original(self, request_id)
    wrap(patch, OffloadingScheduler, "request_closed", closed)


def a_failed_load_of_the_store_is_believed(patch: Patch) -> None:
    """Indexer pages that a rank could not load are not valid."""
    def done(original: Any, self: OffloadingScheduler, job: Any, *more: Any) -> None:
        job.reasons.clear()
        original(self, job, *more)
    wrap(patch, OffloadingScheduler, "_load_done", done)


def loads_outlive_the_ranks(patch: Patch) -> None:
    """What was being loaded from the store has failed when the ranks are replaced."""
    def restarted(original: Any, self: OffloadingScheduler) -> None:
        original(self)
        self._failed_at_once.clear()
    wrap(patch, OffloadingScheduler, "workers_restarted", restarted)


def a_failed_import_is_loaded(patch: Patch) -> None:
    """An import is loaded when no rank failed."""
    def end(original: Any, self: PDConnectorScheduler, job: Any, *more: Any) -> None:
        job.failures.clear()
        original(self, job, *more)
    wrap(patch, PDConnectorScheduler, "_end_job", end)


RANKS_HEARD = 3
"""HiSparse's two words and one more."""

COMPOSITION_FAULTS: list[Fault] = [
    *[value for value in list(globals().values()) if callable(value) and getattr(value, "__module__", "") == __name__],
    failed_import_believed, import_without_pins,
]
