"""Scheduler half of the P/D connector: what it promises for any order of acknowledgements, aborts and restarts."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from hisparse.config import PDConfig
from hisparse.errors import ConfigError, InvariantError, ProtocolError
from hisparse.layout import KVCacheLayout
from hisparse.pd.commands import ImportAck, ImportFailure, PDOutput
from hisparse.pd.connector import PDConnectorScheduler
from hisparse.pd.landings import LandingLog
from hisparse.pd.loopback import LoopbackNetwork
from hisparse.pd.protocol import Notice, decode_notice, encode_notice
from hisparse.types import ImportTarget, Landing, PageGenerations, RequestPages
from tests.pd.rig import GROUPS, LAYOUT, FakeClock, Side, pick_pages

PAGES, TOKENS = 5, 18
INC = 0xABC


DIGEST = "d" * 64


class Engine:
    """A scheduler half over ranks that exist only as endpoints."""

    def __init__(self, name: str, *, num_ranks: int = 1, incarnation: int = INC, clock: FakeClock | None = None,
                 fingerprint: str | None = None, **config: Any) -> None:
        mark = (lambda _: fingerprint) if fingerprint else KVCacheLayout.fingerprint
        self.clock = clock or FakeClock()
        self.side = Side(name, LoopbackNetwork(), num_ranks=num_ranks, incarnation=incarnation)
        self.num_ranks, self.incarnation, self.steps = num_ranks, incarnation, 0
        self.pd = PDConnectorScheduler(LAYOUT, PDConfig(**config), engine_id=name, incarnation=incarnation,
                                       num_ranks=num_ranks, clock=self.clock, fingerprint=mark)
        self.pd.set_endpoints(self.side.endpoints)

    def grant(self, request_id: str) -> dict[str, Any]:
        pages = pick_pages(3, PAGES, TOKENS, resident=[True] * PAGES, host=[True] * PAGES)
        generations = self.side.ranks[0].generations_of(pages)
        return json.loads(json.dumps(self.pd.grant(request_id, pages, generations, prompt_digest=DIGEST)))

    def build(self) -> Any:
        self.steps += 1
        self.pd.check()
        return self.pd.build_metadata(self.steps)

    def ack(self, job_id: int, rank: int = 0, failure: ImportFailure | None = None, incarnation: int | None = None) -> PDOutput:
        return PDOutput(rank=rank, incarnation=incarnation or self.incarnation,
                        acks=(ImportAck(job_id=job_id, failure=failure, reason="why" if failure else ""),))

    def hear(self, *notices: Notice) -> None:
        self.pd.update([PDOutput(rank=0, incarnation=self.incarnation,
                                 notices=tuple(encode_notice(notice) for notice in notices))])


def target(landing: Landing = Landing.HOST, first_page: int = 0, num_tokens: int = TOKENS) -> ImportTarget:
    count = LAYOUT.pages(num_tokens) - first_page
    pages = pick_pages(9, count, num_tokens, first_page=first_page, resident=[landing is Landing.RESIDENT] * count,
                       host=[True] * count)
    return ImportTarget(landing=landing, pages=pages)


def sent(command: Any) -> list[tuple[str, str]]:
    return [] if command is None else [(decode_notice(n.payload).kind, decode_notice(n.payload).lease_id)
                                       for n in command.notices]


# ------------------------------------------------------------------------------------ prefill side


def test_lease_ends_by_release_or_time_and_its_request_is_named_once() -> None:
    prefill = Engine("p", lease_s=30.0)
    first, second = prefill.grant("p-1"), prefill.grant("p-2")
    assert first["lease_id"] != second["lease_id"]
    assert prefill.pd.has_pending_work()
    prefill.hear(Notice(kind="release", lease_id=first["lease_id"]))
    assert prefill.pd.take_expired() == ("p-1",)
    prefill.clock.advance(20.0)
    prefill.hear(Notice(kind="renew", lease_id=second["lease_id"]))
    prefill.clock.advance(29.0)
    assert prefill.pd.take_expired() == ()
    prefill.clock.advance(1.0)
    assert prefill.pd.take_expired() == ("p-2",)
    assert not prefill.pd.has_pending_work()
    stats = prefill.pd.stats()
    assert (stats.leases_granted, stats.leases_released, stats.leases_expired) == (2, 1, 1)


def test_empty_page_list_is_a_failure_on_both_sides() -> None:
    prefill, decode = Engine("p"), Engine("d")
    nothing = RequestPages(first_page=0, num_tokens=0, indexer_blocks=(), resident_blocks=((),) * GROUPS, host_blocks=())
    generations = PageGenerations(indexer=(), resident=((),) * GROUPS, host=())
    params = prefill.pd.grant("p-1", nothing, generations, prompt_digest=DIGEST)
    assert prefill.pd.take_expired() == ("p-1",) and prefill.pd.stats().leases_held == 0
    with pytest.raises(ProtocolError, match="empty page list"):
        decode.pd.add_remote("d-1", params)
    assert decode.pd.remote_tokens("d-1") == 0 and decode.build() is None


def test_grant_refuses_what_cannot_be_leased() -> None:
    prefill = Engine("p")
    pages = pick_pages(3, 3, TOKENS, resident=[True] * 3, host=[True] * 3)
    with pytest.raises(InvariantError, match="3 pages for 18 tokens"):
        prefill.pd.grant("p-1", pages, prefill.side.ranks[0].generations_of(pages), prompt_digest=DIGEST)
    partial = pick_pages(3, 4, TOKENS, first_page=1, resident=[True] * 4, host=[True] * 4)
    with pytest.raises(InvariantError, match="whole prompts"):
        prefill.pd.grant("p-1", partial, prefill.side.ranks[0].generations_of(partial), prompt_digest=DIGEST)
    bare = PDConnectorScheduler(LAYOUT, PDConfig(), engine_id="x", incarnation=1, num_ranks=1)
    with pytest.raises(InvariantError, match="set_endpoints"):
        bare.grant("p-1", pages, prefill.side.ranks[0].generations_of(pages), prompt_digest=DIGEST)
    with pytest.raises(ProtocolError, match="ranks 0..1"):
        PDConnectorScheduler(LAYOUT, PDConfig(), engine_id="x", incarnation=1, num_ranks=2).set_endpoints(
            prefill.side.endpoints)


def test_b30_client_gone_before_the_grant_frees_the_pages_at_once() -> None:
    prefill = Engine("p")
    prefill.pd.release_request("p-17")
    prefill.grant("p-17")
    assert prefill.pd.take_expired() == ("p-17",)
    assert prefill.pd.stats().early_releases == 1


def test_junk_notices_are_counted_and_change_nothing() -> None:
    prefill = Engine("p")
    prefill.grant("p-1")
    prefill.pd.update([PDOutput(rank=0, incarnation=INC, notices=(b"junk", b'{"v":3,"kind":"release","lease":"other"}'))])
    assert prefill.pd.take_expired() == () and prefill.pd.stats().bad_notices == 1


# ------------------------------------------------------------------------------------ decode side


def test_import_is_planned_once_and_loaded_when_every_rank_acknowledged() -> None:
    prefill, decode = Engine("p", num_ranks=8), Engine("d", num_ranks=2)
    params = prefill.grant("p-17")
    assert decode.pd.add_remote("d-93", params) == TOKENS == decode.pd.remote_tokens("d-93")
    goal = target()
    decode.pd.start_import("d-93", goal)
    assert decode.pd.remote_tokens("d-93") == 0 and decode.pd.loading() == {"d-93"}
    (plan,) = decode.build().imports
    assert [source.rank for source in plan.sources] == [0, 4], "each decode rank reads from one prefill rank"
    assert plan.destination.host.tolist() == list(goal.pages.host_blocks)
    assert plan.source.indexer.tolist() != plan.destination.indexer.tolist()
    assert (plan.tail_rows, plan.landing) == (2, Landing.HOST)
    assert decode.build() is None
    assert decode.pd.update([decode.ack(plan.job_id, rank=1)]).loaded == frozenset()
    events = decode.pd.update([decode.ack(plan.job_id, rank=1), decode.ack(plan.job_id, rank=0)])
    assert events.loaded == {"d-93"} and not events.failed
    assert decode.pd.stats().late_acks_ignored == 1
    command = decode.build()
    assert sent(command) == [("release", params["lease_id"])], "P's id; rank 0 only, so no unread rank waits"
    assert command.notices[0].endpoint == prefill.side.endpoints[0]
    assert not decode.pd.has_pending_work()


def test_target_behind_a_local_prefix_reads_only_the_rest() -> None:
    prefill, decode = Engine("p"), Engine("d")
    decode.pd.add_remote("d-1", prefill.grant("p-1"))
    decode.pd.start_import("d-1", target(Landing.RESIDENT, first_page=3, num_tokens=16))
    (plan,) = decode.build().imports
    source = pick_pages(3, PAGES, TOKENS, resident=[True] * PAGES, host=[True] * PAGES)
    assert plan.source.indexer.tolist() == [source.indexer_blocks[3]]
    assert plan.source.resident.tolist() == [[group[3]] for group in source.resident_blocks]
    assert plan.tail_rows == 4


def test_nothing_to_read_is_loaded_at_once_and_released() -> None:
    prefill, decode = Engine("p"), Engine("d")
    params = prefill.grant("p-1")
    decode.pd.add_remote("d-1", params)
    decode.pd.start_import("d-1", ImportTarget(landing=Landing.HOST, pages=RequestPages(
        first_page=4, num_tokens=16, indexer_blocks=(), resident_blocks=((),) * GROUPS, host_blocks=())))
    assert decode.pd.loading() == {"d-1"} and decode.pd.has_pending_work()
    assert decode.pd.update([]).loaded == {"d-1"}
    assert sent(decode.build()) == [("release", params["lease_id"])]
    assert decode.pd.update([]).loaded == frozenset()


def test_failed_rank_cancels_the_others_and_fails_when_all_are_drained() -> None:
    prefill, decode = Engine("p"), Engine("d", num_ranks=3)
    first = prefill.grant("p-1")
    decode.pd.add_remote("d-1", first)
    decode.pd.choose_landing("d-1", False, True)
    decode.pd.start_import("d-1", target())
    (plan,) = decode.build().imports
    assert not decode.pd.update([decode.ack(plan.job_id, 1, ImportFailure.GENERATION)]).failed
    assert decode.build().cancels == (plan.job_id,)
    assert not decode.pd.update([decode.ack(plan.job_id, 0)]).failed
    events = decode.pd.update([decode.ack(plan.job_id, 2, ImportFailure.CANCELLED)])
    assert events.failed == {"d-1": "rank 1: generation: why"} and not events.loaded
    assert decode.pd.stats().imports_failed == {"generation": 1}
    assert decode.pd.remote_tokens("d-1") == 0, "given up: the policy decides now"
    assert sent(decode.build()) == [("release", first["lease_id"])], "prefill need not wait for the lease to run out"
    with pytest.raises(InvariantError, match="failed"):
        decode.pd.start_import("d-1", target())
    decode.pd.add_remote("d-1", prefill.grant("p-2"))
    assert decode.pd.choose_landing("d-1", True, True) is Landing.HOST, "kept through failure and retry"
    assert decode.pd.remote_tokens("d-1") == TOKENS


def test_refused_answer_releases_its_lease_when_it_can_be_read() -> None:
    prefill, decode = Engine("p"), Engine("d")
    params = prefill.grant("p-1")
    params["pages"]["indexer"] = params["pages"]["indexer"][:8]
    with pytest.raises(ProtocolError):
        decode.pd.add_remote("d-1", params)
    assert sent(decode.build()) == [("release", params["lease_id"])]
    decode.pd.reject_remote(prefill.grant("p-2"), "unknown model")
    decode.pd.reject_remote({"version": 1}, "junk")
    decode.pd.reject_remote(None, "junk")
    assert [kind for kind, _ in sent(decode.build())] == ["release"]


def test_b31_peer_of_another_layout_never_reaches_the_workers() -> None:
    prefill, decode = Engine("p", fingerprint="f" * 32), Engine("d")
    for i in range(3):
        with pytest.raises(ProtocolError, match="fingerprint"):
            decode.pd.add_remote(f"d-{i}", prefill.grant(f"p-{i}"))
        assert decode.pd.remote_tokens(f"d-{i}") == 0
    assert decode.build() is None and not decode.pd.has_pending_work()
    assert decode.pd.stats().imports_failed == {"refused": 3}


def test_b31_answers_of_an_earlier_incarnation_are_refused_after_a_restart() -> None:
    old, new, decode = Engine("p", incarnation=1), Engine("p", incarnation=2), Engine("d")
    stale = old.grant("p-1")
    decode.pd.add_remote("d-0", old.grant("p-0"))
    decode.pd.add_remote("d-1", new.grant("p-1"))
    with pytest.raises(ProtocolError, match="restarted"):
        decode.pd.add_remote("d-2", stale)
    assert decode.pd.remote_tokens("d-1") == TOKENS


@pytest.mark.parametrize("order", list(itertools.permutations(["ack0", "ack1", "close"])))
def test_b17_abort_and_acknowledgements_in_any_order_end_the_load_once(order: tuple[str, ...]) -> None:
    prefill, decode = Engine("p"), Engine("d", num_ranks=2)
    params = prefill.grant("p-1")
    decode.pd.add_remote("d-1", params)
    decode.pd.start_import("d-1", target())
    (plan,) = decode.build().imports
    loaded, drained, notices = [], [], []
    for event in order:
        if event == "close":
            decode.pd.request_closed("d-1")
            decode.pd.request_closed("d-1")
        else:
            events = decode.pd.update([decode.ack(plan.job_id, rank=int(event[-1]))])
            loaded += events.loaded
            drained += events.drained
            assert not events.failed
        decode.pd.check()
        notices += sent(decode.build())
    if order[-1] == "close":
        assert (loaded, drained) == (["d-1"], [])
    else:
        assert (loaded, drained) == ([], ["d-1"])
    assert notices == [("release", params["lease_id"])]
    assert not decode.pd.has_pending_work()
    again = decode.pd.update([decode.ack(plan.job_id, rank=0)])
    assert not again.loaded and not again.drained and decode.pd.stats().late_acks_ignored == 1


def test_b18_hundred_aborts_half_way_leave_nothing_behind() -> None:
    prefill, decode = Engine("p"), Engine("d", num_ranks=2)
    rng, late, pinned, drained = random.Random(0), [], 0, 0
    for i in range(100):
        decode.pd.add_remote(f"d-{i}", prefill.grant(f"p-{i}"))
        decode.pd.start_import(f"d-{i}", target())
        pinned += 1
        if rng.random() < 0.2:
            decode.pd.request_closed(f"d-{i}")  # before any worker saw it
        command = decode.build()
        decode.pd.request_closed(f"d-{i}")
        for plan in command.imports if command else ():
            late += [(i + 3, plan.job_id, 0), (i + 3 + rng.randrange(3), plan.job_id, 1)]
        due, late = [entry for entry in late if entry[0] <= i], [entry for entry in late if entry[0] > i]
        failure = rng.choice([None, ImportFailure.CANCELLED, ImportFailure.TIMEOUT])
        drained += len(decode.pd.update([decode.ack(job, rank, failure) for _, job, rank in due]).drained)
        decode.pd.check()
    drained += len(decode.pd.update([decode.ack(job, rank) for _, job, rank in late]).drained)
    assert (pinned, drained) == (100, 100)
    assert not decode.pd.loading() and decode.pd.stats().imports_in_flight == 0
    decode.build()
    assert not decode.pd.has_pending_work()


def test_closed_before_it_was_sent_drains_without_a_worker() -> None:
    prefill, decode = Engine("p"), Engine("d", num_ranks=2)
    params = prefill.grant("p-1")
    decode.pd.add_remote("d-1", params)
    decode.pd.start_import("d-1", target())
    decode.pd.request_closed("d-1")
    command = decode.build()
    assert command.imports == () and command.cancels == () and sent(command) == [("release", params["lease_id"])]
    assert decode.pd.update([]).drained == ("d-1",)
    assert not decode.pd.has_pending_work()


def test_b30_siblings_share_one_lease_and_release_it_with_the_last() -> None:
    prefill, decode = Engine("p"), Engine("d")
    params = prefill.grant("p-17")
    for i in range(3):
        decode.pd.add_remote(f"d-{i}", params)
    decode.pd.start_import("d-0", target())
    (plan,) = decode.build().imports
    decode.pd.update([decode.ack(plan.job_id)])
    decode.pd.release_unused("d-1", "has the prefix now")
    assert sent(decode.build()) == []
    decode.pd.release_unused("d-2", "has the prefix now")
    decode.pd.release_unused("d-2", "again")
    assert sent(decode.build()) == [("release", "0000000000000abc-1")]


def test_heartbeats_while_a_request_waits() -> None:
    prefill, decode = Engine("p", lease_s=30.0), Engine("d")
    params = prefill.grant("p-1")
    decode.pd.add_remote("d-1", params)
    for second in range(1, 91):
        decode.clock.advance(1.0)
        prefill.clock.advance(1.0)
        beats = sent(decode.build())
        assert beats == ([("renew", params["lease_id"])] if second % 10 == 0 else [])
        prefill.hear(*(Notice(kind=kind, lease_id=lease) for kind, lease in beats))
        assert prefill.pd.take_expired() == ()
    decode.pd.request_closed("d-1")
    assert sent(decode.build()) == [("release", params["lease_id"])]


def test_restarted_workers_end_leases_and_imports() -> None:
    prefill, decode = Engine("p"), Engine("d", num_ranks=2)
    for name in ("a", "b"):
        decode.pd.add_remote(f"d-{name}", prefill.grant(f"p-{name}"))
        decode.pd.start_import(f"d-{name}", target())
    plans = decode.build().imports
    decode.pd.request_closed("d-b")
    decode.pd.update([decode.ack(plans[0].job_id, rank=0)])
    decode.pd.workers_restarted(INC + 1, decode.side.endpoints)
    events = decode.pd.update([decode.ack(plans[0].job_id, rank=1)])
    assert events.failed == {"d-a": "restarted: the workers restarted during the import"}
    assert events.drained == ("d-b",) and not events.loaded
    assert decode.pd.stats().late_acks_ignored == 1
    decode.pd.check()
    prefill.grant("p-held")
    prefill.pd.workers_restarted(INC + 1, prefill.side.endpoints)
    assert "p-held" in prefill.pd.take_expired()


def test_workers_hear_of_no_incarnation_but_the_last() -> None:
    """An answer that was taken before prefill's restart was seen: no import, no heartbeat, no release for it. Each would end
    the living incarnation's connection, and its agent would be refused for a while."""
    old, decode = Engine("p"), Engine("d")
    new = Engine("p", incarnation=INC + 1)
    decode.pd.add_remote("d-1", old.grant("p-1"))
    decode.pd.add_remote("d-2", new.grant("p-2"))
    decode.pd.start_import("d-1", target())
    assert decode.pd.loading() == {"d-1"}
    assert decode.pd.update([]).failed == {"d-1": "restarted: prefill engine p has restarted since it answered; its pages "
                                                  "are gone"}
    decode.clock.advance(11.0)
    command = decode.build()
    assert not command.imports and [kind for kind, _ in sent(command)] == ["renew"]
    assert command.notices[0].endpoint.agent.startswith(f"p/{INC + 1:016x}")
    assert decode.pd.remote_tokens("d-1") == 0 and decode.pd.stats().imports_failed == {"restarted": 1}


def nothing() -> ImportTarget:
    pages = RequestPages(first_page=PAGES, num_tokens=TOKENS, indexer_blocks=(), resident_blocks=((),) * GROUPS, host_blocks=())
    return ImportTarget(landing=Landing.RESIDENT, pages=pages)


def test_an_import_of_nothing_fails_with_the_ranks_that_hold_the_prefix() -> None:
    prefill, decode = Engine("p"), Engine("d")
    params = prefill.grant("p-1")
    decode.pd.add_remote("d-1", params)
    decode.pd.start_import("d-1", nothing())
    decode.pd.workers_restarted(INC + 1, decode.side.endpoints)
    events = decode.pd.update([])
    assert not events.loaded and events.failed["d-1"].startswith("restarted")
    assert decode.pd.remote_tokens("d-1") == 0
    assert sent(decode.build()) == [("release", params["lease_id"])]


@pytest.mark.parametrize("restart", [False, True])
def test_a_request_closed_before_its_end_was_reported_is_drained_once(restart: bool) -> None:
    """Whoever saw it loading waits for its end."""
    prefill, decode = Engine("p"), Engine("d")
    decode.pd.add_remote("d-1", prefill.grant("p-1"))
    decode.pd.start_import("d-1", target() if restart else nothing())
    if restart:
        decode.pd.workers_restarted(INC + 1, decode.side.endpoints)
    assert decode.pd.loading() == {"d-1"}
    decode.pd.request_closed("d-1")
    assert decode.pd.loading() == frozenset() and decode.pd.has_pending_work()
    events = decode.pd.update([])
    assert events.drained == ("d-1",) and not events.loaded and not events.failed
    assert decode.pd.update([]).drained == ()


def test_answer_for_a_longer_prompt_is_refused_and_released() -> None:
    prefill, decode = Engine("p"), Engine("d")
    params = prefill.grant("p-1")
    with pytest.raises(ProtocolError, match="18 tokens for a prompt of 17"):
        decode.pd.add_remote("d-1", params, num_prompt_tokens=17)
    assert sent(decode.build()) == [("release", params["lease_id"])]
    assert decode.pd.add_remote("d-1", prefill.grant("p-2"), num_prompt_tokens=18) == TOKENS
    with pytest.raises(ConfigError, match="engine_id"):
        PDConnectorScheduler(LAYOUT, PDConfig(), engine_id="x" * 300, incarnation=1, num_ranks=1)


def test_answer_for_another_prompt_is_refused_and_released() -> None:
    prefill, decode = Engine("p"), Engine("d")
    params = prefill.grant("p-1")
    with pytest.raises(ProtocolError, match="another prompt or cache salt"):
        decode.pd.add_remote("d-1", params, num_prompt_tokens=TOKENS, digest_of=lambda tokens: "e" * 64)
    assert sent(decode.build()) == [("release", params["lease_id"])]
    assert decode.pd.add_remote("d-1", prefill.grant("p-2"), digest_of={TOKENS: DIGEST}.__getitem__) == TOKENS


def test_impossible_calls_are_our_bugs() -> None:
    prefill, decode = Engine("p"), Engine("d")
    with pytest.raises(InvariantError, match="nothing to import"):
        decode.pd.start_import("d-1", target())
    params = prefill.grant("p-1")
    decode.pd.add_remote("d-1", params)
    with pytest.raises(InvariantError, match="do not fit"):
        decode.pd.start_import("d-1", target(num_tokens=24))
    decode.pd.start_import("d-1", target())
    with pytest.raises(InvariantError, match="importing"):
        decode.pd.add_remote("d-1", params)
    with pytest.raises(InvariantError, match="never planned"):
        decode.pd.update([decode.ack(7)])


# ------------------------------------------------------------------------------------ the log of landings


def test_every_import_is_logged_once_with_its_outcome() -> None:
    prefill, decode = Engine("p"), Engine("d", num_ranks=2)
    for name, landing in (("good", Landing.RESIDENT), ("bad", Landing.HOST), ("closed", Landing.HOST), ("early", Landing.HOST)):
        decode.pd.add_remote(name, prefill.grant(f"p-{name}"), num_prompt_tokens=TOKENS)
        decode.pd.start_import(name, target(landing))
        if name == "early":
            decode.pd.request_closed(name)  # before any rank heard of it
            continue
        (plan,) = decode.build().imports
        if name == "closed":
            decode.pd.request_closed(name)
        failure = ImportFailure.GENERATION if name == "bad" else ImportFailure.CANCELLED if name == "closed" else None
        for rank in range(2):
            ack = ImportAck(job_id=plan.job_id, failure=failure if rank else None, reason="page 3 " * 200 if failure else "",
                            num_bytes=1000 + rank, seconds=0.5 + rank)
            decode.pd.update([PDOutput(rank=rank, incarnation=INC, acks=(ack,))])
    junk = prefill.grant("p-junk") | {"layout": "other"}
    with pytest.raises(ProtocolError):
        decode.pd.add_remote("junk", junk | {"version": 99}, num_prompt_tokens=TOKENS)
    log = decode.pd.landing_log()
    assert [(item["request_id"], item["landing"], item["failure"]) for item in reversed(log)] == [
        ("good", "resident", ""), ("bad", "host", "generation"), ("closed", "host", "cancelled"),
        ("early", "host", "cancelled"), ("junk", "", "refused")]
    good, bad = log[-1], log[-2]
    assert (good["tokens"], good["num_bytes"], good["seconds"], good["peer"]) == (TOKENS, 2001, 1.5, "p")
    assert bad["reason"].startswith("page 3") and len(bad["reason"]) <= 300
    assert json.loads(json.dumps(log)) == log and [item["number"] for item in log] == [5, 4, 3, 2, 1]


def test_the_log_of_landings_is_bounded() -> None:
    log = LandingLog(lambda: 7.0)
    for i in range(1000):
        log.add(f"r{i}", failure="timeout")
    newest = log.newest()
    assert len(newest) == 32 and newest[0]["number"] == 1000 and newest[0]["at_s"] == 7.0
