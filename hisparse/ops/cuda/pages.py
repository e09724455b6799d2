"""Copies of whole pages: a kernel on a few CTAs, or the copy engine where pages lie in long runs; see `kernels/pages.cu`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.ops.cuda.copy_engine import copy_strided
from hisparse.ops.cuda.list_upload import ListUploads
from hisparse.ops.cuda.module import Instance, Kernel, kernel
from hisparse.ops.page_list import ListRules, PageList, runs
from hisparse.ops.reference.pages import check_gather, check_staging, staged_page

COPY_CTAS = 16
"""CTAs of a copy that runs beside a forward: enough for the host link, few of the device's."""
GATHER_CTAS = 128
"""CTAs of a gather, which the forward waits for."""
ENGINE_RUN_PAGES = 256
"""Pages in a run, on average, from which on the copy engine takes a batch.

It costs about 15 us of CPU a layer and run; measured on one H200, 512 pages of 78 layers: 23 GB/s in runs of 8 (bound by the
CPU), 49 in runs of 32, 53 from 128 on; the kernel 51 for any. But products on another stream take twice as long while the
kernel copies, and no longer than alone beside the copy engine.
"""
THREADS, UNROLL = 512, 6
PIECE_BYTES = THREADS * UNROLL * 16
"""Of a run, for one CTA at a time."""
_PART_WORDS = 8
_PLACE = -1
"""As a column: the page's place in the list."""

INSTANCES = (
    Instance("pages.cu", "copy_pages", {"THREADS": THREADS, "UNROLL": UNROLL}),
    Instance("pages.cu", "gather_pages", {"THREADS": THREADS, "UNROLL": UNROLL}),
)
Path = Literal["auto", "kernel", "engine"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """What `copy_pages` walks: a line for each layer, see the kernel; and bytes between the blocks of each operand."""

    lines: npt.NDArray[np.int64]
    on_device: Tensor
    source_stride: int
    target_stride: int
    second_stride: int = 0


class PageCopier:
    """Page copies of one rank on CUDA; the contract of each is that of `hisparse.ops.reference.PageCopier`.

    Lists are numpy arrays on the host: they are checked there, and uploaded once a batch from pinned memory.

    Args:
        rows: the packed device allocation seen as rows, contiguous, cuda.
        host_rows: per layer, CUDA tensors that alias registered host memory; empty without a host pool.
        ctas: of every copy but the gather.
    Stream: every method runs on the current stream and returns at once; none may be captured but `gather_pages`.
    """

    def __init__(self, layout: KVCacheLayout, rows: Tensor, host_rows: Sequence[Tensor] = (), *, ctas: int = COPY_CTAS) -> None:
        if ctas < 1:
            raise InvariantError(f"a copy needs at least one CTA, got {ctas}")
        for place in (rows, *host_rows):
            if not place.is_cuda or not place.is_contiguous() or place.data_ptr() % 16 or place.dtype != rows.dtype:
                raise InvariantError(f"rows must be contiguous, 16-byte aligned {rows.dtype} on CUDA, got {place.dtype} on "
                                     f"{place.device} with strides {place.stride()}")
        if host_rows and (len(host_rows) != layout.shape.num_layers or len({tuple(host.shape) for host in host_rows}) != 1):
            raise InvariantError(f"host_rows must be {layout.shape.num_layers} equal tensors, one a layer: {len(host_rows)}")
        self.ctas = ctas
        if layout.row.row_bytes % 16:
            raise InvariantError(f"rows must be whole 16-byte units, got rows of {layout.row.row_bytes} bytes")
        self._layout, self._rows, self._host = layout, rows, tuple(host_rows)
        self._lists = ListUploads(rows.device)
        self._blocks = rows.shape[0] // layout.rows_per_block
        self._host_blocks = self._host[0].shape[0] // layout.block_size if self._host else 0
        self._rules = ListRules(layout, self._blocks, self._host_blocks)
        page, layers = layout.layer_page_bytes, range(layout.shape.num_layers)
        device = [(rows.data_ptr() + layout.layer_byte_offset(layer), 2 + layout.layer_group[layer]) for layer in layers]
        host = [(place.data_ptr(), 1) for place in self._host]
        self._device_part, self._host_part = device, host
        if host:
            self._spill = self._parts(device, host, strides=(layout.block_bytes, page))
            self._restore = self._parts(host, device, strides=(page, layout.block_bytes))
            self._fork = self._parts(host, [(address, 2) for address, _ in host], strides=(page, page))
        starts = range(0, layout.block_bytes, page)
        slices = [[(rows.data_ptr() + start, column) for start in starts] for column in (1, 2)]
        self._cow = self._parts(*slices, strides=(layout.block_bytes, layout.block_bytes),
                                most=[min(page, layout.block_bytes - start) for start in starts])
        self._staged: dict[tuple[bool, int], _Parts] = {}

    def spill(self, pages: PageList, *, path: Path = "auto") -> None:
        """Device pages to their host pages, the first `rows` rows in every layer."""
        self._rules.check_pages(pages)
        self._copy(self._spill, pages, path)

    def restore(self, pages: PageList, *, path: Path = "auto") -> None:
        """Host pages to their device pages, the first `rows` rows in every layer."""
        self._rules.check_pages(pages)
        self._copy(self._restore, pages, path)

    def scatter(self, staging: Tensor, pages: PageList, *, layered: bool, slot_pages: int, path: Path = "auto") -> None:
        """Staged pages to host pages, and to device pages where a block is not 0. `staging`: device memory or an alias."""
        self._rules.check_staged(pages)
        check_staging(self._layout, staging, len(pages), slot_pages)
        if not staging.is_cuda or staging.data_ptr() % 16:
            raise InvariantError(f"staging must be 16-byte aligned on CUDA (or an alias of host memory), got {staging.device}")
        parts = self._staged.get((layered, slot_pages))
        if parts is None:
            places = [staged_page(self._layout, layer, slot_pages, layered) for layer in range(self._layout.shape.num_layers)]
            parts = self._parts([(offset, _PLACE) for offset, _ in places], self._host_part, self._device_part,
                                strides=(places[0][1], self._layout.layer_page_bytes, self._layout.block_bytes))
            self._staged[layered, slot_pages] = parts
        self._copy(parts, pages, path, staging.data_ptr())

    def copy_blocks(self, pairs: PageList) -> None:
        """Whole device blocks of any group, (from, to); the rows of the list are ignored."""
        self._rules.check_block_pairs(pairs)
        whole = pairs.copy()
        whole[:, 0] = self._layout.block_size
        self._copy(self._cow, whole, "kernel")

    def copy_host_pages(self, pairs: PageList) -> None:
        """Host pages, (from, to), the first `rows` rows in every layer; over the host link and back."""
        self._rules.check_host_pairs(pairs)
        self._copy(self._fork, pairs, "kernel")

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
        ctas: int = GATHER_CTAS,
    ) -> None:
        """Pages of one seat's context to a workspace in the order of their positions; capture-safe after a first call.

        A page in neither tier, or outside a pool, sets NO_PAGE in `status`; its rows of the workspace are left alone.
        """
        layout = self._layout
        check_gather(layout, workspace, resident_table, first_page, num_pages)
        for table in (source_table, resident_table):
            if table is not None and (table.dtype != torch.int32 or table.stride(1) != 1 or not 0 <= seat < table.shape[0]):
                raise InvariantError(f"a block table is int32 [seats, pages] with dense rows and a seat {seat}, got "
                                     f"{table.dtype} {list(table.shape)}")
        if workspace.dtype != self._rows.dtype or not workspace.is_contiguous() or workspace.data_ptr() % 16:
            raise InvariantError(f"the workspace must be contiguous, 16-byte aligned {self._rows.dtype}, got {workspace.dtype}")
        host = self._host[layer] if self._host else None
        if not num_pages:
            return
        _kernel("gather_pages")(
            (min(ctas, num_pages),),
            THREADS,
            (
                None if source_table is None or host is None else source_table[seat], resident_table[seat],
                first_page, num_pages,
                host, self._host_blocks, self._rows, self._blocks, layout.block_bytes, layout.layer_byte_offset(layer),
                workspace, layout.layer_page_bytes, int(copy_resident), seat, layout.block_size, status,
            ),
        )

    def _copy(self, parts: _Parts, pages: PageList, path: Path, source_base: int = 0) -> None:
        num = len(pages)
        if not num:
            return
        if path == "engine" or (path == "auto" and num >= ENGINE_RUN_PAGES):
            pieces = runs(pages)
            if path == "engine" or num >= ENGINE_RUN_PAGES * (len(pieces) - 1):
                self._by_engine(parts, pages, pieces, source_base)
                return
        num_parts = parts.lines.shape[0]
        listed = self._lists.upload(pages)
        try:
            _kernel("copy_pages")(
                (min(self.ctas, num * num_parts),),
                THREADS,
                (listed.address, pages.shape[1], num, parts.on_device, num_parts, self._layout.row.row_bytes,
                 source_base, parts.source_stride, parts.target_stride, parts.second_stride),
            )
        finally:
            listed.launched()

    def _by_engine(self, parts: _Parts, pages: PageList, pieces: npt.NDArray[np.int64], source_base: int) -> None:
        """One strided copy for each piece, layer and target."""
        row_bytes = self._layout.row.row_bytes
        targets = ((2, parts.target_stride), (4, parts.second_stride))
        for first, end in zip(pieces[:-1].tolist(), pieces[1:].tolist(), strict=True):
            ids = [first, *pages[first].tolist()]  # behind column c stands ids[c + 1]; the place in the list is column -1
            width = ids[1] * row_bytes
            for line in parts.lines.tolist():
                source = source_base + line[0] + ids[line[1] + 1] * parts.source_stride
                for at, stride in targets:
                    column = line[at + 1]
                    if column and ids[column + 1]:
                        copy_strided(line[at] + ids[column + 1] * stride, stride, source, parts.source_stride,
                                     min(width, line[6]), end - first)

    def _parts(self, source: Sequence[tuple[int, int]], target: Sequence[tuple[int, int]],
               second: Sequence[tuple[int, int]] | None = None, *, strides: Sequence[int],
               most: Sequence[int] | None = None) -> _Parts:
        """Each operand: (address of its block 0, column of its id) for every part."""
        page = self._layout.layer_page_bytes
        none = [(0, 0)] * len(source)
        lines = np.array([(*a, *b, *c, limit, 0) for a, b, c, limit in
                          zip(source, target, second or none, most or [page] * len(source), strict=True)], dtype=np.int64)
        assert lines.shape[1] == _PART_WORDS
        return _Parts(lines=lines, on_device=torch.from_numpy(lines).to(self._rows.device), source_stride=strides[0],
                      target_stride=strides[1], second_stride=strides[2] if second is not None else 0)


def _kernel(function: str) -> Kernel:
    return kernel("pages.cu", function, THREADS=THREADS, UNROLL=UNROLL)
