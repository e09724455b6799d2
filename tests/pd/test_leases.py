"""Leases of the prefill side, and leases in use on the decode side, on a clock that only the test moves."""

from __future__ import annotations

import pytest

from hisparse.errors import InvariantError
from hisparse.pd.held import HeldLeases
from hisparse.pd.leases import MAX_REMEMBERED, LeaseTable
from hisparse.pd.loopback import LoopbackNetwork
from hisparse.pd.protocol import decode_notice
from tests.pd.rig import FakeClock, Side


def test_b27_lease_ends_by_time_and_renewal_extends_it() -> None:
    clock = FakeClock()
    table = LeaseTable(clock)
    table.open("a", "r1", 3.0)
    table.open("b", "r2", 3.0)
    for _ in range(10):
        clock.advance(1.0)
        table.renew("b")
        table.expire()
    assert table.take_ended() == ("r1",)
    assert len(table) == 1 and table.expired == 1
    clock.advance(2.99)
    table.expire()
    assert table.take_ended() == ()
    clock.advance(0.01)
    table.expire()
    assert table.take_ended() == ("r2",)
    table.check()


def test_release_ends_a_lease_once() -> None:
    table = LeaseTable(FakeClock())
    table.open("a", "r1", 3.0)
    table.release("a")
    table.release("a")
    table.expire()
    assert table.take_ended() == ("r1",)
    assert table.take_ended() == ()
    assert (table.released, table.expired) == (1, 0)
    table.open("b", "r1", 3.0)
    assert len(table) == 1, "a repeated release of an old lease does not end the next one of that request"
    table.check()


@pytest.mark.parametrize("by", ["lease", "request"])
def test_b30_release_that_comes_before_the_lease_is_remembered(by: str) -> None:
    clock = FakeClock()
    table = LeaseTable(clock, remember_s=60.0)
    if by == "lease":
        table.release("p-17")
    else:
        table.release_request("r1")
    clock.advance(59.0)
    table.open("p-17", "r1", 30.0)
    assert table.take_ended() == ("r1",) and len(table) == 0 and table.early_releases == 1
    table.open("p-18", "r1", 30.0)
    assert len(table) == 1, "it is used up"
    table.check()


def test_early_releases_are_forgotten_and_bounded() -> None:
    clock = FakeClock()
    table = LeaseTable(clock, remember_s=60.0)
    table.release("old")
    clock.advance(61.0)
    table.open("old", "r0", 30.0)
    assert len(table) == 1
    for i in range(MAX_REMEMBERED + 10):
        table.release(f"x{i}")
    table.open("x0", "r1", 30.0)
    table.open(f"x{MAX_REMEMBERED}", "r2", 30.0)
    assert table.take_ended() == ("r2",)
    table.renew("never seen")
    assert table.unknown_renewals == 1


def test_one_request_has_one_lease() -> None:
    table = LeaseTable(FakeClock())
    table.open("a", "r1", 3.0)
    with pytest.raises(InvariantError):
        table.open("b", "r1", 3.0)
    with pytest.raises(InvariantError):
        table.open("a", "r2", 3.0)


def notices(held: HeldLeases, current: int = 5) -> list[tuple[str, str]]:
    out = []
    for notice in held.take_notices(lambda peer, incarnation: (peer, incarnation) == ("p", current)):
        assert notice.endpoint.rank == 0
        message = decode_notice(notice.payload)
        out.append((message.kind, message.lease_id))
    return out


def test_heartbeats_every_third_of_the_lease_while_somebody_uses_it() -> None:
    clock = FakeClock()
    held = HeldLeases(clock)
    endpoint = Side("p", LoopbackNetwork()).endpoints[0]
    held.add("d-93", "p", 5, endpoint, "p-17", 30.0)
    assert notices(held) == []
    beats = 0
    for _ in range(60):
        clock.advance(1.0)
        beats += notices(held).count(("renew", "p-17"))
        held.check()
    assert beats == 6
    held.drop("d-93", "imported")
    assert notices(held) == [("release", "p-17")], "with P's id, not with D's"
    held.drop("d-93", "again")
    clock.advance(100.0)
    assert notices(held) == [] and not held.has_work()


def test_b30_lease_shared_by_siblings_is_released_with_the_last() -> None:
    held = HeldLeases(FakeClock())
    endpoint = Side("p", LoopbackNetwork()).endpoints[0]
    for i in range(3):
        held.add(f"d-{i}", "p", 5, endpoint, "p-17", 30.0)
    held.drop("d-1", "x")
    held.release_unheld("p", 5, endpoint, "p-17", "a sibling was refused")
    held.drop("d-0", "x")
    assert notices(held) == []
    held.drop("d-2", "x")
    assert notices(held) == [("release", "p-17")]
    held.check()


def test_b30_sibling_that_comes_before_the_release_was_sent_keeps_the_lease() -> None:
    held = HeldLeases(FakeClock())
    endpoint = Side("p", LoopbackNetwork()).endpoints[0]
    held.add("d-0", "p", 5, endpoint, "p-17", 30.0)
    held.drop("d-0", "imported")
    held.release_unheld("p", 5, endpoint, "p-18", "refused")
    held.add("d-1", "p", 5, endpoint, "p-17", 30.0)
    assert notices(held) == [("release", "p-18")], "the sibling needs p-17"
    held.drop("d-1", "imported")
    held.drop("d-1", "again")
    assert notices(held) == [("release", "p-17")]
    held.check()


def test_an_incarnation_that_is_gone_hears_nothing() -> None:
    """A notice opens its agent's connection, which would end that of the living incarnation."""
    clock = FakeClock()
    held = HeldLeases(clock)
    endpoint = Side("p", LoopbackNetwork()).endpoints[0]
    held.add("d-0", "p", 5, endpoint, "p-17", 30.0)
    held.add("d-1", "p", 6, endpoint, "p-18", 30.0)
    clock.advance(11.0)
    assert notices(held, current=6) == [("renew", "p-18")]
    held.drop("d-0", "imported")
    held.drop("d-1", "imported")
    held.release_unheld("p", 5, endpoint, "p-19", "refused")
    assert notices(held, current=6) == [("release", "p-18")]
    assert not held.has_work()
