from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hisparse.config import HiSparseConfig
from hisparse.testing.local_engine import LocalEngine
from tests.parity.rig import Rig

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
