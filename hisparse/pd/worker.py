"""Worker half of the P/D connector: owns the rank's transfer thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hisparse.config import PDConfig
from hisparse.layout import KVCacheLayout
from hisparse.pd.commands import PDCommand, PDOutput
from hisparse.pd.endpoint import RankEndpoint
from hisparse.pd.transport import Transport

if TYPE_CHECKING:
    from hisparse.worker.device_cache import DeviceCache
    from hisparse.worker.host_pool import HostPool


class PDConnectorWorker:
    """One per rank. Registers the pools once, serves peers' READs, and imports pages on its transfer thread.

    In a MultiWorkerConnector it comes after the hisparse child: generations are stored and row masks cleared first.

    Args:
        host_pool: None when the engine runs without HiSparse (then only RESIDENT landings).
        host_writer: this rank writes the host pool (the lowest rank of each physical pool).
        make_transport: agent name -> Transport; default by `config.transport`.
    """

    name = "pd"

    def __init__(self, layout: KVCacheLayout, config: PDConfig, *, cache: DeviceCache, host_pool: HostPool | None,
                 engine_id: str, incarnation: int, rank: int, host_writer: bool,
                 make_transport: Callable[[str], Transport] | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        raise NotImplementedError

    def handshake(self) -> RankEndpoint:
        """Address of this rank for peers; give it to PDConnectorScheduler.set_endpoints."""
        raise NotImplementedError

    def start_step(self, metadata: PDCommand | None) -> None:
        """Hands imports, cancels and notices to the transfer thread; returns at once."""

    def end_step(self) -> None:
        """Nothing: imports need no forward."""

    def output(self) -> PDOutput | None:
        """Acknowledgements and notices since the last call."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Cancels imports, drains or closes every endpoint, deregisters, ends the thread. Idempotent."""
