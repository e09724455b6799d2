"""The page table of states, exhaustively against a second, independently written list."""

from __future__ import annotations

import pytest

from hisparse.cache.residency import DURABLE, PINNED, READABLE_ON_GPU, TRANSITIONS, PageEvent, PageState, next_state
from hisparse.errors import InvariantError

DESIGN = """
none          alloc               gpu_only
none          fork                gpu_only
none          host_hit            host_only
none          import_planned      importing
importing     import_ok_host      host_only
importing     import_ok_mirrored  clean_pinned
importing     import_ok_resident  gpu_only
importing     import_failed       none
gpu_only      plan                spilling
spilling      spill_completed     clean_pinned
spilling      spill_failed        gpu_only
clean_pinned  unpin               clean_loose
clean_loose   reused              host_only
host_only     adopt_loose         clean_loose
host_only     adopt_pinned        clean_pinned
"""


def expected() -> dict[tuple[str, str], str]:
    table = {(a, e): b for a, e, b in (line.split() for line in DESIGN.strip().splitlines())}
    for state in ("importing", "gpu_only", "spilling", "clean_pinned", "clean_loose", "host_only"):
        for event in ("free", "rewind", "crash"):
            table[state, event] = "none"
    return table


@pytest.mark.parametrize("state", PageState, ids=lambda state: state.name)
@pytest.mark.parametrize("event", PageEvent, ids=lambda event: event.name)
def test_every_pair_is_listed_or_refused(state: PageState, event: PageEvent) -> None:
    want = expected().get((state.name.lower(), event.name.lower()))
    if want is None:
        with pytest.raises(InvariantError, match=rf"page 7 of request 'r-1' is {state.name}.*{event.name}"):
            next_state(state, event, "r-1", 7)
    else:
        assert next_state(state, event, "r-1", 7) == PageState[want.upper()]


def test_the_table_has_no_other_pairs() -> None:
    assert {(s.name.lower(), e.name.lower()): n.name.lower() for (s, e), n in TRANSITIONS.items()} == expected()


def test_every_state_is_reached_and_left() -> None:
    assert {new for new in TRANSITIONS.values()} == set(PageState)
    assert {state for state, _ in TRANSITIONS} == set(PageState)


def test_a_page_is_never_neither_durable_nor_on_the_gpu() -> None:
    for state in set(PageState) - {PageState.NONE, PageState.IMPORTING}:
        assert state in DURABLE or state in PINNED
    assert {PageState.GPU_ONLY, PageState.SPILLING} == READABLE_ON_GPU - DURABLE
