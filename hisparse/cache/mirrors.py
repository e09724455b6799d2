"""Host destinations of the rows a step writes: append writes each row to its resident page and its host page."""

from __future__ import annotations

from hisparse.cache.core import CacheCore
from hisparse.cache.request import Incarnation
from hisparse.cache.residency import PageState
from hisparse.errors import InvariantError
from hisparse.types import MirrorSpan


def build_span(core: CacheCore, inc: Incarnation, first: int, num_tokens: int) -> MirrorSpan | None:
    """Span of the positions [max(first, valid), first + num_tokens), page by page; notes the rows it covers.

    A page without resident or host block is skipped by itself, as are pages that a chunk of several accepted tokens
    seals (they are spilled with bytes). A replayed token (below `valid`) writes nothing. None = nothing to mirror.

    Raises:
        InvariantError: a row would go to a page that is shared, published, durable or missing.
    """
    size = core.block_size
    start, end = max(first, inc.valid), first + num_tokens
    if start >= end:
        return None
    accepted = min(end, inc.identity.num_tokens)
    sealed_by_chunk = accepted // size if accepted - start > 1 else 0
    first_page, end_page = start // size, (end - 1) // size + 1
    blocks: list[int] = []
    for page in range(first_page, end_page):
        if page >= inc.num_pages or inc.states[page] is not PageState.GPU_ONLY:
            state = inc.states[page].name if page < inc.num_pages else "not allocated"
            raise InvariantError(f"step would write page {page} of {inc.request_id!r}, which is {state}")
        host = inc.host[page]
        if page < sealed_by_chunk or not host or not inc.resident[page]:
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


def uncover(core: CacheCore, inc: Incarnation, num_tokens: int) -> None:
    """Rows at or beyond `num_tokens` were rejected: their mask bits are cleared on the device, and here."""
    size = core.block_size
    for page in [page for page in inc.covered if (page + 1) * size > num_tokens]:
        inc.covered[page] &= (1 << max(0, num_tokens - page * size)) - 1
