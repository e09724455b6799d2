"""The scheduler side of HiSparse: residency policy, spills, publication, imports, and the command of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hisparse.cache.core import CacheCore
from hisparse.cache.loads import Loads
from hisparse.cache.mirrors import build_spans
from hisparse.cache.pages import Residency
from hisparse.cache.publication import Publication
from hisparse.cache.request import Incarnation
from hisparse.cache.spills import Spills
from hisparse.types import (
    Fence,
    HiSparseWorkerOutput,
    MirrorSpan,
    NewBlocks,
    PageCopy,
    SparseKVOffloadCommand,
)

Scheduled = Sequence[tuple[str, int, int]]


class HiSparseCoordinator:
    """Owns host block ids, request and prefix identity, and residency state. Never touches bytes.

    One thread. Every method is deterministic and costs O(pages that changed).
    """

    def __init__(self, core: CacheCore, residency: Residency, loads: Loads, *, num_writers: int, num_ranks: int,
                 incarnation: int, deadline_s: float, clock: Callable[[], float]) -> None:
        self.core = core
        self.residency = residency
        self.loads = loads
        self.publication = Publication(core, residency)
        self.spills = Spills(core, residency, self.publication, num_writers=num_writers, num_ranks=num_ranks,
                             incarnation=incarnation, deadline_s=deadline_s, clock=clock)
        self._copies: list[PageCopy] = []

    # ------------------------------------------------------------------------------------------- each step
    def update_residency(self) -> None:
        """Under pressure requires hot of every admitted request that is not; a scheduling pass allocates the regions."""
        self.residency.update_all()

    def plan_prefix_materialization(self, scheduled: Scheduled = ()) -> None:
        """Plans the write-back of sealed pages without a host copy, within the budget of one command.

        Pages that the accepted tokens of this step seal count: their copy goes behind the forward.
        """
        live, size = self.core.live, self.core.block_size
        for request_id, first, num_tokens in scheduled:
            inc = live[request_id]
            end = first + num_tokens
            if end < (inc.spill_target + 1) * size and inc.valid <= end:
                continue
            rows = min(max(inc.valid, end), inc.identity.keys.num_tokens)
            self.spills.sealed(inc, rows // size)
        self.spills.plan()

    def build_row_mirrors(self, scheduled: Scheduled) -> tuple[MirrorSpan, ...]:
        """Host destinations of every row the step may write."""
        return build_spans(self.core, scheduled)

    def add_page_copy(self, copy: PageCopy) -> None:
        """A copy-on-write to be done before the next step's first kernel."""
        self._copies.append(copy)

    def build_offload_command(self, step: int, mirrors: tuple[MirrorSpan, ...] = ()) -> SparseKVOffloadCommand:
        """Everything planned since the last command. With nothing to do it is empty."""
        core = self.core
        assert core.source is not None
        blocks, generations = core.pool.take_handed_out()
        host_blocks, host_generations = core.source.pool.take_handed_out()
        fences = core.fences
        copies, self._copies = tuple(self._copies), []
        for copy in copies:
            self.spills.transfers[copy.id].sent = True
        return SparseKVOffloadCommand(
            step=step,
            new_device_blocks=NewBlocks(ids=blocks, generations=generations),
            new_host_blocks=NewBlocks(ids=host_blocks, generations=host_generations),
            fences=tuple(Fence(block=b, transfer_id=fences[b]) for b in blocks if b in fences) if fences else (),
            table_updates=core.tables.take_updates(),
            hot_rows=core.tables.take_hot_rows(),
            seat_resets=core.tables.take_resets(),
            page_copies=copies,
            mirrors=mirrors,
            spills=self.spills.take_outbox(),
        )

    def on_worker_output(self, outputs: Sequence[HiSparseWorkerOutput]) -> None:
        """Acknowledgements, in the order given."""
        for output in outputs:
            for ack in output.acks:
                self.spills.on_ack(ack)

    # ------------------------------------------------------------------------------------------- imports
    def finish_host_import(self, request_id: str, *, failed: bool = False) -> int:
        """Every rank has drained. Returns the tokens now valid; 0 for a request that is gone (counted)."""
        load = self.loads.finish(request_id, failed=failed)
        if load is None:
            return 0
        if not failed:
            self.spills.sealed(load.inc, load.inc.valid // self.core.block_size)
            self.publication.advance(load.inc)
        self.core.update_reservation(load.inc)
        return load.inc.valid

    # ------------------------------------------------------------------------------------------- release
    def free(self, inc: Incarnation, *, finished: bool) -> None:
        """Host side of a release: plans or drops what is unwritten, detaches the publication. Pages go afterwards."""
        self.spills.release(inc, finished=finished)

    # ------------------------------------------------------------------------------------------- queries
    def has_pending_work(self) -> bool:
        """Transfers to send or in flight, publications waiting for them, page copies to send."""
        return self.spills.has_pending() or bool(self.publication.detached) or bool(self._copies)

    def has_pending_reclamation(self) -> bool:
        """A spill under way (or about to be planned) will free blocks of a request that can read from host, or pins
        of a request that is gone."""
        if self.publication.detached or any(
            t.inc.released and t.source_pinned for t in self.spills.transfers.values()
        ):
            return True
        return any(
            (inc.num_spilling or self.spills.wants(inc)) and not inc.held and self._reads_from_host(inc)
            for inc in self.core.live.values()
        )

    def _reads_from_host(self, inc: Incarnation) -> bool:
        hot = self.core.hot
        return inc.has_hot or (
            inc.hot_required and hot is not None and self.core.available_device(inc) >= hot.region_blocks)

    # ------------------------------------------------------------------------------------------- workers
    def crash(self, incarnation: int) -> None:
        self.spills.crash(incarnation)
        self._copies.clear()

    def check(self) -> None:
        self.spills.check()

