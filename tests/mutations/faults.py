"""Seeded faults: each breaks one rule of the cache, in one place. They know its insides; the harness does not.

A fault is a function of a MonkeyPatch whose docstring names the broken rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hisparse.cache.admitter import Admitter
from hisparse.cache.block_pool import BlockPool
from hisparse.cache.core import CacheCore
from hisparse.cache.extents import Extents, num_runs
from hisparse.cache.fork import Fork
from hisparse.cache.growth import Growth
from hisparse.cache.host_blocks import HostBlockPool
from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.cache.loads import Loads
from hisparse.cache.pages import Residency
from hisparse.cache.prefix import ExtraKeys, PageKeys, root_key
from hisparse.cache.prefix_index import PublishedBlocks
from hisparse.cache.publication import Publication
from hisparse.cache.releaser import Releaser
from hisparse.cache.request import Incarnation
from hisparse.cache.residency import PageState
from hisparse.cache.spills import Spills
from hisparse.cache.step_planner import StepPlanner
from hisparse.cache.steps import StepClock
from hisparse.cache.tables import TableChanges
from hisparse.types import AckKind

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def wrap(patch: Patch, owner: type, name: str, around: Callable[..., Any]) -> None:
    """`around(original, self, ...)` takes the place of a method."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args, **more: around(original, self, *args, **more))


# ------------------------------------------------------------------------------------------- blocks and steps
def reuse_before_retire(patch: Patch) -> None:
    """A write that is not ordered with the compute stream waits for the steps that may still touch its blocks."""
    patch.setattr(CacheCore, "is_quiet", lambda self, block: True)


def host_blocks_freed_at_once(patch: Patch) -> None:
    """Host blocks go back only after the last dispatched step retired."""
    patch.setattr(StepClock, "after_dispatched", lambda self, action: action())


def a_loose_page_is_freed_again(patch: Patch) -> None:
    """A loose page's reference is gone already; its release drops none."""
    def twice(release: Any, self: Residency, inc: Incarnation, first: int, end: int, event: object) -> None:
        loose = [inc.blocks(page) for page in range(first, end) if inc.states[page] == PageState.CLEAN_LOOSE]
        release(self, inc, first, end, event)
        for blocks in loose:
            self.core.pool.free(blocks)
    wrap(patch, Residency, "release_pages", twice)


def generations_stand_still(patch: Patch) -> None:
    """Every hand-out starts a new generation."""
    def take_handed_out(original: Any, self: BlockPool) -> object:
        before = self.generations.copy()
        ids, _ = original(self)
        self.generations[:] = before
        return ids, tuple(before[list(ids)].tolist())
    wrap(patch, BlockPool, "take_handed_out", take_handed_out)


def a_reservation_is_leaked(patch: Patch) -> None:
    """What was promised to a request is free again when it ends."""
    def update(original: Any, self: CacheCore, inc: Incarnation) -> None:
        if not inc.released:
            original(self, inc)
    wrap(patch, CacheCore, "update_reservation", update)


def a_table_update_is_lost(patch: Patch) -> None:
    """Table rows travel in the command of the pass that handed a block out."""
    wrap(patch, TableChanges, "take_updates", lambda original, self: original(self)[:-1])


def rows_in_flight_are_forgotten(patch: Patch) -> None:
    """Behind a dispatched step of the same request, rows start where that step's rows were planned to end."""
    def grow(original: Any, self: Growth, inc: Incarnation, num_tokens: int) -> object:
        planned, inc.planned = inc.planned, inc.valid
        room = original(self, inc, num_tokens)
        inc.planned = planned
        return room
    wrap(patch, Growth, "grow", grow)


def a_host_block_is_handed_out_twice(patch: Patch) -> None:
    """A host block that was handed out is not free."""
    def take_run(original: Any, self: Extents, start: int, count: int, out: list[int]) -> None:
        original(self, start, count, out)
        if count > 1:
            self.append(start + count - 1)
    wrap(patch, Extents, "_take_run", take_run)


def another_block_is_taken_for_a_follower(patch: Patch) -> None:
    """A request goes on behind its last host block only while the blocks there are free."""
    def take(original: Any, self: Extents, n: int, *, after: int = 0, room: int = 0) -> list[int]:
        if n == 1 and 0 < after < self.num_blocks - 1 and after + 1 not in self:
            return [after + 1]
        return original(self, n, after=after, room=room)
    wrap(patch, Extents, "take", take)


def neighbours_are_evicted_from_their_readers(patch: Patch) -> None:
    """What is evicted along with the oldest readable host block is held by nobody."""
    def evict(original: Any, self: HostBlockPool, most: int) -> None:
        oldest = self._next[0]
        original(self, most)
        for block in (oldest - 1, oldest + 1):
            if 0 < block < self.num_blocks and self.refs(block) and self._watched[block]:
                self.extents.append(self._take_readable(block))
    wrap(patch, HostBlockPool, "_evict_extent", evict)


def runs_are_counted_from_each_append(patch: Patch) -> None:
    """The runs of a request's host blocks are those of its page list, however it came to be."""
    patch.setattr("hisparse.cache.core.num_runs", lambda blocks, first: num_runs(blocks[first:], 0))


# ------------------------------------------------------------------------------------------- the spill transaction
def fence_ignored(patch: Patch) -> None:
    """A block that an enqueued copy still reads is handed out with a fence."""
    def drop(original: Any, self: Spills, transfer: Any) -> None:
        original(self, transfer)
        if transfer.resident is not None:
            transfer.resident.copy_id = 0
            self.core.fences.clear()
    wrap(patch, Spills, "_drop_source_pin", drop)


def source_never_pinned(patch: Patch) -> None:
    """A spill pins its source from planning until it is enqueued."""
    def unpinned(original: Any, self: Spills, inc: Incarnation, page: int, copy_bytes: bool, now_s: float) -> None:
        original(self, inc, page, copy_bytes, now_s)
        self._drop_source_pin(self.transfers[self._next_id - 1])
        inc.resident[page].copy_id = 0
        self.core.fences.clear()
    wrap(patch, Spills, "_plan_page", unpinned)


def enqueued_is_taken_for_completed(patch: Patch) -> None:
    """Enqueued means that the copy is in the stream, not that it was made."""
    def on_ack(original: Any, self: Spills, ack: Any) -> None:
        original(self, ack._replace(kind=AckKind.COMPLETED, row_mask=self.full_mask) if ack.kind is AckKind.ENQUEUED else ack)
    wrap(patch, Spills, "on_ack", on_ack)


def the_first_rank_completes(patch: Patch) -> None:
    """Every rank that writes a pool, and every rank of a page copy, must report."""
    def one(original: Any, self: Spills, *args: object, **more: object) -> None:
        original(self, *args, **{**more, "num_writers": 1, "num_ranks": 1})
    wrap(patch, Spills, "__init__", one)


def row_mask_ignored(patch: Patch) -> None:
    """A spill without bytes is durable only if the row mask reported with it is full."""
    wrap(patch, Spills, "on_ack", lambda original, self, ack: original(self, ack._replace(row_mask=self.full_mask)))


def rejected_rows_count(patch: Patch) -> None:
    """Only accepted rows are in the cache after a step."""
    def advance(original: Any, self: StepPlanner, inc: Incarnation, rows: int, end: int) -> None:
        original(self, inc, end, end)
    wrap(patch, StepPlanner, "_advance", advance)


def words_of_an_old_incarnation_count(patch: Patch) -> None:
    """A worker that was replaced has no say about the transfers of its successor."""
    wrap(patch, Spills, "on_ack", lambda original, self, ack: original(self, ack._replace(incarnation=self.incarnation)))


def a_spill_of_an_earlier_admission_counts(patch: Patch) -> None:
    """A spill belongs to one admission of a request, not to its id."""
    def inherit(original: Any, self: Publication, inc: Incarnation, page: int, *, durable: bool) -> None:
        again = self.core.live.get(inc.request_id)
        if again is not None and durable and page == again.published and page < len(again.host):
            self._publish(again, page, None)
            again.published += 1
        original(self, inc, page, durable=durable)
    wrap(patch, Publication, "spill_done", inherit)


def the_budget_is_ignored(patch: Patch) -> None:
    """A command carries at most `max_model_len // block_size` spills."""
    def init(original: Any, self: Spills, *args: object, **more: object) -> None:
        original(self, *args, **more)
        self.budget = 10_000
    wrap(patch, Spills, "__init__", init)


# ------------------------------------------------------------------------------------------- publication and keys
def published_before_completed(patch: Patch) -> None:
    """Only durable pages are published."""
    patch.setattr("hisparse.cache.publication.DURABLE", frozenset(PageState))


def published_after_a_preemption(patch: Patch) -> None:
    """A preempted or aborted request's pending publication is dropped."""
    wrap(patch, Spills, "release", lambda original, self, inc, *, finished: original(self, inc, finished=True))


def last_sampled_token_published(patch: Patch) -> None:
    """The last sampled token has no KV."""
    def release(original: Any, self: Releaser, inc: Incarnation, *, finished: bool) -> None:
        if finished and not inc.loading and inc.valid == inc.identity.num_tokens - 1 < inc.num_pages * self.core.block_size:
            inc.valid += 1
        original(self, inc, finished=finished)
    wrap(patch, Releaser, "release", release)


def retention_ignored(patch: Patch) -> None:
    """Pages behind the last boundary of a retention are not published."""
    patch.setattr(Publication, "_retained", lambda self, inc, end: end)


def hash_kept_after_the_hand_out(patch: Patch) -> None:
    """A published block loses its hash before it is handed out."""
    patch.setattr(PublishedBlocks, "_evict", lambda self, block: None)


def hash_without_salt(patch: Patch) -> None:
    """Typed extra keys are part of every key."""
    patch.setattr("hisparse.cache.kv_cache_manager.root_key", lambda layout, extra: root_key(layout, ExtraKeys()))


def hash_chain_without_parent(patch: Patch) -> None:
    """A page's key covers every token before the page."""
    def extend(original: Any, self: PageKeys, token_ids: Any) -> None:
        for token in token_ids:
            before = len(self.keys)
            original(self, [token])
            if len(self.keys) > before:
                self._parent = b"orphan"
    wrap(patch, PageKeys, "extend", extend)


def a_hit_is_remembered_by_id(patch: Patch) -> None:
    """A hit belongs to the tokens of a request, not to its id: ids come back."""
    def look_up(original: Any, self: Admitter, identity: Any, limit: int) -> Any:
        if self._last_find is not None and self._last_find[0].request_id == identity.request_id:
            self._last_find = (identity, *self._last_find[1:])
        return original(self, identity, limit)
    wrap(patch, Admitter, "_look_up", look_up)


# ------------------------------------------------------------------------------------------- residency
def watermark_off(patch: Patch) -> None:
    """Below the watermark requests must go hot, and hot regions do not grow."""
    def init(original: Any, self: KVCacheManager, *args: object, **more: object) -> None:
        original(self, *args, **more)
        self.core.watermark_blocks = 0
    wrap(patch, KVCacheManager, "__init__", init)


def nobody_is_required_to_go_hot(patch: Patch) -> None:
    """Pressure makes requests host-backed."""
    patch.setattr(Residency, "require_hot", lambda self, inc: None)


def tail_unpinned(patch: Patch) -> None:
    """The last two table entries of a request are never unpinned."""
    patch.setattr(Incarnation, "tail_start", property(lambda self: len(self.states)))


def adopted_before_the_allocation(patch: Patch) -> None:
    """Adoption runs after allocation, so that admission arithmetic equals what is pinned."""
    def take(original: Any, self: Admitter, inc: Incarnation, hit: Any) -> None:
        original(self, inc, hit)
        self.residency.adopt(inc, inc.identity.keys.keys[: hit.pages])
    wrap(patch, Admitter, "_take_hit", take)


def a_copy_survives_its_reuse(patch: Patch) -> None:
    """The copies entry of a page goes when one of its blocks is handed out."""
    patch.setattr(Residency, "_forget", lambda self, shared: None)


def reuse_forgets_one_owner(patch: Patch) -> None:
    """Reuse of one block nulls the page for every owner."""
    def reused(original: Any, self: Residency, shared: Any, block: int) -> None:
        if shared.owners and len(shared.owners) > 1:
            shared.owners.pop(next(iter(shared.owners)))
        original(self, shared, block)
    wrap(patch, Residency, "_reused", reused)


def reuse_nulls_one_group_only(patch: Patch) -> None:
    """A page is one block in every resident group; when one is reused, all are given up."""
    patch.setattr(BlockPool, "unwatch", lambda self, blocks: None)


def shrunk_without_reset(patch: Patch) -> None:
    """Slots that a hot region gave back lose their rows."""
    def reset(original: Any, self: TableChanges, change: Any) -> None:
        if change.from_slot <= 0:
            original(self, change)
    wrap(patch, TableChanges, "reset", reset)


def shrunk_without_its_tables(patch: Patch) -> None:
    """The worker learns of a shrunk region before its blocks go on."""
    def grow_only(original: Any, self: TableChanges, inc: Any, group: int, rows: int, *, first_block: int = 0) -> None:
        if not first_block or len(inc.hot[group]) > first_block:
            original(self, inc, group, rows, first_block=first_block)
    wrap(patch, TableChanges, "hot", grow_only)


def grown_blocks_never_given_back(patch: Patch) -> None:
    """What a hot region has beyond its starting size counts as free, so the pool asks for it."""
    def take(original: Any, self: BlockPool, n: int, accept: object = None) -> object:
        self.on_shortage = None
        return original(self, n, accept)
    wrap(patch, BlockPool, "take", take)


# ------------------------------------------------------------------------------------------- imports and forks
def failed_import_believed(patch: Patch) -> None:
    """Nothing of a failed import is valid."""
    wrap(patch, Loads, "finish", lambda original, self, request_id, *, failed: original(self, request_id, failed=False))


def import_without_pins(patch: Patch) -> None:
    """A load pins what it fills until every rank has drained, whatever becomes of its request."""
    def begin(original: Any, self: Loads, inc: Incarnation, **more: object) -> object:
        load = original(self, inc, **more)
        self.core.free_device(load.device_blocks)
        load.device_blocks = ()
        return load
    wrap(patch, Loads, "begin", begin)


def copy_on_write_skipped(patch: Patch) -> None:
    """No row is written to a page with another reader."""
    patch.setattr(Fork, "num_shared_pages", lambda self, parent: self.core.layout.pages(parent.valid))


def fork_ends_not_pinned(patch: Patch) -> None:
    """Both ends of a page copy stay leased until every rank reported."""
    def issue(original: Any, self: Spills, *args: object, **more: Any) -> object:
        self.core.pool.free(more["device_blocks"])
        return original(self, *args, **{**more, "device_blocks": ()})
    wrap(patch, Spills, "issue_page_copy", issue)


FAULTS: tuple[Fault, ...] = (
    reuse_before_retire, host_blocks_freed_at_once, a_loose_page_is_freed_again, generations_stand_still,
    a_reservation_is_leaked, a_table_update_is_lost, a_host_block_is_handed_out_twice, another_block_is_taken_for_a_follower,
    neighbours_are_evicted_from_their_readers, runs_are_counted_from_each_append, rows_in_flight_are_forgotten, fence_ignored,
    source_never_pinned,
    enqueued_is_taken_for_completed, the_first_rank_completes, row_mask_ignored, rejected_rows_count,
    words_of_an_old_incarnation_count, a_spill_of_an_earlier_admission_counts, the_budget_is_ignored,
    published_before_completed, published_after_a_preemption, last_sampled_token_published, retention_ignored,
    a_hit_is_remembered_by_id, hash_kept_after_the_hand_out, hash_without_salt, hash_chain_without_parent, watermark_off,
    nobody_is_required_to_go_hot, tail_unpinned, adopted_before_the_allocation, a_copy_survives_its_reuse,
    reuse_forgets_one_owner, reuse_nulls_one_group_only, shrunk_without_reset, shrunk_without_its_tables,
    grown_blocks_never_given_back, failed_import_believed, import_without_pins, copy_on_write_skipped,
    fork_ends_not_pinned,
)
