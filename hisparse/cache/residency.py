"""The one table of page states: where a request's page lives and what may happen to it."""

from __future__ import annotations

import enum

from hisparse.errors import InvariantError


class PageState(enum.IntEnum):
    """Where one page of one request lives. Small ints: a request keeps one byte per page."""

    NONE = 0
    IMPORTING = 1
    """Leased for rows that come from elsewhere; nothing may read it."""
    GPU_ONLY = 2
    """Resident, no durable host copy: never released."""
    SPILLING = 3
    """Resident, a copy to its host block is under way."""
    CLEAN_PINNED = 4
    """Resident and durable on host."""
    CLEAN_LOOSE = 5
    """Durable on host; its GPU blocks are readable but may be handed out at any time."""
    HOST_ONLY = 6
    """Durable on host, null in the resident tables."""


class PageEvent(enum.IntEnum):
    """What happens to a page."""

    ALLOC = 0
    FORK = 1
    HOST_HIT = 2
    IMPORT_PLANNED = 3
    IMPORT_OK_HOST = 4
    """A whole page, on host only."""
    IMPORT_OK_MIRRORED = 5
    """A whole page, on host and in resident blocks."""
    IMPORT_OK_RESIDENT = 6
    """Landed resident, or partly filled."""
    IMPORT_FAILED = 7
    PLAN = 8
    SPILL_COMPLETED = 9
    SPILL_FAILED = 10
    UNPIN = 11
    REUSED = 12
    ADOPT_LOOSE = 13
    ADOPT_PINNED = 14
    FREE = 15
    REWIND = 16
    CRASH = 17


_S, _E = PageState, PageEvent
TRANSITIONS: dict[tuple[PageState, PageEvent], PageState] = {
    (_S.NONE, _E.ALLOC): _S.GPU_ONLY,
    (_S.NONE, _E.FORK): _S.GPU_ONLY,
    (_S.NONE, _E.HOST_HIT): _S.HOST_ONLY,
    (_S.NONE, _E.IMPORT_PLANNED): _S.IMPORTING,
    (_S.IMPORTING, _E.IMPORT_OK_HOST): _S.HOST_ONLY,
    (_S.IMPORTING, _E.IMPORT_OK_MIRRORED): _S.CLEAN_PINNED,
    (_S.IMPORTING, _E.IMPORT_OK_RESIDENT): _S.GPU_ONLY,
    (_S.IMPORTING, _E.IMPORT_FAILED): _S.NONE,
    (_S.GPU_ONLY, _E.PLAN): _S.SPILLING,
    (_S.SPILLING, _E.SPILL_COMPLETED): _S.CLEAN_PINNED,
    (_S.SPILLING, _E.SPILL_FAILED): _S.GPU_ONLY,
    (_S.CLEAN_PINNED, _E.UNPIN): _S.CLEAN_LOOSE,
    (_S.CLEAN_LOOSE, _E.REUSED): _S.HOST_ONLY,
    (_S.HOST_ONLY, _E.ADOPT_LOOSE): _S.CLEAN_LOOSE,
    (_S.HOST_ONLY, _E.ADOPT_PINNED): _S.CLEAN_PINNED,
    **{(state, event): _S.NONE for state in _S if state is not _S.NONE for event in (_E.FREE, _E.REWIND, _E.CRASH)},
}

DURABLE = frozenset({PageState.CLEAN_PINNED, PageState.CLEAN_LOOSE, PageState.HOST_ONLY})
"""States whose host page is complete."""
PINNED = frozenset({PageState.GPU_ONLY, PageState.SPILLING, PageState.CLEAN_PINNED})
"""States that hold a reference on resident blocks in every group."""
READABLE_ON_GPU = PINNED | {PageState.CLEAN_LOOSE}
"""States whose resident table entries are non-null."""

_NEXT = tuple(tuple(TRANSITIONS.get((state, event), -1) for state in PageState) for event in PageEvent)
"""`TRANSITIONS` by [event][state]; -1 = unlisted."""


def next_state(state: int, event: PageEvent, request_id: str, page: int) -> int:
    """The state after `event`. Raises InvariantError, with the ids, when the table does not list the pair."""
    new = _NEXT[event][state]
    if new < 0:
        raise InvariantError(
            f"page {page} of request {request_id!r} is {PageState(state).name}, in which {event.name} cannot happen")
    return new
