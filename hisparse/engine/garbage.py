"""When Python's garbage collector stops an engine: while it rests, not within a step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

YOUNG = (5_000, 5)
"""Thresholds of the two young generations. A collection of both looks at some 25,000 objects at most: a few milliseconds."""
NEVER = 2**31 - 1
MAX_BUSY_S = 600.0
"""An engine that never rests is stopped once in this time."""


def freeze_heap() -> None:
    """What is there now (modules, the model) stays, and no later collection looks at it: 20 ms of each full one in a process
    with Ray, 80 ms with torch.
    """
    gc.collect()
    gc.freeze()


class IdleCollector:
    """Full collections of the process only when told that nothing is to be done. Process-wide, so one at a time.

    An engine's own objects form no cycles: they go with their last reference. What the collector finds is left by libraries
    and by exceptions, and is little; young garbage is collected as ever.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thresholds = gc.get_threshold()
        self._worked = False
        self._last_s = clock()

    def begin(self) -> None:
        """After start-up, before the first step."""
        self._thresholds = gc.get_threshold()
        freeze_heap()
        gc.set_threshold(*YOUNG, NEVER)
        self._last_s = self._clock()

    def worked(self) -> None:
        """After a step."""
        self._worked = True
        if self._clock() - self._last_s >= MAX_BUSY_S:
            self._collect()

    def rest(self) -> None:
        """Nothing is to be done. Collects once after each time of work."""
        if self._worked:
            self._collect()

    def end(self) -> None:
        """Leaves the process's collector as `begin` found it. Idempotent."""
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def _collect(self) -> None:
        gc.collect()
        self._worked, self._last_s = False, self._clock()
