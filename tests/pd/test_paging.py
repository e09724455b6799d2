"""Different pages on the two sides: every row arrives at its position, from the right peer page, and nothing else is written.

The oracle knows no page of the other side: it reads each token's row of each layer where the side's own layout has it.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hisparse.config import PDConfig
from hisparse.errors import ProtocolError
from hisparse.layout import KVCacheLayout
from hisparse.pd.commands import ImportFailure
from hisparse.pd.connector import PDConnectorScheduler
from hisparse.pd.loopback import LoopbackNetwork
from hisparse.pd.paging import Paging, PeerLayouts, match_units, source_pages
from hisparse.types import ImportTarget, Landing, RequestPages
from tests.pd.rig import LAYOUT, SHAPE, RankMemory, Side, make_plan, pick_pages, run_to_end

LAYOUTS = {(size, groups): KVCacheLayout.build(SHAPE, block_size=size, dtype="float32", num_groups=groups)
           for size in (4, 8, 16) for groups in (1, 2, 3)}
UNEQUAL = [(p, d) for p, d in itertools.product(LAYOUTS, LAYOUTS) if p != d]
PAIRS = [((4, 2), (8, 2)), ((8, 2), (4, 2)), ((16, 3), (4, 2)), ((4, 1), (16, 3)), ((8, 2), (8, 3))]
"""(block size, groups) of prefill and of decode. The last differ in their packing alone."""


# ------------------------------------------------------------------------------------ oracle: one row of one token
def key_of(memory: RankMemory, pages: RequestPages, i: int, token: int) -> bytes:
    """The token's key of the i-th indexer layer."""
    layout = memory.layout
    page, row = divmod(token, layout.block_size)
    start = (i * layout.block_size + row) * layout.indexer_row_bytes
    block = pages.indexer_blocks[page - pages.first_page]
    return memory.memory.device[block, start : start + layout.indexer_row_bytes].tobytes()


def resident_of(memory: RankMemory, pages: RequestPages, layer: int, token: int) -> bytes | None:
    layout = memory.layout
    page, row = divmod(token, layout.block_size)
    block = pages.resident_blocks[layout.layer_group[layer]][page - pages.first_page]
    start = layout.layer_byte_offset(layer) + row * layout.row.row_bytes
    return memory.memory.device[block, start : start + layout.row.row_bytes].tobytes() if block else None


def host_of(memory: RankMemory, pages: RequestPages, layer: int, token: int) -> bytes | None:
    layout = memory.layout
    page, row = divmod(token, layout.block_size)
    block = pages.host_blocks[page - pages.first_page]
    assert memory.memory.host is not None
    start = row * layout.row.row_bytes
    return memory.memory.host[layer, block, start : start + layout.row.row_bytes].tobytes() if block else None


class Case:
    """A prompt at prefill, pages of decode from `first_page` on, both at random ids."""

    def __init__(self, prefill: tuple[int, int], decode: tuple[int, int], *, num_tokens: int, first_page: int = 0,
                 landing: Landing = Landing.HOST, direct: bool = False, slot_pages: int = 2, seed: int = 0,
                 num_ranks: int = 1) -> None:
        network, rng = LoopbackNetwork(), np.random.default_rng(seed)
        far, near = LAYOUTS[prefill], LAYOUTS[decode]
        self.num_tokens, self.landing, self.first_token = num_tokens, landing, first_page * near.block_size
        self.prefill = Side("p", network, seed=1, layout=far)
        self.decode = Side("d", network, seed=2, layout=near, direct=direct, slot_pages=slot_pages, num_ranks=num_ranks)
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
        return [run_to_end(importer)[0] for importer in self.decode.importers]

    def check(self) -> None:
        far = self.prefill.ranks[0]
        for rank, near in enumerate(self.decode.ranks):
            for token in range(self.first_token, self.num_tokens):
                for i in range(len(SHAPE.index_groups)):
                    assert key_of(near, self.target, i, token) == key_of(far, self.source, i, token), (rank, token, i)
                for layer in range(SHAPE.num_layers):
                    want = resident_of(far, self.source, layer, token) or host_of(far, self.source, layer, token)
                    where = (rank, token, layer)
                    if self.landing is Landing.HOST and rank == 0:
                        assert host_of(near, self.target, layer, token) == want, where
                    assert resident_of(near, self.target, layer, token) in (None, want), where
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


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("landing", list(Landing), ids=lambda landing: landing.value)
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_every_row_arrives_at_its_position(prefill: tuple[int, int], decode: tuple[int, int], landing: Landing,
                                           direct: bool) -> None:
    case = Case(prefill, decode, num_tokens=45, landing=landing, direct=direct)
    (ack,) = case.run()
    assert ack.failure is None, ack.reason
    case.check()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_paging_prompt_length_and_first_page(data: st.DataObject) -> None:
    prefill, decode = data.draw(st.sampled_from(UNEQUAL))
    num_tokens = data.draw(st.integers(1, 56))
    first_page = data.draw(st.integers(0, (num_tokens - 1) // decode[0]))
    case = Case(prefill, decode, num_tokens=num_tokens, first_page=first_page, landing=data.draw(st.sampled_from(Landing)),
                direct=data.draw(st.booleans()), slot_pages=data.draw(st.sampled_from([1, 2, 3])),
                seed=data.draw(st.integers(0, 1000)), num_ranks=data.draw(st.sampled_from([1, 2])))
    assert [ack.failure for ack in case.run()] == [None] * case.decode.num_ranks
    case.check()


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_each_source_page_that_holds_imported_rows_is_verified(prefill: tuple[int, int], decode: tuple[int, int]) -> None:
    """The page of every tier of every position: reused meanwhile, the import fails, and no row becomes durable. Pages in
    front of the import are not read, and may be reused."""
    num_tokens, first_page = 45, 2
    first_token, size = first_page * decode[0], prefill[0]
    for page in range(-(-num_tokens // size)):
        used = (page + 1) * size > first_token
        for tier in ("indexer", "rows"):
            case = Case(prefill, decode, num_tokens=num_tokens, first_page=first_page, seed=page)
            groups, memory = case.source.resident_blocks, case.prefill.ranks[0]
            if tier == "indexer":
                memory.cache.generations[case.source.indexer_blocks[page]] += 1
            elif all(group[page] for group in groups):
                memory.cache.generations[groups[page % len(groups)][page]] += 1
            else:
                memory.pool.generations[case.source.host_blocks[page]] += 1
            (ack,) = case.run()
            assert ack.failure is (ImportFailure.GENERATION if used else None), (page, tier, ack.reason)
            if used:
                assert not case.decode.ranks[0].pool.row_masks.any()


def test_reads_of_neighbouring_pages_are_merged() -> None:
    """Four pages of 4 in a row at prefill, one page of 16 at decode, and the other way round: a descriptor a layer."""
    small = RequestPages(first_page=0, num_tokens=16, indexer_blocks=(5, 6, 7, 8), resident_blocks=((0,) * 4,) * 2,
                         host_blocks=(10, 11, 12, 13))
    large = RequestPages(first_page=0, num_tokens=16, indexer_blocks=(9,), resident_blocks=((0,),) * 2, host_blocks=(3,))
    for prefill, decode, source, target in (((4, 2), (16, 2), small, large), ((16, 2), (4, 2), large, small)):
        network = LoopbackNetwork()
        far, near = Side("p", network, layout=LAYOUTS[prefill]), Side("d", network, layout=LAYOUTS[decode], slot_pages=8)
        near.importers[0].submit(make_plan(far, source, target, Landing.HOST, block_size=decode[0], tail_rows=decode[0]))
        assert run_to_end(near.importers[0])[0].failure is None
        rows = [len(descriptors) for _, descriptors in near.transports[0].posted if descriptors[0, 2] == 16 * 64]
        assert rows == [SHAPE.num_layers]


@given(st.sampled_from([4, 8, 16, 64]), st.sampled_from([4, 8, 16, 64]), st.integers(0, 5), st.integers(1, 200))
def test_units_cover_each_token_once(source_size: int, target_size: int, first_page: int, count: int) -> None:
    first_token = first_page * target_size
    first, behind, skip = source_pages(first_token=first_token, num_tokens=first_token + count, block_size=source_size)
    units = match_units(num_tokens=count, source_skip=skip, source_block_size=source_size, target_block_size=target_size)
    far = [(first + s) * source_size + row + k for s, row in zip(units.source, units.source_row) for k in range(units.size)]
    near = [first_token + t * target_size + row + k for t, row in zip(units.target, units.target_row)
            for k in range(units.size)]
    assert far == near == list(range(first_token, first_token + len(units.source) * units.size))
    assert count <= len(far) < count + units.size
    assert units.source[-1] == behind - first - 1 and units.target[-1] == -(-count // target_size) - 1


# ------------------------------------------------------------------------------------ the handshake
def test_layouts_of_peers_are_what_the_peers_have() -> None:
    for layout in LAYOUTS.values():
        peers = PeerLayouts(layout)
        for other in LAYOUTS.values():
            mine = peers.of(Paging(other.block_size, other.num_resident_groups))
            assert mine.fingerprint() == other.fingerprint() and mine.row_fingerprint() == layout.row_fingerprint()
    assert len({layout.fingerprint() for layout in LAYOUTS.values()}) == len(LAYOUTS)
    fp8 = KVCacheLayout.build(SHAPE, block_size=16, row_format="auto", dtype="bfloat16", indexer_dtype="float32")
    assert fp8.repaged(block_size=16, num_groups=fp8.num_resident_groups) == fp8


@pytest.mark.parametrize("size", [3, 6, 12, 24, 40])
def test_pages_that_do_not_divide_are_refused_with_both_sizes(size: int) -> None:
    with pytest.raises(ProtocolError, match=rf"pages of {size} tokens, decode 16; one must be a multiple of the other"):
        PeerLayouts(LAYOUTS[16, 2]).of(Paging(size, 2))


def test_where_pages_must_be_cut_alike_others_are_refused() -> None:
    peers = PeerLayouts(LAYOUTS[16, 2], same_pages=True)
    assert peers.of(Paging(16, 2)) is LAYOUTS[16, 2]
    for paging, words in ((Paging(8, 2), "pages of 8 tokens in 2 groups, decode 16 in 2"), (Paging(16, 3), "in 3 groups")):
        with pytest.raises(ProtocolError, match=words):
            peers.of(paging)


def engines(prefill: tuple[int, int], decode: tuple[int, int], num_tokens: int) -> tuple[PDConnectorScheduler, dict[str, Any]]:
    side = Side("p", LoopbackNetwork(), layout=LAYOUTS[prefill])
    half = PDConnectorScheduler(LAYOUTS[prefill], PDConfig(), engine_id="p", incarnation=0xABC, num_ranks=1)
    half.set_endpoints(side.endpoints)
    count = LAYOUTS[prefill].pages(num_tokens)
    pages = pick_pages(3, count, num_tokens, resident=[True] * count, host=[True] * count, groups=prefill[1])
    params = half.grant("p-1", pages, side.ranks[0].generations_of(pages), prompt_digest="d" * 64)
    other = PDConnectorScheduler(LAYOUTS[decode], PDConfig(), engine_id="d", incarnation=1, num_ranks=1)
    return other, json.loads(json.dumps(params))


@pytest.mark.parametrize(("prefill", "decode", "first_page", "expected"), [
    ((4, 2), (8, 2), 0, (12, 0)), ((4, 2), (8, 2), 3, (6, 0)), ((16, 3), (4, 2), 5, (2, 4)), ((16, 3), (4, 2), 8, (1, 0)),
    ((4, 1), (16, 3), 2, (4, 0)), ((8, 2), (8, 3), 1, (5, 0))])
def test_a_plan_takes_the_source_pages_of_its_positions(prefill: tuple[int, int], decode: tuple[int, int], first_page: int,
                                                        expected: tuple[int, int]) -> None:
    """45 tokens; expected: number of source pages, rows skipped in the first."""
    half, params = engines(prefill, decode, 45)
    assert half.add_remote("d-1", params) == 45
    count = LAYOUTS[decode].pages(45) - first_page
    pages = pick_pages(9, count, 45, first_page=first_page, resident=[False] * count, host=[True] * count, groups=decode[1])
    half.start_import("d-1", ImportTarget(landing=Landing.HOST, pages=pages))
    command = half.build_metadata(1)
    assert command is not None
    (plan,) = command.imports
    assert (plan.source.num_pages, plan.source_skip) == expected and plan.source_paging == prefill
    assert plan.num_source_pages(decode[0]) == plan.source.num_pages
    assert plan.num_tokens(decode[0]) == 45 - first_page * decode[0]


def test_a_peer_whose_pages_do_not_divide_never_reaches_the_workers() -> None:
    half, params = engines((16, 3), (4, 2), 45)
    with pytest.raises(ProtocolError, match="pages of 6 tokens, decode 4"):
        half.add_remote("d-1", params | {"block_size": 6})
    assert half.stats().imports_failed == {"refused": 1} and half.build_metadata(1) is None
    assert LAYOUT.block_size == 4
