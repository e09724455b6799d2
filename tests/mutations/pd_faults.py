"""Seeded faults of prefill/decode: each breaks one rule in one place. The random schedules must find every one.

A fault is a function of a MonkeyPatch whose docstring names the broken rule.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import hisparse.pd.held
import hisparse.pd.importer
import hisparse.pd.scheduler
from hisparse.engine.load_failures import LoadFailurePolicy, Recovery
from hisparse.pd.commands import ImportFailure, ImportPlan, PDOutput
from hisparse.pd.connector import PDConnectorScheduler
from hisparse.pd.descriptors import ReadPlanner
from hisparse.pd.generations import GENERATION_BYTES, plan_check
from hisparse.pd.held import HeldLeases
from hisparse.pd.importer import Importer
from hisparse.pd.incarnations import Incarnations
from hisparse.pd.leases import LeaseTable
from hisparse.pd.mapped_reads import MappedReads
from hisparse.pd.overdue import ImportDeadlines
from hisparse.pd.paging import Units, source_pages
from hisparse.pd.peers import PeerTable
from hisparse.pd.protocol import Notice, encode_notice
from hisparse.pd.reads import Read
from hisparse.pd.repaging import RepagingPlanner
from hisparse.pd.running_import import Phase
from hisparse.pd.scatter import Scatter
from hisparse.pd.staging import SlotPool
from hisparse.worker.device_cache import DeviceCache
from tests.mutations.faults import Fault, Patch, wrap
from tests.pd.prefill import Job


# ----------------------------------------------------------------------------------------------- generations
def generations_are_never_read(patch: Patch) -> None:
    """An import is verified by reading the generations of its pages."""
    patch.setattr(hisparse.pd.importer, "plan_check", lambda *args: [])


def generations_are_read_before_the_data(patch: Patch) -> None:
    """The generation READ is posted after every data READ has completed."""
    def submit(original: Any, self: Importer, plan: ImportPlan) -> None:
        original(self, plan)
        job = self._jobs[plan.job_id]
        if job.failure is None:
            batches = plan_check(plan, job.source, plan.source_of(job.rows_of, self._layout.block_size), GENERATION_BYTES)
            job.waiting.extend(Read(runs=batch, pool=self.slots.generations) for batch in batches)
    wrap(patch, Importer, "submit", submit)
    wrap(patch, Importer, "_start_verify",
         lambda original, self, job: setattr(job, "phase", Phase.VERIFY))


def one_generation_stands_for_all(patch: Patch) -> None:
    """Every page that was read is compared."""
    def first_difference(runs: Any, slot: Any) -> str:
        return original([replace(run, ids=run.ids[:1], expected=run.expected[:1]) for run in runs], slot)
    original = hisparse.pd.importer.first_difference
    patch.setattr(hisparse.pd.importer, "first_difference", first_difference)


def host_generations_are_not_read(patch: Patch) -> None:
    """Pages that prefill serves from its host pool are verified too."""
    def check(*args: Any) -> Any:
        batches = [[run for run in batch if run.array.name == "device"] for batch in plan_check(*args)]
        return [batch for batch in batches if batch]
    patch.setattr(hisparse.pd.importer, "plan_check", check)


def every_generation_is_that_of_the_first_page(patch: Patch) -> None:
    """Generations are compared at the array's stride, at the page's own place."""
    def first_difference(runs: Any, slot: Any) -> str:
        return original([replace(run, ids=np.full_like(run.ids, run.first), expected=run.expected) for run in runs], slot)
    original = hisparse.pd.importer.first_difference
    patch.setattr(hisparse.pd.importer, "first_difference", first_difference)


def bumped_after_the_reuse(patch: Patch) -> None:
    """A page's generation is stored before anything is written to it."""
    def late(original: Any, self: Any, *args: Any) -> None:
        waiting = held.setdefault(id(self), deque())
        waiting.append(args)
        if len(waiting) > 1:
            original(self, *waiting.popleft())
    held: dict[int, deque[Any]] = {}
    wrap(patch, DeviceCache, "store_generations", late)


def answered_before_it_is_written(patch: Patch) -> None:
    """Prefill answers only when the last write to the pages was observed."""
    patch.setattr(Job, "is_written", lambda self: not self.unsaid)


# ------------------------------------------------------------------------------------------ data and commits
def published_on_failure(patch: Patch) -> None:
    """No page of a failed import may be selected."""
    def end_job(original: Any, self: PDConnectorScheduler, job: Any, *more: Any) -> None:
        job.failures.clear()
        original(self, job, *more)
    wrap(patch, PDConnectorScheduler, "_end_job", end_job)


def the_first_rank_speaks_for_all(patch: Patch) -> None:
    """An import is loaded when every rank acknowledged it."""
    def start(original: Any, self: PDConnectorScheduler, *args: Any) -> None:
        original(self, *args)
        for job in self._jobs._jobs.values():
            job.waiting &= {0}
    wrap(patch, PDConnectorScheduler, "start_import", start)


def a_broken_read_counts(patch: Patch) -> None:
    """A READ that failed fails its import."""
    def fail(original: Any, self: Importer, job: Any, failure: ImportFailure, reason: str) -> None:
        if failure is not ImportFailure.TRANSFER:
            original(self, job, failure, reason)
    wrap(patch, Importer, "_fail", fail)


def a_chunk_is_forgotten(patch: Patch) -> None:
    """Every page of the plan is read before the import is ok."""
    wrap(patch, ReadPlanner, "slot_chunks", lambda original, self, *args: original(self, *args)[1:])


def the_last_reads_are_not_awaited(patch: Patch) -> None:
    """The import is ok only when nothing of it is waiting, posted or being copied."""
    def advance(original: Any, self: Importer, job: Any) -> bool:
        moved = original(self, job)
        if job.plan.job_id in self._jobs and job.failure is None and not job.waiting and len(job.posted) == 1:
            self._free_slot(job.posted.pop())
        return bool(moved)
    wrap(patch, Importer, "_advance", advance)


def holes_are_selectable(patch: Patch) -> None:
    """Rows of the last page behind the prompt are holes."""
    wrap(patch, Scatter, "set_row_masks",
         lambda original, self, plan: original(self, replace(plan, tail_rows=self._layout.block_size)))


def mirrors_are_not_filled(patch: Patch) -> None:
    """Pages needed at once are mirrored to their resident destinations."""
    patch.setattr(Scatter, "_to_resident", lambda self, *args: None)


# ---------------------------------------------------------------------------------------------- unequal pages
def with_units(patch: Patch, change: Callable[[Units], Units]) -> None:
    wrap(patch, ImportPlan, "units", lambda original, self, block_size: change(original(self, block_size)))


def rows_of_source_pages_are_not_counted(patch: Patch) -> None:
    """A row is read from its own place in a larger page of prefill."""
    with_units(patch, lambda units: replace(units, source_row=np.zeros_like(units.source_row)))


def rows_of_target_pages_are_not_counted(patch: Patch) -> None:
    """A smaller page of prefill goes to its own place in the page of decode."""
    with_units(patch, lambda units: replace(units, target_row=np.zeros_like(units.target_row)))


def a_plan_begins_at_a_page_border_of_prefill(patch: Patch) -> None:
    """An import that begins inside a page of prefill skips the rows before it."""
    def pages(**args: int) -> tuple[int, int, int]:
        return (*original(**args)[:2], 0)
    original = source_pages
    patch.setattr(hisparse.pd.scheduler, "source_pages", pages)


def a_unit_filled_in_part_is_left_out(patch: Patch) -> None:
    """The last unit of tokens is read, however few of its rows the prompt fills."""
    with_units(patch, lambda units: units.where(np.arange(units.source.size) < max(1, units.source.size - 1)))


def prefill_is_taken_to_pack_as_decode_does(patch: Patch) -> None:
    """Layers are read where the peer's own layout has them."""
    def make(original: Any, self: RepagingPlanner, layout: Any, plan: Any, source: Any, own: Any, far: Any,
             **options: Any) -> None:
        original(self, layout, plan, source, own, far, **options)
        swapped = list(far.layer_row_offset)
        swapped[0], swapped[1] = swapped[1], swapped[0]
        self._far_layout = replace(far, layer_row_offset=tuple(swapped))
    wrap(patch, RepagingPlanner, "__init__", make)


def one_source_page_of_each_import_is_verified(patch: Patch) -> None:
    """Every page of prefill that a page of decode was put together from is compared."""
    wrap(patch, ImportPlan, "source_of", lambda original, self, pages, block_size: original(self, pages, block_size)[:1])


# ---------------------------------------------------------------------------------------- ranks and shared pools
def the_writer_of_the_pool_is_not_awaited(patch: Patch) -> None:
    """Ranks that share a host pool use its pages when the rank that writes them said so."""
    def start(original: Any, self: PDConnectorScheduler, *args: Any) -> None:
        original(self, *args)
        for job in self._jobs._jobs.values():
            job.waiting = job.waiting - {0} or job.waiting
    wrap(patch, PDConnectorScheduler, "start_import", start)


def leases_outlive_the_ranks(patch: Patch) -> None:
    """Leases end with the ranks that held the pages."""
    patch.setattr(LeaseTable, "end_all", lambda self: None)


def an_import_of_nothing_outlives_the_ranks(patch: Patch) -> None:
    """A request whose prefix was here is not loaded any more when the ranks are replaced."""
    def restarted(original: Any, self: PDConnectorScheduler, *args: Any) -> None:
        loaded, self._loaded = self._loaded, set()
        original(self, *args)
        self._loaded = loaded
    wrap(patch, PDConnectorScheduler, "workers_restarted", restarted)


# ------------------------------------------------------------------------------------------------ quarantine
def quarantine_is_skipped(patch: Patch) -> None:
    """Pages and slots of a failed import stay taken until its READs ended or the endpoint is closed."""
    def fail(original: Any, self: Importer, job: Any, *more: Any) -> None:
        original(self, job, *more)
        for read in job.posted:
            self._free_slot(read)
        job.posted.clear()
    wrap(patch, Importer, "_fail", fail)


def a_closed_request_frees_its_pages(patch: Patch) -> None:
    """A cancelled import is drained when every rank said so, not when the cancel was sent."""
    def close(original: Any, self: PDConnectorScheduler, request_id: str) -> None:
        flying, jobs = request_id in self._jobs.requests(), self._jobs._jobs
        original(self, request_id)
        if flying and request_id not in self._drained:
            self._drained.append(request_id)
            for job_id in [job_id for job_id, job in jobs.items() if job.request_id == request_id]:
                del jobs[job_id]
    wrap(patch, PDConnectorScheduler, "request_closed", close)


def a_slot_is_free_before_its_copy(patch: Patch) -> None:
    """A staging slot is free when the event of its copies was seen."""
    def start(original: Any, self: Importer, job: Any, read: Any) -> None:
        original(self, job, read)
        self._free_slot(read)
    wrap(patch, Importer, "_start_copy", start)


def an_endpoint_that_would_not_close_counts_as_closed(patch: Patch) -> None:
    """READs of a lost endpoint are over when closing it worked."""
    def disconnect(original: Any, self: PeerTable, agent: str) -> bool:
        original(self, agent)
        return True
    wrap(patch, PeerTable, "disconnect", disconnect)


def slots_stay_in_quarantine(patch: Patch) -> None:
    """What was in quarantine is usable again."""
    def abort(original: Any, self: Importer, job: Any, *more: Any) -> None:
        for read in job.posted:
            read.slot = -1
        original(self, job, *more)
    wrap(patch, Importer, "_abort", abort)


def a_landed_slot_of_a_failed_import_is_kept(patch: Patch) -> None:
    """A slot whose READ is over is free when its import has failed meanwhile."""
    def start(original: Any, self: Importer, job: Any, read: Any) -> None:
        if job.failure is None:
            original(self, job, read)
    wrap(patch, Importer, "_start_copy", start)


def reads_over_a_mapping_outlive_their_endpoint(patch: Patch) -> None:
    """READs over mapped memory are over when their endpoint is closed."""
    def unmap(original: Any, self: MappedReads, state: Any) -> None:
        state.reads.clear()
        original(self, state)
    wrap(patch, MappedReads, "_unmap", unmap)


def deadlines_are_the_transports(patch: Patch) -> None:
    """A READ that never ends fails at our deadline; the transport has none."""
    wrap(patch, Importer, "submit", lambda original, self, plan: original(self, replace(plan, deadline_s=1e12)))


# ------------------------------------------------------------------------------------------- leases and peers
def a_lease_never_expires(patch: Patch) -> None:
    """Pages that nobody renews are free after the lease."""
    patch.setattr(LeaseTable, "expire", lambda self: None)


def a_lease_expires_early(patch: Patch) -> None:
    """A lease lasts as long as it says."""
    wrap(patch, LeaseTable, "open", lambda original, self, lease_id, request_id, lease_s:
         original(self, lease_id, request_id, lease_s / 20))


def heartbeats_change_nothing(patch: Patch) -> None:
    """A heartbeat extends the lease by its full duration."""
    patch.setattr(LeaseTable, "renew", lambda self, lease_id: None)


def released_with_the_wrong_id(patch: Patch) -> None:
    """A notice names the lease by prefill's id."""
    patch.setattr(hisparse.pd.held, "encode_notice",
                  lambda notice: encode_notice(Notice(kind=notice.kind, lease_id="d-1", reason=notice.reason)))


def released_with_the_first_sharer(patch: Patch) -> None:
    """A lease that several requests use is released with the last of them."""
    def drop(original: Any, self: HeldLeases, request_id: str, reason: str) -> None:
        key = self._by_request.get(request_id)
        if key is not None:
            for other in list(self._held[key].users - {request_id}):
                original(self, other, reason)
        original(self, request_id, reason)
    wrap(patch, HeldLeases, "drop", drop)


def an_early_release_is_forgotten(patch: Patch) -> None:
    """A release that comes before the lease is remembered."""
    patch.setattr(LeaseTable, "_remember", lambda self, name: None)


def a_refused_answer_keeps_its_lease(patch: Patch) -> None:
    """Prefill is told to release what decode will not read."""
    patch.setattr(HeldLeases, "release_unheld", lambda self, *args: None)


def a_restarted_peer_is_taken_for_the_old_one(patch: Patch) -> None:
    """A restarted peer is a new agent, connected anew."""
    def connect(original: Any, self: PeerTable, peer_id: str, endpoint: Any) -> None:
        if (peer_id, endpoint.rank) not in self._agents:
            original(self, peer_id, endpoint)
    wrap(patch, PeerTable, "connect", connect)


def a_replaced_incarnation_is_believed(patch: Patch) -> None:
    """Answers that a peer gave before its restart are refused."""
    patch.setattr(Incarnations, "check", lambda self, engine_id, incarnation: None)


def the_dead_are_told_to_release(patch: Patch) -> None:
    """Notices go to no incarnation but the last: they open its agent's connection."""
    wrap(patch, HeldLeases, "take_notices", lambda original, self, is_current: original(self, lambda *peer: True))


def an_answer_of_the_dead_is_imported(patch: Patch) -> None:
    """Nothing is imported from an incarnation that was replaced since it answered."""
    wrap(patch, Incarnations, "is_current", lambda original, self, engine_id, incarnation:
         sys._getframe(2).f_code.co_name == "start_import" or original(self, engine_id, incarnation))


def a_failed_request_is_not_reported(patch: Patch) -> None:
    """Whoever waits for an import hears of its failure."""
    def update(original: Any, self: PDConnectorScheduler, outputs: Any) -> Any:
        return replace(original(self, outputs), failed={})
    wrap(patch, PDConnectorScheduler, "update", update)


# ----------------------------------------------------------------------------------------------- the failure policy
def an_overdue_import_is_waited_for(patch: Patch) -> None:
    """A request does not wait for a transport call that does not come back."""
    patch.setattr(ImportDeadlines, "late", lambda self: [])


def an_overdue_import_counts_as_drained(patch: Patch) -> None:
    """Pages of an overdue import stay in quarantine until every rank said that it drained."""
    def overdue(original: Any, self: PDConnectorScheduler, output: PDOutput) -> Any:
        told = original(self, output)
        self._drained += told
        return told
    wrap(patch, PDConnectorScheduler, "_overdue", overdue)


def the_policy_fail_recomputes(patch: Patch) -> None:
    """Under the policy `fail` no prompt is computed that prefill did not bring."""
    wrap(patch, LoadFailurePolicy, "__init__", lambda original, self, config:
         original(self, config.model_copy(update={"kv_load_failure_policy": "recompute"})))


def prefill_is_asked_once_too_often(patch: Patch) -> None:
    """Prefill is asked again `max_retries` times at most."""
    wrap(patch, LoadFailurePolicy, "decide", lambda original, self, request_id, *, tokens, retries_left:
         original(self, request_id, tokens=tokens, retries_left=retries_left + 1))


def nobody_is_retried(patch: Patch) -> None:
    """Before a request is computed here or refused, its retries are used up."""
    wrap(patch, LoadFailurePolicy, "decide", lambda original, self, request_id, *, tokens, retries_left:
         original(self, request_id, tokens=tokens, retries_left=0))


def the_budget_counts_nothing(patch: Patch) -> None:
    """Prompts that are computed here at once stay within the budget."""
    patch.setattr(LoadFailurePolicy, "tokens", property(lambda self: 0))


def a_budget_of_zero_takes_one(patch: Patch) -> None:
    """With a budget of 0 nothing is computed here."""
    wrap(patch, LoadFailurePolicy, "__init__", lambda original, self, config: original(
        self, config.model_copy(update={"local_prefill_tokens": max(1, config.local_prefill_tokens)})))


def the_budget_is_not_given_back(patch: Patch) -> None:
    """A request counts against the budget until its first token or its end, whichever comes first."""
    patch.setattr(LoadFailurePolicy, "end", lambda self, request_id: None)


def a_long_prompt_is_never_computed(patch: Patch) -> None:
    """One request alone may exceed the budget."""
    def decide(original: Any, self: LoadFailurePolicy, request_id: str, *, tokens: int, retries_left: int) -> Recovery:
        alone = not self.tokens
        decision: Recovery = original(self, request_id, tokens=tokens, retries_left=retries_left)
        if decision is Recovery.RECOMPUTE and alone and tokens > self._limit_tokens - 4:
            self.end(request_id)
            return Recovery.REFUSE
        return decision
    wrap(patch, LoadFailurePolicy, "decide", decide)


# ----------------------------------------------------------------------------------------------- staging
def one_peer_takes_every_slot(patch: Patch) -> None:
    """Staging has a quota per peer."""
    def acquire(original: Any, self: SlotPool, peer: str) -> int | None:
        self.quota, quota = self.memory.shape[0], self.quota
        slot = original(self, peer)
        self.quota = quota
        return slot if slot is None else int(slot)
    wrap(patch, SlotPool, "acquire", acquire)


PD_FAULTS: list[Fault] = [value for value in list(globals().values()) if value is not with_units
                          and callable(value) and getattr(value, "__module__", "") == __name__]
