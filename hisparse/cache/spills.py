"""The spill transaction: plan, enqueued, completed; and the ledger of every transfer id ever issued."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hisparse.cache.core import CacheCore
from hisparse.cache.pages import Residency
from hisparse.cache.publication import Publication
from hisparse.cache.request import ABSENT, Incarnation, ResidentPage
from hisparse.cache.residency import DURABLE, PageEvent, PageState
from hisparse.errors import InvariantError, TransferError
from hisparse.types import AckKind, SparseKVPageTransfer, TransferAck


class TransferKind(enum.Enum):
    SPILL = "spill"
    PAGE_COPY = "page_copy"


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    """One transfer the workers were, or will be, told of. It pins every block it touches until it has drained."""

    id: int
    kind: TransferKind
    inc: Incarnation
    page: int
    resident: ResidentPage | None
    """Spills: the page copied; pinned until every writer enqueued its copy."""
    host_blocks: tuple[int, ...]
    device_blocks: tuple[int, ...]
    """Page copies: both ends, a reference of their own on each until every rank has done them."""
    num_workers: int
    """Workers that must acknowledge."""
    started_s: float
    """Planned, or last enqueued by a worker: a step that runs long delays its copies, and is no failure of theirs."""
    sent: bool = False
    source_pinned: bool = True
    failed: bool = False
    enqueued: int = 0
    done: int = 0
    """Ranks that said so, as bits."""


class Spills:
    """Plans the write-back of sealed pages and takes acknowledgements. Writer of `core.fences`."""

    def __init__(self, core: CacheCore, residency: Residency, publication: Publication, *, num_writers: int,
                 num_ranks: int, incarnation: int, deadline_s: float, clock: Callable[[], float]) -> None:
        self.core = core
        self.residency = residency
        self.publication = publication
        self.num_writers = num_writers
        self.num_ranks = num_ranks
        self.incarnation = incarnation
        self.deadline_s = deadline_s
        self._now_s = clock
        self._next_id = 1
        self.transfers: dict[int, Transfer] = {}
        self._outbox: deque[tuple[Transfer, SparseKVPageTransfer]] = deque()
        self._wanting: dict[Incarnation, None] = {}
        """Live requests that may have sealed pages to plan, in order of arrival at this state."""
        self.full_mask = (1 << core.block_size) - 1

    # ------------------------------------------------------------------------------------------- plan
    @property
    def budget(self) -> int:
        """Transfers per command over all requests."""
        return max(1, self.core.max_model_len // self.core.block_size)

    def sealed(self, inc: Incarnation, num_pages: int) -> None:
        """Pages below `num_pages` have all their rows once the step being planned (or the last one) is done."""
        if num_pages > inc.spill_target:
            inc.spill_target = num_pages
            self._wanting[inc] = None

    def wants(self, inc: Incarnation) -> bool:
        """Has sealed pages that no spill was planned for yet."""
        return inc in self._wanting

    def plan(self) -> None:
        """Plans spills of sealed pages without a host copy, up to the budget."""
        for inc in list(self._wanting):
            while len(self._outbox) < self.budget:
                if not self._plan_next(inc):
                    del self._wanting[inc]
                    break
            else:
                return

    def _plan_next(self, inc: Incarnation) -> bool:
        """Plans one page of `inc`. False: none is left."""
        while inc.spill_again:
            page = inc.spill_again.pop(0)
            if page < inc.num_pages and inc.states[page] == PageState.GPU_ONLY:
                self._plan_page(inc, page, copy_bytes=True)
                return True
        while inc.spill_cursor < min(inc.spill_target, inc.num_pages):
            page = inc.spill_cursor
            inc.spill_cursor += 1
            if inc.states[page] == PageState.GPU_ONLY:
                covered = inc.covered.pop(page, 0)
                self._plan_page(inc, page, copy_bytes=covered != self.full_mask)
                return True
        return False

    def _plan_page(self, inc: Incarnation, page: int, *, copy_bytes: bool) -> None:
        core = self.core
        resident, host = inc.resident.get(page), inc.host[page]
        if core.source is None or not host or resident is None:
            raise InvariantError(
                f"page {page} of {inc.request_id!r} cannot be spilled: host block {host}, resident {inc.blocks(page)}")
        core.move(inc, page, PageEvent.PLAN)
        core.pin(resident)
        core.source.pool.touch((host,))
        transfer = self.issue(TransferKind.SPILL, inc, page, resident=resident, host_blocks=(host,),
                              num_workers=self.num_writers)
        inc.pending_spills += 1
        inc.identity.spilled_pages += 1
        core.counters.spills_planned += 1
        core.counters.spills_without_bytes += not copy_bytes
        after_forward = (page + 1) * core.block_size > inc.valid
        self._outbox.append((transfer, SparseKVPageTransfer(
            id=transfer.id, host_block=host, device_blocks=resident.blocks, after_forward=after_forward,
            copy_bytes=copy_bytes)))

    def issue(self, kind: TransferKind, inc: Incarnation, page: int, *, host_blocks: tuple[int, ...], num_workers: int,
              resident: ResidentPage | None = None, device_blocks: tuple[int, ...] = ABSENT) -> Transfer:
        """A new id. The caller pinned the page, and took one reference on every block listed."""
        transfer = Transfer(id=self._next_id, kind=kind, inc=inc, page=page, resident=resident, host_blocks=host_blocks,
                            device_blocks=device_blocks, num_workers=num_workers, started_s=self._now_s())
        self._next_id += 1
        self.transfers[transfer.id] = transfer
        return transfer

    def take_outbox(self) -> tuple[SparseKVPageTransfer, ...]:
        """The spills of the command being built, oldest first, up to the budget."""
        out: list[SparseKVPageTransfer] = []
        while self._outbox and len(out) < self.budget:
            transfer, message = self._outbox.popleft()
            transfer.sent = True
            out.append(message)
        return tuple(out)

    # ------------------------------------------------------------------------------------------- release
    def release(self, inc: Incarnation, *, finished: bool) -> None:
        """The request gives everything back: plans what a finished one still has to write, detaches its publication.

        Called before the pages are released. Host blocks go back here (after the last dispatched step)."""
        core = self.core
        if finished and core.source is not None and core.prefix_cache and not inc.loading:
            self.sealed(inc, self.publication.limit(inc))
            while self._plan_next(inc):
                pass
        self._wanting.pop(inc, None)
        if finished and inc.pending_spills and core.prefix_cache:
            limit = self.publication.limit(inc)
            awaited, durable = {}, set()
            for page in range(inc.published, limit):
                if inc.states[page] == PageState.SPILLING:
                    awaited[page] = self.residency.keep_readable(inc, page)
                elif inc.states[page] in DURABLE:
                    durable.add(page)
            self.publication.detach(inc, durable, awaited, limit)
        else:
            core.free_host_after_steps([block for block in reversed(inc.host) if block])

    # ------------------------------------------------------------------------------------------- acknowledgements
    def on_ack(self, ack: TransferAck) -> None:
        """One worker's word. Repeated ones and those of an older incarnation are counted, otherwise ignored.

        Raises:
            InvariantError: an id that was never sent. TransferError: a page copy failed (steps already read it).
        """
        core = self.core
        if ack.incarnation != self.incarnation:
            core.counters.acks_old_incarnation += 1
            return
        transfer = self.transfers.get(ack.transfer_id)
        if transfer is None:
            if not 0 < ack.transfer_id < self._next_id:
                raise InvariantError(f"rank {ack.rank} acknowledged transfer {ack.transfer_id}, which was never issued")
            core.counters.acks_repeated += 1
            return
        if not transfer.sent:
            raise InvariantError(f"rank {ack.rank} acknowledged transfer {ack.transfer_id}, which was not sent yet")
        rank_bit, kind = 1 << ack.rank, ack.kind
        if (transfer.enqueued if kind is AckKind.ENQUEUED else transfer.done) & rank_bit:
            core.counters.acks_repeated += 1
            return
        transfer.enqueued |= rank_bit
        if transfer.source_pinned and transfer.enqueued.bit_count() == transfer.num_workers:
            self._drop_source_pin(transfer)
        if kind is AckKind.ENQUEUED:
            transfer.started_s = self._now_s()
            return
        transfer.done |= rank_bit
        if kind is AckKind.FAILED or (
                transfer.kind is TransferKind.SPILL and ack.row_mask & self.full_mask != self.full_mask):
            transfer.failed = True
        if transfer.done.bit_count() == transfer.num_workers:
            self._finish(transfer)

    def _drop_source_pin(self, transfer: Transfer) -> None:
        """Stream order protects the copy from the compute stream; everybody else must heed the fence, which the page's
        blocks get when they become free."""
        resident = transfer.resident
        if resident is None:
            return
        transfer.source_pinned = False
        resident.copy_id = transfer.id
        self.core.unpin(resident)

    def _finish(self, transfer: Transfer) -> None:
        """Every worker has drained."""
        core, inc, page = self.core, transfer.inc, transfer.page
        del self.transfers[transfer.id]
        if transfer.resident is None:
            core.free_device(transfer.device_blocks)
        else:
            self._end_copy(transfer.resident, transfer.id)
            inc.pending_spills -= 1
            core.counters.spills_completed += not transfer.failed
            core.counters.spills_failed += transfer.failed
            if inc.released:
                self.publication.spill_done(inc, page, durable=not transfer.failed)
            elif transfer.failed:
                core.move(inc, page, PageEvent.SPILL_FAILED)
                inc.spill_again.append(page)
                self._wanting[inc] = None
            else:
                self.residency.clean(inc, page, PageEvent.SPILL_COMPLETED)
                self.publication.advance(inc)
        if core.source is not None:
            core.source.pool.free(transfer.host_blocks)
        if transfer.kind is TransferKind.PAGE_COPY and transfer.failed:
            raise TransferError(
                f"page copy {transfer.id} (page {page} of {inc.request_id!r}) failed; its worker must be replaced")

    def _end_copy(self, resident: ResidentPage, transfer_id: int) -> None:
        resident.copy_id = 0
        fences = self.core.fences
        if fences:
            for block in resident.blocks:
                if fences.get(block) == transfer_id:
                    del fences[block]

    def awaits_copy(self, inc: Incarnation) -> bool:
        """A page copy into this request's pages has not been reported by every rank."""
        return any(t.kind is TransferKind.PAGE_COPY and t.inc is inc for t in self.transfers.values())

    def overdue(self) -> tuple[tuple[int, int], ...]:
        """(rank, transfer id) of sent transfers not done within the deadline.

        With fewer writers than ranks, the lowest ranks that have not finished are named."""
        late_s = self._now_s() - self.deadline_s
        out: list[tuple[int, int]] = []
        for transfer in self.transfers.values():
            if transfer.sent and transfer.started_s < late_s:
                missing = [rank for rank in range(self.num_ranks) if not transfer.done >> rank & 1]
                out += [(rank, transfer.id) for rank in missing[: transfer.num_workers - transfer.done.bit_count()]]
        return tuple(out)

    # ------------------------------------------------------------------------------------------- the workers are gone
    def crash(self, incarnation: int) -> None:
        """Drops every transfer with its pins (the processes are gone) and detached publication; host pages only."""
        core = self.core
        self.incarnation = incarnation
        for inc in list(self.publication.detached):
            self.publication.drop(inc)
        for transfer in self.transfers.values():
            transfer.inc.pending_spills = 0
            if core.source is not None:
                core.source.pool.free(transfer.host_blocks)
        self.transfers.clear()
        self._outbox.clear()
        self._wanting.clear()
        core.fences.clear()

    def has_pending(self) -> bool:
        return bool(self.transfers or self._wanting)

    def check(self) -> None:
        core = self.core
        pending: dict[Incarnation, int] = {}
        for transfer in self.transfers.values():
            resident = transfer.resident
            blocks = transfer.device_blocks if resident is None else resident.blocks
            if transfer.source_pinned and any(core.pool.refs(block) < 1 for block in blocks):
                raise InvariantError(f"transfer {transfer.id} does not pin its device blocks {blocks}")
            if core.source is not None and any(core.source.pool.refs(block) < 1 for block in transfer.host_blocks):
                raise InvariantError(f"transfer {transfer.id} does not pin its host blocks {transfer.host_blocks}")
            if transfer.kind is TransferKind.SPILL:
                pending[transfer.inc] = pending.get(transfer.inc, 0) + 1
        for block, transfer_id in core.fences.items():
            if transfer_id not in self.transfers:
                raise InvariantError(f"device block {block} is fenced by transfer {transfer_id}, which is over")
        for inc in core.live.values():
            if inc.pending_spills != pending.get(inc, 0) or inc.num_spilling != inc.pending_spills:
                raise InvariantError(f"request {inc.request_id!r} counts {inc.pending_spills} spills, ledger has "
                                     f"{pending.get(inc, 0)}, pages {inc.num_spilling}")
        self.publication.check()
