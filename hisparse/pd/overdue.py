"""When an import that was not acknowledged is overdue: told by a clock that no transport call can hold up."""

from __future__ import annotations

import time
from collections.abc import Callable

from hisparse.pd.commands import ImportPlan


class ImportDeadlines:
    """Imports of one rank without an acknowledgement. At its deadline one fails, a drain later its endpoint is closed: one that
    is not acknowledged even then is overdue, and its pages may still be written.

    Args:
        quarantine_s: what draining and closing may take after the deadline.
    """

    def __init__(self, quarantine_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._quarantine_s, self._clock = quarantine_s, clock
        self._late_at_s: dict[int, float] = {}

    def begin(self, plan: ImportPlan) -> None:
        """The rank was told of it, whether or not its transfer thread has heard yet."""
        self._late_at_s[plan.job_id] = self._clock() + plan.deadline_s + self._quarantine_s

    def end(self, job_id: int) -> None:
        """Its acknowledgement came. Unknown ids are ignored."""
        self._late_at_s.pop(job_id, None)

    def late(self) -> list[int]:
        """Job ids that are overdue."""
        now = self._clock()
        return [job_id for job_id, late_at_s in self._late_at_s.items() if now >= late_at_s]
