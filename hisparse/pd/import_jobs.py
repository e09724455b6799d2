"""Imports that the ranks have not ended yet: who must still acknowledge, and what the next command tells them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from hisparse.errors import InvariantError
from hisparse.pd.commands import ImportAck, ImportFailure, ImportPlan
from hisparse.types import Landing


@dataclass(slots=True)
class ImportJob:
    """One import. `waiting`: ranks that have not acknowledged. `closed`: its request is gone, it only drains. `overdue`: its
    request was told that a rank cannot end it.

    Attributes:
        peer_id, landing, num_tokens: as planned.
        failures: (rank, kind, text) in the order they were heard; rank -1 = no rank's word.
    """

    job_id: int
    request_id: str
    waiting: set[int]
    peer_id: str
    landing: Landing
    num_tokens: int
    closed: bool = False
    overdue: bool = False
    failures: list[tuple[int, ImportFailure, str]] = field(default_factory=list)
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def failure(self) -> tuple[int, ImportFailure, str] | None:
        """The first that says more than "cancelled"; None = every rank was ok."""
        told = [failure for failure in self.failures if failure[1] is not ImportFailure.CANCELLED]
        return next(iter(told or self.failures), None)


class ImportJobs:
    """Jobs by id, ids never reused; at most one per live request.

    Attributes:
        late_acks: acknowledgements that nobody waited for.
    """

    def __init__(self) -> None:
        self._jobs: dict[int, ImportJob] = {}
        self._by_request: dict[str, int] = {}  # live requests
        self._next_job = 1
        self._plans: list[ImportPlan] = []
        self._cancels: list[int] = []
        self.late_acks = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def next_id(self) -> int:
        """For the plan of the next job."""
        return self._next_job

    def start(self, request_id: str, plan: ImportPlan, ranks: Collection[int], *, num_tokens: int) -> None:
        """Every rank must acknowledge the plan, whose id is `next_id()` and which brings `num_tokens`."""
        self._next_job += 1
        self._plans.append(plan)
        self._jobs[plan.job_id] = ImportJob(job_id=plan.job_id, request_id=request_id, waiting=set(ranks), peer_id=plan.peer_id,
                                            landing=plan.landing, num_tokens=num_tokens)
        self._by_request[request_id] = plan.job_id

    def cancel(self, request_id: str) -> bool:
        """The ranks need not finish it; its end comes as an acknowledgement. False = the request imports nothing."""
        job_id = self._by_request.get(request_id)
        if job_id is not None:
            self._cancels.append(job_id)
        return job_id is not None

    def close(self, request_id: str) -> ImportJob | None:
        """The request is gone: its job is cancelled and drains. The job if no rank has seen it, so that it has ended now."""
        job_id = self._by_request.pop(request_id, None)
        if job_id is None:
            return None
        planned = [plan for plan in self._plans if plan.job_id != job_id]
        if len(planned) < len(self._plans):
            self._plans = planned
            self._cancels = [other for other in self._cancels if other != job_id]
            return self._jobs.pop(job_id)
        self._jobs[job_id].closed = True
        self._cancels.append(job_id)
        return None

    def take_orders(self) -> tuple[tuple[ImportPlan, ...], tuple[int, ...]]:
        """Plans and cancels since the last call."""
        plans, cancels = tuple(self._plans), tuple(self._cancels)
        self._plans, self._cancels = [], []
        return plans, cancels

    def take_ack(self, rank: int, ack: ImportAck) -> ImportJob | None:
        """One rank's last word. The job when that was the last rank's, else None.

        Raises:
            InvariantError: no such job was ever planned.
        """
        if not 0 < ack.job_id < self._next_job:
            raise InvariantError(f"rank {rank} acknowledged import {ack.job_id}, which was never planned")
        job = self._jobs.get(ack.job_id)
        if job is None or rank not in job.waiting:
            self.late_acks += 1
            return None
        job.waiting.discard(rank)
        job.num_bytes += ack.num_bytes
        job.seconds = max(job.seconds, ack.seconds)
        if ack.failure is not None:
            job.failures.append((rank, ack.failure, ack.reason))
            if len(job.failures) == 1 and job.waiting and not job.closed:
                self._cancels.append(ack.job_id)  # the other ranks need not finish
        if job.waiting:
            return None
        self._cancels = [job_id for job_id in self._cancels if job_id != ack.job_id]
        return self._end(job)

    def take_overdue(self, rank: int, job_id: int) -> ImportJob | None:
        """A rank cannot end it. The job when that is news for a live request, else None."""
        job = self._jobs.get(job_id)
        if job is None or rank not in job.waiting or job.closed or job.overdue:
            return None
        job.overdue = True
        return job

    def end_all(self, failure: ImportFailure, reason: str) -> list[ImportJob]:
        """The ranks are gone: every job has failed."""
        self._plans, self._cancels = [], []
        for job in self._jobs.values():
            job.failures.append((-1, failure, reason))
        return [self._end(job) for job in list(self._jobs.values())]

    def requests(self) -> Collection[str]:
        """Live requests with a job."""
        return self._by_request.keys()

    def has_orders(self) -> bool:
        return bool(self._plans or self._cancels)

    def check(self) -> None:
        """Every job waits for a rank and, unless closed, is its request's only one."""
        for request_id, job_id in self._by_request.items():
            job = self._jobs.get(job_id)
            if job is None or job.request_id != request_id or job.closed:
                raise InvariantError(f"request {request_id} imports in job {job_id}, which is not its job")
        for job_id, job in self._jobs.items():
            if not job.waiting or (not job.closed and self._by_request.get(job.request_id) != job_id):
                raise InvariantError(f"import {job_id} of {job.request_id} is in flight for nobody")

    def _end(self, job: ImportJob) -> ImportJob:
        del self._jobs[job.job_id]
        if not job.closed:
            del self._by_request[job.request_id]
        return job
