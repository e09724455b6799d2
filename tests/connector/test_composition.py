"""P/D, HiSparse and offloading together: loads, words and failures reach the right child, and nobody waits for ever.

`python -c "from tests.connector.machine import Machine; Machine(SEED).live()"` repeats a life.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.connector.machine import Machine
from tests.mutations.composition_faults import COMPOSITION_FAULTS
from tests.mutations.faults import Fault

LIVES, FAULT_SEEDS = 40, 120
EXPECTED = ("load of pd", "load of offloading", "load of offloading and pd", "siblings", "loaded", "failed", "drained",
            "load failed at once", "ranks restarted", "closed while waiting", "closed while loading", "closed while running")


def test_every_load_ends_once_with_its_own_end() -> None:
    met: Counter[str] = Counter()
    for seed in range(LIVES):
        machine = Machine(seed)
        try:
            machine.live()
        except Exception as error:
            raise AssertionError(f"life {seed}: {error}") from error
        met.update(machine.met)
    print(f"\n{LIVES} lives: {dict(met)}")
    assert not [name for name in EXPECTED if not met[name]]


@pytest.mark.parametrize("fault", COMPOSITION_FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    for seed in range(FAULT_SEEDS):
        try:
            Machine(seed).live()
        except (AttributeError, NameError, TypeError):
            raise
        except Exception as error:
            print(f"\n{fault.__name__}: {seed + 1}, {error!s:.100}")
            return
    raise AssertionError(f"{FAULT_SEEDS} lives with {fault.__name__} looked right")
