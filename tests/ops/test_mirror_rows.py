"""mirror_rows of the reference against plain loops: which rows reach the host, and that nothing else there changes."""

from __future__ import annotations

import pytest
import torch

from hisparse.errors import InvariantError
from hisparse.ops import reference
from tests.ops.mirror_world import MirrorWorld


@pytest.mark.parametrize(("num", "block_size"), [(1, 64), (7, 4), (200, 16)])
def test_rows_reach_their_mirrors_and_nothing_else_changes(num: int, block_size: int) -> None:
    for seed in range(5):
        world = MirrorWorld(num, seed=seed, block_size=block_size, row_bytes=32)
        want = world.expected()
        reference.mirror_rows(**world.arguments(), host_body=world.host)
        assert torch.equal(world.host, want)


def test_a_page_that_is_not_resident_is_left_out() -> None:
    world = MirrorWorld(60, seed=1, row_bytes=32)
    world.table(1).zero_()
    want = world.expected()
    reference.mirror_rows(**world.arguments(), host_body=world.host)
    assert torch.equal(world.host, want)
    assert bool((world.host[world.host_rows : 2 * world.host_rows] == 0xEE).all()), "layer 1 is of group 1"


def test_a_mirror_outside_the_pool_is_refused() -> None:
    world = MirrorWorld(60, seed=2, row_bytes=32)
    world.mirror.fill_(world.num_host)
    with pytest.raises(InvariantError, match=f"host block {world.num_host}, but there are {world.num_host}"):
        reference.mirror_rows(**world.arguments(), host_body=world.host)
    assert bool((world.host == 0xEE).all())
