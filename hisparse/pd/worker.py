"""Worker half of the P/D connector: registers the rank's pools and hands orders to its transfer thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hisparse.config import PDConfig
from hisparse.layout import KVCacheLayout
from hisparse.pd.commands import PDCommand, PDOutput
from hisparse.pd.endpoint import RankEndpoint
from hisparse.pd.importer import Importer
from hisparse.pd.memory import HostSlab, LocalMemory, Slab
from hisparse.pd.transfer_thread import TransferThread
from hisparse.pd.transport import Transport

START_TIMEOUT_S = 120.0
DRAIN_S = 1.0
"""A READ past its deadline gets this long to end by itself before its endpoint is closed."""
CLOSE_S = 10.0
"""Closing an endpoint may take this long, e.g. to register a large pool with a new agent, before its imports are overdue."""

_log = logging.getLogger(__name__)


class PDConnectorWorker:
    """One per rank. Registers the pools once, serves peers' READs, and imports pages on its transfer thread.

    In a MultiWorkerConnector it comes after the hisparse child: generations are stored and row masks cleared first.

    Args:
        cache: the rank's DeviceCache. host_pool: its HostPool, None without HiSparse (then only RESIDENT landings).
        host_writer: this rank writes the host pool (the lowest rank of each physical pool).
        make_transport: agent name -> Transport, called on the transfer thread; default by `config.transport`.
    """

    name = "pd"

    def __init__(self, layout: KVCacheLayout, config: PDConfig, *, cache: Slab, host_pool: HostSlab | None,
                 engine_id: str, incarnation: int, rank: int, host_writer: bool,
                 make_transport: Callable[[str], Transport] | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._rank, self._incarnation = rank, incarnation
        memory = LocalMemory(layout, cache, host_pool)

        serves_only = config.role == "prefill"  # imports nothing, so it needs no staging worth the memory

        def make_importer(transport: Transport) -> Importer:
            return Importer(memory, transport, rank=rank, host_writer=host_writer,
                            staging_slots=1 if serves_only else config.staging_slots,
                            slot_pages=1 if serves_only else config.staging_slot_pages,
                            direct=config.landing_path == "direct", drain_s=DRAIN_S, clock=clock)

        self._thread = TransferThread(
            memory, engine_id=engine_id, incarnation=incarnation, rank=rank, drain_s=DRAIN_S, close_s=CLOSE_S,
            stall_s=config.transfer_deadline_s, make_transport=make_transport or transport_factory(config.transport),
            make_importer=make_importer)
        self._told: tuple[list[int], bool] = ([], False)
        self._reported = self._thread.report

    def handshake(self) -> RankEndpoint:
        """Address of this rank for peers; give it to PDConnectorScheduler.set_endpoints.

        Raises:
            TransferError: the transport could not start (memlock, missing library, name in use).
        """
        return self._thread.endpoint(START_TIMEOUT_S)

    def start_step(self, metadata: PDCommand | None) -> None:
        """Hands imports, cancels and notices to the transfer thread; returns at once."""
        if metadata is not None:
            self._thread.submit(metadata)

    def end_step(self) -> None:
        """Nothing: imports need no forward."""

    def output(self) -> PDOutput | None:
        """Acknowledgements and notices since the last call. Raises TransferError when the transfer thread died."""
        self._thread.raise_error()
        acks, notices = self._thread.take()
        overdue, stuck, report = self._thread.overdue(), self._thread.stuck(), self._thread.report
        told, self._told = self._told, (sorted(overdue), bool(stuck))
        fresh, self._reported = report is not self._reported, report
        if not (acks or notices or fresh or told != self._told):
            return None
        return PDOutput(rank=self._rank, incarnation=self._incarnation, acks=tuple(acks), notices=tuple(notices),
                        overdue=overdue, stuck=stuck, report=report if fresh else None)

    def shutdown(self) -> None:
        """Cancels imports, drains or closes every endpoint, deregisters, ends the thread. Idempotent."""
        self._thread.stop(DRAIN_S + 30.0)


def transport_factory(kind: str) -> Callable[[str], Transport]:
    """Agent name -> Transport of the configured kind; nixl is imported on first use, on the calling thread."""
    def make(name: str) -> Transport:
        if kind == "nixl":
            from hisparse.pd.nixl import NixlTransport

            return NixlTransport(name)
        from hisparse.pd.loopback import LoopbackTransport

        return LoopbackTransport(name)

    return make
