"""Worker half of the P/D connector: registers the rank's pools and hands orders to its transfer thread."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from hisparse.config import PDConfig
from hisparse.layout import KVCacheLayout
from hisparse.pd.commands import PDCommand, PDOutput
from hisparse.pd.copies import CopyEvent
from hisparse.pd.endpoint import RankEndpoint
from hisparse.pd.importer import Importer
from hisparse.pd.mapped_reads import GpuMemory, MappedReads
from hisparse.pd.memory import DeviceSlab, HostSlab, LocalMemory, device_index
from hisparse.pd.transfer_thread import TransferThread
from hisparse.pd.transport import Transport
from hisparse.worker.streams import Mark, Place, StepEvent, Streams

START_TIMEOUT_S = 120.0
DRAIN_S = 1.0
"""A READ past its deadline gets this long to end by itself before its endpoint is closed."""
SLOT_BYTES, SLOT_BYTES_CUDA = 16 << 20, 32 << 20
"""Of a staging slot. Longer ones on the CPU are copied out of memory instead of caches; on CUDA, shorter ones reach the host
faster than the next one can be posted (0.5 ms for both ways)."""
CLOSE_S = 10.0
"""Closing an endpoint may take this long, e.g. to register a large pool with a new agent, before its imports are overdue."""

_log = logging.getLogger(__name__)


class ImportStream:
    """Orders imports with the rank's other work: what they wait for, and when their copies are over.

    `close` is the step's thread's, `is_open` and `copy` are the transfer thread's. On the CPU nothing has to be waited for.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._behind: dict[int, Mark] = {}

    def close(self, job_ids: Sequence[int]) -> None:
        """The imports' pages may be written when the device has done what it was given until now: fences, resets, readers of
        whatever was in those pages before."""
        mark = self._streams.record(StepEvent.COMMAND_APPLIED, Place.COMPUTE)
        self._behind.update(dict.fromkeys(job_ids, mark))

    def is_open(self, job_id: int) -> bool:
        """The device has come there. Never waits."""
        mark = self._behind.get(job_id)
        return mark is None or self._streams.reached(mark)

    def forget(self, job_id: int) -> None:
        """The import has ended."""
        self._behind.pop(job_id, None)

    def copy(self, copy: Callable[[], None]) -> CopyEvent:
        """Runs copies out of staging, on a stream of their own. Never waits."""
        with self._streams.on(Place.IMPORT):
            copy()
            return _Copied(self._streams, self._streams.record(StepEvent.IMPORT_DONE, Place.IMPORT))


@dataclass(frozen=True, slots=True)
class _Copied:
    streams: Streams
    mark: Mark

    def done(self) -> bool:
        return self.streams.reached(self.mark)


class PDConnectorWorker:
    """One per rank. Registers the pools once, serves peers' READs, and imports pages on its transfer thread.

    In a MultiWorkerConnector it comes after the hisparse child: generations are stored and row masks cleared first.

    Args:
        cache: the rank's DeviceCache. host_pool: its HostPool, None without HiSparse (then only RESIDENT landings).
        host_writer: this rank writes the host pool (the lowest rank of each physical pool).
        streams: of the rank, whose compute stream is current in every step; None makes some.
        make_transport: agent name -> Transport, called on the transfer thread; default by `config.transport`.
    """

    name = "pd"

    def __init__(self, layout: KVCacheLayout, config: PDConfig, *, cache: DeviceSlab, host_pool: HostSlab | None,
                 engine_id: str, incarnation: int, rank: int, host_writer: bool, streams: Streams | None = None,
                 make_transport: Callable[[str], Transport] | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._rank, self._incarnation = rank, incarnation
        memory = LocalMemory(layout, cache, host_pool)
        self._stream = stream = ImportStream(streams or Streams(cache.device))
        serves_only = config.role == "prefill"  # imports nothing, so it needs neither threads nor staging worth the memory
        threads = 0 if serves_only or memory.on_cuda else None
        if config.transfer_threads is not None and not serves_only:
            threads = config.transfer_threads
        make = make_transport or transport_factory(config.transport, threads)
        mapped = make_transport is None and config.transport == "nixl"

        def make_transport_here(name: str) -> Transport:
            if memory.on_cuda:
                _use_device(cache.device)
            return MappedReads(make(name), _gpu_memory(cache.device, config)) if mapped else make(name)

        def make_importer(transport: Transport) -> Importer:
            return Importer(memory, transport, rank=rank, host_writer=host_writer,
                            staging_slots=1 if serves_only else config.staging_slots,
                            slot_pages=1 if serves_only else config.staging_slot_pages or default_slot_pages(memory),
                            direct=config.landing_path == "direct", drain_s=DRAIN_S, clock=clock,
                            staged_reads=None if memory.on_cuda else 1,  # UCX's threads take the next when they are done
                            copy_engine=stream.copy, ready=stream.is_open)

        self._thread = TransferThread(
            memory, engine_id=engine_id, incarnation=incarnation, rank=rank, drain_s=DRAIN_S, close_s=CLOSE_S,
            stall_s=config.transfer_deadline_s, make_transport=make_transport_here, make_importer=make_importer)
        self._told: tuple[list[int], bool] = ([], False)
        self._reported = self._thread.report

    def handshake(self) -> RankEndpoint:
        """Address of this rank for peers; give it to PDConnectorScheduler.set_endpoints.

        Raises:
            TransferError: the transport could not start (memlock, missing library, name in use).
        """
        return self._thread.endpoint(START_TIMEOUT_S)

    def start_step(self, metadata: PDCommand | None) -> None:
        """Hands imports, cancels and notices to the transfer thread; returns at once.

        Stream: compute (torch's current one), where the hisparse child's part of the command is queued already.
        """
        if metadata is not None:
            if self._rank:  # one notice is enough; another rank would connect to the peer's rank 0 for nothing else
                metadata = replace(metadata, notices=())
            if metadata.imports:
                self._stream.close([plan.job_id for plan in metadata.imports])
            self._thread.submit(metadata)

    def end_step(self) -> None:
        """Nothing: imports need no forward."""

    def output(self) -> PDOutput | None:
        """Acknowledgements and notices since the last call. Raises TransferError when the transfer thread died."""
        self._thread.raise_error()
        acks, notices = self._thread.take()
        for ack in acks:
            self._stream.forget(ack.job_id)
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


def default_slot_pages(memory: LocalMemory) -> int:
    """Pages of a staging slot: as many bytes for any model, no more pages than there are."""
    slot_bytes = SLOT_BYTES_CUDA if memory.on_cuda else SLOT_BYTES
    return max(1, min(slot_bytes // memory.layout.staged_page_bytes, memory.num_device_blocks))


def _gpu_memory(device: torch.device, config: PDConfig) -> GpuMemory | None:
    """What maps GPU memory of other processes; None = there is none, or UCX shall read it."""
    if device.type != "cuda" or config.gpu_reads != "mapped":
        return None
    from hisparse.ops.cuda.peer_memory import PeerMemory

    return PeerMemory(torch.device("cuda", device_index(device)))


def _use_device(device: torch.device) -> None:
    """Makes `device` this thread's own, with its context current, as the transport's registrations need it."""
    # UCX reads GPU memory of another process of the same GPU ten times faster with it (NVLink it uses anyway).
    os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y")
    torch.cuda.set_device(device_index(device))
    torch.cuda.current_stream().query()


def transport_factory(kind: str, threads: int | None = None) -> Callable[[str], Transport]:
    """Agent name -> Transport of the configured kind; nixl is imported on first use, on the calling thread.

    Args:
        threads: see `NixlTransport`; None = its default.
    """
    def make(name: str) -> Transport:
        if kind == "nixl":
            from hisparse.pd.nixl import READ_THREADS, NixlTransport

            return NixlTransport(name, threads=READ_THREADS if threads is None else threads)
        from hisparse.pd.loopback import LoopbackTransport

        return LoopbackTransport(name)

    return make
