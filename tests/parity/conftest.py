from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hisparse.config import HiSparseConfig
from hisparse.testing.local_engine import LocalEngine
from hisparse.types import Landing
from tests.parity.cells import never_fits_resident
from tests.parity.failures import MakePair
from tests.parity.rig import Rig, engine_config

_IDS = itertools.count()


@pytest.fixture
def make_rig(tiny_checkpoints: dict[str, Path]) -> Iterator[Callable[..., Rig]]:
    """(decode or colocated configuration, prefill configuration or None) -> Rig; closed at the end."""
    rigs: list[Rig] = []

    def make(decode: HiSparseConfig, prefill: HiSparseConfig | None = None) -> Rig:
        number = next(_IDS)
        first = LocalEngine(prefill, engine_id=f"prefill-{number}") if prefill is not None else None
        rig = Rig(path=Path(decode.model.path), decode=LocalEngine(decode, engine_id=f"decode-{number}"), prefill=first)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def pair(make_rig: Callable[..., Rig], tiny_checkpoints: dict[str, Path]) -> MakePair:
    """(policy, landing, ...) -> Rig. The prefill pool is small, so that pages are reused soon."""
    def make(*, policy: str = "recompute", landing: Landing = Landing.RESIDENT, model: str = "glm52", lease_s: float = 30.0,
             deadline_s: float = 20.0, transport: str = "loopback", seats: int = 8, slack: int | None = None) -> Rig:
        path = tiny_checkpoints[model]
        pd = {"lease_s": lease_s, "transfer_deadline_s": deadline_s, "transport": transport,
              "kv_load_failure_policy": policy}
        rig = make_rig(engine_config(path, "decode", pd=pd, scheduler={"max_num_seqs": seats}, slack=slack),
                       engine_config(path, "prefill", pd=pd, slack=30, host_pages=30))
        if landing is Landing.HOST:
            never_fits_resident(rig.decode)
        return rig

    return make
