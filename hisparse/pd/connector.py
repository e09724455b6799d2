"""The P/D connector, for engines: `PDConnectorScheduler` (name "pd") and `PDConnectorWorker`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hisparse.config import HiSparseConfig, kv_layout
from hisparse.pd.scheduler import PDConnectorScheduler
from hisparse.pd.stats import PDStats
from hisparse.pd.worker import PDConnectorWorker

if TYPE_CHECKING:
    from hisparse.worker.assembly import WorkerParts

__all__ = ["PDConnectorScheduler", "PDConnectorWorker", "PDStats", "make_pd_worker"]


def make_pd_worker(parts: WorkerParts, *, config: HiSparseConfig, engine_id: str, incarnation: int) -> PDConnectorWorker:
    """The worker half over one rank's pools; with functools.partial a picklable connector factory for `RankEngine`."""
    return PDConnectorWorker(
        kv_layout(config), config.pd, cache=parts.cache, host_pool=parts.host_pool, engine_id=engine_id,
        incarnation=incarnation, rank=parts.rank, host_writer=parts.is_writer,
    )
