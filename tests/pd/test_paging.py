"""Different pages on the two sides: every row arrives at its position, from the right peer page, and nowhere else."""

from __future__ import annotations

import json
from typing import Any

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
from tests.pd.fake_gpu import FAKE_GPU
from tests.pd.paging_case import CPU, LAYOUTS, PAIRS, UNEQUAL, Case, World
from tests.pd.rig import LAYOUT, SHAPE, Side, make_plan, pick_pages, run_to_end


@pytest.mark.parametrize("world", [CPU, FAKE_GPU], ids=["cpu", "fake gpu"])
@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("landing", list(Landing), ids=lambda landing: landing.value)
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_every_row_arrives_at_its_position(prefill: tuple[int, int], decode: tuple[int, int], landing: Landing,
                                           direct: bool, world: World) -> None:
    case = Case(prefill, decode, num_tokens=45, landing=landing, direct=direct, world=world)
    (ack,) = case.run()
    assert ack.failure is None, ack.reason
    case.check()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_paging_prompt_length_and_first_page(data: st.DataObject) -> None:
    """Also where the packed allocations count as a GPU's, so that no READ may mix memory, and a page may come from both."""
    prefill, decode = data.draw(st.sampled_from(UNEQUAL))
    num_tokens = data.draw(st.integers(1, 56))
    first_page = data.draw(st.integers(0, (num_tokens - 1) // decode[0]))
    case = Case(prefill, decode, num_tokens=num_tokens, first_page=first_page, landing=data.draw(st.sampled_from(Landing)),
                direct=data.draw(st.booleans()), slot_pages=data.draw(st.sampled_from([1, 2, 3])),
                seed=data.draw(st.integers(0, 1000)), num_ranks=data.draw(st.sampled_from([1, 2])),
                world=data.draw(st.sampled_from([CPU, FAKE_GPU])))
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
