"""Generic offload of indexer pages to CPU memory: what HiSparse leaves on the GPU and would have to recompute.

The scheduler half maps page keys to slots of a store that every rank keeps; the worker half (`offloading_worker`) copies. A
page can be hit only when its store completed on every rank. Only whole sealed pages of the indexer group are offloaded, no
other group.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from hisparse.connector.base import LoadEvents
from hisparse.errors import ConfigError, InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadJob:
    """One copy between device blocks and store slots, pairwise. Never both directions in one job."""

    job_id: int
    slots: tuple[int, ...]
    device_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadCommand:
    """Loads start before the step's forward, stores after it."""

    loads: tuple[OffloadJob, ...] = ()
    stores: tuple[OffloadJob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadAck:
    """One rank's outcome of one job; `reason` is "" when ok. The job touches nothing any more on that rank."""

    job_id: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOutput:
    rank: int
    acks: tuple[OffloadAck, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadStats:
    """Gauges and counters of the store, in pages (loads_failed: jobs)."""

    capacity_pages: int
    used_pages: int
    stored_pages: int
    loaded_pages: int
    evicted_pages: int
    refused_pages: int
    loads_failed: int
    late_acks_ignored: int


class _EntryState(enum.Enum):
    STORING = "storing"
    READY = "ready"


@dataclass(slots=True)
class _Entry:
    slot: int
    state: _EntryState
    readers: int = 0


@dataclass(slots=True)
class _Job:
    waiting: set[int]  # ranks that have not acknowledged
    keys: tuple[bytes, ...]
    device_blocks: tuple[int, ...]
    request_id: str | None = None  # loads only
    closed: bool = False
    reasons: list[str] = field(default_factory=list)


class OffloadingScheduler:
    """Scheduler half; implements IndexerOffload and SchedulerConnector (name "offloading"). LRU over keys.

    Args:
        capacity_pages: slots of the store on every rank. num_ranks: that must acknowledge each job.
    """

    name = "offloading"

    def __init__(self, capacity_pages: int, num_ranks: int) -> None:
        if capacity_pages < 1 or num_ranks < 1:
            raise ConfigError(f"offloading needs at least 1 page and 1 rank, got {capacity_pages} and {num_ranks}")
        self.capacity_pages = capacity_pages
        self._num_ranks = num_ranks
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._free_slots = list(range(capacity_pages - 1, -1, -1))
        self._jobs: dict[int, _Job] = {}
        self._next_job_id = 1
        self._planned_loads: list[OffloadJob] = []
        self._planned_stores: list[OffloadJob] = []
        self._loading: dict[str, int] = {}  # live request -> its load job
        self._failed_at_once: dict[str, str] = {}
        self._drained_at_once: list[str] = []
        self._stored = self._loaded = self._evicted = self._refused = self._loads_failed = self._late_acks = 0

    # ---- IndexerOffload
    def hit(self, keys: Sequence[bytes], first_page: int) -> int:
        """Consecutive pages from `keys[first_page]` on that every rank's store holds. Pure: no page gets younger."""
        count = 0
        for key in keys[first_page:]:
            entry = self._entries.get(key)
            if entry is None or entry.state is not _EntryState.READY:
                break
            count += 1
        return count

    def plan_store(self, key: bytes, device_block: int) -> bool:
        """Plans a copy of one sealed page; False = the store has it (or is getting it), or no slot can be freed now."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            return False
        slot = self._take_slot()
        if slot is None:
            self._refused += 1
            return False
        self._entries[key] = _Entry(slot=slot, state=_EntryState.STORING)
        job = self._new_job((key,), (slot,), (device_block,), None)
        self._planned_stores.append(job)
        return True

    def plan_load(self, request_id: str, keys: Sequence[bytes], device_blocks: Sequence[int]) -> None:
        """Plans one load of `keys[i]` into `device_blocks[i]`. A key evicted since `hit` fails it at the next update.

        Raises:
            InvariantError: the lists differ in length or are empty, or the request is already loading.
        """
        if len(keys) != len(device_blocks) or not keys:
            raise InvariantError(f"load for {request_id}: {len(keys)} keys for {len(device_blocks)} blocks")
        if request_id in self._loading or request_id in self._failed_at_once:
            raise InvariantError(f"request {request_id} is already loading indexer pages")
        entries = [self._entries.get(key) for key in keys]
        slots: list[int] = []
        for entry in entries:
            if entry is None or entry.state is not _EntryState.READY:
                self._failed_at_once[request_id] = "an indexer page left the offload store before its load"
                self._loads_failed += 1
                return
            slots.append(entry.slot)
        for key in keys:
            self._entries[key].readers += 1
            self._entries.move_to_end(key)
        job = self._new_job(tuple(keys), tuple(slots), tuple(device_blocks), request_id)
        self._loading[request_id] = job.job_id
        self._planned_loads.append(job)

    # ---- SchedulerConnector
    def build_metadata(self, step: int) -> OffloadCommand | None:
        if not self._planned_loads and not self._planned_stores:
            return None
        command = OffloadCommand(loads=tuple(self._planned_loads), stores=tuple(self._planned_stores))
        self._planned_loads, self._planned_stores = [], []
        return command

    def update(self, outputs: Sequence[OffloadOutput]) -> LoadEvents:
        loaded: set[str] = set()
        failed, self._failed_at_once = self._failed_at_once, {}
        released: list[int] = []
        drained, self._drained_at_once = self._drained_at_once, []
        for output in outputs:
            for ack in output.acks:
                if not 0 < ack.job_id < self._next_job_id:
                    raise InvariantError(f"rank {output.rank} acknowledged offload job {ack.job_id}, never issued")
                job = self._jobs.get(ack.job_id)
                if job is None or output.rank not in job.waiting:
                    self._late_acks += 1
                    continue
                job.waiting.discard(output.rank)
                if ack.reason:
                    job.reasons.append(f"rank {output.rank}: {ack.reason}")
                if job.waiting:
                    continue
                del self._jobs[ack.job_id]
                if job.request_id is None:
                    released.extend(self._store_done(job))
                else:
                    self._load_done(job, loaded, failed, drained)
        return LoadEvents(loaded=frozenset(loaded), failed=failed, released_device_blocks=tuple(released),
                          drained=tuple(drained))

    def request_closed(self, request_id: str) -> None:
        """A load in flight goes on until drained; LoadEvents.drained then names the request, once."""
        if self._failed_at_once.pop(request_id, None) is not None:
            self._drained_at_once.append(request_id)
        job_id = self._loading.pop(request_id, None)
        if job_id is not None:
            self._jobs[job_id].closed = True

    def loading(self) -> frozenset[str]:
        """Live requests whose load is planned, in flight or about to be reported."""
        return frozenset((*self._loading, *self._failed_at_once))

    def has_pending_work(self) -> bool:
        return bool(self._jobs or self._failed_at_once or self._drained_at_once)

    def workers_restarted(self) -> None:
        """The ranks' stores are gone: nothing is held any more, late acks are ignored. Loads in flight fail, and closed ones
        are drained, at the next update. No pin is named for release: the device blocks are gone with the ranks."""
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            if job.request_id is None:
                continue
            if job.closed:
                self._drained_at_once.append(job.request_id)
            else:
                self._failed_at_once[job.request_id] = "the workers restarted during the load"
                self._loads_failed += 1
        self._entries.clear()
        self._loading.clear()
        self._planned_loads, self._planned_stores = [], []
        self._free_slots = list(range(self.capacity_pages - 1, -1, -1))

    def check(self) -> None:
        """Each slot is free or owned by one entry; readers match load jobs; STORING entries match store jobs."""
        slots = sorted([*self._free_slots, *(entry.slot for entry in self._entries.values())])
        if slots != list(range(self.capacity_pages)):
            raise InvariantError(f"offload slots not conserved: {len(slots)} of {self.capacity_pages}, {slots[:16]}...")
        readers: dict[bytes, int] = {}
        storing: set[bytes] = set()
        for job in self._jobs.values():
            for key in job.keys:
                if job.request_id is None:
                    storing.add(key)
                else:
                    readers[key] = readers.get(key, 0) + 1
        for key, entry in self._entries.items():
            if entry.readers != readers.get(key, 0):
                raise InvariantError(f"offload entry {key.hex()[:12]} has {entry.readers} readers, "
                                     f"{readers.get(key, 0)} loads")
            if (entry.state is _EntryState.STORING) != (key in storing):
                raise InvariantError(f"offload entry {key.hex()[:12]} is {entry.state.value}; store jobs disagree")
        for request_id, job_id in self._loading.items():
            if job_id not in self._jobs or self._jobs[job_id].request_id != request_id:
                raise InvariantError(f"request {request_id} loads in job {job_id}, which is not in flight")

    def stats(self) -> OffloadStats:
        return OffloadStats(
            capacity_pages=self.capacity_pages, used_pages=len(self._entries), stored_pages=self._stored,
            loaded_pages=self._loaded, evicted_pages=self._evicted, refused_pages=self._refused,
            loads_failed=self._loads_failed, late_acks_ignored=self._late_acks)

    def _take_slot(self) -> int | None:
        if self._free_slots:
            return self._free_slots.pop()
        for key, entry in self._entries.items():
            if entry.state is _EntryState.READY and entry.readers == 0:
                del self._entries[key]
                self._evicted += 1
                return entry.slot
        return None

    def _new_job(self, keys: tuple[bytes, ...], slots: tuple[int, ...], device_blocks: tuple[int, ...],
                 request_id: str | None) -> OffloadJob:
        job_id, self._next_job_id = self._next_job_id, self._next_job_id + 1
        self._jobs[job_id] = _Job(waiting=set(range(self._num_ranks)), keys=keys, device_blocks=device_blocks,
                                  request_id=request_id)
        return OffloadJob(job_id=job_id, slots=slots, device_blocks=device_blocks)

    def _store_done(self, job: _Job) -> tuple[int, ...]:
        (key,) = job.keys
        if job.reasons:
            self._free_slots.append(self._entries.pop(key).slot)
        else:
            self._entries[key].state = _EntryState.READY
            self._stored += 1
        return job.device_blocks

    def _load_done(self, job: _Job, loaded: set[str], failed: dict[str, str], drained: list[str]) -> None:
        assert job.request_id is not None
        for key in job.keys:
            self._entries[key].readers -= 1
        if job.closed:
            drained.append(job.request_id)
            return
        del self._loading[job.request_id]
        if job.reasons:
            self._loads_failed += 1
            failed[job.request_id] = "; ".join(job.reasons)
        else:
            self._loaded += len(job.keys)
            loaded.add(job.request_id)
