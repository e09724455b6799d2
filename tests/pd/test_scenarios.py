"""Reported failures of other systems between prefill and decode, with the reports' own numbers. Labels as in the list."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hisparse.config import PDConfig
from hisparse.errors import ProtocolError
from hisparse.layout import KVCacheLayout
from hisparse.pd.connector import PDConnectorScheduler
from hisparse.pd.loopback import LoopbackNetwork
from hisparse.pd.paging import match_units, source_pages
from hisparse.pd.protocol import decode_notice
from hisparse.types import ImportTarget, Landing
from tests.pd.rig import LAYOUT, SHAPE, FakeClock, Side, expected_page, make_plan, pick_pages, run_to_end
from tests.pd.test_connector import SOURCE, Pair, network, pair, start, until  # noqa: F401
from tests.pd.test_scheduler import Engine, sent, target


@pytest.mark.parametrize(("far", "pages", "last_rows"), [(64, 501, 19), (32, 1001, 19), (16, 2002, 3), (4, 8005, 3)])
def test_b03_prompt_of_32019_tokens_from_pages_of_any_size(far: int, pages: int, last_rows: int) -> None:
    """Decode pages of 64: 501 of them, the last with 19 rows and 45 holes, whatever prefill's pages are."""
    first, behind, skip = source_pages(first_token=0, num_tokens=32_019, block_size=far)
    assert (first, behind, skip, 32_019 - (pages - 1) * far) == (0, pages, 0, last_rows)
    units = match_units(num_tokens=32_019, source_skip=0, source_block_size=far, target_block_size=64)
    assert units.target[-1] == 500 and units.source[-1] == pages - 1
    assert 32_019 <= units.source.size * units.size < 32_019 + far
    layout = KVCacheLayout.build(SHAPE, block_size=64, dtype="float32")
    assert layout.pages(32_019) == 501 and 32_019 - 500 * 64 == 19


def test_b27_read_after_the_lease_ended_and_its_pages_were_given_away() -> None:
    """Lease 3 s, freed at 3.0 s, given to another request at 3.5 s, read at 4 s; and renewed every second, read at 10 s."""
    for renewed in (False, True):
        clock, side_network = FakeClock(), LoopbackNetwork()
        prefill, decode = Side("p", side_network, seed=1), Side("d", side_network, seed=2, clock=clock)
        half = PDConnectorScheduler(LAYOUT, PDConfig(lease_s=3.0), engine_id="p", incarnation=0xABC, num_ranks=1, clock=clock)
        other = PDConnectorScheduler(LAYOUT, PDConfig(), engine_id="d", incarnation=1, num_ranks=1, clock=clock)
        half.set_endpoints(prefill.endpoints)
        source = pick_pages(3, 5, 18, resident=[True] * 5, host=[False] * 5)
        goal = pick_pages(9, 5, 18, resident=[False] * 5, host=[True] * 5)
        plan = make_plan(prefill, source, goal, Landing.HOST, tail_rows=2)
        other.add_remote("d-93", half.grant("p-17", source, prefill.ranks[0].generations_of(source), prompt_digest="d" * 64))
        for second in range(1, 11 if renewed else 5):
            clock.advance(1.0)
            command = other.build_metadata(second)
            beats = [decode_notice(notice.payload) for notice in command.notices] if command else []
            for beat in beats if renewed else ():
                assert beat.kind == "renew"
                half._leases.renew(beat.lease_id)
            if half.take_expired():
                assert second == 3 and not renewed
                for block in (*source.indexer_blocks, *source.resident_blocks[0], *source.resident_blocks[1]):
                    prefill.ranks[0].cache.generations[block] += 1
                    prefill.ranks[0].memory.device[block] = 0xEE
        before = decode.ranks[0].pool.row_masks.copy()
        decode.importers[0].submit(plan)
        (ack,) = run_to_end(decode.importers[0])
        if renewed:
            assert ack.failure is None
            for i in range(5):
                assert (decode.ranks[0].host_row(0, goal.host_blocks[i]) == expected_page(prefill.ranks[0], source, i, 0)).all()
        else:
            assert ack.failure is not None and ack.failure.value == "generation"
            assert (decode.ranks[0].pool.row_masks == before).all(), "no row of the other request can be selected"


def test_b28_twenty_rejected_requests_leave_room_for_the_next() -> None:
    """200 blocks, 20 requests of 12 blocks, all refused by decode before admission: each frees prefill at once. One that
    decode never heard of is freed by its lease."""
    prefill, decode = Engine("p", lease_s=30.0), Engine("d")
    free, held = 200, {}
    for i in range(20):
        assert free >= 12, f"request {i} finds {free} free blocks"
        free, held[f"p-{i}"] = free - 12, 12
        decode.pd.reject_remote(prefill.grant(f"p-{i}"), "the template does not fit")
        decode.clock.advance(0.9)
        prefill.clock.advance(0.9)
        prefill.hear(*(decode_notice(notice.payload) for notice in decode.build().notices))
        free += sum(held.pop(name) for name in prefill.pd.take_expired())
        assert free == 200
    prefill.grant("p-lost")
    prefill.clock.advance(29.0)
    assert prefill.pd.take_expired() == ()
    prefill.clock.advance(1.0)
    assert prefill.pd.take_expired() == ("p-lost",) and prefill.pd.stats().leases_released == 20


def test_b30_eight_prefill_ranks_two_decode_ranks_and_three_siblings() -> None:
    """Decode ranks read prefill ranks 0 and 4; one release, by prefill's id and after the last sibling, frees all eight."""
    prefill, decode = Engine("p", num_ranks=8), Engine("d", num_ranks=2)
    params = prefill.grant("p-17")
    for name in ("d-93", "d-94", "d-95"):
        decode.pd.add_remote(name, params)
    decode.pd.start_import("d-93", target())
    command = decode.build()
    assert [endpoint.rank for endpoint in command.imports[0].sources] == [0, 4]
    events = [decode.pd.update([decode.ack(1, rank)]) for rank in (1, 0)]
    assert events[1].loaded == {"d-93"}
    assert sent(decode.build()) == [], "the siblings have not read yet"
    for name in ("d-94", "d-95"):
        decode.pd.release_unused(name, "the whole prefix is already here")
    last = decode.build()
    assert sent(last) == [("release", params["lease_id"])] and last.notices[0].endpoint.rank == 0
    prefill.hear(decode_notice(last.notices[0].payload))
    assert prefill.pd.take_expired() == ("p-17",) and not prefill.pd.has_pending_work()


def test_b31_three_refusals_a_restart_and_a_transfer_of_ten_deadlines() -> None:
    stranger, decode = Engine("q", fingerprint="f" * 32), Engine("d", transfer_deadline_s=2.0)
    for i in range(3):
        with pytest.raises(ProtocolError, match="fingerprint"):
            decode.pd.add_remote(f"d-{i}", stranger.grant(f"q-{i}"))
    assert decode.build() is None and decode.pd.stats().imports_failed == {"refused": 3}, "no rank hears of them"
    clock, side_network = FakeClock(), LoopbackNetwork()
    near = Side("d", side_network, seed=2, clock=clock)
    source = pick_pages(3, 5, 20, resident=[True] * 5, host=[False] * 5)
    goal = pick_pages(9, 5, 20, resident=[False] * 5, host=[True] * 5)
    old = Side("p", side_network, seed=1)
    near.importers[0].submit(make_plan(old, source, goal, Landing.HOST))
    assert run_to_end(near.importers[0])[0].failure is None
    side_network.kill(old.endpoints[0].agent)
    new = Side("p", side_network, seed=3, incarnation=0xDEF)
    near.importers[0].submit(make_plan(new, source, goal, Landing.HOST, job_id=2))
    assert run_to_end(near.importers[0])[0].failure is None and near.importers[0].peers.handshakes == 2
    near.importers[0].submit(make_plan(old, source, goal, Landing.HOST, job_id=3))
    assert run_to_end(near.importers[0])[0].failure.value == "refused", "a handle of the old incarnation"
    near.faults.hang = lambda number: True
    near.importers[0].submit(make_plan(new, source, goal, Landing.HOST, job_id=4, deadline_s=2.0))
    ended_s = None
    for tenth in range(200):
        clock.advance(0.1)
        near.importers[0].pump()
        (ack,) = near.importers[0].take_acks() or (None,)
        if ack is not None:
            ended_s = (tenth + 1) / 10
            assert ack.failure is not None and ack.failure.value == "timeout"
            assert near.transports[0].aborted > 0, "its READs were over before the pages were handed back"
    assert ended_s is not None and 2.0 <= ended_s <= 3.2, "at the deadline and a second to drain, not after ten of them"


def test_b40_drain_cancels_imports_and_tells_prefill(pair: Pair) -> None:  # noqa: F811
    """Two imports hang when the replica goes: prefill is told within a second, the imports drain, then the transport closes."""
    prefill, decode = pair
    decode.faults.hang = lambda number: True
    for i in (1, 2):
        start(prefill, decode, str(i), seed=6 + i)
    decode.step()
    for i in (1, 2):
        decode.scheduler.request_closed(f"d-{i}")
    assert until(lambda: len(prefill.ended) == 2, prefill, decode) < 1.0
    until(lambda: len(decode.drained) == 2, decode)
    assert not decode.scheduler.has_pending_work() and not decode.loaded
    for rank in decode.ranks:
        rank.shutdown()


def test_vllm_50297_an_empty_page_list_is_no_prefix_of_nothing() -> None:
    """A prefill that was preempted in its last step hands over nothing: decode fails the attempt, and prefill frees it."""
    prefill, decode = Engine("p"), Engine("d")
    params: dict[str, Any] = json.loads(json.dumps(prefill.grant("p-1")))
    params["num_tokens"] = 0
    with pytest.raises(ProtocolError, match="failed prefill, not an absent prefix"):
        decode.pd.add_remote("d-1", params)
    assert decode.pd.remote_tokens("d-1") == 0 and not decode.pd.loading()


def test_dynamo_7489_a_cancel_under_an_active_transfer_frees_both_sides(pair: Pair) -> None:  # noqa: F811
    prefill, decode = pair
    decode.faults.delay_polls = 5
    goal = start(prefill, decode, "1")
    decode.step()
    decode.scheduler.request_closed("d-1")
    until(lambda: decode.drained and prefill.ended, prefill, decode)
    decode.faults.delay_polls = 0
    decode.pd.add_remote("d-2", prefill.pd.grant("p-2", SOURCE, prefill.memories[0].generations_of(SOURCE),
                                                  prompt_digest="d" * 64))
    decode.pd.start_import("d-2", ImportTarget(landing=Landing.HOST, pages=goal))
    until(lambda: decode.loaded, decode)
    assert decode.loaded == ["d-2"]
