"""The one table of page states: where a request's page lives and what may happen to it."""

from __future__ import annotations

import enum

from hisparse.errors import InvariantError


class PageState(enum.Enum):
    """Where one page of one request lives."""

    NONE = "none"
    IMPORTING = "importing"
    """Leased for rows that come from elsewhere; nothing may read it."""
    GPU_ONLY = "gpu_only"
    """Resident, no durable host copy: never released."""
    SPILLING = "spilling"
    """Resident, a copy to its host block is under way."""
    CLEAN_PINNED = "clean_pinned"
    """Resident and durable on host."""
    CLEAN_LOOSE = "clean_loose"
    """Durable on host; its GPU blocks are readable but may be handed out at any time."""
    HOST_ONLY = "host_only"
    """Durable on host, null in the resident tables."""


class PageEvent(enum.Enum):
    """What happens to a page."""

    ALLOC = "alloc"
    FORK = "fork"
    HOST_HIT = "host_hit"
    IMPORT_PLANNED = "import_planned"
    IMPORT_OK_HOST = "import_ok_host"
    """A whole page, on host only."""
    IMPORT_OK_MIRRORED = "import_ok_mirrored"
    """A whole page, on host and in resident blocks."""
    IMPORT_OK_RESIDENT = "import_ok_resident"
    """Landed resident, or partly filled."""
    IMPORT_FAILED = "import_failed"
    PLAN = "plan"
    SPILL_COMPLETED = "spill_completed"
    SPILL_FAILED = "spill_failed"
    UNPIN = "unpin"
    REUSED = "reused"
    ADOPT_LOOSE = "adopt_loose"
    ADOPT_PINNED = "adopt_pinned"
    FREE = "free"
    REWIND = "rewind"
    CRASH = "crash"


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


def next_state(state: PageState, event: PageEvent, request_id: str, page: int) -> PageState:
    """The state after `event`. Raises InvariantError, with the ids, when the table does not list the pair."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InvariantError(
            f"page {page} of request {request_id!r} is {state.name}, in which {event.name} cannot happen"
        ) from None
