"""A gate that holds the device, for the tests of what waits for it; and a device that lacks room for large clusters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hisparse.ops.cuda import driver
from tests.gpu.gate import Gate


@pytest.fixture(scope="module")
def shut() -> Gate:
    return Gate()


@pytest.fixture
def gate(shut: Gate) -> Iterator[Gate]:
    yield shut
    shut.close()


@pytest.fixture
def small_clusters(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The device cannot run clusters of more than 8 CTAs. What it is asked: (CTAs, so many of which really run at once)."""
    asked, ask = [], driver.max_active_clusters

    def room(function: int, cluster: int, threads: int, shared_bytes: int) -> int:
        asked.append((cluster, ask(function, cluster, threads, shared_bytes)))
        return 0 if cluster > 8 else asked[-1][1]

    monkeypatch.setattr(driver, "max_active_clusters", room)
    return asked
