"""Frozen values that cross a boundary: scheduler to worker and back, engine to connector, decode to prefill.

Every class here is importable, picklable and small; arrays are tuples of ints so that a command can be printed as a repro.
What a step has many of is a NamedTuple: made in a third of the time of a frozen dataclass.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Landing(enum.Enum):
    """Where an imported prefix lands on the decode side; chosen once per request."""

    RESIDENT = "resident"
    HOST = "host"


# ------------------------------------------------------------------------------------ scheduler -> worker, HiSparse


class BlockTableUpdate(NamedTuple):
    """New entries of one seat's row of one group's block table.

    `table[seat, first_page : first_page + len(ids)] = ids`, then every entry at or beyond `num_pages` becomes 0 (null).
    Entries below `first_page` keep. An emptied seat is `first_page=0, ids=(), num_pages=0`.
    For a hot group the "pages" are the blocks of the hot region in slot order; for the source group, host blocks.
    """

    group_id: int
    seat: int
    first_page: int
    ids: tuple[int, ...]
    num_pages: int


class ResidentPagesUpdate(NamedTuple):
    """New entries of one seat's rows in the tables of *every* resident group: one value for a page, however many groups.

    `blocks[i]` are the blocks of page `first_page + i`, one per resident group in the order of `layout.residents`; () = null
    in all of them. Entries below `first_page` keep; every entry at or beyond `num_pages` becomes null.
    """

    seat: int
    first_page: int
    blocks: tuple[tuple[int, ...], ...]
    num_pages: int

    def by_group(self, group_ids: Sequence[int]) -> tuple[BlockTableUpdate, ...]:
        """The same as one update per resident group; `group_ids` of `layout.residents` in order."""
        return tuple(
            BlockTableUpdate(group_id, self.seat, self.first_page,
                             tuple([page[g] if page else 0 for page in self.blocks]), self.num_pages)
            for g, group_id in enumerate(group_ids))


TableUpdate = BlockTableUpdate | ResidentPagesUpdate


class SeatReset(NamedTuple):
    """Clear the hot-region state of a seat, in every hot group (or one), before this step's first kernel.

    Slots at or beyond `from_slot` and positions at or beyond `from_position` become empty; (0, 0) clears all.
    A value of -1 leaves that dimension alone. `hot_group` is an index into `layout.hots`; -1 means every one.
    """

    seat: int
    from_slot: int = 0
    from_position: int = 0
    hot_group: int = -1


class HotRows(NamedTuple):
    """Rows that the hot region of (seat, hot group) has from this command on; 0 = no region."""

    seat: int
    hot_group: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBlocks:
    """Blocks handed out since the last command, with the generation each has from now on (parallel tuples).

    The worker stores the generations (then a fence) before any write to these blocks; for host blocks it also clears
    the page's row mask before the step's first kernel.
    """

    ids: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()


class Fence(NamedTuple):
    """`block` (a device block) may be written on the compute stream only after transfer `transfer_id`'s copy event."""

    block: int
    transfer_id: int


class SparseKVPageTransfer(NamedTuple):
    """One page, device to host (a spill): physical coordinates and an id, nothing else.

    Attributes:
        device_blocks: one block per resident group, in the order of `layout.residents`.
        after_forward: the copy goes behind this step's forward (else before it, at once).
        copy_bytes: False = every row was mirrored by append; nothing is copied, the row mask decides durability.
    """

    id: int
    host_block: int
    device_blocks: tuple[int, ...]
    after_forward: bool = True
    copy_bytes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRestore:
    """One page, host to device, in every resident group. Completed by every rank. `num_rows` rows from row 0."""

    id: int
    host_block: int
    device_blocks: tuple[int, ...]
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """Copy-on-write of a partly shared page, filled before the step's first kernel; rows [0, num_rows).

    Device blocks: (source, destination) pairs of whole blocks (any group). Host: likewise, done by the pool's writer.
    Acknowledged by every rank.
    """

    id: int
    device_pairs: tuple[tuple[int, int], ...]
    host_pair: tuple[int, int] | None
    num_rows: int


class MirrorSpan(NamedTuple):
    """Host blocks behind pages that this step may write: append mirrors each written row there. -1 = skip the page."""

    seat: int
    first_page: int
    host_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseKVOffloadCommand:
    """The opaque scheduler-to-worker work of one step. Applied in field order; spills after the forward if they say so."""

    step: int
    new_device_blocks: NewBlocks = NewBlocks()
    new_host_blocks: NewBlocks = NewBlocks()
    fences: tuple[Fence, ...] = ()
    table_updates: tuple[TableUpdate, ...] = ()
    hot_rows: tuple[HotRows, ...] = ()
    seat_resets: tuple[SeatReset, ...] = ()
    page_copies: tuple[PageCopy, ...] = ()
    restores: tuple[PageRestore, ...] = ()
    mirrors: tuple[MirrorSpan, ...] = ()
    spills: tuple[SparseKVPageTransfer, ...] = ()


# ------------------------------------------------------------------------------------ worker -> scheduler, HiSparse


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveStats:
    """Selected rows by the tier that served them, summed over layers and query rows; and bytes moved."""

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

    def __add__(self, other: ResolveStats) -> ResolveStats:
        return ResolveStats(**{name: getattr(self, name) + getattr(other, name) for name in _STAT_FIELDS})


_STAT_FIELDS = ("resident_rows", "hot_rows", "miss_rows", "prefill_host_rows", "host_to_device_bytes",
                "device_to_host_bytes", "mirrored_rows", "spilled_pages", "spilled_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class HiSparseWorkerOutput:
    """What the worker half of HiSparseConnector returns with each step."""

    rank: int
    incarnation: int
    acks: tuple[TransferAck, ...] = ()
    stats: ResolveStats = ResolveStats()
    request_stats: Mapping[int, ResolveStats] = field(default_factory=dict)
    """By seat: the share of `stats` that each scheduled seat caused."""
    index_groups: tuple[TierRows, ...] = ()
    """The rows of `stats` by index group, in the order of `ModelShape.index_groups`; () = no row was selected."""


# ------------------------------------------------------------------------------------ pages of a request, for P/D


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPages:
    """Physical pages of positions [first_page * block_size, num_tokens) of one request, by group.

    All tuples cover pages first_page .. pages(num_tokens)-1. 0 = this tier does not hold the page.
    """

    first_page: int
    num_tokens: int
    indexer_blocks: tuple[int, ...]
    resident_blocks: tuple[tuple[int, ...], ...]
    """One tuple per resident group."""
    host_blocks: tuple[int, ...]

    @property
    def num_pages(self) -> int:
        return len(self.indexer_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGenerations:
    """Generations of a `RequestPages`, same shape; 0 where the page is not held."""

    indexer: tuple[int, ...]
    resident: tuple[tuple[int, ...], ...]
    host: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportTarget:
    """Where a prefix computed elsewhere is to land, all blocks already leased to the request."""

    landing: Landing
    pages: RequestPages


# ------------------------------------------------------------------------------------ engine step


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. temperature 0 = greedy."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledChunk:
    """One request's share of a step: `token_ids` are the tokens at positions first_position, first_position + 1, ...

    Attributes:
        writes: False for a replayed last token: its KV is there already; the worker writes no row in any group.
        sample: take a token from the last position's logits.
        plain_tables: every page of the context is resident, so the block tables alone resolve it.
    """

    request_id: str
    seat: int
    first_position: int
    token_ids: tuple[int, ...]
    writes: bool = True
    sample: bool = False
    plain_tables: bool = False
    sampling: SamplingParams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommand:
    """One engine step for every rank. `kv` maps a connector's name to its metadata."""

    step: int
    chunks: tuple[ScheduledChunk, ...] = ()
    table_updates: tuple[TableUpdate, ...] = ()
    """Used only when HiSparse is off; otherwise updates travel in SparseKVOffloadCommand."""
    kv: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One rank's output of one step. Only rank 0 fills `sampled`. `kv` maps a connector's name to its output."""

    step: int
    rank: int
    incarnation: int
    sampled: Mapping[str, SampledToken] = field(default_factory=dict)
    kv: Mapping[str, Any] = field(default_factory=dict)
    device_s: float = 0.0


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """What happened to one request, for usage fields, the demo table and tests."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    landing: Landing | None = None
    preemptions: int = 0
    import_failures: int = 0
    imported_tokens: int = 0
    spilled_pages: int = 0
    """Pages whose write-back to host was planned while the request ran."""
    queue_s: float | None = None
    """From its arrival at the engine to its first admission; None = it was never admitted."""
    resolve: ResolveStats = ResolveStats()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimeline:
    """When an engine did what with a request. Seconds since its arrival; None = not yet, or never.

    Attributes:
        arrived_unix_s: on the wall clock. admitted_s: first admission. loaded_s: end of its import from prefill, whatever the
            outcome; None = nothing was imported, or it is under way.
    """

    arrived_unix_s: float
    admitted_s: float | None = None
    loaded_s: float | None = None
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One increment of one request: tokens and text since the last increment."""

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    new_text: str = ""
    logprobs: tuple[SampledToken, ...] = ()
    """Of the tokens whose text is given out now (of all new ones without a tokenizer): none that ended the output, neither
    an end of sequence nor a part of a stop string."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    retry: bool = False
    """The error says nothing about the request: another engine may answer it."""
    stats: RequestStats | None = None
    """Set on the last increment."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """Prefill role: where and until when decode can read the prompt's KV. Set on the last increment."""
    retry_prefill: str | None = None
    """Decode role, no increment: why the prompt's KV did not come from prefill. Whoever asked prefill asks again and tells
    the engine by `resume`; the request waits, holding nothing, until then."""
    timeline: RequestTimeline | None = None
    """Set on the first increment that has a token, and on the last one."""
