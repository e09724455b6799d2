"""Extents and the host pool against plain models, and how well a request's blocks hang together after a long life."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hisparse.cache import host_blocks
from hisparse.cache.block_pool import BlockPool
from hisparse.cache.extents import Extents, num_runs
from hisparse.cache.host_blocks import EXTENT_BLOCKS, RESERVE, HostBlockPool
from hisparse.errors import InvariantError
from tests.cache.harness import Harness
from tests.cache.lives import live


def count_runs(blocks: list[int]) -> int:
    return sum(after != before + 1 for before, after in pairwise([-1, *blocks]))


def put(extents: Extents, blocks: list[int]) -> list[int]:
    """Everything but `blocks` is taken."""
    extents.take(len(extents))
    extents.extend(blocks)
    return blocks


# ------------------------------------------------------------------------------------------- rules one by one
def test_a_request_goes_on_behind_its_last_block() -> None:
    extents = Extents(64, 8)
    first = extents.take(3)
    other = extents.take(2)
    assert extents.take(2, after=first[-1]) == [first[-1] + 1, first[-1] + 2]
    assert other[0] % 8 == 0 and other[0] != first[0], "another request begins with an extent of its own"
    extents.check("x")


def test_a_place_is_chosen_with_room_for_what_is_promised() -> None:
    """There are rows of two and of four whole extents; 10 blocks fit the first, with 20 more to come only the second."""
    extents = Extents(80, 8)
    put(extents, [*range(8, 24), *range(40, 72)])
    assert extents.take(10, room=20) == list(range(40, 50))
    put(extents, [*range(8, 24), *range(40, 56)])
    assert extents.take(10, room=20) == list(range(8, 18)), "room is a wish only"


def test_without_a_long_row_the_longest_ones_serve() -> None:
    extents = Extents(200, 8)
    put(extents, [*range(8, 16), *range(24, 72), *range(80, 96), 101, 103])
    taken = extents.take(74)
    assert taken[:48] == list(range(24, 72)) and count_runs(taken) == 5
    extents.check("x")


def test_rests_are_taken_from_the_middle() -> None:
    """So that the request in front of a rest may go on."""
    extents = Extents(64, 8)
    put(extents, [10, 11, 12, 13, 14, 15, 33])
    assert extents.take(1) == [12]
    assert extents.take(2, after=9) == [10, 11]


def test_the_last_extent_may_be_cut_off() -> None:
    for num_blocks in range(2, 40):
        extents = Extents(num_blocks, 8)
        extents.check("x")
        assert sorted(extents.take(num_blocks - 1)) == list(range(1, num_blocks)) and len(extents) == 0
        extents.extend(list(range(1, num_blocks)))
        extents.check("x")


def test_many_blocks_come_back_at_once() -> None:
    extents = Extents(5000, 16)
    taken = extents.take(4000)
    back = random.Random(0).sample(taken, 1500)
    extents.extend(back)
    extents.check("x")
    assert set(extents) == set(back) | (set(range(1, 5000)) - set(taken))


@pytest.mark.parametrize("size", [0, 256])
def test_the_size_of_an_extent_fits_a_byte(size: int) -> None:
    with pytest.raises(InvariantError, match="1 to 255"):
        Extents(1000, size)


@pytest.mark.parametrize(("damage", "words"), [
    (lambda extents: extents._free.__setitem__(0, 1), "the null block is free"),
    (lambda extents: extents._free.__setitem__(9, 2), "more than once"),
    (lambda extents: extents._free.__setitem__(9, 0), "extent 1 counts 8 free blocks, it has 7"),
    (lambda extents: extents._room.__setitem__(2, 7), "extent 2 counts 7 free blocks, it has 8"),
    (lambda extents: setattr(extents, "_count", 3), "3 free blocks counted, there are 63"),
])
def test_check_finds_damage(damage, words: str) -> None:
    extents = Extents(64, 8)
    damage(extents)
    with pytest.raises(InvariantError, match=words):
        extents.check("host")


@pytest.mark.parametrize("first", [0, 1, 60])
@pytest.mark.parametrize("length", [60, 61, 300])
def test_runs_are_counted_alike_few_or_many(first: int, length: int) -> None:
    rng = random.Random(length)
    blocks = [rng.randrange(1, 1000)]
    while len(blocks) < length:
        blocks.append(blocks[-1] + 1 if rng.random() < 0.7 else rng.randrange(1, 1000))
    whole = array("i", blocks)
    assert num_runs(whole, first) == sum(at == 0 or blocks[at] != blocks[at - 1] + 1 for at in range(first, length))
    assert num_runs(whole, 0) == num_runs(whole[:first], 0) + num_runs(whole, first)


# ------------------------------------------------------------------------------------------- models
class ExtentsMachine(RuleBasedStateMachine):
    """The model: the set of free blocks, and what a hand-out promises about their places."""

    @initialize(num_blocks=st.integers(2, 90), size=st.sampled_from([1, 3, 4, 8]))
    def start(self, num_blocks: int, size: int) -> None:
        self.extents, self.size, self.num_blocks = Extents(num_blocks, size), size, num_blocks
        self.free = set(range(1, num_blocks))

    def rows(self) -> list[list[int]]:
        """Whole extents, neighbours together."""
        rows: list[list[int]] = []
        for extent in range(self.num_blocks // self.size):
            if all(block in self.free for block in range(extent * self.size, (extent + 1) * self.size)):
                if rows and rows[-1][-1] == extent - 1:
                    rows[-1].append(extent)
                else:
                    rows.append([extent])
        return rows

    @rule(share=st.floats(0, 1), small=st.booleans(), after=st.integers(0, 89), room=st.integers(0, 30))
    def take(self, share: float, small: bool, after: int, room: int) -> None:
        after %= self.num_blocks
        n = min(len(self.free), int(share * (5 if small else len(self.free))))
        following = []
        while after and len(following) < n and after + 1 + len(following) in self.free:
            following.append(after + 1 + len(following))
        self.free.difference_update(following)
        rows, rest = self.rows(), n - len(following)
        got = self.extents.take(n, after=after, room=room)
        assert got[: len(following)] == following
        got = got[len(following) :]
        assert len(got) == len(set(got)) == rest and set(got) <= self.free
        if rest and rows:
            longest = max(map(len, rows))
            assert got[0] % self.size == 0 and any(got[0] // self.size in row for row in rows)
            if longest * self.size >= rest:
                assert count_runs(got) == 1
            else:
                head = next((at for at, (a, b) in enumerate(pairwise(got), 1) if b != a + 1), len(got))
                assert head * 2 >= longest * self.size
            if longest * self.size >= rest + room:
                place = next(row for row in rows if got[0] // self.size in row)
                assert (place[-1] + 1) * self.size - got[0] >= rest + room
        self.free.difference_update(got)

    @rule(data=st.data(), share=st.floats(0, 1))
    def give_back(self, data: st.DataObject, share: float) -> None:
        taken = sorted(set(range(1, self.num_blocks)) - self.free)
        back = data.draw(st.permutations(taken))[: int(share * len(taken))]
        self.extents.extend(back)
        self.free.update(back)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "free"):
            self.extents.check("model")
            assert list(self.extents) == sorted(self.free) and len(self.extents) == len(self.free)
            assert self.extents.num_whole == sum(map(len, self.rows()))
            assert all((block in self.extents) == (block in self.free) for block in range(self.num_blocks))


class HostPoolMachine(RuleBasedStateMachine):
    """The model: references, free blocks, readable ones oldest first."""

    @initialize(num_blocks=st.integers(2, 200), small=st.booleans())
    def start(self, num_blocks: int, small: bool) -> None:
        with patch.object(host_blocks, "SMALL_POOL_BLOCKS", num_blocks + small):
            self.pool = HostBlockPool(num_blocks, incarnation=7, name="host")
        self.reserve = 0 if small else num_blocks // RESERVE
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.free, self.readable = set(self.refs), list[int]()
        self.watched: set[int] = set()
        self.fired: list[int] = []
        self.pool.standing_watcher = self.fired.append

    @rule(n=st.integers(0, 40), after=st.integers(0, 199), room=st.integers(0, 8))
    def take(self, n: int, after: int, room: int) -> None:
        del self.fired[:]
        got = self.pool.take(n, after=after % (len(self.refs) + 1), room=room)
        if n > len(self.free) + len(self.readable):
            assert got is None and not self.fired
            return
        evicted = list(self.fired)
        assert len(evicted) == len(set(evicted)) and set(evicted) <= set(self.readable)
        assert len(evicted) <= max(0, n + self.reserve - len(self.free)), "no more than the hand-out and the reserve need"
        if self.readable and evicted:
            assert evicted[0] == self.readable[0]
        self.readable = [block for block in self.readable if block not in set(evicted)]
        self.watched.difference_update(evicted)
        self.free.update(evicted)
        assert len(got) == len(set(got)) == n and set(got) <= self.free
        self.free.difference_update(got)
        for block in got:
            self.refs[block] = 1

    def held(self, data: st.DataObject) -> list[int]:
        blocks = sorted(block for block, count in self.refs.items() if count)
        return data.draw(st.lists(st.sampled_from(blocks), unique=True, max_size=30)) if blocks else []

    @rule(data=st.data(), keep=st.booleans())
    def give_back(self, data: st.DataObject, keep: bool) -> None:
        blocks = self.held(data)
        if keep:
            self.pool.watch(blocks)
            self.watched.update(blocks)
        self.pool.free(blocks)
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                if block in self.watched:
                    self.readable.append(block)
                else:
                    self.free.add(block)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.readable), unique=True)) if self.readable else []
        self.pool.touch(blocks)
        for block in blocks:
            self.refs[block] += 1
            self.readable.remove(block)

    @rule(data=st.data())
    def unwatch(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.watched)), unique=True)) if self.watched else []
        self.pool.unwatch(blocks)
        self.watched.difference_update(blocks)
        self.free.update(block for block in blocks if block in self.readable)
        self.readable = [block for block in self.readable if block not in blocks]

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.free_blocks() == [*sorted(self.free), *self.readable]
            assert (self.pool.num_free, self.pool.num_readable) == (len(self.free) + len(self.readable), len(self.readable))
            assert all(self.pool.refs(block) == count for block, count in self.refs.items())


ExtentsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
HostPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestExtentsMachine = ExtentsMachine.TestCase
TestHostPoolMachine = HostPoolMachine.TestCase


def test_what_the_device_pool_offers_to_outside_writers_is_refused() -> None:
    pool = HostBlockPool(40, name="host")
    with pytest.raises(InvariantError, match="of its choice"):
        pool.take(1, lambda block: True)
    with pytest.raises(InvariantError, match="nobody waits"):
        pool.drop_readable(1)


# ------------------------------------------------------------------------------------------- long lives
def churn(pool: BlockPool, *, num_requests: int, cached: bool, seed: int, steps: int = 1500) -> float:
    """Mean length of the runs of live requests after many have come, grown a page at a time side by side, and gone.
    `cached`: what they leave stays readable."""
    rng, live = random.Random(seed), list[tuple[list[int], int]]()
    extents = isinstance(pool, HostBlockPool)
    pool.standing_watcher = lambda block: None
    for _ in range(steps):
        while len(live) < num_requests:
            pages, target = rng.randrange(16, 160), rng.randrange(4, 80)
            live.append((pool.take(pages, after=0, room=16) if extents else pool.take(pages), pages + target))
        for blocks, _ in rng.sample(live, num_requests // 4):
            blocks += pool.take(1, after=blocks[-1]) if extents else pool.take(1)
        for blocks, _ in [request for request in live if len(request[0]) >= request[1]]:
            if cached:
                pool.watch(blocks[:-1])
            pool.free(reversed(blocks))
        live = [request for request in live if len(request[0]) < request[1]]
    pool.check()
    return sum(len(blocks) for blocks, _ in live) / sum(count_runs(blocks) for blocks, _ in live)


@pytest.mark.parametrize("cached", [False, True], ids=["free", "cached"])
@pytest.mark.parametrize("num_blocks", [6000, 12_000])
def test_blocks_of_a_request_stay_together(num_blocks: int, cached: bool) -> None:
    """40 requests of about 110 pages fill most of the pool, or half. A stack scatters the same lives."""
    mean = churn(HostBlockPool(num_blocks, name="host"), num_requests=40, cached=cached, seed=num_blocks)
    assert mean >= EXTENT_BLOCKS * 0.75, mean
    assert churn(BlockPool(num_blocks), num_requests=40, cached=cached, seed=num_blocks) < mean / 3


def test_requests_that_grow_side_by_side_do_not_interleave() -> None:
    """Through the manager: the gauges are those of the pages."""
    h = Harness(device_blocks=400, host_blocks=200, max_model_len=96, seats=4, groups=1)
    for i in range(4):
        h.add(f"r{i}", [100 * i + token for token in range(24)], 60)
    for _ in range(40):
        h.step()
    stats = h.manager.stats()
    assert stats.requests_admitted == 4 and stats.host_pages == sum(
        len(h.manager.page_views(f"r{i}")) for i in range(4))
    assert stats.host_runs == sum(
        count_runs([view.host for view in h.manager.page_views(f"r{i}")]) for i in range(4))
    assert stats.host_pages / stats.host_runs >= 6, (stats.host_pages, stats.host_runs)


@pytest.mark.parametrize("seed", range(12))
def test_lives_in_a_pool_that_evicts_early(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random lives are small; here their pools behave like large ones. Every law holds after every move."""
    monkeypatch.setattr(host_blocks, "SMALL_POOL_BLOCKS", 0)
    monkeypatch.setattr(host_blocks, "EXTENT_BLOCKS", 2 + seed % 3)
    live(seed, 200)
