"""A loopback transport as hostile as the Transport protocol allows: bytes arrive 16 at a time, in any order, at any moment."""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hisparse.errors import TransferError
from hisparse.pd.loopback import LoopbackNetwork, LoopbackTransport, _Read
from hisparse.pd.transport import Descriptors, PeerLost

PIECE_BYTES = 16
NOBODY = "(mapped)"


@dataclass(slots=True)
class Levers:
    """Probabilities, per event, shared by all agents of a world; all 0 = a friendly network.

    Attributes:
        hang: a READ makes no progress until its endpoint is closed. fail: a READ breaks off after some of its bytes.
        refuse: a READ is not posted. stuck: an endpoint cannot be closed now. drop, repeat: a notice is lost, comes twice.
        late: a notice, or the completion of a READ, is not seen yet.
    """

    hang: float = 0.0
    fail: float = 0.0
    refuse: float = 0.0
    stuck: float = 0.0
    drop: float = 0.0
    repeat: float = 0.0
    late: float = 0.0


@dataclass(slots=True, eq=False)
class _Flight:
    """A posted READ. Its pieces move until it ends or its endpoint is closed, whatever `poll` says of the peer."""

    peer: str
    pieces: npt.NDArray[np.int64]
    ends_at: int
    """Pieces after which it breaks off; all of them = it does not."""
    hung: bool
    moved: int = 0


class TornTransport(LoopbackTransport):
    """Bytes move only in `move`, never in `poll`, so that anything can happen between two pieces."""

    def __init__(self, name: str, network: LoopbackNetwork, levers: Levers, rng: random.Random) -> None:
        super().__init__(name=name, network=network)
        self._levers, self._rng = levers, rng
        self._flights: dict[int, _Flight] = {}
        self._inbox_seen: list[bytes] = []
        self.dropped_notices = 0

    def register(self, address: int, num_bytes: int, device: int | None = None) -> None:
        """All memory is the CPU's here, whatever it stands for."""
        super().register(address, num_bytes)

    def read(self, peer: str, descriptors: Descriptors) -> _Read:
        if self._rng.random() < self._levers.refuse:
            raise TransferError("not posted")
        read = super().read(peer, descriptors)
        pieces = self._torn(read.descriptors)
        fails = self._rng.random() < self._levers.fail
        self._flights[id(read)] = _Flight(
            peer=peer, pieces=pieces, hung=self._rng.random() < self._levers.hang,
            ends_at=self._rng.randrange(len(pieces)) if fails else len(pieces))
        return read

    def _torn(self, descriptors: Descriptors) -> npt.NDArray[np.int64]:
        pieces = _pieces(descriptors[np.argsort(descriptors[:, 1])])  # the order of slabs in memory is not the seed's
        if self._rng.random() < 0.5:
            pieces = pieces[np.random.default_rng(self._rng.getrandbits(32)).permutation(len(pieces))]
        return pieces

    def fly(self, descriptors: Descriptors) -> _Flight:
        """Pieces that move with those of the READs and belong to none: no peer, dead or alive, stops them."""
        pieces = self._torn(descriptors)
        flight = _Flight(peer=NOBODY, pieces=pieces, hung=False, ends_at=len(pieces))
        self._flights[id(flight)] = flight
        return flight

    def move(self, most: int) -> bool:
        """Moves up to `most` pieces of one READ. False = nothing is in flight (what hangs may hang in the middle)."""
        flights = [f for f in self._flights.values() if f.moved < (f.ends_at // 2 if f.hung else f.ends_at)]
        if not flights:
            return False
        flight = self._rng.choice(flights)
        end = min(flight.ends_at, flight.moved + most)
        for far, near, size in flight.pieces[flight.moved : end].tolist():
            ctypes.memmove(near, far, size)
        flight.moved = end
        return True

    def poll(self, handle: _Read) -> bool:
        if id(handle) not in self._reads:
            raise TransferError(f"read {handle.number} was released")
        flight = self._flights[id(handle)]
        try:
            self._alive(handle.peer)
        except PeerLost:
            self._drop(handle)  # its pieces go on moving until the endpoint is closed
            raise
        if flight.hung or flight.moved < flight.ends_at or self._rng.random() < self._levers.late:
            return False
        self._drop(handle)
        del self._flights[id(handle)]
        if flight.ends_at < len(flight.pieces):
            raise TransferError(f"read {handle.number} from {handle.peer} failed")
        return True

    def disconnect(self, peer: str) -> None:
        if self._rng.random() < self._levers.stuck:
            raise TransferError(f"the endpoint of {peer} cannot be closed now")
        self._flights = {key: flight for key, flight in self._flights.items() if flight.peer != peer}
        super().disconnect(peer)

    def notify(self, peer: str, message: bytes) -> None:
        if self._rng.random() < self._levers.drop:
            self.dropped_notices += 1
            return
        super().notify(peer, message)
        if self._rng.random() < self._levers.repeat:
            super().notify(peer, message)

    def notices(self) -> list[bytes]:
        self._inbox_seen += super().notices()
        self._rng.shuffle(self._inbox_seen)
        late = [notice for notice in self._inbox_seen if self._rng.random() < self._levers.late]
        now = self._inbox_seen[len(late):]
        self._inbox_seen = self._inbox_seen[: len(late)]
        return now

    def destinations(self) -> npt.NDArray[np.int64]:
        """Own addresses that some READ may still write to."""
        return np.concatenate([np.zeros(0, np.int64), *(f.pieces[f.moved :, 1] for f in self._flights.values())])

    def die(self) -> None:
        """The process is gone: peers see it, and nothing of its own moves any more."""
        self.network.kill(self.name)
        self._flights.clear()
        self._closed = True


class TornGpu:
    """Mapped memory as `MappedReads` uses it: a READ moves in pieces like any other, and goes on though its peer is dead."""

    def __init__(self, transport: TornTransport) -> None:
        self._transport, self._open = transport, Counter[int]()
        self.reads = 0

    def export(self, address: int, num_bytes: int) -> tuple[bytes, int]:
        return b"".join(number.to_bytes(8, "little") for number in (address, num_bytes)).ljust(64, b"\0"), 0

    def open(self, handle: bytes) -> tuple[int, int]:
        address, num_bytes = (int.from_bytes(handle[i : i + 8], "little") for i in (0, 8))
        self._open[address] += 1
        return address, num_bytes

    def close(self, address: int) -> None:
        assert self._open[address] > 0, "not mapped"
        self._open[address] -= 1

    def read(self, pieces: Descriptors) -> TornEvent:
        self.reads += 1
        return TornEvent(self._transport, self._transport.fly(pieces))

    def wait(self) -> None:
        for flight in self._transport._flights.values():
            if flight.peer == NOBODY:
                for far, near, size in flight.pieces[flight.moved :].tolist():
                    ctypes.memmove(near, far, size)
                flight.moved = flight.ends_at


class TornEvent:
    """Of a READ of TornGpu; seen late, at times."""

    def __init__(self, transport: TornTransport, flight: _Flight) -> None:
        self._transport, self._flight = transport, flight

    def query(self) -> bool:
        if self._flight.moved < self._flight.ends_at or self._transport._rng.random() < self._transport._levers.late:
            return False
        self._transport._flights.pop(id(self._flight), None)
        return True


def _pieces(descriptors: Descriptors) -> npt.NDArray[np.int64]:
    """[n, 3]: the descriptors cut into pieces."""
    far, near, size = descriptors.T
    counts = -(-size // PIECE_BYTES)
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    start = index * PIECE_BYTES
    return np.stack([np.repeat(far, counts) + start, np.repeat(near, counts) + start,
                     np.minimum(PIECE_BYTES, np.repeat(size, counts) - start)], axis=1)
