"""What a request is (identity) and what one admission of it holds (incarnation)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hisparse.cache.prefix import PageKeys
from hisparse.cache.residency import PageState


@dataclass(slots=True, eq=False, kw_only=True)
class Identity:
    """Tokens and keys of an open request; outlives preemptions."""

    request_id: str
    keys: PageKeys
    max_rows: int
    """Rows of KV it can ever need: the last sampled token has none."""
    num_prompt_tokens: int
    max_tokens: int
    spilled_pages: int = 0
    """Spills planned for it so far, over all its admissions."""

    @property
    def num_tokens(self) -> int:
        return self.keys.num_tokens


@dataclass(slots=True, eq=False)
class SharedPage:
    """The resident blocks (one per resident group) of one sealed, durable page, and who reads them without a reference.

    `owners` are (incarnation, page) that list the blocks in their tables as a loose page. `key` is set while `copies`
    lists this page under it; `awaited` while a spill of a finished request may still make it a copy.
    """

    blocks: tuple[int, ...]
    reused: Callable[[SharedPage, int], None]
    owners: dict[tuple[Incarnation, int], None] = field(default_factory=dict)
    key: bytes | None = None
    awaited: bool = False
    alive: bool = True

    def on_reuse(self, block: int) -> None:
        """The pool hands out one of the blocks."""
        self.reused(self, block)

    @property
    def wanted(self) -> bool:
        """Somebody could still read the blocks once nobody references them."""
        return self.alive and (bool(self.owners) or self.key is not None or self.awaited)


@dataclass(slots=True, eq=False, kw_only=True)
class Incarnation:
    """Everything one admission of a request holds. Spills and loads belong to it, never to the request id."""

    identity: Identity
    seat: int
    order: int
    # ---- pages, parallel lists by page
    states: list[PageState] = field(default_factory=list)
    indexer: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    resident: list[tuple[int, ...]] = field(default_factory=list)
    """One block per resident group, or () where the page is not resident."""
    shared: dict[int, SharedPage] = field(default_factory=dict)
    # ---- counts of pages
    num_absent: int = 0
    """Pages without resident blocks."""
    num_pinned: int = 0
    num_spilling: int = 0
    clean_pinned: set[int] = field(default_factory=set)
    # ---- rows
    valid: int = 0
    """Rows in cache as of the last retired step."""
    sealed: int = 0
    """Pages whose indexer keys were offered to the prefix cache."""
    covered: dict[int, int] = field(default_factory=dict)
    """Page -> bits of the rows that our mirror spans covered; pages not yet planned for a spill only."""
    # ---- spills and publication
    spill_cursor: int = 0
    spill_target: int = 0
    """Pages below it are sealed."""
    spill_again: list[int] = field(default_factory=list)
    """Pages whose spill failed: planned again with bytes."""
    published: int = 0
    pending_spills: int = 0
    # ---- hot regions
    hot: list[list[int]] = field(default_factory=list)
    """Blocks by hot group, in slot order; [] = no region."""
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
