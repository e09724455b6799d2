"""The P/D connector, for engines: `PDConnectorScheduler` (name "pd") and `PDConnectorWorker`."""

from __future__ import annotations

from hisparse.pd.scheduler import PDConnectorScheduler, PDStats
from hisparse.pd.worker import PDConnectorWorker

__all__ = ["PDConnectorScheduler", "PDConnectorWorker", "PDStats"]
