"""Random lives under hypothesis: every event of a page's life, in any order, on one to three ranks.

`HISPARSE_LIVES` and `HISPARSE_LIFE_STEPS` set the number of lives and of moves in each (default 40 and 60; the large run is
2000 and 100); `HISPARSE_SHRINK=1` shrinks what fails.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hisparse.errors import InvariantError
from hisparse.types import AckKind, HiSparseWorkerOutput, TransferAck
from tests.cache.harness import Harness
from tests.cache.laws import check
from tests.cache.lives import SCRIPTS, live
from tests.cache.steps import MAX_LEN
from tests.cache.world import LANDINGS, World

RANKS = st.integers(0, 2)


class Lives(RuleBasedStateMachine):
    """One `World`; a rule is a move, and every law is checked after each."""

    world: World | None = None

    @initialize(seed=st.integers(0, 2**16), groups=st.integers(1, 3), spare=st.integers(0, 40), host=st.integers(0, 40),
                store=st.sampled_from([0, 3, 40]), drafts=st.booleans(), elastic=st.integers(0, 6), uneven=st.integers(0, 2),
                ranks=st.integers(1, 3), private=st.booleans(), pipelined=st.booleans())
    def start(self, **shape: int) -> None:
        self.world = World(**shape)

    @rule(length=st.integers(1, MAX_LEN - 4), kind=st.integers(0, 5), max_tokens=st.integers(1, 20), salt=st.integers(0, 9))
    def arrive(self, length: int, kind: int, max_tokens: int, salt: int) -> None:
        self.world.arrive(length, kind, max_tokens, salt == 9)

    @rule(landing=st.sampled_from(LANDINGS))
    def admit(self, **arguments: object) -> None:
        self.world.admit(**arguments)

    @rule()
    def come_back(self) -> None:
        self.world.come_back()

    @precondition(lambda self: self.world.h.imports or self.world.h.loads)
    @rule(failed=st.booleans(), num_rows=st.integers(0, MAX_LEN))
    def load_done(self, **arguments: object) -> None:
        self.world.load_done(**arguments)

    @rule(finished=st.booleans(), chance=st.integers(0, 3))
    def end_request(self, finished: bool, chance: int) -> None:
        if not chance:
            self.world.end_request(finished)

    @rule(chance=st.integers(0, 3))
    def preempt(self, chance: int) -> None:
        if not chance:
            self.world.preempt()

    @precondition(lambda self: len(self.world.flights) < 3)
    @rule(use_drafts=st.booleans(), most=st.integers(0, 4))
    def dispatch(self, **arguments: object) -> None:
        self.world.dispatch(**arguments)

    @precondition(lambda self: any(len(f.done) < len(self.world.h.workers) for f in self.world.flights))
    @rule(rank=RANKS)
    def execute(self, rank: int) -> None:
        self.world.execute(rank)

    @precondition(lambda self: self.world.flights)
    @rule()
    def turn(self) -> None:
        self.world.turn()

    @precondition(lambda self: self.world.h.store is not None and self.world.h.store.stores)
    @rule()
    def store_done(self) -> None:
        self.world.store_done()

    @rule(max_tokens=st.integers(1, 6))
    def fork(self, max_tokens: int) -> None:
        self.world.fork(max_tokens)

    @precondition(lambda self: any(worker.page_copies for worker in self.world.h.workers))
    @rule(rank=RANKS)
    def report_page_copies(self, rank: int) -> None:
        self.world.report_page_copies(rank)

    @precondition(lambda self: any(worker.copies for worker in self.world.h.workers))
    @rule(rank=RANKS, fail=st.integers(0, 5), mask_only=st.booleans())
    def complete(self, rank: int, fail: int, mask_only: bool) -> None:
        self.world.complete(rank, fail == 0, mask_only)

    @rule(rank=RANKS, num_rows=st.integers(1, 3))
    def drop_rows(self, **arguments: int) -> None:
        self.world.drop_rows(**arguments)

    @rule(most=st.sampled_from([1, 2, 100]))
    def hear(self, most: int) -> None:
        self.world.mail.hear(most)

    @precondition(lambda self: self.world.mail.heard)
    @rule()
    def hear_again(self) -> None:
        self.world.mail.hear_again()

    @precondition(lambda self: self.world.mail.ghosts or self.world.mail.issued)
    @rule()
    def hear_a_ghost(self) -> None:
        self.world.mail.hear_a_ghost()

    @precondition(lambda self: not self.world.mail.lost)
    @rule(chance=st.integers(0, 9))
    def lose_a_word(self, chance: int) -> None:
        if not chance:
            self.world.mail.lose_a_word()

    @precondition(lambda self: self.world.mail.lost)
    @rule()
    def time_out(self) -> None:
        self.world.time_out()

    @rule()
    def late_load(self) -> None:
        self.world.late_load()

    @rule()
    def hold(self) -> None:
        self.world.hold()

    @rule(host_lost=st.booleans(), chance=st.integers(0, 19))
    def crash(self, host_lost: bool, chance: int) -> None:
        if not chance:
            self.world.crash(host_lost)

    @invariant()
    def laws(self) -> None:
        if self.world is not None:
            check(self.world)

    def teardown(self) -> None:
        if self.world is not None:
            self.world.settle()


Lives.TestCase.settings = settings(
    max_examples=int(os.environ.get("HISPARSE_LIVES", "40")),
    stateful_step_count=int(os.environ.get("HISPARSE_LIFE_STEPS", "60")), deadline=None,
    report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate] + [Phase.shrink] * ("HISPARSE_SHRINK" in os.environ))
TestLives = Lives.TestCase


def test_lives_meet_every_event() -> None:
    """The bounded run is no proof of what it never meets."""
    met: Counter[str] = Counter()
    for seed in range(60):
        world = live(seed)
        met.update(world.events)
        met.update(asdict(world.m.stats()))
    for script in SCRIPTS:
        script(0)
    expected = [
        *(f"fork of a page {state}" for state in ("GPU_ONLY", "SPILLING", "CLEAN_PINNED", "CLEAN_LOOSE", "HOST_ONLY")),
        "fork at a page border", "fork inside a page border", "fork of a request in flight",
        *(f"load {outcome}, {when}" for outcome in ("ok", "failed") for when in ("in time", "late")),
        "prefix hit", "hit of the whole prompt", "indexer pages loaded", "admission refused", "below the watermark",
        "finished with spills under way", "read from host", "drafts rejected", "spill without bytes",
        "spill with an incomplete mask", "planned behind its own step", "planned behind rejected drafts", "held",
        "crash, host pool kept", "crash, host pool lost", "timed out",
        "acks_repeated", "acks_old_incarnation", "late_completions", "spills_failed", "pages_unpinned", "pages_reused",
        "pages_adopted", "host_pages_evicted", "hot_required", "hot_blocks_grown", "hot_blocks_taken_back", "preemptions",
    ]
    print("\n" + "\n".join(f"{met[name]:>6}  {name}" for name in expected))
    assert not [name for name in expected if not met[name]]


def test_a_never_issued_id_is_our_bug() -> None:
    h = Harness()
    ack = TransferAck(incarnation=1000, rank=0, transfer_id=1, kind=AckKind.ENQUEUED)
    with pytest.raises(InvariantError, match="never issued"):
        h.manager.on_worker_output([HiSparseWorkerOutput(rank=0, incarnation=1000, acks=(ack,))])
