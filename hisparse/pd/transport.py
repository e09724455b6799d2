"""The Transport protocol: one-sided reads and notices between agents. Every call comes from the thread that owns it."""

from __future__ import annotations

import enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hisparse.errors import TransferError


class PeerLost(TransferError):
    """The endpoint is unusable and parts of its reads may still be on their way: only `disconnect` makes it quiet."""


Descriptors = npt.NDArray[np.int64]
"""[n, 3]: remote address, local address, bytes."""


class FarMemory(enum.Enum):
    """Which memory of the peer holds the rows of a page. A READ has one kind of memory on either side."""

    GPU = "gpu"
    CPU = "cpu"
    BOTH = "both"
    """A page that is put together from several of the peer's."""


class Transport(Protocol):
    """A named agent. Not thread-safe: one thread makes every call, construction included.

    Reads may complete in any order, and their parts too. After `disconnect(peer)` or `close()` returns, no read of that
    peer writes local memory any more: this is what ends the quarantine of a transfer that never completes.
    """

    name: str

    def register(self, address: int, num_bytes: int, device: int | None = None) -> None:
        """Makes [address, address + num_bytes) readable by peers and usable as a destination. Raises TransferError.

        Args:
            device: number of the GPU whose memory it is; None = CPU memory.
        """

    def metadata(self) -> bytes:
        """What a peer needs for connect(). Covers everything registered so far."""

    def connect(self, peer: str, metadata: bytes) -> None:
        """Adds a peer. Raises TransferError: it calls itself something else, is gone, or the metadata is unusable."""

    def read(self, peer: str, descriptors: Descriptors) -> Any:
        """Posts one READ of all descriptors; returns its handle. May block for the copy.

        On either side all of them are CPU memory, or all of them memory of one GPU.

        Raises:
            TransferError: nothing was posted (range outside a registration, unknown peer). PeerLost: see there.
        """

    def poll(self, handle: Any) -> bool:
        """True = every byte is here, False = in progress. The handle is released when it returns True or raises.

        Raises:
            TransferError: the read failed and is drained: it writes nothing any more. PeerLost: see there.
        """

    def notify(self, peer: str, message: bytes) -> None:
        """Sends a message without waiting for its delivery. Raises TransferError when the peer is known to be gone."""

    def notices(self) -> list[bytes]:
        """Messages that peers sent since the last call. Never blocks."""

    def disconnect(self, peer: str) -> None:
        """Aborts the peer's reads, releases their handles, closes the endpoint. Idempotent.

        May take long, and may start the reads of other peers anew. Raises TransferError: not done, the reads may still write.
        """

    def close(self) -> None:
        """Disconnects every peer, deregisters, destroys the agent. Idempotent."""
