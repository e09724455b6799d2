"""Both halves of the P/D connector of an engine with one rank, stepped in turn."""

from __future__ import annotations

from hisparse.connector.base import LoadEvents
from hisparse.pd.connector import PDConnectorScheduler, PDConnectorWorker


class Halves:
    """Whoever inherits makes the halves."""

    worker: PDConnectorWorker
    scheduler: PDConnectorScheduler
    steps = 0

    def step(self) -> LoadEvents:
        """One step of an engine that runs no token."""
        self.steps += 1
        self.worker.start_step(self.scheduler.build_metadata(self.steps))
        self.worker.end_step()
        output = self.worker.output()
        events = self.scheduler.update([output] if output is not None else [])
        self.scheduler.check()
        return events
