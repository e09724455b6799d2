"""Prefill/decode fails closed: whatever the order of messages, bytes, copies and failures, a request gets its own KV or none.

`HISPARSE_PD_SCHEDULES=n` runs n schedules instead of the bounded profile (the large run is 10000), from the seed
`HISPARSE_PD_FIRST_SEED` on. A schedule that fails is named by its seed:
`python -c "from tests.pd.schedules import live; live(SEED)"` repeats it.
`HISPARSE_PD_FAULT_SEEDS=n` tries n seeds on each seeded fault and prints how many find it (`-s`), instead of stopping at the
first.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from pathlib import Path

import pytest

from tests.mutations.faults import Fault
from tests.mutations.pd_faults import PD_FAULTS
from tests.pd import engines
from tests.pd.fake_gpu import FakeGpuRank, fake_gpu
from tests.pd.schedules import live

SCHEDULES = int(os.environ.get("HISPARSE_PD_SCHEDULES", "160"))
FIRST_SEED = int(os.environ.get("HISPARSE_PD_FIRST_SEED", "0"))
GPU_SCHEDULES = 24
FAULT_SEEDS = 150
COUNT_SEEDS = int(os.environ.get("HISPARSE_PD_FAULT_SEEDS", "0"))

EXPECTED = (
    "landing resident", "landing host", "loaded", "drained", "twins", "late twin", "answer for nobody",
    "answer refused", "no answer",
    "failed: generation", "failed: refused", "failed: timeout", "failed: transfer", "failed: restarted",
    "closed while asked", "closed while offered", "closed while importing", "closed while loaded", "closed while recomputing",
    "recompute", "refuse", "overdue", "transport call blocks",
    "lease lost", "lease lost while it was read", "prefill killed", "prefill cut off", "prefill restarted",
    "decode restarted", "decode ranks restarted",
    "prefill ranks restarted", "larger pages at prefill", "smaller pages at prefill", "from the middle of a page of prefill",
    "other groups at prefill", "shared host pool", "nothing to read", "read over a mapping",
)
"""What the bounded profile must meet: it is no proof of what it never sees."""


@pytest.mark.timeout(300 + SCHEDULES // 2)
def test_every_request_gets_its_own_bytes_or_none() -> None:
    met: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + SCHEDULES):
        try:
            met.update(live(seed).met)
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        if seed % 500 == 499:
            print(f"{seed + 1 - FIRST_SEED} schedules are right", flush=True)
    print(f"\n{SCHEDULES} schedules\n" + "\n".join(f"{met[name]:>7}  {name}" for name in sorted({*EXPECTED, *met})))
    assert not [name for name in EXPECTED if not met[name]]


def test_packed_allocations_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA plans: slots of two kinds, and no READ that mixes memory, also where a page is put together from both."""
    monkeypatch.setattr(engines, "RankMemory", FakeGpuRank)
    met: Counter[str] = Counter()
    with fake_gpu():
        for seed in range(FIRST_SEED, FIRST_SEED + max(GPU_SCHEDULES, SCHEDULES // 10)):
            try:
                met.update(live(seed).met)
            except Exception as error:
                raise AssertionError(f"schedule {seed}: {error}") from error
    assert met["larger pages at prefill"] and met["smaller pages at prefill"] and met["failed: generation"], met


def name_of_check(error: Exception) -> str:
    """Module and function whose check failed. A fault that does not fit the code any more is not found by it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, AttributeError | NameError | TypeError) or Path(frame.filename).stem == "pd_faults":
        raise error
    return f"{Path(frame.filename).stem}.{frame.name}"


@pytest.mark.parametrize("fault", PD_FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    found: Counter[str] = Counter()
    for seed in range(COUNT_SEEDS or FAULT_SEEDS):
        try:
            live(seed)
        except Exception as error:
            found[name_of_check(error)] += 1
            if not COUNT_SEEDS:
                print(f"\n{fault.__name__}: {seed + 1}, {next(iter(found))}")
                break
    if COUNT_SEEDS:
        print(f"\n{fault.__name__:<52} {found.total():>3} of {COUNT_SEEDS}  {found.most_common(3)}")
    assert found, f"{COUNT_SEEDS or FAULT_SEEDS} schedules with {fault.__name__} looked right"
