"""The last imports and how they ended, for people to look at; decides nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from hisparse.types import Landing

NUM_KEPT = 32
MAX_REASON_CHARS = 300


class LandingEntry(NamedTuple):
    """One import. `at_s`: Unix time of its end. `seconds`: of the slowest rank. `failure`: "" = it landed."""

    number: int
    at_s: float
    request_id: str
    peer: str
    landing: str
    tokens: int
    num_bytes: int
    seconds: float
    failure: str
    reason: str


class LandingLog:
    """Keeps the last `NUM_KEPT` imports; numbers them since the start."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._entries: deque[LandingEntry] = deque(maxlen=NUM_KEPT)
        self._number = 0

    def add(self, request_id: str, *, peer: str = "", landing: Landing | None = None, tokens: int = 0, num_bytes: int = 0,
            seconds: float = 0.0, failure: str = "", reason: str = "") -> None:
        """An import ended, or was refused before it began (`landing` None)."""
        self._number += 1
        self._entries.append(LandingEntry(
            self._number, self._wall_clock(), request_id, peer, landing.value if landing is not None else "", tokens,
            num_bytes, seconds, failure, reason[:MAX_REASON_CHARS]))

    def newest(self) -> list[dict[str, Any]]:
        """JSON types, newest first."""
        return [entry._asdict() for entry in reversed(self._entries)]
