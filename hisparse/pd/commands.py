"""What the scheduler half of the P/D connector sends to every rank, and what comes back. No request id in either."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hisparse.pd.endpoint import RankEndpoint
from hisparse.pd.pages import Ids, PageTable
from hisparse.pd.paging import Paging, Units, match_units
from hisparse.types import Landing


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """One import for every rank: positions of `source` go to the same positions of `destination`, page to page where both
    sides cut alike, else by `units`.

    Attributes:
        job_id: names the import in acknowledgements; never reused by an engine.
        peer_id: the prefill engine, without its incarnation: a new agent of the same peer replaces the old one.
        sources: by decode rank, the prefill rank it reads from.
        source_paging: of the prefill engine. source_skip: rows of source page 0 before the first row of destination page 0.
        destination: own blocks; generations unused. HOST landing: a resident id other than 0 asks for a mirror there.
        tail_rows: rows of the last page that hold KV (1..block_size); the others are holes.
        deadline_s: relative; a rank that is not done by then fails the import.
    """

    job_id: int
    peer_id: str
    sources: tuple[RankEndpoint, ...]
    landing: Landing
    source: PageTable
    source_paging: Paging
    destination: PageTable
    tail_rows: int
    deadline_s: float
    source_skip: int = 0

    def num_tokens(self, block_size: int) -> int:
        """That the import brings. Args: block_size: of the destination."""
        return (self.destination.num_pages - 1) * block_size + self.tail_rows

    def num_source_pages(self, block_size: int) -> int:
        """Length that `source` must have."""
        return -(-(self.source_skip + self.num_tokens(block_size)) // self.source_paging.block_size)

    def units(self, block_size: int) -> Units:
        return match_units(num_tokens=self.num_tokens(block_size), source_skip=self.source_skip,
                           source_block_size=self.source_paging.block_size, target_block_size=block_size)

    def source_of(self, pages: Ids, block_size: int) -> Ids:
        """Source pages (indices, ascending) that hold rows of the destination pages named (indices)."""
        if self.source_paging.block_size == block_size:
            return pages
        return np.unique(self.units(block_size).on(pages).source)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingNotice:
    """A notice for a prefill engine; rank 0 sends it to the peer's rank 0."""

    peer_id: str
    endpoint: RankEndpoint
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PDCommand:
    """P/D work of one step. Cancels name imports of earlier commands: post nothing more, drain, acknowledge."""

    imports: tuple[ImportPlan, ...] = ()
    cancels: tuple[int, ...] = ()
    notices: tuple[OutgoingNotice, ...] = ()


class ImportFailure(enum.Enum):
    """Why an import failed, for policies and metrics; the text beside it says what exactly."""

    REFUSED = "refused"
    """The peer could not be connected, or belongs to an earlier incarnation."""
    TIMEOUT = "timeout"
    TRANSFER = "transfer"
    GENERATION = "generation"
    """A page was reused while it was read."""
    CANCELLED = "cancelled"
    RESTARTED = "restarted"
    """The peer, or this engine's workers, restarted meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportAck:
    """One rank's last word on one import. Either way nothing of it is in flight on that rank any more.

    Attributes:
        failure: None when ok. num_bytes: read from the peer. seconds: from receipt to outcome.
    """

    job_id: int
    failure: ImportFailure | None = None
    reason: str = ""
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTraffic:
    """READs and notices between one rank and one prefill engine, since the rank's start.

    Attributes:
        reads: completed; data and generation READs alike. num_descriptors, num_bytes: of those.
        seconds: from before the post until the poll that saw the end, summed over READs, which overlap. slowest_s: of one.
        failures: READs refused, broken or cut off by a closed endpoint. connects: endpoints opened.
    """

    reads: int = 0
    num_descriptors: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    failures: int = 0
    connects: int = 0
    notices_sent: int = 0
    notices_failed: int = 0

    def __add__(self, other: PeerTraffic) -> PeerTraffic:
        return PeerTraffic(
            reads=self.reads + other.reads, num_descriptors=self.num_descriptors + other.num_descriptors,
            num_bytes=self.num_bytes + other.num_bytes, seconds=self.seconds + other.seconds,
            slowest_s=max(self.slowest_s, other.slowest_s), failures=self.failures + other.failures,
            connects=self.connects + other.connects, notices_sent=self.notices_sent + other.notices_sent,
            notices_failed=self.notices_failed + other.notices_failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """Of one rank's transfer thread. `peers`: by prefill engine id. Slots in use or in quarantine are not free; on CUDA there
    are as many on the GPU as in CPU memory, and both count."""

    peers: Mapping[str, PeerTraffic] = field(default_factory=dict)
    staging_slots: int = 0
    staging_slots_free: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PDOutput:
    """What a rank reports with a step.

    Attributes:
        notices: raw bytes from peers, unchecked.
        overdue: imports that were to be over long ago and were not acknowledged -> why. Their pages may still be written:
            each stays in quarantine until its acknowledgement comes after all.
        stuck: why the transfer thread does not go on; "" = it does.
        report: None = as before.
    """

    rank: int
    incarnation: int
    acks: tuple[ImportAck, ...] = ()
    notices: tuple[bytes, ...] = ()
    overdue: Mapping[int, str] = field(default_factory=dict)
    stuck: str = ""
    report: TransferReport | None = None
