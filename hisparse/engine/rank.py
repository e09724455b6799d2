"""One rank of an engine: the model, its pages, and the worker halves of the connectors, step by step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from hisparse.config import HiSparseConfig, host_blocks, kv_layout
from hisparse.connector.base import WorkerConnector
from hisparse.connector.hisparse import HiSparseConnectorWorker
from hisparse.connector.multi import MultiWorkerConnector
from hisparse.connector.offloading_worker import OffloadingWorker
from hisparse.engine.device import check_room, open_device
from hisparse.engine.model_runner import ModelRunner
from hisparse.engine.models.hf import DSAModel, load_network
from hisparse.engine.parallel import HeadParallel
from hisparse.engine.sampler import Sampler
from hisparse.engine.step_output import StepOutput
from hisparse.errors import ConfigError, InvariantError
from hisparse.trace.recorder import SelectionRecorder
from hisparse.types import SampledToken, StepCommand, StepResult
from hisparse.worker import HostPool, WorkerParts, build_worker

_log = logging.getLogger(__name__)


@runtime_checkable
class Handshaking(Protocol):
    """A worker connector whose peers must know this rank's address."""

    def handshake(self) -> Any: ...


ConnectorFactory = Callable[[WorkerParts], WorkerConnector]
"""Makes a worker connector over one rank's memory, e.g. P/D's, which registers it with NIXL."""


class RankEngine:
    """Executes the scheduler's steps on one rank. Decides nothing; every rank gets the same commands.

    Args:
        rank, num_ranks: place among the tensor-parallel ranks. incarnation: the engine's, sent with every answer.
        host_pool: this rank's mapping of the host pool, closed by `shutdown`; None when `cache.enabled` is False.
        extra_connectors: further worker connectors, or functions that make one from this rank's memory.
        process_group: gloo group of the ranks; None with one rank.
        on_pinned: called with (bytes, bytes in all) while the host pool is being pinned.
    Attributes:
        layout, parts, model, device: read-only, for connectors and tests.
        handshakes: addresses of the extra connectors that have one (P/D), in order.
    Raises:
        ConfigError: the checkpoint cannot be loaded or split, or sizes do not fit.
    """

    def __init__(self, config: HiSparseConfig, rank: int = 0, num_ranks: int = 1, incarnation: int = 0,
                 host_pool: HostPool | None = None,
                 extra_connectors: Sequence[WorkerConnector | ConnectorFactory] = (),
                 process_group: dist.ProcessGroup | None = None,
                 on_pinned: Callable[[int, int], None] | None = None) -> None:
        self.config, self.rank, self.incarnation = config, rank, incarnation
        self.layout = kv_layout(config)
        if "OMP_NUM_THREADS" not in os.environ and num_ranks > 1:
            torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
        if config.cache.enabled != (host_pool is not None):
            raise InvariantError(f"cache.enabled = {config.cache.enabled}, but the host pool is {host_pool!r}")
        self._parallel = HeadParallel(rank=rank, size=num_ranks, group=process_group)
        self.device = open_device(config.model, rank)
        network, shape = load_network(config.model, num_ranks=num_ranks, device=self.device)
        num_blocks = config.cache.device_blocks
        check_room(self.device, self.layout.device_bytes(num_blocks), num_blocks)
        num_host_blocks = host_blocks(config.cache, self.layout, config.model.max_model_len)
        self._recorder = make_recorder(config, rank)
        self.parts = build_worker(
            self.layout, config.cache, num_device_blocks=num_blocks, num_host_blocks=num_host_blocks,
            max_seats=config.scheduler.max_num_seqs, max_model_len=config.model.max_model_len, rank=rank,
            num_ranks=num_ranks, incarnation=incarnation, host_pool=host_pool, device=str(self.device),
            recorder=self._recorder, on_pinned=on_pinned,
        )
        self.model = DSAModel(network, shape, self.parts.handles, self.parts.indexer, self._parallel)
        self._runner = ModelRunner(self.model, max_seats=config.scheduler.max_num_seqs,
                                   max_model_len=config.model.max_model_len, samples=rank == 0,
                                   use_graphs=config.engine.cuda_graphs, has_host=host_pool is not None)
        self._runner.warm_up(config.scheduler.prefill_chunk_tokens)
        self._sampler = Sampler()
        worker = self.parts.worker
        if worker is not None and num_ranks > 1:
            worker.follow_writer(self._parallel.from_first(worker.host_writes.handle if rank == 0 else b""))
        children: list[WorkerConnector] = []
        if worker is not None:
            children.append(HiSparseConnectorWorker(worker))
            if config.cache.offload_indexer and config.cache.prefix_cache:
                children.append(OffloadingWorker(self.layout, self.parts.cache, capacity_pages=num_host_blocks,
                                                 rank=rank, streams=self.parts.streams))
        extra = [_made(item, self.parts) for item in extra_connectors]
        children += extra
        self.handshakes = tuple(item.handshake() for item in extra if isinstance(item, Handshaking))
        self._connectors = MultiWorkerConnector(children)
        self._last_step: int | None = None
        self._stopped = False

    def execute(self, command: StepCommand) -> StepResult:
        """Runs one step: tables and copies, forwards, stores; then samples (rank 0 only).

        Stream: the device's current one; waits for the step once, for its tokens and status word together. Background copies
        may still run when it returns, and are reported by later steps.
        Raises:
            InvariantError: steps out of order, the command does not fit this rank's memory, or the device reports an error.
        """
        if self._last_step is not None and command.step <= self._last_step:
            raise InvariantError(f"step {command.step} came after step {self._last_step}")
        self._last_step = command.step
        began = time.perf_counter()
        if command.table_updates:
            if self.parts.worker is not None:
                raise InvariantError(f"step {command.step}: table updates belong in HiSparse's command when it is on")
            self.parts.tables.apply(command.table_updates)
        self._connectors.start_step(command.kv)
        if _copies_host_pages(command):
            self._parallel.barrier()  # rank 0 copied pages that the others may read in this step
            if self.parts.worker is not None:
                self.parts.worker.wait_for_writer()
        if self._recorder is not None:
            self._recorder.begin_step({c.seat: c.request_id for c in command.chunks if len(c.token_ids) == 1})
        out = self._runner.run(command.chunks)
        self._connectors.end_step()
        kv = self._connectors.output() or {}  # while the device works: what completes meanwhile is told by the next step
        sampled = self._sample(out)
        if self._recorder is not None:
            self._recorder.end_step()
        return StepResult(step=command.step, rank=self.rank, incarnation=self.incarnation, sampled=sampled, kv=kv,
                          worked_s=time.perf_counter() - began)

    def _sample(self, out: StepOutput) -> dict[str, SampledToken]:
        """Waits for the step and chooses. Raises InvariantError, and lets no token out, when the step went wrong."""
        tokens, logits = out.take()
        sampled = {row.request_id: SampledToken(token_id=token) for row, token in zip(out.rows, tokens)}
        if logits is not None:
            asked = [row for row in out.rows if row.needs_logits]
            sampled |= {row.request_id: token for row, token in zip(asked, self._sampler.sample(logits, asked))}
        return sampled

    def _save_selections(self) -> None:
        """A trace that cannot be written ends nothing."""
        if self._recorder is None:
            return
        path = Path(str(self.config.trace.directory)) / f"selections-{self.incarnation:x}.npz"
        try:
            if self._recorder.save(path, f"recorded from {self.config.model.path}, rank 0 of {self._parallel.size}"):
                _log.info("selections are in %s", path)
        except (ConfigError, OSError) as error:
            _log.error("%s", error)

    def shutdown(self) -> None:
        """Drains the connectors' copies and releases memory. Idempotent."""
        if not self._stopped:
            self._stopped = True
            self._save_selections()
            self._connectors.shutdown()
            self._runner.close()


def make_recorder(config: HiSparseConfig, rank: int) -> SelectionRecorder | None:
    """Of rank 0 of an engine that decodes, if the configuration asks for it. Raises ConfigError where it cannot record."""
    trace = config.trace
    if trace.directory is None or rank or config.pd.role == "prefill":
        return None
    if config.model.device == "cuda" and config.engine.cuda_graphs:
        raise ConfigError("trace.directory: steps replayed as CUDA graphs cannot be recorded; set engine.cuda_graphs to false")
    if not Path(trace.directory).is_dir():
        raise ConfigError(f"trace.directory = {trace.directory} is no directory; make it, or set it to null")
    return SelectionRecorder(max_requests=trace.requests, max_steps=trace.steps)


def _made(item: WorkerConnector | ConnectorFactory, parts: WorkerParts) -> WorkerConnector:
    """A class has a connector's attributes too, so it must be told from an instance first."""
    if isinstance(item, WorkerConnector) and not isinstance(item, type):
        return item
    return item(parts)


def _copies_host_pages(command: StepCommand) -> bool:
    offload = command.kv.get(HiSparseConnectorWorker.name)
    return offload is not None and any(copy.host_pair is not None for copy in offload.page_copies)
