"""A Transport within one process, with levers to make it slow, unordered, broken, torn or silent. For tests, demos.

Same surface and rules as NIXL: registered ranges are checked on both sides, a dead peer raises, a hung one does not.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hisparse.errors import TransferError
from hisparse.pd.transport import Descriptors, PeerLost

_METADATA = b"loopback:"


@dataclass(slots=True, kw_only=True)
class LoopbackFaults:
    """Levers of one reader's transport; may be changed at any time.

    Attributes:
        delay_polls: polls that a read stays in progress.
        reorder: with it, each poll is a coin toss, so reads complete in random order.
        fail: (read number from 0) -> True makes that read fail after half of its bytes.
        hang: (read number) -> True keeps that read in progress until the peer is disconnected.
        tear: called between the first and the second half of each read's bytes.
        silent: (read number) -> True completes that read without moving a byte.
        drop_notices: outgoing notices vanish.
    """

    delay_polls: int = 0
    reorder: random.Random | None = None
    fail: Callable[[int], bool] = lambda number: False
    hang: Callable[[int], bool] = lambda number: False
    tear: Callable[[], None] | None = None
    silent: Callable[[int], bool] = lambda number: False
    drop_notices: bool = False


class LoopbackNetwork:
    """The agents that can reach each other. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.agents: dict[str, LoopbackTransport] = {}

    def kill(self, name: str) -> None:
        """The agent's process is gone: peers' reads and notices raise from now on."""
        with self.lock:
            self.agents.pop(name, None)


DEFAULT_NETWORK = LoopbackNetwork()


@dataclass(slots=True, eq=False)
class _Read:
    number: int
    peer: str
    descriptors: Descriptors
    polls_left: int
    halves: int = 0


@dataclass(slots=True)
class LoopbackTransport:
    """One agent; see Transport. Bytes move inside `poll`, by memmove, and by the copy engine where a GPU's memory is involved.

    Attributes:
        faults: levers. posted: every READ so far, as (peer, descriptors), for tests of what is read.
        aborted: reads that a disconnect cut off.
    """

    name: str
    network: LoopbackNetwork = field(default_factory=lambda: DEFAULT_NETWORK)
    faults: LoopbackFaults = field(default_factory=LoopbackFaults)
    posted: list[tuple[str, Descriptors]] = field(default_factory=list)
    aborted: int = 0
    _ranges: list[tuple[int, int]] = field(default_factory=list)
    _device_ranges: list[tuple[int, int]] = field(default_factory=list)
    _peers: dict[str, set[int]] = field(default_factory=dict)
    _reads: dict[int, _Read] = field(default_factory=dict)
    _inbox: list[bytes] = field(default_factory=list)
    _closed: bool = False

    def __post_init__(self) -> None:
        with self.network.lock:
            if self.name in self.network.agents:
                raise TransferError(f"agent {self.name} exists already on this network")
            self.network.agents[self.name] = self

    def register(self, address: int, num_bytes: int, device: int | None = None) -> None:
        (self._ranges if device is None else self._device_ranges).append((address, address + num_bytes))

    def metadata(self) -> bytes:
        return _METADATA + self.name.encode()

    def connect(self, peer: str, metadata: bytes) -> None:
        if metadata != _METADATA + peer.encode():
            raise TransferError(f"metadata of agent {peer} is unusable")
        self._alive(peer)
        if peer in self._peers:
            raise TransferError(f"agent {peer} is connected already; disconnect it first")
        self._peers[peer] = set()

    def read(self, peer: str, descriptors: Descriptors) -> _Read:
        if peer not in self._peers:
            raise TransferError(f"agent {peer} is not connected")
        remote = self._alive(peer)
        for far, near, size in descriptors.tolist():
            if not remote.covers(far, size):
                raise TransferError(f"[{far}, {far + size}) is not registered by {peer}")
            if not self.covers(near, size):
                raise TransferError(f"[{near}, {near + size}) is not registered here")
        if len({remote.on_device(far) for far in descriptors[:, 0].tolist()}) > 1 \
                or len({self.on_device(near) for near in descriptors[:, 1].tolist()}) > 1:
            raise TransferError("one READ has memory of several kinds on one side")
        read = _Read(number=len(self.posted), peer=peer, descriptors=descriptors.copy(),
                     polls_left=self.faults.delay_polls)
        self.posted.append((peer, read.descriptors))
        self._reads[id(read)] = read
        self._peers[peer].add(id(read))
        return read

    def poll(self, handle: _Read) -> bool:
        if id(handle) not in self._reads:
            raise TransferError(f"read {handle.number} was released")
        faults = self.faults
        try:
            self._alive(handle.peer)
        except TransferError:
            self._drop(handle)
            raise
        if faults.hang(handle.number):
            return False
        if handle.polls_left > 0:
            handle.polls_left -= 1
            return False
        if faults.reorder is not None and faults.reorder.random() < 0.5:
            return False
        if faults.silent(handle.number):
            self._drop(handle)
            return True
        if handle.halves == 0:
            self._move(handle, first_half=True)
            if faults.fail(handle.number):
                self._drop(handle)
                raise TransferError(f"read {handle.number} from {handle.peer} failed")
            if faults.tear is not None:
                faults.tear()
                return False
        self._move(handle, first_half=False)
        self._drop(handle)
        return True

    def notify(self, peer: str, message: bytes) -> None:
        if peer not in self._peers:
            raise TransferError(f"agent {peer} is not connected")
        remote = self._alive(peer)
        if not self.faults.drop_notices:
            with self.network.lock:
                remote._inbox.append(message)

    def notices(self) -> list[bytes]:
        with self.network.lock:
            inbox, self._inbox = self._inbox, []
        return inbox

    def disconnect(self, peer: str) -> None:
        for key in self._peers.pop(peer, set()):
            del self._reads[key]
            self.aborted += 1

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._closed = True
        with self.network.lock:
            if self.network.agents.get(self.name) is self:
                del self.network.agents[self.name]

    def covers(self, address: int, num_bytes: int) -> bool:
        """True when one registration holds [address, address + num_bytes)."""
        return any(first <= address and address + num_bytes <= last for first, last in (*self._ranges, *self._device_ranges))

    def on_device(self, address: int) -> bool:
        """The address is registered memory of a GPU."""
        return any(first <= address < last for first, last in self._device_ranges)

    def _alive(self, peer: str) -> LoopbackTransport:
        with self.network.lock:
            remote = self.network.agents.get(peer)
        if remote is None or self._closed:
            raise PeerLost(f"agent {peer} is gone")
        return remote

    def _drop(self, read: _Read) -> None:
        del self._reads[id(read)]
        self._peers[read.peer].discard(id(read))

    def _move(self, read: _Read, *, first_half: bool) -> None:
        read.halves += 1
        remote = self._alive(read.peer)
        with_device = []
        for far, near, size in read.descriptors.tolist():
            half = size // 16 * 8
            start, count = (0, half) if first_half else (half, size - half)
            if self.on_device(near) or remote.on_device(far):
                with_device.append((near + start, far + start, count))
            else:
                ctypes.memmove(near + start, far + start, count)
        if with_device:
            _copy_on_device(with_device)


def _copy_on_device(pieces: Sequence[tuple[int, int, int]]) -> None:
    """(to, from, bytes), on a stream of its own; returns when they are there."""
    import torch

    from hisparse.ops.cuda.driver import copy_async

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for to, source, count in pieces:
            copy_async(to, source, count)
    while not stream.query():  # no step waits here, so no synchronise either
        time.sleep(0)
