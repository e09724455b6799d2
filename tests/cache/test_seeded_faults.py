"""The random lives must find each of these faults; a harness that finds nothing proves nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hisparse.cache import mirrors
from hisparse.cache.block_pool import BlockPool
from hisparse.cache.core import CacheCore
from hisparse.cache.loads import Loads
from hisparse.cache.pages import Residency
from hisparse.cache.publication import Publication
from hisparse.cache.residency import PageState
from hisparse.cache.spills import Spills
from hisparse.cache.steps import StepClock
from hisparse.cache.tables import TableChanges
from hisparse.types import Landing
from tests.cache.test_coordinator_machine import Lives

MOVES = ("arrive", "admit", "load_done", "end_request", "preempt", "dispatch", "execute", "retire", "complete", "hear",
         "hear_again", "hold", "store_done", "fork", "report_page_copies")
CALM = (4, 6, 4, 1, 1, 9, 9, 9, 7, 7, 1, 1, 2, 2, 3)
HECTIC = (8, 14, 9, 4, 2, 9, 5, 7, 7, 7, 1, 1, 2, 2, 3)
"""Requests come and go while steps are in flight."""


def live(seed: int, steps: int = 250) -> None:
    """One random life, without hypothesis: fast and reproducible by its seed."""
    rng = random.Random(seed)
    lives = Lives()
    lives.start(seed=seed, groups=rng.randint(1, 2), spare=rng.randint(0, 30), host=rng.randint(0, 20),
                store=rng.random() < 0.5, drafts=rng.random() < 0.5, elastic=rng.randint(0, 6))
    for _ in range(steps):
        move = rng.choices(MOVES, HECTIC if seed % 2 else CALM)[0]
        if move == "arrive" and len(lives.h.reqs) < 6:
            lives.arrive(length=rng.randint(1, 36), kind=rng.randint(0, 2), max_tokens=rng.randint(1, 9))
        elif move == "admit":
            lives.admit(landing=rng.choice([None, None, Landing.HOST, Landing.RESIDENT]))
        elif move == "load_done":
            lives.load_done(failed=rng.random() < 0.3, partial=rng.random() < 0.5)
        elif move == "end_request":
            lives.end_request(finished=rng.random() < 0.5)
        elif move == "dispatch" and len(lives.flights) < 3:
            lives.dispatch(use_drafts=rng.random() < 0.5, most=rng.randint(1, 4))
        elif move == "execute" and any(not f.executed for f in lives.flights):
            lives.execute()
        elif move == "retire" and lives.flights and lives.flights[0].executed:
            lives.retire()
        elif move == "complete":
            lives.complete(fail=rng.randint(0, 5))
        elif move == "hear_again" and lives.old_acks:
            lives.hear_again()
        elif move == "hold" and len(lives.held) < 2:
            lives.hold()
        elif move == "store_done" and lives.h.store is not None and lives.h.store.stores:
            lives.store_done()
        elif move == "fork" and len(lives.h.reqs) < 6:
            lives.fork(max_tokens=rng.randint(1, 6))
        elif move in ("preempt", "hear", "report_page_copies"):
            getattr(lives, move)()
        lives.laws()
    lives.teardown()


def import_over_an_aborted_request(seed: int) -> None:
    """A step that mirrors into host pages is in flight, its request is aborted, and an import needs host pages."""
    lives = Lives()
    lives.start(seed=seed, groups=1, spare=40, host=0, store=False, drafts=False)
    lives.arrive(length=7, kind=0, max_tokens=4)
    lives.admit(landing=None)
    lives.dispatch(use_drafts=False, most=1)
    lives.end_request(finished=False)
    lives.arrive(length=24, kind=1, max_tokens=8)
    lives.admit(landing=Landing.HOST)
    lives.dispatch(use_drafts=False, most=0)
    lives.load_done(failed=False, partial=False)
    for _ in range(2):
        lives.execute()
        lives.retire()
    lives.dispatch(use_drafts=False, most=1)
    lives.execute()
    lives.laws()
    lives.teardown()


@pytest.mark.parametrize("seed", range(12))
def test_lives_without_faults(seed: int) -> None:
    live(seed)
    import_over_an_aborted_request(seed)


def reuse_before_retire(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheCore, "is_quiet", lambda self, block: True)


def host_blocks_freed_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepClock, "after_dispatched", lambda self, action: action())


def fence_not_listed(patch: pytest.MonkeyPatch) -> None:
    def drop(self: Spills, transfer: object) -> None:
        transfer.source_pinned = False  # type: ignore[attr-defined]
        self.core.free_device(transfer.device_blocks)  # type: ignore[attr-defined]
    patch.setattr(Spills, "_drop_source_pin", drop)


def source_never_pinned(patch: pytest.MonkeyPatch) -> None:
    plan = Spills._plan_page

    def unpinned(self: Spills, inc: object, page: int, *, copy_bytes: bool) -> None:
        plan(self, inc, page, copy_bytes=copy_bytes)  # type: ignore[arg-type]
        self._drop_source_pin(self.transfers[self._next_id - 1])
        self.core.fences.clear()
    patch.setattr(Spills, "_plan_page", unpinned)


def publish_before_completed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("hisparse.cache.publication.DURABLE", frozenset(PageState))


def mask_ignored(patch: pytest.MonkeyPatch) -> None:
    init = Spills.__init__

    def blind(self: Spills, *args: object, **more: object) -> None:
        init(self, *args, **more)  # type: ignore[arg-type]
        self.full_mask = 0
    patch.setattr(Spills, "__init__", blind)


def rejected_rows_count_as_covered(patch: pytest.MonkeyPatch) -> None:
    """Together with a mask nobody looks at."""
    mask_ignored(patch)
    patch.setattr("hisparse.cache.step_planner.uncover", lambda *args: None)
    patch.setattr(mirrors, "uncover", lambda *args: None)


def reuse_keeps_one_owner(patch: pytest.MonkeyPatch) -> None:
    reused = Residency._reused

    def forgetful(self: Residency, shared: object, block: int) -> None:
        owners = shared.owners  # type: ignore[attr-defined]
        if len(owners) > 1:
            owners.pop(next(iter(owners)))
        reused(self, shared, block)  # type: ignore[arg-type]
    patch.setattr(Residency, "_reused", forgetful)


def reuse_nulls_one_group_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "unwatch", lambda self, blocks: None)


def loose_page_freed_again(patch: pytest.MonkeyPatch) -> None:
    release = Residency.release_pages

    def twice(self: Residency, inc: object, first: int, end: int, event: object) -> None:
        loose = [inc.blocks(page) for page in range(first, end)  # type: ignore[attr-defined]
                 if inc.states[page] == PageState.CLEAN_LOOSE]  # type: ignore[attr-defined]
        release(self, inc, first, end, event)  # type: ignore[arg-type]
        for blocks in loose:
            self.core.pool.free(blocks)
    patch.setattr(Residency, "release_pages", twice)


def adopt_before_allocation(patch: pytest.MonkeyPatch) -> None:
    """A loose page of a hit is taken over although its blocks were handed out by the same admission."""
    patch.setattr(Residency, "_forget", lambda self, shared: None)


def failed_import_is_believed(patch: pytest.MonkeyPatch) -> None:
    finish = Loads.finish
    patch.setattr(Loads, "finish", lambda self, request_id, *, failed: finish(self, request_id, failed=False))


def import_without_pins(patch: pytest.MonkeyPatch) -> None:
    begin = Loads.begin

    def unpinned(self: Loads, inc: object, **more: object) -> object:
        load = begin(self, inc, **more)  # type: ignore[arg-type]
        self.core.free_device(load.device_blocks)
        load.device_blocks = ()
        return load
    patch.setattr(Loads, "begin", unpinned)


def a_spill_of_an_earlier_admission_counts(patch: pytest.MonkeyPatch) -> None:
    def inherit(self: Publication, inc: object, page: int, *, durable: bool) -> None:
        again = self.core.live.get(inc.request_id)  # type: ignore[attr-defined]
        if again is not None and durable and page == again.published and page < len(again.host):
            self._publish(again, page, None)
            again.published += 1
        spill_done(self, inc, page, durable=durable)  # type: ignore[arg-type]
    spill_done = Publication.spill_done
    patch.setattr(Publication, "spill_done", inherit)


def shrunk_without_reset(patch: pytest.MonkeyPatch) -> None:
    """Rows stay tagged in slots that are no longer there."""
    reset = TableChanges.reset
    patch.setattr(TableChanges, "reset", lambda self, r: reset(self, r) if r.from_slot <= 0 else None)


def shrunk_without_its_tables(patch: pytest.MonkeyPatch) -> None:
    """The worker goes on with blocks that are somebody else's."""
    hot = TableChanges.hot

    def grow_only(self: TableChanges, inc: object, rows: int, *, first_block: int = 0) -> None:
        if not first_block or len(inc.hot[0]) > first_block:  # type: ignore[attr-defined]
            hot(self, inc, rows, first_block=first_block)  # type: ignore[arg-type]
    patch.setattr(TableChanges, "hot", grow_only)


def grown_blocks_counted_and_never_given_back(patch: pytest.MonkeyPatch) -> None:
    """They count as free, but the pool does not ask for them."""
    patch.setattr(BlockPool, "take", _without_asking(BlockPool.take))


def _without_asking(take: Callable[..., object]) -> Callable[..., object]:
    def without(self: BlockPool, n: int, accept: object = None) -> object:
        self.on_shortage = None
        return take(self, n, accept)
    return without


FAULTS = [
    reuse_before_retire, host_blocks_freed_at_once, fence_not_listed, source_never_pinned, publish_before_completed,
    mask_ignored, rejected_rows_count_as_covered, reuse_keeps_one_owner, reuse_nulls_one_group_only,
    loose_page_freed_again, adopt_before_allocation, failed_import_is_believed, import_without_pins,
    a_spill_of_an_earlier_admission_counts, shrunk_without_reset, shrunk_without_its_tables,
    grown_blocks_counted_and_never_given_back,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_found(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    for seed in range(60):
        try:
            live(seed)
            import_over_an_aborted_request(seed)
        except Exception:
            return
    pytest.fail(f"60 lives with {fault.__name__} looked right")
