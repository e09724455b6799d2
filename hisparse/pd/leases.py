"""Leases of the prefill side: who may still read a finished request's pages, and until when.

A lease that ended protects nothing: its pages may be reused at once, and the generation check of the reader finds out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from hisparse.errors import InvariantError

MAX_REMEMBERED = 4096


@dataclass(slots=True)
class _Lease:
    request_id: str
    lease_s: float
    ends_at_s: float


class LeaseTable:
    """Leases by id. Times are relative durations on an injected monotonic clock.

    Args:
        clock: seconds, monotonic. remember_s: how long a release that came early is kept.
    Attributes:
        granted, released, expired, early_releases, unknown_renewals: counters since start.
    """

    def __init__(self, clock: Callable[[], float], *, remember_s: float = 60.0) -> None:
        self._clock = clock
        self._remember_s = remember_s
        self._leases: dict[str, _Lease] = {}
        self._by_request: dict[str, str] = {}
        self._ended: list[str] = []
        self._early: OrderedDict[tuple[str, str], float] = OrderedDict()  # (kind, id) -> forgotten at
        self._past: OrderedDict[tuple[str, str], None] = OrderedDict()  # ended lately: a late release means nothing
        self.granted = self.released = self.expired = self.early_releases = self.unknown_renewals = 0

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, lease_id: str, request_id: str, lease_s: float) -> None:
        """Starts a lease; one that was released before it began ends at once. Raises InvariantError for a used id."""
        if lease_id in self._leases or request_id in self._by_request:
            raise InvariantError(f"lease {lease_id} or request {request_id} is leased already")
        self.granted += 1
        self._past.pop(("request", request_id), None)
        self._leases[lease_id] = _Lease(request_id=request_id, lease_s=lease_s, ends_at_s=self._clock() + lease_s)
        self._by_request[request_id] = lease_id
        self._forget_early()
        by_lease = self._early.pop(("lease", lease_id), None)
        by_request = self._early.pop(("request", request_id), None)
        if by_lease is not None or by_request is not None:
            self.early_releases += 1
            self.release(lease_id)

    def end_unopened(self, request_id: str) -> None:
        """A request that holds nothing worth a lease: it is among the next take_ended()."""
        self._ended.append(request_id)

    def release(self, lease_id: str) -> None:
        """Ends a lease. An id not known yet is remembered; one that ended already is ignored."""
        if lease_id in self._leases:
            self._end(lease_id)
            self.released += 1
        else:
            self._remember(("lease", lease_id))

    def release_request(self, request_id: str) -> None:
        """The same by the prefill request's own id."""
        lease_id = self._by_request.get(request_id)
        if lease_id is not None:
            self.release(lease_id)
        else:
            self._remember(("request", request_id))

    def renew(self, lease_id: str) -> None:
        """A heartbeat: the lease lasts its full duration from now. Unknown ids are counted and change nothing."""
        lease = self._leases.get(lease_id)
        if lease is None:
            self.unknown_renewals += 1
        else:
            lease.ends_at_s = self._clock() + lease.lease_s

    def expire(self) -> None:
        """Ends every lease whose time is over."""
        now = self._clock()
        for lease_id in [lease_id for lease_id, lease in self._leases.items() if lease.ends_at_s <= now]:
            self._end(lease_id)
            self.expired += 1
        self._forget_early()

    def end_all(self) -> None:
        """The pages are gone (the workers restarted)."""
        for lease_id in list(self._leases):
            self._end(lease_id)
            self.expired += 1

    def take_ended(self) -> tuple[str, ...]:
        """Request ids whose lease ended since the last call, each once."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def has_ended(self) -> bool:
        return bool(self._ended)

    def check(self) -> None:
        """Both indexes name the same leases."""
        pairs = {lease.request_id: lease_id for lease_id, lease in self._leases.items()}
        if pairs != self._by_request:
            raise InvariantError(f"leases {pairs} and their request index {self._by_request} differ")

    def _end(self, lease_id: str) -> None:
        lease = self._leases.pop(lease_id)
        del self._by_request[lease.request_id]
        self._ended.append(lease.request_id)
        for name in (("lease", lease_id), ("request", lease.request_id)):
            self._past[name] = None
        while len(self._past) > MAX_REMEMBERED:
            self._past.popitem(last=False)

    def _remember(self, name: tuple[str, str]) -> None:
        if name in self._past:
            return
        self._early[name] = self._clock() + self._remember_s
        self._early.move_to_end(name)
        while len(self._early) > MAX_REMEMBERED:
            self._early.popitem(last=False)

    def _forget_early(self) -> None:
        now = self._clock()
        while self._early and next(iter(self._early.values())) <= now:
            self._early.popitem(last=False)
