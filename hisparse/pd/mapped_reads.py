"""READs of GPU memory of a process on the same host, by one kernel over memory that is mapped here.

UCX gives every descriptor between two GPUs to the copy engine by itself, 5 us each, so that pages in short runs are far below
the link. A kernel takes the whole list at once. CPU memory (generations too), notices, peers on other hosts and memory that
cannot be mapped go through the transport below, whose errors say that a peer is gone: a mapping stays readable without it, and
keeps its memory from being free. So memory is mapped for READs only, and for a while after the last one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hisparse.errors import InvariantError, TransferError
from hisparse.pd.descriptors import cut
from hisparse.pd.ranges_head import RangesHead
from hisparse.pd.transport import Descriptors, PeerLost, Transport

PIECE_BYTES, UNIT_BYTES = 256 << 10, 16
"""Most bytes of a piece, which one CTA copies; and what addresses and lengths must be multiples of."""
IDLE_S = 5.0
"""A mapping without READs for so long ends: the successor of a dead peer needs the memory."""
_BOOT_ID, _HOST_BYTES = Path("/proc/sys/kernel/random/boot_id"), 36
_HEAD = RangesHead(b"HSM1", "ranges of GPU memory", fields_format=f"{_HOST_BYTES}s", range_format="QQ64sQ")
"""The host, then of each range what _Exported has."""

_log = logging.getLogger(__name__)


class GpuMemory(Protocol):
    """See hisparse.ops.cuda.peer_memory.PeerMemory."""

    def export(self, address: int, num_bytes: int) -> tuple[bytes, int]: ...
    def open(self, handle: bytes) -> tuple[int, int]: ...
    def close(self, address: int) -> None: ...
    def read(self, pieces: Descriptors) -> Any: ...
    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exported:
    """[address, address + num_bytes) of an agent is `offset` bytes into the allocation of `handle`."""

    address: int
    num_bytes: int
    handle: bytes
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mapped:
    """[address, address + num_bytes) of a peer, `shift` bytes further here; in the mapping at `base`."""

    address: int
    num_bytes: int
    shift: int
    base: int


@dataclass(slots=True, eq=False)
class MappedRead:
    """A READ by the kernel. `event`: None once it is released."""

    peer: str
    event: Any


@dataclass(slots=True, eq=False)
class _Peer:
    """exported: what may be mapped; ranges: what is; idle_s: since when no READ was posted or seen to be over."""

    exported: list[_Exported]
    ranges: list[_Mapped] = field(default_factory=list)
    reads: set[MappedRead] = field(default_factory=set)
    idle_s: float = 0.0


class MappedReads:
    """See Transport.

    Args:
        transport: for everything else. gpu: None = nothing is exported or mapped here.
        host: of this machine, since it was started; only agents with the same are mapped.
    """

    def __init__(self, transport: Transport, gpu: GpuMemory | None, *, host: str | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._transport, self._gpu, self._clock = transport, gpu, clock
        self.name = transport.name
        self._host = (_boot_id() if host is None else host).encode()[:_HOST_BYTES].ljust(_HOST_BYTES, b"\0")
        self._own: list[tuple[int, int]] = []  # GPU memory, by first address and end
        self._exported: list[_Exported] = []
        self._peers: dict[str, _Peer] = {}

    def register(self, address: int, num_bytes: int, device: int | None = None) -> None:
        self._transport.register(address, num_bytes, device)
        if device is None or self._gpu is None:
            return
        self._own.append((address, address + num_bytes))
        try:
            handle, offset = self._gpu.export(address, num_bytes)
        except (RuntimeError, InvariantError) as error:
            _log.warning("%s: %d bytes of GPU memory cannot be mapped by others, who read them through UCX: %s", self.name,
                         num_bytes, error)
            return
        self._exported.append(_Exported(address=address, num_bytes=num_bytes, handle=handle, offset=offset))

    def metadata(self) -> bytes:
        metadata = self._transport.metadata()
        if not self._exported:
            return metadata
        ranges = [(item.address, item.num_bytes, item.handle, item.offset) for item in self._exported]
        return _HEAD.pack(ranges, metadata, (self._host,))

    def connect(self, peer: str, metadata: bytes) -> None:
        host, exported, metadata = _unwrap(metadata)
        self._transport.connect(peer, metadata)
        alike = self._gpu is not None and host == self._host and bool(host.strip(b"\0"))
        self._peers[peer] = _Peer(exported if alike else [])

    def read(self, peer: str, descriptors: Descriptors) -> Any:
        state = self._peers.get(peer)
        pieces = self._pieces(state, descriptors) if state is not None else None
        if state is None or pieces is None or self._gpu is None:
            return self._transport.read(peer, descriptors)
        read = MappedRead(peer, None)
        state.reads.add(read)  # first: a part of one that fails may be under way, which only closing the endpoint ends
        state.idle_s = self._clock()
        try:
            read.event = self._gpu.read(pieces)
        except RuntimeError as error:
            raise PeerLost(f"READ of mapped memory from {peer}: {error}") from error
        return read

    def poll(self, handle: Any) -> bool:
        if not isinstance(handle, MappedRead):
            return self._transport.poll(handle)
        if handle.event is None:
            raise TransferError(f"this READ from {handle.peer} was released")
        if not handle.event.query():
            return False
        handle.event = None
        state = self._peers[handle.peer]
        state.reads.discard(handle)
        state.idle_s = self._clock()
        return True

    def notify(self, peer: str, message: bytes) -> None:
        self._transport.notify(peer, message)

    def notices(self) -> list[bytes]:
        """Also ends mappings that nothing was read from for a while."""
        for state in self._peers.values():
            if state.ranges and not state.reads and self._clock() >= state.idle_s + IDLE_S:
                self._unmap(state)
        return self._transport.notices()

    def disconnect(self, peer: str) -> None:
        self._transport.disconnect(peer)
        state = self._peers.get(peer)
        if state is not None:
            self._unmap(state)
            del self._peers[peer]

    def close(self) -> None:
        self._transport.close()
        for peer in list(self._peers):
            self._unmap(self._peers.pop(peer))

    def _pieces(self, state: _Peer, descriptors: Descriptors) -> Descriptors | None:
        """What the kernel copies; None = that is for the transport: not mapped, not GPU memory here, or odd addresses."""
        if not len(descriptors) or not state.exported:
            return None
        far, near, size = descriptors.T
        first, end = int(near.min()), int((near + size).max())
        if not any(own <= first and end <= own_end for own, own_end in self._own):
            return None
        if np.bitwise_or.reduce(descriptors[:, 1:], axis=None) % UNIT_BYTES:
            return None  # before anything is mapped for it
        if not state.ranges:
            self._map(state)
        low, high = int(far.min()), int((far + size).max())
        mapped = next((item for item in state.ranges
                       if item.address <= low and high <= item.address + item.num_bytes), None)
        if mapped is None:
            return None
        pieces = cut(descriptors, PIECE_BYTES)
        if pieces is descriptors:
            pieces = descriptors.copy()
        pieces[:, 0] += mapped.shift
        return None if np.bitwise_or.reduce(pieces[:, 0]) % UNIT_BYTES else np.ascontiguousarray(pieces)

    def _map(self, state: _Peer) -> None:
        """What cannot be mapped is not tried again."""
        assert self._gpu is not None
        for item in list(state.exported):
            try:
                base, size = self._gpu.open(item.handle)
            except RuntimeError as error:
                _log.warning("%s reads GPU memory at %#x of a peer through UCX, as it cannot be mapped: %s", self.name,
                             item.address, error)
                state.exported.remove(item)
                continue
            if item.offset + item.num_bytes > size:
                self._gpu.close(base)
                _log.warning("a peer of %s says it has %d bytes at %d of an allocation of %d bytes; read through UCX",
                             self.name, item.num_bytes, item.offset, size)
                state.exported.remove(item)
                continue
            state.ranges.append(_Mapped(address=item.address, num_bytes=item.num_bytes,
                                        shift=base + item.offset - item.address, base=base))

    def _unmap(self, state: _Peer) -> None:
        """Its READs are over, and its memory is not mapped any more."""
        if self._gpu is None:
            return
        if state.reads:
            self._gpu.wait()
        for read in state.reads:
            read.event = None
        state.reads.clear()
        while state.ranges:
            self._gpu.close(state.ranges.pop().base)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _unwrap(data: bytes) -> tuple[bytes, list[_Exported], bytes]:
    """Host, exported ranges and the transport's own metadata. Raises TransferError for a list that is cut off."""
    if not _HEAD.begins(data):  # nothing is exported there
        return b"", [], data
    (host,), ranges, metadata = _HEAD.unpack(data)
    return host, [_Exported(address=address, num_bytes=num_bytes, handle=handle, offset=offset)
                  for address, num_bytes, handle, offset in ranges], metadata
