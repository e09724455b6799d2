"""The block pool against a plain model, and its rules one by one."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hisparse.cache.block_pool import BlockPool
from hisparse.errors import ConfigError, InvariantError


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    ids = pool.allocate(4)
    assert ids is not None
    assert sorted(ids.tolist()) == [1, 2, 3, 4] and ids.dtype == np.int32
    assert pool.allocate(1) is None
    pool.check()


def test_a_pool_without_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        BlockPool(1)


def test_hand_out_is_all_or_nothing() -> None:
    pool = BlockPool(5)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    assert pool.allocate(0).tolist() == []


def test_unpin_keeps_the_content_until_hand_out_and_fires_once_first() -> None:
    pool, fired = BlockPool(4), []
    blocks = pool.allocate(3).tolist()

    def watch(block: int) -> None:
        assert pool.is_free(block), "the watcher comes before the hand-out"
        fired.append(block)

    pool.unpin(blocks[:1], watch)
    assert (pool.num_free, pool.num_readable, fired) == (1, 1, [])
    pool.free(blocks[1:2])
    assert pool.allocate(1).tolist() == blocks[1:2], "ordinary free blocks go first, readable ones last"
    assert fired == []
    assert pool.allocate(1).tolist() == blocks[:1] and fired == [blocks[0]]
    pool.free(blocks[:1])
    pool.allocate(1)
    assert fired == [blocks[0]], "once"
    pool.check()


def test_a_watched_block_is_free_only_when_the_last_reference_goes_by_whichever_call() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1).tolist()
    pool.touch([block])
    pool.unpin([block], lambda _: None)
    assert (pool.num_free, pool.num_readable) == (1, 0)
    pool.free([block])
    assert (pool.num_free, pool.num_readable) == (2, 1)
    pool.check()


def test_touch_takes_from_the_middle_and_keeps_the_watcher() -> None:
    pool, fired = BlockPool(6), []
    blocks = pool.allocate(5).tolist()
    for block in blocks:
        pool.unpin([block], fired.append)
    pool.touch(blocks[2:3])
    assert pool.free_blocks() == [*blocks[:2], *blocks[3:]]
    pool.check()
    pool.free(blocks[2:3])
    assert pool.free_blocks()[-1] == blocks[2] and pool.is_watched(blocks[2])
    pool.allocate(5)
    assert sorted(fired) == blocks


def test_unwatch_makes_an_ordinary_block() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3).tolist()
    pool.unpin(blocks, lambda _: pytest.fail("unwatched"))
    pool.unwatch(blocks[1:])
    assert pool.num_readable == 1
    assert set(pool.allocate(2).tolist()) == set(blocks[1:])
    pool.check()


def test_a_watcher_may_unwatch_the_rest_of_its_page() -> None:
    pool = BlockPool(5)
    page = pool.allocate(4).tolist()
    pool.unpin(page, lambda block: pool.unwatch(b for b in page if b != block))
    assert len(pool.allocate(2)) == 2
    assert pool.num_readable == 0
    pool.check()


def test_a_watcher_may_take_along_a_block_that_was_chosen_already() -> None:
    """With `accept`, the choice is made before the first watcher is called."""
    pool = BlockPool(6)
    page = pool.allocate(4).tolist()
    pool.unpin(page, lambda block: pool.unwatch(b for b in page if b != block))
    taken = pool.allocate(3, lambda block: block in page)
    assert taken is not None and set(taken.tolist()) < set(page) and len(set(taken.tolist())) == 3
    assert (pool.num_free, pool.num_readable) == (2, 0)
    pool.check()


def test_the_latest_watcher_counts() -> None:
    """A watcher of its own gives way to the pool's standing one, and the other way round."""
    pool, standing, own = BlockPool(4), [], []
    pool.standing_watcher = standing.append
    blocks = pool.allocate(3).tolist()
    pool.watch(blocks, own.append)
    pool.watch(blocks[:1])
    pool.watch(blocks[1:2])
    pool.watch(blocks[1:2], own.append)
    pool.check()
    pool.free(blocks)
    pool.allocate(3)
    assert (standing, own) == (blocks[:1], blocks[1:])


def test_accept_restricts_the_choice_and_changes_nothing_on_refusal() -> None:
    pool = BlockPool(6)
    assert pool.allocate(3, lambda block: block % 2 == 0) is None
    assert pool.num_free == 5 and pool.take_handed_out() == ((), ())
    assert pool.allocate(2, lambda block: block % 2 == 0).tolist() == [2, 4]
    pool.check()


def test_generations_start_at_the_incarnation_and_grow_at_each_hand_out() -> None:
    pool = BlockPool(3, incarnation=2**64 - 1)
    (block,) = pool.allocate(1).tolist()
    assert pool.take_handed_out() == ((block,), (0,)), "wraps"
    for _ in range(2):
        pool.free([block])
        pool.allocate(1)
    assert pool.take_handed_out() == ((block,), (1,)), "once for each command that lists it"
    assert pool.take_handed_out() == ((), ())
    assert int(pool.generations[2]) == 2**64 - 1


def test_double_free_is_our_bug() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1).tolist()
    pool.free([block])
    with pytest.raises(InvariantError, match=f"block {block} was freed once more"):
        pool.free([block])
    with pytest.raises(InvariantError, match="not referenced"):
        pool.watch([block], lambda _: None)
    with pytest.raises(InvariantError, match=f"block {block} is neither referenced nor readable"):
        pool.touch([block])
    with pytest.raises(InvariantError, match="block 0 is neither referenced nor readable, or not in 1"):
        pool.touch([0])


def test_drop_readable_leaves_the_blocks_free() -> None:
    pool, fired = BlockPool(5), []
    blocks = pool.allocate(4).tolist()
    pool.unpin(blocks, fired.append)
    assert pool.drop_readable(2) == blocks[:2] == fired
    assert (pool.num_free, pool.num_readable) == (4, 2)
    pool.check()


@pytest.mark.parametrize("damage", ["refs", "count", "link", "readable"])
def test_check_finds_damage(damage: str) -> None:
    pool = BlockPool(5)
    block = int(pool.allocate(2)[0])
    if damage == "refs":
        pool._refs[block] = 0
    elif damage == "count":
        pool._plain.append(pool._plain[0])
    elif damage == "link":
        pool.unpin([block], lambda _: None)
        pool._prev[block] = 4
    else:
        pool.num_readable = 1
    with pytest.raises(InvariantError):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """The model: references per block, an ordered free list, a set of watched blocks."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, incarnation=7)
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.free = list(range(1, num_blocks))
        self.watched: set[int] = set()
        self.fired: list[int] = []
        self.expect_fired: list[int] = []
        self.gens = dict.fromkeys(range(1, num_blocks), 7)
        self.listed: set[int] = set()

    @rule()
    def list_handed_out(self) -> None:
        for block in self.listed:
            self.gens[block] += 1
        ids = tuple(sorted(self.listed))
        assert self.pool.take_handed_out() == (ids, tuple(self.gens[block] for block in ids))
        self.listed.clear()

    def held(self, data: st.DataObject) -> list[int]:
        blocks = sorted(b for b, n in self.refs.items() if n)
        return data.draw(st.lists(st.sampled_from(blocks), unique=True, max_size=4)) if blocks else []

    @rule(n=st.integers(0, 6))
    def allocate(self, n: int) -> None:
        got = self.pool.allocate(n)
        if n > len(self.free):
            assert got is None
            return
        assert got.tolist() == self.free[:n]
        for block in self.free[:n]:
            self.refs[block] = 1
            self.listed.add(block)
            if block in self.watched:
                self.watched.discard(block)
                self.expect_fired.append(block)
        del self.free[:n]

    def drop(self, blocks: list[int]) -> None:
        plain = []
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                if block in self.watched:
                    self.free.append(block)
                else:
                    plain.append(block)
        self.free[:0] = plain

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        blocks = self.held(data)
        self.pool.free(blocks)
        self.drop(blocks)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        blocks = self.held(data)
        self.pool.unpin(blocks, self.fired.append)
        self.watched.update(blocks)
        self.drop(blocks)

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True, max_size=4))
        gone = [block for block in blocks if not self.refs[block] and block not in self.watched]
        for block in gone:
            with pytest.raises(InvariantError, match=f"block {block} is neither referenced nor readable"):
                self.pool.touch([block])
        blocks = [block for block in blocks if block not in gone]
        self.pool.touch(blocks)
        for block in blocks:
            self.refs[block] += 1
            if block in self.free:
                self.free.remove(block)

    @rule(data=st.data())
    def unwatch(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.refs)), unique=True, max_size=4))
        self.pool.unwatch(blocks)
        for block in blocks:
            if block in self.watched and not self.refs[block]:
                self.free.remove(block)
                self.free.insert(0, block)
            self.watched.discard(block)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.free_blocks() == self.free
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_readable == len(self.watched & set(self.free))
        assert self.fired == self.expect_fired
        assert all(self.pool.refs(block) == n for block, n in self.refs.items())
        assert [int(g) for g in self.pool.generations[1:]] == list(self.gens.values())


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
