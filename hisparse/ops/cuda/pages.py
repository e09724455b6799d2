"""Copies of whole pages by a few CTAs; see `kernels/pages.cu`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.ops.cuda.module import Instance, Kernel, kernel
from hisparse.ops.page_list import ListRules, PageList
from hisparse.ops.reference.pages import check_gather, check_staging, staged_page

COPY_CTAS = 16
"""CTAs of a copy to device memory: enough for the host link, few of the device's."""
SEND_CTAS = 8
"""CTAs of a copy to host memory; its threads are one warp each."""
GATHER_CTAS = 128
"""CTAs of a gather, which the forward waits for."""
THREADS, UNROLL = 512, 6
STAGES, AHEAD, PIECE_BYTES = 2, 1, 10_752
"""Of a CTA that sends: pieces in shared memory, those that are being loaded, and the most bytes of one.

With SEND_CTAS they bound what is on its way to the host. docs/kernels.md has the rates of others, and their effect on a
forward.
"""
LIST_WORDS = (1024, 8000)
"""Of a list in a launch's parameters (at most 32,764 bytes), whole pages; a longer list is several launches."""
LIST_PIECES = (128, 1360)
"""Of a READ in a launch's parameters, as above; three integers each."""
_PART_WORDS = 8
_PLACE = -1
"""As a column: the page's place in the list."""


def _copy_instance(words: int) -> Instance:
    return Instance("pages.cu", "copy_pages", {"THREADS": THREADS, "UNROLL": UNROLL, "LIST_WORDS": words})


def _send_instance(words: int, stages: int = STAGES, ahead: int = AHEAD) -> Instance:
    return Instance("pages.cu", "send_pages", {"STAGES": stages, "AHEAD": ahead, "LIST_WORDS": words})


def _read_instance(pieces: int) -> Instance:
    return Instance("pages.cu", "read_pieces", {"THREADS": THREADS, "UNROLL": UNROLL, "LIST_PIECES": pieces})


INSTANCES = (
    *(_copy_instance(words) for words in LIST_WORDS),
    *(_send_instance(words) for words in LIST_WORDS),
    Instance("pages.cu", "gather_pages", {"THREADS": THREADS, "UNROLL": UNROLL}),
    *(_read_instance(pieces) for pieces in LIST_PIECES),
)


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

    Lists are numpy arrays on the host: they are checked there, and travel in the parameters of the launch. What writes to the
    host is bounded in what it has on its way, so that a forward beside it keeps its speed; see `kernels/pages.cu`.

    Args:
        rows: the packed device allocation seen as rows, contiguous, cuda.
        host_rows: per layer, CUDA tensors that alias registered host memory; empty without a host pool.
        ctas: of copies to device memory but the gather. send_ctas: of copies to the host.
    Stream: every method runs on the current stream and returns at once; capture-safe, and a list is captured as it is
    (`gather_pages` after a first call).
    """

    def __init__(self, layout: KVCacheLayout, rows: Tensor, host_rows: Sequence[Tensor] = (), *, ctas: int = COPY_CTAS,
                 send_ctas: int = SEND_CTAS) -> None:
        if min(ctas, send_ctas) < 1:
            raise InvariantError(f"a copy needs at least one CTA, got {ctas} and {send_ctas}")
        for place in (rows, *host_rows):
            if not place.is_cuda or not place.is_contiguous() or place.data_ptr() % 16 or place.dtype != rows.dtype:
                raise InvariantError(f"rows must be contiguous, 16-byte aligned {rows.dtype} on CUDA, got {place.dtype} on "
                                     f"{place.device} with strides {place.stride()}")
        if host_rows and (len(host_rows) != layout.shape.num_layers or len({tuple(host.shape) for host in host_rows}) != 1):
            raise InvariantError(f"host_rows must be {layout.shape.num_layers} equal tensors, one a layer: {len(host_rows)}")
        self.ctas, self.send_ctas = ctas, send_ctas
        if layout.row.row_bytes % 16:
            raise InvariantError(f"rows must be whole 16-byte units, got rows of {layout.row.row_bytes} bytes")
        self._layout, self._rows, self._host = layout, rows, tuple(host_rows)
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
        for words in LIST_WORDS:  # loading one later, in a step, would wait for the device
            for instance in (_copy_instance, _send_instance):
                _loaded(instance, words, torch.cuda.current_device())

    def spill(self, pages: PageList) -> None:
        """Device pages to their host pages, the first `rows` rows in every layer."""
        self._rules.check_pages(pages)
        self._copy(self._spill, pages, send=True)

    def restore(self, pages: PageList) -> None:
        """Host pages to their device pages, the first `rows` rows in every layer."""
        self._rules.check_pages(pages)
        self._copy(self._restore, pages)

    def scatter(self, staging: Tensor, pages: PageList, *, layered: bool, slot_pages: int) -> None:
        """Staged pages to host and device pages, where a block is not 0. `staging`: device memory or an alias."""
        self._rules.check_staged(pages)
        check_staging(self._layout, staging, len(pages), slot_pages)
        if not staging.is_cuda or staging.data_ptr() % 16:
            raise InvariantError(f"staging must be 16-byte aligned on CUDA (or an alias of host memory), got {staging.device}")
        parts = self._staged.get((layered, slot_pages)) or self._prepare(layered, slot_pages)
        self._copy(parts, pages, send=True, source_base=staging.data_ptr(), placed=True)

    def prepare_scatter(self, slot_pages: int) -> None:
        """Takes the memory that `scatter` of slots of this size needs, which the first one would take otherwise."""
        for layered in (False, True):
            self._prepare(layered, slot_pages)

    def _prepare(self, layered: bool, slot_pages: int) -> _Parts:
        places = [staged_page(self._layout, layer, slot_pages, layered) for layer in range(self._layout.shape.num_layers)]
        no_host = [(0, 0)] * len(places)
        parts = self._staged[layered, slot_pages] = self._parts(
            [(offset, _PLACE) for offset, _ in places], self._host_part or no_host, self._device_part,
            strides=(places[0][1], self._layout.layer_page_bytes, self._layout.block_bytes))
        return parts

    def copy_blocks(self, pairs: PageList) -> None:
        """Whole device blocks of any group, (from, to); the rows of the list are ignored."""
        self._rules.check_block_pairs(pairs)
        whole = pairs.copy()
        whole[:, 0] = self._layout.block_size
        self._copy(self._cow, whole)

    def copy_host_pages(self, pairs: PageList) -> None:
        """Host pages, (from, to), the first `rows` rows in every layer; over the host link and back."""
        self._rules.check_host_pairs(pairs)
        self._copy(self._fork, pairs, send=True)

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
        kernel("pages.cu", "gather_pages", THREADS=THREADS, UNROLL=UNROLL)(
            (min(ctas, num_pages),),
            THREADS,
            (
                None if source_table is None or host is None else source_table[seat], resident_table[seat],
                first_page, num_pages,
                host, self._host_blocks, self._rows, self._blocks, layout.block_bytes, layout.layer_byte_offset(layer),
                workspace, layout.layer_page_bytes, int(copy_resident), seat, layout.block_size, status,
            ),
        )

    def _copy(self, parts: _Parts, pages: PageList, *, send: bool = False, source_base: int = 0, placed: bool = False) -> None:
        """Args: send: to the host. placed: the source's column is the page's place in the list."""
        if not len(pages):
            return
        num, width = pages.shape
        longest, num_parts, page_bytes = LIST_WORDS[-1] // width, parts.lines.shape[0], self._layout.layer_page_bytes
        for first in range(0, num, longest):
            part = pages[first : first + longest]
            words = next(words for words in LIST_WORDS if part.size <= words)
            launch = _loaded(_send_instance if send else _copy_instance, words, torch.cuda.current_device())
            base = source_base + first * parts.source_stride if placed else source_base
            args = (part.tobytes(), width, len(part), parts.on_device, num_parts, self._layout.row.row_bytes,
                    base, parts.source_stride, parts.target_stride, parts.second_stride)
            if send:
                pieces = -(-page_bytes // PIECE_BYTES)
                piece_bytes = -(-page_bytes // (16 * pieces)) * 16
                ctas = min(self.send_ctas, len(part) * num_parts * pieces)
                launch((ctas,), 32, (*args, pieces, piece_bytes), STAGES * piece_bytes)
            else:
                launch((min(self.ctas, len(part) * num_parts),), THREADS, args)

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


def load_read_pieces() -> None:
    """Before `read_pieces`, which would wait for the device otherwise."""
    for pieces in LIST_PIECES:
        _loaded(_read_instance, pieces, torch.cuda.current_device())


def read_pieces(pieces: npt.NDArray[np.int64], *, ctas: int) -> None:
    """Copies pieces int64 [n, 3]: source address, target address, bytes; multiples of 16. A source may be on another device.

    They travel in the parameters of the launches: no memory is taken for them. Stream: the current one; returns at once.
    """
    for first in range(0, len(pieces), LIST_PIECES[-1]):
        part = pieces[first : first + LIST_PIECES[-1]]
        size = next(size for size in LIST_PIECES if len(part) <= size)
        launch = _loaded(_read_instance, size, torch.cuda.current_device())
        launch((min(ctas, len(part)),), THREADS, (part.tobytes(), len(part)))


@functools.cache
def _loaded(instance: Callable[[int], Instance], size: int, device: int) -> Kernel:
    """Args: size: of the list in its parameters."""
    made = instance(size)
    return kernel(made.source, made.function, **made.defines)
