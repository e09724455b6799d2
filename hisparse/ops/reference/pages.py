"""Copies of whole pages in plain torch: between the device's packed blocks, the host pool and staging memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.ops.page_list import ListRules, PageList


class PageCopier:
    """Page copies of one rank. The lists are checked; where a page is, and who may write it, is the caller's business.

    Args:
        rows: the packed device allocation seen as rows [blocks * rows_per_block, row_elems].
        host_rows: per layer [host blocks * block_size, row_elems]; empty without a host pool.
    """

    def __init__(self, layout: KVCacheLayout, rows: Tensor, host_rows: Sequence[Tensor] = ()) -> None:
        self._layout = layout
        self._rows = rows
        self._host = tuple(host_rows)
        self._blocks = rows.shape[0] // layout.rows_per_block
        self._rules = ListRules(layout, self._blocks, self._host[0].shape[0] // layout.block_size if self._host else 0)

    def spill(self, pages: PageList) -> None:
        """Device pages to their host pages, the first `rows` rows in every layer.

        Args:
            pages: see `page_list`; host blocks are distinct.
        Raises:
            InvariantError: an id outside a pool.
        """
        self._rules.check_pages(pages)
        self._between(pages, to_host=True)

    def restore(self, pages: PageList) -> None:
        """Host pages to their device pages, the first `rows` rows in every layer; device blocks are distinct."""
        self._rules.check_pages(pages)
        self._between(pages, to_host=False)

    def prepare_scatter(self, slot_pages: int) -> None:
        """Takes whatever memory `scatter` of slots of this size needs, so that it takes none. Here: none."""

    def scatter(self, staging: Tensor, pages: PageList, *, layered: bool, slot_pages: int) -> None:
        """Staged pages, in the order of the list, to host and device pages, where a block is not 0.

        Args:
            staging: uint8, contiguous: `[layer][slot_pages][page bytes]` if `layered` (it came from a host pool), else
                `[group][slot_pages][block bytes]`, whole blocks (it came from resident blocks).
        Raises:
            InvariantError: an id outside a pool, more pages than the slot holds, or a slot that is too short.
        """
        self._rules.check_staged(pages)
        layout, num = self._layout, len(pages)
        check_staging(layout, staging, num, slot_pages)
        place, (count, host, device) = torch.arange(num), self._columns(pages)
        slot = staging.view(-1)[: slot_pages * layout.staged_page_bytes]
        staged = slot.view(self._rows.dtype).view(-1, layout.row.row_elems)
        for layer, group in enumerate(layout.layer_group):
            offset, stride = staged_page(layout, layer, slot_pages, layered)
            first = (offset + place * stride) // layout.row.row_bytes
            there = host > 0
            if bool(there.any()):
                _move(self._host[layer], host[there] * layout.block_size, staged, first[there], count[there])
            there = device[:, group] > 0
            target = self._first(layer, device[:, group])
            _move(self._rows, target[there], staged, first[there], count[there])

    def copy_blocks(self, pairs: PageList) -> None:
        """Whole device blocks of any group, (from, to); the rows of the list are ignored."""
        self._rules.check_block_pairs(pairs)
        _, source, target = (torch.from_numpy(pairs[:, i].copy()).long() for i in range(3))
        blocks = self._rows.view(self._blocks, -1)
        blocks.index_copy_(0, target.to(blocks.device), blocks.index_select(0, source.to(blocks.device)))

    def copy_host_pages(self, pairs: PageList) -> None:
        """Host pages, (from, to), the first `rows` rows in every layer."""
        self._rules.check_host_pairs(pairs)
        count, source, target = (torch.from_numpy(pairs[:, i].copy()).long() for i in range(3))
        size = self._layout.block_size
        for host in self._host:
            _move(host, target * size, host, source * size, count)

    def gather_pages(
        self,
        layer: int,
        seat: int,
        source_table: Tensor | None,
        resident_table: Tensor,
        workspace: Tensor,
        *,
        first_page: int,
        num_pages: int,
        copy_resident: bool = False,
        status: Tensor | None = None,
    ) -> None:
        """Pages of one seat's context to a workspace in the order of their positions: row r of the workspace is position
        `first_page * block_size + r`.

        Non-resident pages come from the host. Resident ones are copied too if `copy_resident`, else their rows of the
        workspace are left alone.

        Args:
            source_table, resident_table: int32 [seats, pages], 0 = no page; the resident table of the layer's group.
            workspace: [num_pages * block_size, row_elems] or more rows, like `rows`; changed in place.
            status: not written here; kernels report NO_PAGE in it where this raises.
        Raises:
            InvariantError: a page is in neither tier, or outside a pool or table.
        """
        check_gather(self._layout, workspace, resident_table, first_page, num_pages)
        layout, span = self._layout, slice(first_page, first_page + num_pages)
        block = resident_table[seat, span].long()
        host = torch.zeros_like(block) if source_table is None else source_table[seat, span].long()
        limit = self._host[layer].shape[0] // layout.block_size if self._host else 0
        bad = torch.where(block > 0, block >= self._blocks, (host <= 0) | (host >= limit))
        if bool(bad.any()):
            at = first_page + int(bad.nonzero()[0])
            raise InvariantError(f"page {at} of seat {seat} is neither resident nor on the host")
        target = torch.arange(num_pages) * layout.block_size
        count = torch.full_like(target, layout.block_size)
        there = block > 0
        if copy_resident:
            _move(workspace, target[there], self._rows, self._first(layer, block[there]), count[there])
        if self._host:
            _move(workspace, target[~there], self._host[layer], host[~there] * layout.block_size, count[~there])

    def _between(self, pages: PageList, *, to_host: bool) -> None:
        count, host, device = self._columns(pages)
        for layer, group in enumerate(self._layout.layer_group):
            near, far = self._first(layer, device[:, group]), host * self._layout.block_size
            if to_host:
                _move(self._host[layer], far, self._rows, near, count)
            else:
                _move(self._rows, near, self._host[layer], far, count)

    def _columns(self, pages: PageList) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [m], host blocks [m] and device blocks [m, groups], int64."""
        ids = torch.from_numpy(pages).long()
        return ids[:, 0], ids[:, 1], ids[:, 2:]

    def _first(self, layer: int, blocks: Tensor) -> Tensor:
        return blocks * self._layout.rows_per_block + self._layout.layer_row_offset[layer]


def staged_page(layout: KVCacheLayout, layer: int, slot_pages: int, layered: bool) -> tuple[int, int]:
    """Byte offset of a layer's part of the first staged page, and bytes from a page to the next."""
    if layered:
        return layer * slot_pages * layout.layer_page_bytes, layout.layer_page_bytes
    first_block = layout.layer_group[layer] * slot_pages * layout.block_bytes
    return first_block + layout.layer_byte_offset(layer), layout.block_bytes


def check_staging(layout: KVCacheLayout, staging: Tensor, num_pages: int, slot_pages: int) -> None:
    """Raises InvariantError unless `num_pages` pages fit in the slot and the slot in `staging`."""
    need = slot_pages * layout.staged_page_bytes
    if num_pages > slot_pages or staging.dtype != torch.uint8 or not staging.is_contiguous() or staging.numel() < need:
        raise InvariantError(
            f"{num_pages} pages from a slot of {slot_pages} need {need} contiguous bytes of staging, got {staging.dtype} "
            f"{list(staging.shape)}"
        )


def check_gather(layout: KVCacheLayout, workspace: Tensor, table: Tensor, first_page: int, num_pages: int) -> None:
    """Raises InvariantError unless the pages are in the table and fit in the workspace."""
    if first_page < 0 or num_pages < 0 or first_page + num_pages > table.shape[1]:
        raise InvariantError(f"pages {first_page}..{first_page + num_pages} are not in a table of {table.shape[1]}")
    rows = num_pages * layout.block_size
    if workspace.ndim != 2 or workspace.shape[1] != layout.row.row_elems or workspace.shape[0] < rows:
        raise InvariantError(f"a workspace for {rows} rows of {layout.row.row_elems} is needed, got {list(workspace.shape)}")


def _move(target: Tensor, target_first: Tensor, source: Tensor, source_first: Tensor, count: Tensor) -> None:
    """The first `count[i]` rows of each page."""
    step = torch.arange(int(count.max()) if count.numel() else 0)
    wanted = step < count[:, None]
    to, of = ((first[:, None] + step)[wanted] for first in (target_first, source_first))
    target.index_copy_(0, to.to(target.device), source.index_select(0, of.to(source.device)).to(target.device))
