"""Pages of two sides that cut the same tokens differently: other block sizes, other packings of layers into groups.

Positions are matched from the front in units of the smaller block size. A peer names its block size and number of groups;
its layout is rebuilt here and must have the fingerprint that the peer sent, so both sides mean the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hisparse.errors import ConfigError, ProtocolError
from hisparse.layout import KVCacheLayout
from hisparse.pd.pages import Ids

Fingerprint = Callable[[KVCacheLayout], str]
"""What two sides must agree on, of a layout: `KVCacheLayout.fingerprint`, or one that also covers the checkpoint."""


class Paging(NamedTuple):
    """How an engine cuts the KV of a model into pages. block_size: tokens. num_groups: resident groups."""

    block_size: int
    num_groups: int


class PeerLayouts:
    """Layouts of peers that serve the same rows in other pages, each built once.

    Args:
        layout: of this side.
    """

    def __init__(self, layout: KVCacheLayout) -> None:
        own = Paging(layout.block_size, layout.num_resident_groups)
        self._layout = layout
        self._known: dict[Paging, KVCacheLayout] = {own: layout}

    def of(self, paging: Paging) -> KVCacheLayout:
        """The peer's layout.

        Raises:
            ProtocolError: pages of that size do not divide ours or are not divided by them, or no such layout exists.
        """
        known = self._known.get(paging)
        if known is not None:
            return known
        theirs, ours = paging.block_size, self._layout.block_size
        if max(theirs, ours) % min(theirs, ours):
            raise ProtocolError(f"prefill uses pages of {theirs} tokens, decode {ours}; one must be a multiple of the other: "
                                "choose cache.block_size so on both sides")
        try:
            layout = self._layout.repaged(block_size=theirs, num_groups=paging.num_groups)
        except ConfigError as error:
            raise ProtocolError(f"prefill's pages of {theirs} tokens in {paging.num_groups} groups are impossible here: "
                                f"{error}") from error
        if layout.num_resident_groups != paging.num_groups:
            raise ProtocolError(f"prefill packs its layers into {paging.num_groups} groups; here that gives "
                                f"{layout.num_resident_groups}: run one release on both sides")
        self._known[paging] = layout
        return layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The parts that pages of both sides consist of: unit i is `size` tokens, on page `source[i]` from row `source_row[i]`
    on, and on page `target[i]` from row `target_row[i]` on. Pages are indices into the two tables of an import.

    Example: pages of 8 at prefill and 4 at decode, the first unit in the second half of prefill's page 0, 3 units:
    source (0, 1, 1), source_row (4, 0, 4), target (0, 1, 2), target_row (0, 0, 0), size 4.
    """

    size: int
    source: Ids
    source_row: Ids
    target: Ids
    target_row: Ids

    def on(self, pages: Ids) -> Units:
        """Those of the target pages named, in the order of the units."""
        return self.where(np.isin(self.target, pages))

    def where(self, chosen: npt.NDArray[np.bool_]) -> Units:
        return Units(size=self.size, source=self.source[chosen], source_row=self.source_row[chosen],
                     target=self.target[chosen], target_row=self.target_row[chosen])


def match_units(*, num_tokens: int, source_skip: int, source_block_size: int, target_block_size: int) -> Units:
    """Units that hold `num_tokens` tokens from row `source_skip` of source page 0 and row 0 of target page 0 on.

    The last one may be filled in part. Rows of the last target page behind it have no source and are not read.
    """
    size = min(source_block_size, target_block_size)
    first = np.arange(-(-num_tokens // size), dtype=np.int64) * size
    far = first + source_skip
    return Units(size=size, source=far // source_block_size, source_row=far % source_block_size,
                 target=first // target_block_size, target_row=first % target_block_size)


def source_pages(*, first_token: int, num_tokens: int, block_size: int) -> tuple[int, int, int]:
    """Which pages of the peer hold positions [first_token, num_tokens).

    Returns: first page, page behind the last, rows of the first page that lie before `first_token`.
    """
    first = first_token // block_size
    return first, -(-num_tokens // block_size), first_token - first * block_size
