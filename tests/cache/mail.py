"""What the ranks say about their transfers, on its way to the scheduler: late, repeated, in any order, or never."""

from __future__ import annotations

import random

from hisparse.types import AckKind, HiSparseWorkerOutput
from hisparse.types import TransferAck as Ack
from tests.cache.harness import Harness


class Mail:
    """Carries acknowledgements, and keeps the ledger that they must lead to."""

    def __init__(self, h: Harness, rng: random.Random) -> None:
        self.h = h
        self.m = h.manager
        self.rng = rng
        self.sent: list[Ack] = []
        """Not heard yet."""
        self.heard: list[Ack] = []
        self.ghosts: list[Ack] = []
        """Of ranks that were replaced since."""
        self.lost: set[tuple[int, int]] = set()
        """(rank, id) whose outcome never arrives."""
        self.issued: dict[int, int] = {}
        """Transfers sent and not over -> ranks that must report."""
        self.enqueued: dict[int, set[int]] = {}
        self.reported: dict[int, set[int]] = {}
        self.num_repeated = self.num_old = 0

    def issue(self, transfer_id: int, num_ranks: int) -> None:
        """A command carries this transfer."""
        assert transfer_id not in self.reported, f"transfer {transfer_id} was sent twice"
        self.issued[transfer_id] = num_ranks
        self.enqueued[transfer_id], self.reported[transfer_id] = set(), set()

    def crash(self) -> None:
        """The ranks are replaced. Their words may still arrive; so may bytes of their copies, before that."""
        self.collect()
        for worker in self.h.workers:
            for copy in worker.copies.values():
                if self.rng.random() < 0.5 and not copy.read:
                    worker.read(copy)
            for transfer_id in list(worker.copies):
                worker.complete(transfer_id)
            self.ghosts += worker.output().acks
        self.ghosts = [*self.ghosts, *self.sent][-8:]
        for mess in (self.sent, self.heard, self.lost, self.issued):
            mess.clear()

    def hear(self, most: int) -> None:
        """Up to `most` words arrive, in any order."""
        self.collect()
        self.rng.shuffle(self.sent)
        heard, self.sent = self.sent[:most], self.sent[most:]
        by_rank: dict[int, list[Ack]] = {}
        for ack in heard:
            by_rank.setdefault(ack.rank, []).append(ack)
        for rank in self.rng.sample(list(by_rank), len(by_rank)):
            self.tell(rank, by_rank[rank])
        self.heard = [*self.heard, *heard][-20:]

    def collect(self) -> None:
        for worker in self.h.workers:
            self.sent += [ack for ack in worker.output().acks if (ack.rank, ack.transfer_id) not in self.lost]

    def tell(self, rank: int, acks: list[Ack]) -> None:
        for ack in acks:
            self.expect(ack)
        self.m.on_worker_output([HiSparseWorkerOutput(rank=rank, incarnation=acks[0].incarnation, acks=tuple(acks))])

    def expect(self, ack: Ack) -> None:
        """The ledger as it must be after this word."""
        if ack.incarnation != self.h.worker.incarnation:
            self.num_old += 1
            return
        if ack.transfer_id not in self.issued or ack.rank in self.reported[ack.transfer_id] or (
                ack.kind is AckKind.ENQUEUED and ack.rank in self.enqueued[ack.transfer_id]):
            self.num_repeated += 1
            return
        self.enqueued[ack.transfer_id].add(ack.rank)
        if ack.kind is not AckKind.ENQUEUED:
            self.reported[ack.transfer_id].add(ack.rank)
            if len(self.reported[ack.transfer_id]) == self.issued[ack.transfer_id]:
                del self.issued[ack.transfer_id]

    def hear_again(self) -> None:
        if self.heard:
            ack = self.rng.choice(self.heard)
            free = self.m.stats().device_blocks_free
            self.tell(ack.rank, [ack])
            assert self.m.stats().device_blocks_free == free

    def hear_a_ghost(self) -> None:
        """A word of a worker that was replaced, about a transfer of its own or (it cannot know better) a later one."""
        old = self.h.worker.incarnation - 1
        ids = list(self.issued)
        if self.ghosts and self.rng.random() < 0.7:
            self.tell(0, [self.ghosts.pop()])
        elif ids:
            rank = self.rng.randrange(len(self.h.workers))
            self.tell(rank, [Ack(incarnation=old, rank=rank, transfer_id=self.rng.choice(ids), kind=AckKind.COMPLETED,
                                 row_mask=self.h.worker.full)])

    def lose_a_word(self) -> None:
        """An outcome never arrives; sooner or later its worker is given up."""
        self.collect()
        outcomes = [ack for ack in self.sent if ack.kind is not AckKind.ENQUEUED]
        if outcomes and not self.lost:
            ack = self.rng.choice(outcomes)
            self.sent = [other for other in self.sent if (other.rank, other.transfer_id) != (ack.rank, ack.transfer_id)]
            self.lost.add((ack.rank, ack.transfer_id))
