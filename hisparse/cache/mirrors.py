"""Host destinations of the rows a step writes: append writes each row to its resident page and its host page."""

from __future__ import annotations

from collections.abc import Sequence

from hisparse.cache.core import CacheCore
from hisparse.cache.request import Incarnation
from hisparse.cache.residency import PageState
from hisparse.errors import InvariantError
from hisparse.types import MirrorSpan

_GPU_ONLY = PageState.GPU_ONLY


def build_spans(core: CacheCore, scheduled: Sequence[tuple[str, int, int]]) -> tuple[MirrorSpan, ...]:
    """Spans of every position that a step may write: from the rows that are certain by then to the furthest lookahead.

    Notes the rows they cover. A page without resident or host block is skipped by itself, as are pages that a chunk of
    several accepted tokens seals (they are spilled with bytes). A replayed token writes nothing.

    Raises:
        InvariantError: a row would go to a page that is shared, published, durable or missing.
    """
    live, size, out = core.live, core.block_size, []
    for request_id, first, num_tokens in scheduled:
        inc = live[request_id]
        start, end = inc.settled, first + num_tokens
        if start < inc.valid:
            start = inc.valid
        if start >= end:
            continue
        if end - start > 1:
            span = _build_span(core, inc, start, end)
            if span is not None:
                out.append(span)
            continue
        page = start // size
        if page >= len(inc.states) or inc.states[page] != _GPU_ONLY:
            _refuse(inc, page)
        host = inc.host[page]
        if not host or page not in inc.resident:
            continue
        inc.covered[page] = inc.covered.get(page, 0) | 1 << start - page * size
        span = inc.span
        if span is None or span.first_page != page or span.host_blocks[0] != host:
            span = inc.span = MirrorSpan(inc.seat, page, (host,))
        out.append(span)
    return tuple(out)


def _build_span(core: CacheCore, inc: Incarnation, start: int, end: int) -> MirrorSpan | None:
    """Span of the positions [start, end), page by page; None = nothing to mirror."""
    size = core.block_size
    accepted = min(end, inc.identity.num_tokens)
    sealed_by_chunk = accepted // size if accepted - start > 1 else 0
    first_page, end_page = start // size, (end - 1) // size + 1
    blocks: list[int] = []
    for page in range(first_page, end_page):
        if page >= inc.num_pages or inc.states[page] != _GPU_ONLY:
            _refuse(inc, page)
        host = inc.host[page]
        if page < sealed_by_chunk or not host or page not in inc.resident:
            blocks.append(-1)
            continue
        blocks.append(host)
        low, high = max(start - page * size, 0), min(end - page * size, size)
        inc.covered[page] = inc.covered.get(page, 0) | ((1 << high) - (1 << low))
    skipped = 0
    while skipped < len(blocks) and blocks[skipped] < 0:
        skipped += 1
    if skipped == len(blocks):
        return None
    return MirrorSpan(seat=inc.seat, first_page=first_page + skipped, host_blocks=tuple(blocks[skipped:]))


def _refuse(inc: Incarnation, page: int) -> None:
    state = inc.state(page).name if page < inc.num_pages else "not allocated"
    raise InvariantError(f"step would write page {page} of {inc.request_id!r}, which is {state}")


def uncover(core: CacheCore, inc: Incarnation, num_tokens: int) -> None:
    """Rows at or beyond `num_tokens` were rejected: their mask bits are cleared on the device, and here."""
    size = core.block_size
    for page in [page for page in inc.covered if (page + 1) * size > num_tokens]:
        inc.covered[page] &= (1 << max(0, num_tokens - page * size)) - 1
