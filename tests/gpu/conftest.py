"""A gate that holds the device, for the tests of what waits for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.gate import Gate


@pytest.fixture(scope="module")
def shut() -> Gate:
    return Gate()


@pytest.fixture
def gate(shut: Gate) -> Iterator[Gate]:
    yield shut
    shut.close()
