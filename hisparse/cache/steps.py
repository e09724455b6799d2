"""Which steps the device may still be working on, and what must wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from hisparse.errors import InvariantError


class StepClock:
    """Steps are *dispatched* (command built) and *retired* (every rank's output is back), in order.

    `busy` names device blocks freed while a step that may touch them was in flight: the compute stream may have them at
    once, any other writer only after that step retired. Writer of every field: this class.
    """

    def __init__(self) -> None:
        self.dispatched = 0
        self.retired = 0
        self.busy: dict[int, int] = {}
        self._deferred: deque[tuple[int, Callable[[], None]]] = deque()

    @property
    def outstanding(self) -> bool:
        return self.dispatched > self.retired

    @property
    def has_deferred(self) -> bool:
        return bool(self._deferred)

    def dispatch(self, step: int) -> None:
        if step <= self.dispatched:
            raise InvariantError(f"step {step} was planned after step {self.dispatched}; step numbers must increase")
        self.dispatched = step

    def retire(self, step: int) -> None:
        """Also retires every earlier step. Runs what waited for it."""
        if not self.retired < step <= self.dispatched:
            raise InvariantError(
                f"step {step} retired, but dispatched is {self.dispatched} and already retired is {self.retired}"
            )
        self.retired = step
        if step == self.dispatched:
            self.busy.clear()
        elif self.busy:
            self.busy = {block: last for block, last in self.busy.items() if last > step}
        while self._deferred and self._deferred[0][0] <= step:
            self._deferred.popleft()[1]()

    def abandon(self) -> None:
        """The workers are gone: nothing dispatched will touch anything any more."""
        self.retired = self.dispatched
        self.busy.clear()
        while self._deferred:
            self._deferred.popleft()[1]()

    def after_dispatched(self, action: Callable[[], None]) -> None:
        """Runs `action` once every step dispatched so far has retired; now, if none is in flight."""
        if self.outstanding:
            self._deferred.append((self.dispatched, action))
        else:
            action()

    def mark_busy(self, blocks: Iterable[int]) -> None:
        """Device blocks being given back now: dispatched steps may still touch them."""
        if self.outstanding:
            self.busy.update(dict.fromkeys(blocks, self.dispatched))

    def is_busy(self, block: int) -> bool:
        return block in self.busy
