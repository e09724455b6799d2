"""The mirror kernel against the reference, over every byte of the host pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hisparse.errors import InvariantError
from hisparse.ops import reference
from hisparse.ops.status import NO_TARGET
from tests.gpu.host_memory import HostMemory
from tests.gpu.test_append import same_bytes
from tests.ops.mirror_world import MirrorWorld

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def memory() -> Iterator[HostMemory]:
    with HostMemory(512 << 20) as memory:
        yield memory


def run(world: MirrorWorld, memory: HostMemory, index: torch.dtype = torch.int64) -> list[int]:
    """Runs the kernel over a poisoned pool, compares it with the reference's bytes, and returns the status word."""
    from hisparse.ops.cuda import mirror_rows

    arguments = world.arguments("cuda")
    arguments |= {name: arguments[name].to(index) for name in ("seats", "positions")}
    held = memory.cpu[: world.host.nbytes]
    held.fill_(0xEE)
    status = torch.zeros(4, dtype=torch.int32, device="cuda")
    mirror_rows(**arguments, host_body=memory.cuda[: world.host.nbytes].view(world.host.shape), status=status)
    torch.cuda.synchronize()
    reference.mirror_rows(**world.arguments(), host_body=world.host)
    same_bytes(held, world.host, "host")
    return status.tolist()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("row_bytes", [16, 320, 656, 1152, 2304])
@pytest.mark.parametrize("num", [1, 3, 64, 256])
def test_bytes_are_the_references(num: int, row_bytes: int, index: torch.dtype, memory: HostMemory) -> None:
    for seed in range(2):
        assert run(MirrorWorld(num, seed=seed, row_bytes=row_bytes), memory, index) == [0, 0, 0, 0]


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_block_sizes_and_many_layers(block_size: int, memory: HostMemory) -> None:
    assert run(MirrorWorld(100, seed=3, num_layers=13, block_size=block_size, row_bytes=64), memory) == [0, 0, 0, 0]


def test_a_page_that_is_not_resident_is_left_out(memory: HostMemory) -> None:
    world = MirrorWorld(60, seed=1)
    world.table(1).zero_()
    assert run(world, memory) == [0, 0, 0, 0]


def test_a_mirror_outside_the_pool_is_reported_and_not_written(memory: HostMemory) -> None:
    from hisparse.ops.cuda import mirror_rows

    world = MirrorWorld(60, seed=2)
    world.mirror.fill_(world.num_host)
    memory.cpu.fill_(0xEE)
    status = torch.zeros(4, dtype=torch.int32, device="cuda")
    mirror_rows(**world.arguments("cuda"), host_body=memory.cuda[: world.host.nbytes].view(world.host.shape), status=status)
    torch.cuda.synchronize()
    assert status[0] == NO_TARGET and status[3] == world.num_host
    assert bool((memory.cpu == 0xEE).all())


def test_a_graph_follows_the_tables(memory: HostMemory) -> None:
    from hisparse.ops.cuda import mirror_rows

    world = MirrorWorld(64, seed=5)
    arguments = world.arguments("cuda")
    body = memory.cuda[: world.host.nbytes].view(world.host.shape)
    mirror_rows(**arguments, host_body=body)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mirror_rows(**arguments, host_body=body)
    for turn in range(3):
        world.mirror = world.mirror.roll(turn + 1, 1)
        arguments["mirror_table"].copy_(world.mirror)
        memory.cpu.fill_(0xEE)
        graph.replay()
        torch.cuda.synchronize()
        world.host.fill_(0xEE)
        reference.mirror_rows(**world.arguments(), host_body=world.host)
        same_bytes(memory.cpu[: world.host.nbytes], world.host, f"host, replay {turn}")


def test_b14_rows_beyond_two_gib() -> None:
    """Row 3,273,604 of 656 bytes starts at byte 2,147,484,224, on the device and on the host."""
    from hisparse.ops.cuda import mirror_rows

    blocks = 3_273_664 // 64 + 1
    with HostMemory(blocks * 64 * 656, 0xEE) as memory:
        rows = torch.zeros(blocks * 64, 656, dtype=torch.uint8, device="cuda")
        position = torch.tensor([3_273_603, 3_273_604, 3_273_663], device="cuda")
        rows[position] = torch.randint(0, 256, (3, 656), dtype=torch.uint8, device="cuda")
        table = torch.arange(blocks, dtype=torch.int32, device="cuda")[None]
        mirror_rows(torch.zeros(3, dtype=torch.int32, device="cuda"), position, torch.ones(3, dtype=torch.bool, device="cuda"),
                    torch.zeros(1, 3, dtype=torch.int64, device="cuda"), tables=table, resident_table=table, mirror_table=table,
                    block_size=64, rows_per_block=64, rows=rows, host_body=memory.cuda.view(-1, 656), host_rows=blocks * 64)
        torch.cuda.synchronize()
        assert torch.equal(rows[position].cpu(), memory.cpu.view(-1, 656)[position.cpu()])
        assert 3_273_604 * 656 == 2_147_484_224 and bool((memory.cpu[: 1 << 20] == 0xEE).all())


@pytest.mark.parametrize("wrong", [{"layers": torch.zeros(2, 2, dtype=torch.int64)}, {"tables": torch.zeros(4)},
                                   {"rows": torch.zeros(8, 20, dtype=torch.uint8)}])
def test_what_the_kernel_cannot_take_is_refused(wrong: dict[str, torch.Tensor], memory: HostMemory) -> None:
    from hisparse.ops.cuda import mirror_rows

    world = MirrorWorld(4, seed=0)
    arguments = world.arguments("cuda") | {name: value.cuda() for name, value in wrong.items()}
    with pytest.raises(InvariantError, match=next(iter(wrong))):
        mirror_rows(**arguments, host_body=memory.cuda[: world.host.nbytes].view(world.host.shape))
