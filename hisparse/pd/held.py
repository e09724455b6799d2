"""Leases that this decode engine uses at prefill engines: heartbeats while a live request needs one, release after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hisparse.errors import InvariantError
from hisparse.pd.commands import OutgoingNotice
from hisparse.pd.endpoint import RankEndpoint
from hisparse.pd.protocol import Notice, encode_notice


@dataclass(slots=True)
class _Held:
    incarnation: int
    endpoint: RankEndpoint
    lease_s: float
    renew_at_s: float
    users: set[str] = field(default_factory=set)


class HeldLeases:
    """By (prefill engine, lease id). Several requests may use one lease; it is released with the last of them.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[tuple[str, str], _Held] = {}
        self._by_request: dict[str, tuple[str, str]] = {}
        self._releases: dict[tuple[str, str], tuple[int, OutgoingNotice]] = {}

    def add(self, request_id: str, peer_id: str, incarnation: int, endpoint: RankEndpoint, lease_id: str,
            lease_s: float) -> None:
        """The request needs the lease; it is renewed every third of `lease_s`. A release not sent yet is withdrawn.

        Raises:
            InvariantError: the request uses a lease already.
        """
        if request_id in self._by_request:
            raise InvariantError(f"request {request_id} uses lease {self._by_request[request_id]} already")
        key = (peer_id, lease_id)
        self._releases.pop(key, None)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held(incarnation=incarnation, endpoint=endpoint, lease_s=lease_s,
                                           renew_at_s=self._clock() + lease_s / 3)
        held.users.add(request_id)
        self._by_request[request_id] = key

    def drop(self, request_id: str, reason: str) -> None:
        """The request needs it no more. The last user's drop sends the release. Idempotent."""
        key = self._by_request.pop(request_id, None)
        if key is None:
            return
        held = self._held[key]
        held.users.discard(request_id)
        if not held.users:
            del self._held[key]
            self._release(key, held.incarnation, held.endpoint, reason)

    def release_unheld(self, peer_id: str, incarnation: int, endpoint: RankEndpoint, lease_id: str, reason: str) -> None:
        """Releases a lease that no request took, unless another request uses it."""
        if (peer_id, lease_id) not in self._held:
            self._release((peer_id, lease_id), incarnation, endpoint, reason)

    def take_notices(self, is_current: Callable[[str, int], bool]) -> tuple[OutgoingNotice, ...]:
        """Releases since the last call, and the heartbeats that are due.

        Args:
            is_current: (peer, incarnation) -> that incarnation counts. Others hear nothing: their leases are gone with them.
        """
        now = self._clock()
        releases, self._releases = self._releases, {}
        notices = [notice for key, (incarnation, notice) in releases.items() if is_current(key[0], incarnation)]
        for key, held in self._held.items():
            if held.renew_at_s <= now:
                held.renew_at_s = now + held.lease_s / 3
                if is_current(key[0], held.incarnation):
                    notices.append(_notice("renew", key, held.endpoint, ""))
        return tuple(notices)

    def has_work(self) -> bool:
        """Notices wait to be taken, or leases to be renewed."""
        return bool(self._releases or self._held)

    def check(self) -> None:
        """Both indexes agree; no lease is held for nobody."""
        users = {request_id: key for key, held in self._held.items() for request_id in held.users}
        if users != self._by_request or any(not held.users for held in self._held.values()):
            raise InvariantError(f"leases in use {users} do not match requests {self._by_request}")

    def _release(self, key: tuple[str, str], incarnation: int, endpoint: RankEndpoint, reason: str) -> None:
        self._releases[key] = incarnation, _notice("release", key, endpoint, reason)


def _notice(kind: str, key: tuple[str, str], endpoint: RankEndpoint, reason: str) -> OutgoingNotice:
    payload = encode_notice(Notice(kind=kind, lease_id=key[1], reason=reason))
    return OutgoingNotice(peer_id=key[0], endpoint=endpoint, payload=payload)
