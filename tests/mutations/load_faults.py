"""Seeded faults of what the engine makes of an import that failed. `tests/parity/test_load_failures.py` must find every one.

A fault is a function of a MonkeyPatch whose docstring names the broken rule.
"""

from __future__ import annotations

from typing import Any

from hisparse.engine.core import EngineCore
from hisparse.engine.imports import Imports
from hisparse.engine.load_failures import LoadFailurePolicy, Recovery
from hisparse.engine.open_requests import OpenRequests
from hisparse.engine.request import Request
from tests.mutations.faults import Fault, Patch, wrap


def a_failed_import_needs_no_budget(patch: Patch) -> None:
    """Every recompute takes from the budget."""
    patch.setattr(Imports, "decide", lambda self, request: Recovery.RECOMPUTE)


def the_budget_is_kept_to_the_end(patch: Patch) -> None:
    """The budget is given back with the first token."""
    wrap(patch, EngineCore, "_accept", lambda original, self, request, token:
         (setattr(request, "recomputes", False), original(self, request, token)))


def an_overdue_import_keeps_its_name(patch: Patch) -> None:
    """A request leaves its id to the pages that its overdue import may still write."""
    def keep(original: Any, self: OpenRequests, request: Request) -> None:
        name = request.request_id
        original(self, request)
        self[name] = self.pop(request.request_id)
        request.request_id = name
    wrap(patch, OpenRequests, "rename", keep)


def an_overdue_import_is_an_error(patch: Patch) -> None:
    """The policy decides what becomes of an overdue import."""
    wrap(patch, Imports, "failed", lambda original, self, request, problem:
         self._refuse(request, problem) if "quarantine" in problem
         else original(self, request, problem))


def a_retry_counts_for_nothing(patch: Patch) -> None:
    """The engine asks for a retry only while the caller has some left."""
    wrap(patch, LoadFailurePolicy, "decide", lambda original, self, name, *, tokens, retries_left:
         original(self, name, tokens=tokens, retries_left=1))


def an_unusable_answer_is_not_a_failure(patch: Patch) -> None:
    """An answer that cannot be used falls under the policy, too."""
    take = Imports.take_answer
    patch.setattr(Imports, "take_answer", lambda self, request, params: (take(self, request, params), None)[1])


def nobody_tells_prefill_that_the_client_left(patch: Patch) -> None:
    """The answer of a retry that nobody waits for is refused, so that its lease ends."""
    wrap(patch, EngineCore, "resume", lambda original, self, request_id, **answer:
         original(self, request_id, **answer) if request_id in self.requests else None)


LOAD_FAULTS: list[Fault] = [value for value in list(globals().values())
                            if callable(value) and getattr(value, "__module__", "") == __name__]
