"""Which incarnation of each prefill engine counts: the one seen last. Answers of one that was replaced are refused a while."""

from __future__ import annotations

from collections.abc import Callable

from hisparse.errors import ProtocolError
from hisparse.pd.endpoint import RETIRED_S


class Incarnations:
    """By prefill engine. Args: clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._current: dict[str, int] = {}
        self._retired: dict[tuple[str, int], float] = {}  # (peer, incarnation) -> refused until

    def is_current(self, engine_id: str, incarnation: int) -> bool:
        """It is the one seen last. Workers must hear of no other: a peer table that connects an earlier one after a later one
        ends the living connection."""
        return self._current.get(engine_id) == incarnation

    def check(self, engine_id: str, incarnation: int) -> None:
        """Takes note of a new incarnation; the one before it is retired.

        Raises:
            ProtocolError: this one was replaced within the last RETIRED_S seconds.
        """
        if self._retired.get((engine_id, incarnation), 0.0) > self._clock():
            raise ProtocolError(f"prefill engine {engine_id} has restarted since it gave this answer; its pages are gone")
        current = self._current.setdefault(engine_id, incarnation)
        if current != incarnation:
            now = self._clock()
            self._retired = {name: until_s for name, until_s in self._retired.items() if until_s > now}
            self._retired[engine_id, current] = now + RETIRED_S
            self._current[engine_id] = incarnation
