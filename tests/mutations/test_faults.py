"""The random lives must find every seeded fault; a harness that finds nothing proves nothing.

`HISPARSE_FAULT_SEEDS=n` tries n seeds on each fault and counts every find, instead of stopping at the first; with `-s` the
last test prints which check found what.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from pathlib import Path

import pytest

from tests.cache.lives import SCRIPTS, live
from tests.mutations.faults import FAULTS, Fault

SEEDS = 60
COUNT_SEEDS = int(os.environ.get("HISPARSE_FAULT_SEEDS", "0"))
FOUND: dict[str, Counter[str]] = {}
"""Fault -> the checks that found it -> seeds."""


def life(seed: int) -> None:
    for script in SCRIPTS:
        script(seed)
    live(seed, 300)


def name_of_check(error: Exception) -> str:
    """Module and function whose check failed, the innermost one. A fault that does not fit the code is not found by it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, AttributeError | NameError | TypeError) or Path(frame.filename).stem == "faults":
        raise error
    return f"{Path(frame.filename).stem}.{frame.name}"


@pytest.mark.parametrize("seed", range(20))
def test_lives_without_faults_look_right(seed: int) -> None:
    """The lives that find the faults, and more."""
    life(seed)


def find(fault: Fault, patch: pytest.MonkeyPatch) -> Counter[str]:
    """What finds the fault, in how many lives: in the first life that looks wrong, or in all of them."""
    fault(patch)
    found = FOUND[fault.__name__] = Counter()
    for seed in range(COUNT_SEEDS or SEEDS):
        try:
            life(seed)
        except Exception as error:
            found[name_of_check(error)] += 1
            if not COUNT_SEEDS:
                break
    return found


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(fault, monkeypatch), f"{COUNT_SEEDS or SEEDS} lives with {fault.__name__} looked right"


def test_every_kind_of_check_finds_something() -> None:
    """Worker, laws and the cache's own checks each find faults; no single one would do. Prints what this process found."""
    kinds = {"fake_worker", "laws"}
    for fault in FAULTS:
        if kinds <= modules():
            break
        if fault.__name__ not in FOUND:
            with pytest.MonkeyPatch.context() as patch:
                find(fault, patch)
    for name, checks in FOUND.items():
        seeds = f"{checks.total():>3} of {COUNT_SEEDS}" if COUNT_SEEDS else ""
        print(f"\n{name:<42} {seeds} " + ", ".join(f"{check} ({n})" for check, n in checks.most_common()), end="")
    print()
    assert kinds <= modules()


def modules() -> set[str]:
    return {check.split(".")[0] for checks in FOUND.values() for check in checks}
