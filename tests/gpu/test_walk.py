"""The random life of tests/worker/test_walk.py with every kernel, on a device whose copies are held up."""

from __future__ import annotations

import pytest
import torch

from hisparse.worker import Place
from tests.gpu.gate import Gate
from tests.worker.test_walk import World, live

pytestmark = pytest.mark.gpu
LOADED_STEPS = 12
"""Nothing is held up before: loading a kernel for the first time waits for the whole device."""


class CudaWorld(World):
    """Copies wait at a gate on the DMA stream. Attention in float32: sums in another order than the reference's."""

    atol, rtol = 2e-5, 2e-4

    def __init__(self, seed: int, num_groups: int) -> None:
        self.gate = Gate()
        super().__init__(seed, num_groups, "cuda", wide=True)

    def pause(self) -> None:
        if self.rig.worker._step > LOADED_STEPS:
            self.gate.hold(self.rig.parts.streams.raw(Place.DMA))

    def resume(self) -> None:
        self.gate.open()


@pytest.mark.parametrize(("seed", "num_groups", "drafts"), [(0, 2, False), (1, 4, False), (2, 1, False), (3, 2, True)])
def test_random_life_equals_dense_attention(seed, num_groups, drafts):
    world = CudaWorld(seed, num_groups)
    if drafts:
        world.rows, world.regions = (3,), (8,)
    try:
        live(world)
        assert world.refused or not drafts
    finally:
        world.gate.open()
        torch.cuda.synchronize()
