"""Lists of pages to copy: which rows of which blocks, as an int32 array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hisparse.errors import InvariantError
from hisparse.layout import KVCacheLayout

PageList = npt.NDArray[np.int32]
"""[m, 2 + resident groups]: rows (from row 0), host block, device block of each group; or [m, 3]: rows, from, to."""


def page_list(host_blocks: Sequence[int], device_blocks: Any, num_rows: int | Sequence[int]) -> PageList:
    """A list of pages with a host block [m] and device blocks [m, groups].

    Example: `page_list([7], [(3, 9)], 64)` is [[64, 7, 3, 9]].
    """
    blocks = np.asarray(device_blocks, dtype=np.int32)
    if blocks.ndim != 2:
        blocks = blocks.reshape(len(host_blocks), -1 if len(host_blocks) else 0)
    out = np.empty((blocks.shape[0], 2 + blocks.shape[1]), dtype=np.int32)
    out[:, 0], out[:, 1], out[:, 2:] = num_rows, host_blocks, blocks
    return out


def pair_list(pairs: Any, num_rows: int | Sequence[int]) -> PageList:
    """A list of (from, to) blocks of one pool. Example: `pair_list([(3, 9)], 10)` is [[10, 3, 9]]."""
    blocks = np.asarray(pairs, dtype=np.int32).reshape(-1, 2)
    out = np.empty((blocks.shape[0], 3), dtype=np.int32)
    out[:, 0], out[:, 1:] = num_rows, blocks
    return out


class ListRules:
    """What a list must keep to, for one layout and the sizes of its pools; a kernel has no way to refuse."""

    def __init__(self, layout: KVCacheLayout, num_device_blocks: int, num_host_blocks: int) -> None:
        groups = layout.num_resident_groups
        rows, host = ("rows", 0, layout.block_size + 1), ("host block", 1, num_host_blocks)
        any_host = ("host block", 0, max(num_host_blocks, 1))
        self._pages = _Ranges(rows, host, *[("device block", 1, num_device_blocks)] * groups)
        self._staged = _Ranges(rows, any_host, *[("device block", 0, num_device_blocks)] * groups)
        self._host_pairs = _Ranges(rows, host, host)
        self._block_pairs = _Ranges(("rows", 0, 1 << 31), *[("device block", 1, num_device_blocks)] * 2)

    def check_pages(self, pages: PageList) -> None:
        """Raises InvariantError unless rows, host blocks and device blocks are in range."""
        self._pages.check(pages)

    def check_staged(self, pages: PageList) -> None:
        """Like `check_pages`, but a block may be 0: no copy there."""
        self._staged.check(pages)

    def check_host_pairs(self, pairs: PageList) -> None:
        """Raises InvariantError unless both blocks of every pair are host blocks."""
        self._host_pairs.check(pairs)

    def check_block_pairs(self, pairs: PageList) -> None:
        """Raises InvariantError unless both blocks of every pair are device blocks."""
        self._block_pairs.check(pairs)


_ROWS = 1024


class _Ranges:
    """(name, least, limit) of each column; repeated for _ROWS rows, as numpy is slow at short rows."""

    def __init__(self, *columns: tuple[str, int, int]) -> None:
        self._columns = columns
        self._least = np.array([least for _, least, _ in columns] * _ROWS, dtype=np.int32)
        self._span = np.array([max(0, limit - least) for _, least, limit in columns] * _ROWS, dtype=np.uint32)

    def check(self, pages: PageList) -> None:
        width = len(self._columns)
        if pages.dtype != np.int32 or pages.ndim != 2 or (pages.shape[1] != width and len(pages)):
            raise InvariantError(f"a page list must be int32 [m, {width}], got {pages.dtype} {list(pages.shape)}")
        if not len(pages):
            return
        for start in range(0, len(pages), _ROWS):
            part = pages[start : start + _ROWS].reshape(-1)
            outside = (part - self._least[: part.size]).view(np.uint32) >= self._span[: part.size]  # below wraps to the top
            if outside.any():
                at = int(outside.argmax())
                name, least, limit = self._columns[at % width]
                raise InvariantError(f"a page list names {name} {int(part[at])}, outside {least}..{limit - 1}")
