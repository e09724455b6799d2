"""The copies out of staging that CUDA uses, over the CPU's operations: where every byte of a staged slot goes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hisparse.layout import KVCacheLayout
from hisparse.pd.commands import ImportPlan
from hisparse.pd.device_scatter import DeviceScatter
from hisparse.pd.loopback import LoopbackNetwork
from hisparse.pd.staging import SlotPool
from hisparse.types import Landing
from tests.pd.rig import LAYOUT, RankMemory, Side, make_plan, pick_pages

SLOT_PAGES, PAGES = 4, 6
MIRRORED = [True, False, True, True, False, True]
CHUNK = np.array([5, 1, 2], dtype=np.int64)
"""Pages of the plan in the slot, in this order."""


def plan_of(landing: Landing) -> ImportPlan:
    resident = [True] * PAGES if landing is Landing.RESIDENT else MIRRORED
    source = pick_pages(3, PAGES, PAGES * 4, resident=[True] * PAGES, host=[False] * PAGES)
    target = pick_pages(4, PAGES, PAGES * 4, resident=resident, host=[landing is Landing.HOST] * PAGES)
    return make_plan(Side("p", LoopbackNetwork()), source, target, landing)


def staged(layout: KVCacheLayout, slot: np.ndarray, place: int, layer: int, *, layered: bool) -> np.ndarray:
    """Bytes of one layer of the page at `place`, by the order that SlotCopies names."""
    size, group = layout.layer_page_bytes, layout.layer_group[layer]
    if layered:
        return slot[(layer * SLOT_PAGES + place) * size :][:size]
    within = [other for other in range(layout.shape.num_layers) if layout.layer_group[other] == group].index(layer)
    return slot[(group * SLOT_PAGES + place) * layout.block_bytes + within * size :][:size]


@pytest.mark.parametrize("layered", [True, False], ids=["layered", "grouped"])
@pytest.mark.parametrize("landing", list(Landing))
def test_a_slot_goes_where_the_plan_says_and_nowhere_else(landing: Landing, layered: bool) -> None:
    rank, plan = RankMemory(8), plan_of(landing)
    pool = SlotPool(2, SLOT_PAGES * LAYOUT.staged_page_bytes)
    pool.memory[:] = np.random.default_rng(0).integers(0, 256, pool.memory.shape, dtype=np.uint8)
    pool.tensor = torch.from_numpy(pool.memory)
    device, host = rank.snapshot()
    copies = DeviceScatter(rank.memory, SLOT_PAGES)
    assert all((a == b).all() for a, b in zip(rank.snapshot(), (device, host))), "loading kernels touches no page"
    copies.from_slot(plan, CHUNK, pool, 1, layered=layered, to_host=landing is Landing.HOST)
    for place, page in enumerate(CHUNK):
        for layer, group in enumerate(LAYOUT.layer_group):
            want = staged(LAYOUT, pool.memory[1], place, layer, layered=layered)
            if landing is Landing.HOST:
                host[layer, plan.destination.host[page]] = want
            block = plan.destination.resident[group, page]
            if block:
                start = LAYOUT.layer_byte_offset(layer)
                device[block, start : start + LAYOUT.layer_page_bytes] = want
    assert (rank.memory.device == device).all() and (rank.memory.host == host).all()


def test_mirrors_come_from_the_host_pages() -> None:
    rank, plan = RankMemory(9), plan_of(Landing.HOST)
    device, host = rank.snapshot()
    copies = DeviceScatter(rank.memory, SLOT_PAGES)
    copies.mirror_from_host(plan)
    for page in np.flatnonzero(MIRRORED):
        for layer, group in enumerate(LAYOUT.layer_group):
            start = LAYOUT.layer_byte_offset(layer)
            block = plan.destination.resident[group, page]
            device[block, start : start + LAYOUT.layer_page_bytes] = host[layer, plan.destination.host[page]]
    assert (rank.memory.device == device).all() and (rank.memory.host == host).all()
