"""A Transport that counts what every peer moved and says which call it is in.

Counting is ours, not the transport's telemetry: a transport without telemetry must not turn a completed READ into a
failure, and the loopback has none.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hisparse.errors import TransferError
from hisparse.pd.commands import PeerTraffic
from hisparse.pd.endpoint import peer_of
from hisparse.pd.transport import Descriptors, Transport

T = TypeVar("T")
_News = defaultdict[str, Any]
"""By field of PeerTraffic; one object for each READ would cost more."""
MAX_PEERS = 256
OTHERS = "(others)"
"""Whose counters the least lately used peers are added to when there are more than `MAX_PEERS`."""


@dataclass(slots=True, eq=False)
class _Read:
    handle: Any
    agent: str
    num_descriptors: int
    num_bytes: int
    began_s: float


class MeteredTransport:
    """See Transport. Everything but `call` belongs to the thread that owns the transport.

    Attributes:
        call: (method, agent) of the call under way, None between calls; may be read by any thread.
    """

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport, self._clock = transport, clock
        self.name = transport.name
        self.call: tuple[str, str] | None = None
        self._traffic: dict[str, PeerTraffic] = {}  # by engine, the least lately reported first
        self._news: defaultdict[str, _News] = defaultdict(lambda: defaultdict(int))  # by engine, since `take_traffic`
        self._reads: dict[str, set[_Read]] = {}

    @property
    def changed(self) -> bool:
        """Counters moved since the last `take_traffic`."""
        return bool(self._news)

    def take_traffic(self) -> Mapping[str, PeerTraffic]:
        """Cumulative counters by prefill engine id."""
        for peer, counts in self._news.items():
            self._traffic[peer] = self._traffic.pop(peer, PeerTraffic()) + PeerTraffic(**counts)
            while len(self._traffic) > MAX_PEERS + 1:
                oldest = next(name for name in self._traffic if name != OTHERS)
                self._traffic[OTHERS] = self._traffic.pop(OTHERS, PeerTraffic()) + self._traffic.pop(oldest)
        self._news.clear()
        return dict(self._traffic)

    def register(self, address: int, num_bytes: int, device: int | None = None) -> None:
        self._inside("register", "", lambda: self._transport.register(address, num_bytes, device))

    def metadata(self) -> bytes:
        return self._inside("metadata", "", self._transport.metadata)

    def connect(self, peer: str, metadata: bytes) -> None:
        self._inside("connect", peer, lambda: self._transport.connect(peer, metadata))
        self._of(peer)["connects"] += 1

    def read(self, peer: str, descriptors: Descriptors) -> _Read:
        began_s = self._clock()
        try:
            handle = self._inside("read", peer, lambda: self._transport.read(peer, descriptors))
        except TransferError:
            self._of(peer)["failures"] += 1
            raise
        read = _Read(handle, peer, len(descriptors), int(descriptors[:, 2].sum()), began_s)
        self._reads.setdefault(peer, set()).add(read)
        return read

    def poll(self, handle: _Read) -> bool:
        try:
            if not self._inside("poll", handle.agent, lambda: self._transport.poll(handle.handle)):
                return False
        except TransferError:
            self._drop(handle)
            self._of(handle.agent)["failures"] += 1
            raise
        self._drop(handle)
        seconds, counts = self._clock() - handle.began_s, self._of(handle.agent)
        counts["reads"] += 1
        counts["num_descriptors"] += handle.num_descriptors
        counts["num_bytes"] += handle.num_bytes
        counts["seconds"] += seconds
        counts["slowest_s"] = max(counts["slowest_s"], seconds)
        return True

    def notify(self, peer: str, message: bytes) -> None:
        try:
            self._inside("notify", peer, lambda: self._transport.notify(peer, message))
        except TransferError:
            self._of(peer)["notices_failed"] += 1
            raise
        self._of(peer)["notices_sent"] += 1

    def notices(self) -> list[bytes]:
        return self._inside("notices", "", self._transport.notices)

    def disconnect(self, peer: str) -> None:
        self._inside("disconnect", peer, lambda: self._transport.disconnect(peer))
        aborted = len(self._reads.pop(peer, ()))
        if aborted:
            self._of(peer)["failures"] += aborted

    def close(self) -> None:
        self._inside("close", "", self._transport.close)
        self._reads.clear()

    def _inside(self, method: str, peer: str, function: Callable[[], T]) -> T:
        self.call = (method, peer)
        try:
            return function()
        finally:
            self.call = None

    def _drop(self, read: _Read) -> None:
        self._reads.get(read.agent, set()).discard(read)

    def _of(self, agent: str) -> _News:
        return self._news[peer_of(agent)]
