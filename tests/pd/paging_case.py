"""An import between sides that cut the same tokens differently, and the oracle of its bytes.

The oracle knows no page of the other side: it reads each token's row of each layer where the side's own layout has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from hisparse.layout import KVCacheLayout
from hisparse.pd.copies import CopyEvent, copy_now
from hisparse.pd.loopback import LoopbackNetwork
from hisparse.types import Landing, RequestPages
from tests.pd.rig import SHAPE, RankMemory, Side, make_plan, pick_pages, run_to_end

LAYOUTS = {(size, groups): KVCacheLayout.build(SHAPE, block_size=size, dtype="float32", num_groups=groups)
           for size in (4, 8, 16) for groups in (1, 2, 3)}
UNEQUAL = [(p, d) for p, d in itertools.product(LAYOUTS, LAYOUTS) if p != d]
PAIRS = [((4, 2), (8, 2)), ((8, 2), (4, 2)), ((16, 3), (4, 2)), ((4, 1), (16, 3)), ((8, 2), (8, 3))]
"""(block size, groups) of prefill and of decode. The last differ in their packing alone."""


class World(NamedTuple):
    """Where packed allocations lie. `inside`: what importers are made and run in."""

    make_rank: Callable[..., RankMemory]
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    copy_engine: Callable[[Callable[[], None]], CopyEvent] = copy_now


CPU = World(RankMemory)


def key_of(memory: RankMemory, pages: RequestPages, i: int, token: int) -> bytes:
    """The token's key of the i-th indexer layer."""
    layout = memory.layout
    page, row = divmod(token, layout.block_size)
    start = (i * layout.block_size + row) * layout.indexer_row_bytes
    block = pages.indexer_blocks[page - pages.first_page]
    return memory.device_bytes()[block, start : start + layout.indexer_row_bytes].tobytes()


def resident_of(memory: RankMemory, pages: RequestPages, layer: int, token: int) -> bytes | None:
    layout = memory.layout
    page, row = divmod(token, layout.block_size)
    block = pages.resident_blocks[layout.layer_group[layer]][page - pages.first_page]
    start = layout.layer_byte_offset(layer) + row * layout.row.row_bytes
    return memory.device_bytes()[block, start : start + layout.row.row_bytes].tobytes() if block else None


def host_of(memory: RankMemory, pages: RequestPages, layer: int, token: int) -> bytes | None:
    layout = memory.layout
    page, row = divmod(token, layout.block_size)
    block = pages.host_blocks[page - pages.first_page]
    assert memory.memory.host is not None
    start = row * layout.row.row_bytes
    return memory.memory.host[layer, block, start : start + layout.row.row_bytes].tobytes() if block else None


def check_rows(far: RankMemory, source: RequestPages, near: RankMemory, target: RequestPages, tokens: Sequence[int], *,
               to_host: bool) -> None:
    """Every key and every row of these tokens, in every tier that the target names. Args: to_host: the host pages, too."""
    for token in tokens:
        for i in range(len(SHAPE.index_groups)):
            assert key_of(near, target, i, token) == key_of(far, source, i, token), (token, i)
        for layer in range(SHAPE.num_layers):
            want = resident_of(far, source, layer, token) or host_of(far, source, layer, token)
            if to_host:
                assert host_of(near, target, layer, token) == want, (token, layer)
            assert resident_of(near, target, layer, token) in (None, want), (token, layer)


class Case:
    """A prompt at prefill, pages of decode from `first_page` on, both at random ids."""

    def __init__(self, prefill: tuple[int, int], decode: tuple[int, int], *, num_tokens: int, first_page: int = 0,
                 landing: Landing = Landing.HOST, direct: bool = False, slot_pages: int = 2, seed: int = 0,
                 num_ranks: int = 1, world: World = CPU) -> None:
        network, rng = LoopbackNetwork(), np.random.default_rng(seed)
        far, near = LAYOUTS[prefill], LAYOUTS[decode]
        self.num_tokens, self.landing, self.first_token = num_tokens, landing, first_page * near.block_size
        self.world = world
        with world.inside():
            self.prefill = Side("p", network, seed=1, layout=far, make_rank=world.make_rank)
            self.decode = Side("d", network, seed=2, layout=near, direct=direct, slot_pages=slot_pages, num_ranks=num_ranks,
                               make_rank=world.make_rank, copy_engine=world.copy_engine)
        count = far.pages(num_tokens)
        kinds = rng.integers(0, 3, count).tolist()
        self.source = pick_pages(seed, count, num_tokens, resident=[kind != 0 for kind in kinds],
                                 host=[kind != 1 for kind in kinds], groups=prefill[1])
        last = near.pages(num_tokens)
        mirror = rng.integers(0, 2, last - first_page).astype(bool).tolist()
        mirror[-1] = True
        self.target = pick_pages(seed + 1, last - first_page, num_tokens, first_page=first_page,
                                 resident=[landing is Landing.RESIDENT or held for held in mirror],
                                 host=[True] * (last - first_page), groups=decode[1])
        self.tail_rows = num_tokens - (last - 1) * near.block_size
        self.before = [rank.snapshot() for rank in self.decode.ranks]
        self.plan = make_plan(self.prefill, self.source, self.target, landing, tail_rows=self.tail_rows,
                              block_size=near.block_size, num_ranks=num_ranks)

    def run(self) -> list[Any]:
        for importer in self.decode.importers:
            importer.submit(self.plan)
        with self.world.inside():
            return [run_to_end(importer)[0] for importer in self.decode.importers]

    def check(self) -> None:
        for rank, near in enumerate(self.decode.ranks):
            check_rows(self.prefill.ranks[0], self.source, near, self.target, range(self.first_token, self.num_tokens),
                       to_host=self.landing is Landing.HOST and rank == 0)
            self.check_masks(rank)
            self.check_only_written(rank)

    def check_masks(self, rank: int) -> None:
        masks, layout = self.decode.ranks[rank].pool.row_masks.copy(), self.decode.layout
        if self.landing is Landing.HOST and rank == 0:
            blocks = list(self.target.host_blocks)
            assert (masks[blocks[:-1]] == (1 << layout.block_size) - 1).all()
            assert masks[blocks[-1]] == (1 << self.tail_rows) - 1
            masks[blocks] = 0
        assert not masks.any()

    def check_only_written(self, rank: int) -> None:
        layout, (device, host) = self.decode.layout, self.decode.ranks[rank].snapshot()
        old_device, old_host = self.before[rank]
        for block in self.target.indexer_blocks:
            device[block, : layout.indexer_page_bytes] = old_device[block, : layout.indexer_page_bytes]
        for g, blocks in enumerate(self.target.resident_blocks):
            used = [block for block in blocks if block]
            device[used, : layout.resident_page_bytes(g)] = old_device[used, : layout.resident_page_bytes(g)]
        if self.landing is Landing.HOST and rank == 0:
            host[:, list(self.target.host_blocks)] = old_host[:, list(self.target.host_blocks)]
        assert (device == old_device).all() and (host == old_host).all(), "bytes outside the destination were written"
