"""Prefill and decode on CUDA that cut the same tokens into other pages: every row, and tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from hisparse.pd.copies import CopyEvent, copy_now
from hisparse.types import Landing
from tests.gpu import pd_world
from tests.gpu.engine_world import move_to_cuda
from tests.gpu.pd_world import Half
from tests.integration.nixl_prefill import SEED, PrefillProcess
from tests.parity import rig
from tests.parity.conftest import make_rig  # noqa: F401
from tests.parity.test_paging import test_imports_of_other_pages_give_the_same_tokens  # noqa: F401
from tests.pd.device_rank import DeviceRank
from tests.pd.paging_case import LAYOUTS, PAIRS, Case, World, check_rows
from tests.pd.rig import RankMemory, pick_pages

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
NUM_TOKENS = 45
NUMBERS = itertools.count(1)
WAYS = [pytest.param(landing, path, id=f"{landing.value}-{path}") for landing, path in
        ((Landing.RESIDENT, "staged"), (Landing.HOST, "staged"), (Landing.HOST, "direct"))]


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cuda":
        move_to_cuda(monkeypatch, graphs=True, modules=(rig,))


def copy_and_wait(copy: Callable[[], None]) -> CopyEvent:
    copy()
    torch.cuda.synchronize()
    return copy_now(lambda: None)


GPU = World(DeviceRank, copy_engine=copy_and_wait)


@pytest.mark.parametrize(("landing", "path"), WAYS)
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
@pytest.mark.parametrize("first_page", [0, 2])
def test_every_row_arrives_at_its_position(prefill: tuple[int, int], decode: tuple[int, int], landing: Landing, path: str,
                                           first_page: int) -> None:
    case = Case(prefill, decode, num_tokens=NUM_TOKENS, first_page=first_page, landing=landing, direct=path == "direct",
                num_ranks=2, world=GPU)
    assert [ack.reason for ack in case.run()] == ["", ""]
    case.check()


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[tuple[int, int], PrefillProcess]]:
    """By paging."""
    pytest.importorskip("nixl", reason="needs NIXL")
    started = {paging: PrefillProcess(f"p-{paging[0]}-{paging[1]}", 5, device=pd_world.FAR, paging=paging, lease_s=30.0)
               for paging in dict.fromkeys(prefill for prefill, _ in PAIRS)}
    yield started
    for process in started.values():
        process.end()


@pytest.mark.parametrize(("landing", "path"), WAYS)
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_nixl_between_two_processes(processes: dict[tuple[int, int], PrefillProcess], prefill: tuple[int, int],
                                    decode: tuple[int, int], landing: Landing, path: str) -> None:
    """Some of decode's pages come from prefill's GPU and from its host pool, both."""
    far, near, rng = LAYOUTS[prefill], LAYOUTS[decode], np.random.default_rng(3)
    count, last, name = far.pages(NUM_TOKENS), near.pages(NUM_TOKENS), f"{decode}-{landing.value}-{path}"
    held = [True, False, *rng.integers(0, 2, max(count - 2, 0)).astype(bool).tolist()][:count]
    source = pick_pages(3, count, NUM_TOKENS, resident=held, host=[not here for here in held], groups=prefill[1])
    mirrored = [landing is Landing.RESIDENT or page in (0, last - 1) for page in range(last)]
    target = pick_pages(4, last, NUM_TOKENS, resident=mirrored,
                        host=[landing is Landing.HOST] * last, groups=decode[1])
    half = Half("d", 2, role="decode", device=pd_world.NEAR, layout=near, incarnation=next(NUMBERS), landing_path=path)
    try:
        half.start_at(name, processes[prefill].grant(name, source), landing, target)
        assert half.outcome(name) == ""
        check_rows(RankMemory(SEED, layout=far), source, half.memory, target, range(NUM_TOKENS),
                   to_host=landing is Landing.HOST)
        if landing is Landing.HOST:
            masks = half.memory.pool.row_masks[list(target.host_blocks)]
            rows = NUM_TOKENS - (last - 1) * near.block_size
            assert [int(mask) for mask in masks] == [(1 << near.block_size) - 1] * (last - 1) + [(1 << rows) - 1]
    finally:
        half.close()
