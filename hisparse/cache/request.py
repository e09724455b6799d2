"""What a request is (identity) and what one admission of it holds (incarnation)."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from hisparse.cache.prefix import PageKeys
from hisparse.cache.residency import PageState
from hisparse.cache.retention import Retention
from hisparse.types import MirrorSpan

ABSENT: tuple[int, ...] = ()
"""Resident blocks of a page that is not on the GPU."""


@dataclass(slots=True, eq=False, kw_only=True)
class Identity:
    """Tokens and keys of an open request; outlives preemptions."""

    request_id: str
    keys: PageKeys
    max_rows: int
    """Rows of KV it can ever need: the last sampled token has none."""
    num_prompt_tokens: int
    max_tokens: int
    retention: Retention | None = None
    """Which prefixes of it are published; None = every full page."""
    spilled_pages: int = 0
    """Spills planned for it so far, over all its admissions."""

    @property
    def num_tokens(self) -> int:
        return self.keys.num_tokens


class ResidentPage:
    """One page on the GPU: a block in every resident group, and who holds or reads it.

    Attributes:
        pins: holders (requests that list the page pinned, spills that copy it). While there is one, the page has one
            reference on each block; without, the blocks are free, and readable as long as the page is `wanted`.
        owners: incarnation -> its page, where the blocks are listed as a loose page, without a pin.
        key: set while `copies` lists this page under it. awaited: a spill of a finished request may yet make it a copy.
        copy_id: spill whose copy is in the stream (enqueued everywhere) and has not completed; 0 = none.
        watched: the last pin went while the page was wanted: the pool calls the page before it hands one of the blocks out.
            alive: that did not happen yet.
    """

    __slots__ = ("alive", "awaited", "blocks", "copy_id", "key", "owners", "pins", "reused", "watched")

    def __init__(self, blocks: tuple[int, ...], reused: Callable[[ResidentPage, int], None]) -> None:
        self.blocks = blocks
        self.reused = reused
        self.pins = 1
        self.owners: dict[Incarnation, int] | None = None
        self.key: bytes | None = None
        self.awaited = False
        self.copy_id = 0
        self.watched = False
        self.alive = True

    def __call__(self, block: int) -> None:
        """The pool hands out one of the blocks."""
        self.reused(self, block)

    @property
    def wanted(self) -> bool:
        """Somebody could still read the blocks once nobody pins them."""
        return self.alive and (bool(self.owners) or self.key is not None or self.awaited)


@dataclass(slots=True, eq=False, kw_only=True)
class Incarnation:
    """Everything one admission of a request holds. Spills and loads belong to it, never to the request id."""

    identity: Identity
    seat: int
    order: int
    # ---- pages
    states: bytearray = field(default_factory=bytearray)
    """A PageState per page."""
    indexer: array[int] = field(default_factory=lambda: array("i"))
    host: array[int] = field(default_factory=lambda: array("i"))
    """Blocks by page; 0 = none."""
    host_runs: int = 0
    """Runs of consecutive host blocks, in page order."""
    resident: dict[int, ResidentPage] = field(default_factory=dict)
    """The pages that are on the GPU."""
    # ---- counts of pages
    num_pinned: int = 0
    num_spilling: int = 0
    clean_pinned: set[int] = field(default_factory=set)
    # ---- rows
    valid: int = 0
    """Rows in cache as of the last retired step."""
    planned: int = 0
    """Rows that there may be once every dispatched step has retired; at least `valid`."""
    settled: int = 0
    """Rows that there will be at least by then, if that is more than `valid`: drafts in flight may be rejected."""
    sealed: int = 0
    """Pages whose indexer keys were offered to the prefix cache."""
    covered: dict[int, int] = field(default_factory=dict)
    """Page -> bits of the rows that our mirror spans covered; pages not yet planned for a spill only."""
    span: MirrorSpan | None = None
    """Of the last step that wrote one page."""
    # ---- spills and publication
    spill_cursor: int = 0
    spill_target: int = 0
    """Pages below it are sealed."""
    spill_again: list[int] = field(default_factory=list)
    """Pages whose spill failed: planned again with bytes."""
    published: int = 0
    pending_spills: int = 0
    # ---- hot regions
    hot: list[array[int]] = field(default_factory=list)
    """Blocks by hot group, in slot order; [] = no region."""
    hot_level: int = 0
    """Times the region grew beyond its starting size and was not shrunk again."""
    hot_required: bool = False
    # ---- admission
    target_pages: int = 0
    window_pages: int = 0
    host_target_pages: int = 0
    reserved_device: int = 0
    reserved_host: int = 0
    # ---- life
    loading: bool = False
    held: bool = False
    released: bool = False
    detached_durable: set[int] | None = None
    """After a finish with spills under way: durable pages at or beyond `published`; None = no pending publication."""
    detached_limit: int = 0
    retained_host: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.identity.request_id

    @property
    def num_pages(self) -> int:
        return len(self.states)

    @property
    def num_absent(self) -> int:
        """Pages without resident blocks."""
        return len(self.states) - len(self.resident)

    @property
    def has_hot(self) -> bool:
        """Holds a full region in every hot group."""
        return bool(self.hot)

    @property
    def host_backed(self) -> bool:
        return bool(self.hot) or self.hot_required

    @property
    def tail_start(self) -> int:
        """First page of the tail: the last two table entries, never unpinned."""
        return max(0, len(self.states) - 2)

    def state(self, page: int) -> PageState:
        return PageState(self.states[page])

    def blocks(self, page: int) -> tuple[int, ...]:
        """Resident blocks of a page, one per resident group; () where it is not resident."""
        resident = self.resident.get(page)
        return ABSENT if resident is None else resident.blocks
