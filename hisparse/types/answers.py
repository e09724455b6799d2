"""Worker to scheduler: what became of transfers, and which tier served the selected rows."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple


class AckKind(enum.Enum):
    """What a worker saw of a transfer. Contents (completed) and logical allocation (enqueued) are kept apart."""

    ENQUEUED = "enqueued"
    COMPLETED = "completed"
    FAILED = "failed"


class TransferAck(NamedTuple):
    """One worker's word on one transfer (spill, restore or page copy)."""

    incarnation: int
    rank: int
    transfer_id: int
    kind: AckKind
    row_mask: int = 0
    """Completed spills: the host page's row mask on its writer when the copy's event was reached."""


class TierRows(NamedTuple):
    """Selected rows of one index group by what served them, summed over its layers and over query rows. See ResolveStats."""

    resident: int = 0
    hot: int = 0
    miss: int = 0
    prefill_host: int = 0


class ResolveStats(NamedTuple):
    """Selected rows by the tier that served them, summed over layers and query rows; and bytes moved. `+` adds field by field.

    A tuple, because every step makes, sends and adds one for each of its requests.
    """

    resident_rows: int = 0
    hot_rows: int = 0
    miss_rows: int = 0
    """Hot misses: rows copied host -> hot region by the resolver."""
    prefill_host_rows: int = 0
    """Rows of non-resident history gathered from host for prefill chunks."""
    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0
    mirrored_rows: int = 0
    spilled_pages: int = 0
    spilled_bytes: int = 0
    """The part of `device_to_host_bytes` that pages took; mirrored rows took the rest."""

    def __add__(self, other: tuple[int, ...]) -> ResolveStats:  # type: ignore[override]
        return ResolveStats(*map(add, self, other))


@dataclass(frozen=True, slots=True, kw_only=True)
class HiSparseWorkerOutput:
    """What the worker half of HiSparseConnector returns with each step."""

    rank: int
    incarnation: int
    acks: tuple[TransferAck, ...] = ()
    stats: ResolveStats = field(default_factory=ResolveStats)
    request_stats: Mapping[int, ResolveStats] = field(default_factory=dict)
    """By seat: the share of `stats` that each scheduled seat caused."""
    index_groups: tuple[TierRows, ...] = ()
    """The rows of `stats` by index group, in the order of `ModelShape.index_groups`; () = no row was selected."""
