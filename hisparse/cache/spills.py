"""The spill transaction: plan, enqueued, completed; and the ledger of every transfer id ever issued."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from hisparse.cache.core import CacheCore
from hisparse.cache.pages import Residency
from hisparse.cache.publication import Publication
from hisparse.cache.request import ABSENT, Incarnation, ResidentPage
from hisparse.cache.residency import DURABLE, PageEvent, PageState
from hisparse.errors import InvariantError, TransferError
from hisparse.types import AckKind, SparseKVPageTransfer, TransferAck

_GPU_ONLY, _ENQUEUED, _FAILED = PageState.GPU_ONLY, AckKind.ENQUEUED, AckKind.FAILED


class PendingTransfer(NamedTuple):
    """A transfer that has not completed, for people to look at.

    Attributes:
        phase: "planned", "sent" (in a step's command) or "enqueued" (a worker has put the copy into its stream).
        age_s: since it was planned, or last enqueued by a worker.
    """

    request_id: str
    page: int
    phase: str
    age_s: float


class Transfer:
    """One transfer the workers were, or will be, told of. It pins every block it touches until it has drained.

    Attributes:
        resident: of a spill, the page copied; pinned until every writer enqueued its copy. None: a page copy.
        host_blocks: host blocks pinned: a spill's one, a page copy's pair or none.
        device_blocks: of a page copy, both ends; a reference of its own on each.
        num_workers: workers that must acknowledge. enqueued, done: ranks that said so, as bits.
        started_s: planned, or last enqueued by a worker: a step that runs long delays its copies, and is no failure of
            theirs.
    """

    __slots__ = ("device_blocks", "done", "enqueued", "failed", "host_blocks", "id", "inc", "num_workers", "page",
                 "resident", "sent", "source_pinned", "started_s")

    def __init__(self, transfer_id: int, inc: Incarnation, page: int, resident: ResidentPage | None,
                 host_blocks: tuple[int, ...], device_blocks: tuple[int, ...], num_workers: int, started_s: float) -> None:
        self.id = transfer_id
        self.inc = inc
        self.page = page
        self.resident = resident
        self.host_blocks = host_blocks
        self.device_blocks = device_blocks
        self.num_workers = num_workers
        self.started_s = started_s
        self.sent = self.failed = False
        self.source_pinned = True
        self.enqueued = self.done = 0


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
        self.budget = max(1, core.max_model_len // core.block_size)
        """Transfers per command over all requests."""
        self._outbox: deque[SparseKVPageTransfer] = deque()
        self._wanting: dict[Incarnation, None] = {}
        """Live requests that may have sealed pages to plan, in order of arrival at this state."""
        self.full_mask = (1 << core.block_size) - 1

    # ------------------------------------------------------------------------------------------- plan
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
            room = self.budget - len(self._outbox)
            if room <= 0:
                return
            if self._plan_pages(inc, room):
                del self._wanting[inc]

    def _plan_pages(self, inc: Incarnation, most: int) -> bool:
        """Plans up to `most` pages of `inc`. True: none is left."""
        now_s, states = self._now_s(), inc.states
        while inc.spill_again and most:
            page = inc.spill_again.pop(0)
            if page < len(states) and states[page] == _GPU_ONLY:
                self._plan_page(inc, page, True, now_s)
                most -= 1
        end = min(inc.spill_target, len(states))
        page = inc.spill_cursor
        while page < end and most:
            if states[page] == _GPU_ONLY:
                self._plan_page(inc, page, inc.covered.pop(page, 0) != self.full_mask, now_s)
                most -= 1
            page += 1
        inc.spill_cursor = page
        return page >= end and not inc.spill_again

    def _plan_page(self, inc: Incarnation, page: int, copy_bytes: bool, now_s: float) -> None:
        core, resident, host = self.core, inc.resident.get(page), inc.host[page]
        if core.source is None or not host or resident is None:
            raise InvariantError(
                f"page {page} of {inc.request_id!r} cannot be spilled: host block {host}, resident {inc.blocks(page)}")
        core.move(inc, page, PageEvent.PLAN)
        core.pin(resident)
        host_blocks = (host,)
        core.source.pool.touch(host_blocks)
        transfer_id = self._next_id
        self._next_id = transfer_id + 1
        self.transfers[transfer_id] = Transfer(
            transfer_id, inc, page, resident, host_blocks, ABSENT, self.num_writers, now_s)
        inc.pending_spills += 1
        inc.identity.spilled_pages += 1
        counters = core.counters
        counters.spills_planned += 1
        if not copy_bytes:
            counters.spills_without_bytes += 1
        after_forward = (page + 1) * core.layout.block_size > inc.valid
        self._outbox.append(SparseKVPageTransfer(transfer_id, host, resident.blocks, after_forward, copy_bytes))

    def issue_page_copy(self, inc: Incarnation, page: int, *, host_blocks: tuple[int, ...],
                        device_blocks: tuple[int, ...]) -> Transfer:
        """A new id, to be acknowledged by every rank. The caller took one reference on every block listed."""
        transfer = Transfer(self._next_id, inc, page, None, host_blocks, device_blocks, self.num_ranks, self._now_s())
        self._next_id += 1
        self.transfers[transfer.id] = transfer
        return transfer

    def take_outbox(self) -> tuple[SparseKVPageTransfer, ...]:
        """The spills of the command being built, oldest first, up to the budget."""
        outbox, transfers = self._outbox, self.transfers
        out = [outbox.popleft() for _ in range(min(len(outbox), self.budget))]
        for message in out:
            transfers[message.id].sent = True
        return tuple(out)

    # ------------------------------------------------------------------------------------------- release
    def release(self, inc: Incarnation, *, finished: bool) -> None:
        """The request gives everything back: plans what a finished one still has to write, detaches its publication.

        Called before the pages are released. Host blocks go back here (after the last dispatched step)."""
        core = self.core
        if finished and core.source is not None and core.prefix_cache and not inc.loading:
            self.sealed(inc, self.publication.limit(inc))
            self._plan_pages(inc, inc.num_pages)
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
        if (transfer.enqueued if kind is _ENQUEUED else transfer.done) & rank_bit:
            core.counters.acks_repeated += 1
            return
        transfer.enqueued |= rank_bit
        if transfer.source_pinned and transfer.enqueued.bit_count() == transfer.num_workers:
            self._drop_source_pin(transfer)
        if kind is _ENQUEUED:
            transfer.started_s = self._now_s()
            return
        transfer.done |= rank_bit
        full = self.full_mask
        if kind is _FAILED or (transfer.resident is not None and ack.row_mask & full != full):
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
            transfer.resident.copy_id = 0
            if core.fences:
                self._lift_fences(transfer)
            inc.pending_spills -= 1
            if transfer.failed:
                core.counters.spills_failed += 1
            else:
                core.counters.spills_completed += 1
                core.counters.spill_seconds += self._now_s() - transfer.started_s
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
        if transfer.resident is None and transfer.failed:
            raise TransferError(
                f"page copy {transfer.id} (page {page} of {inc.request_id!r}) failed; its worker must be replaced")

    def _lift_fences(self, transfer: Transfer) -> None:
        fences = self.core.fences
        assert transfer.resident is not None
        for block in transfer.resident.blocks:
            if fences.get(block) == transfer.id:
                del fences[block]

    def awaits_copy(self, inc: Incarnation) -> bool:
        """A page copy into this request's pages has not been reported by every rank."""
        return any(t.resident is None and t.inc is inc for t in self.transfers.values())

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

    def oldest(self, most: int) -> tuple[PendingTransfer, ...]:
        """What has not completed, oldest first, up to `most`."""
        now_s = self._now_s()
        return tuple(
            PendingTransfer(t.inc.request_id, t.page, "enqueued" if t.enqueued else "sent" if t.sent else "planned",
                            now_s - t.started_s)
            for t in itertools.islice(self.transfers.values(), most))

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
            if resident is not None:
                pending[transfer.inc] = pending.get(transfer.inc, 0) + 1
        for block, transfer_id in core.fences.items():
            if transfer_id not in self.transfers:
                raise InvariantError(f"device block {block} is fenced by transfer {transfer_id}, which is over")
        for inc in core.live.values():
            if inc.pending_spills != pending.get(inc, 0) or inc.num_spilling != inc.pending_spills:
                raise InvariantError(f"request {inc.request_id!r} counts {inc.pending_spills} spills, ledger has "
                                     f"{pending.get(inc, 0)}, pages {inc.num_spilling}")
        self.publication.check()
