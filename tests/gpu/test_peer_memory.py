"""GPU memory of another process: mapped, read by the kernel, and what cannot be mapped."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from tests.gpu.full_gpu import full_gpu

pytestmark = pytest.mark.gpu
SIZE, LEAD = 8 << 20, 4096
"""Bytes that the other process shares, and bytes in front of them in the same tensor."""


def content() -> torch.Tensor:
    return torch.arange((LEAD + SIZE) // 4, dtype=torch.int32).view(torch.uint8)


def share(pipe: Connection) -> None:
    from hisparse.ops.cuda.peer_memory import PeerMemory

    device = torch.device("cuda", torch.cuda.device_count() - 1)
    torch.cuda.set_device(device)
    memory = content().to(device)
    torch.cuda.synchronize()
    pipe.send(PeerMemory(device).export(memory.data_ptr() + LEAD, SIZE))
    pipe.recv()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[bytes, int]]:
    context = mp.get_context("spawn")
    pipe, far = context.Pipe()
    process = context.Process(target=share, args=(far,), daemon=True)
    process.start()
    assert pipe.poll(90), "the other process did not start"
    yield pipe.recv()
    pipe.send("stop")
    process.join(20)


def test_pieces_of_any_length_arrive_and_nothing_else_is_written(shared: tuple[bytes, int]) -> None:
    from hisparse.ops.cuda.peer_memory import PeerMemory

    gpu, (handle, offset) = PeerMemory(torch.device("cuda", 0)), shared
    base, size = gpu.open(handle)
    assert size >= offset + SIZE
    sizes = np.array([16, 32, 4096, 64 << 10, 656 * 64, 656 * 64 * 3, 256 << 10, (1 << 20) + 16, 16])
    rng = np.random.default_rng(7)
    for _ in range(3):
        order = rng.permutation(len(sizes))
        far = offset + np.concatenate([[0], np.cumsum(sizes + 48)[:-1]])
        near = np.empty(len(sizes), dtype=np.int64)
        near[order] = np.concatenate([[0], np.cumsum(sizes[order] + 16)[:-1]])
        target = torch.full((4 << 20,), 0xA5, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        event = gpu.read(np.stack([base + far, target.data_ptr() + near, sizes], axis=1))
        event.synchronize()
        want, source = torch.full((4 << 20,), 0xA5, dtype=torch.uint8), content()
        for f, n, num in zip((far - offset + LEAD).tolist(), near.tolist(), sizes.tolist(), strict=True):
            want[n : n + num] = source[f : f + num]
        assert torch.equal(target.cpu(), want)
    gpu.wait()
    gpu.close(base)
    again, _ = gpu.open(handle)
    gpu.close(again)


def test_what_cannot_be_shared_or_mapped_is_an_error_and_leaves_the_device_usable() -> None:
    from hisparse.errors import InvariantError
    from hisparse.ops.cuda.driver import DriverError
    from hisparse.ops.cuda.peer_memory import HANDLE_BYTES, PeerMemory

    gpu = PeerMemory(torch.device("cuda", 0))
    own = torch.ones(1 << 20, dtype=torch.uint8, device="cuda:0")
    handle, _ = gpu.export(own.data_ptr(), own.nbytes)
    with pytest.raises(DriverError):
        gpu.open(handle)
    with pytest.raises(DriverError):
        gpu.open(bytes(HANDLE_BYTES))
    with pytest.raises(InvariantError, match="allocation"):
        gpu.export(own.data_ptr(), 1 << 40)
    pinned = torch.ones(4096, dtype=torch.uint8).pin_memory()
    with pytest.raises((DriverError, InvariantError)):
        gpu.export(pinned.data_ptr(), 4096)
    assert int((own + own).sum()) == 2 * own.numel()


def test_a_full_gpu_takes_a_read_of_any_number_of_pieces(shared: tuple[bytes, int]) -> None:
    from hisparse.ops.cuda.peer_memory import PeerMemory

    gpu, (handle, offset) = PeerMemory(torch.device("cuda", 0)), shared
    base, _ = gpu.open(handle)
    target, source = torch.zeros(SIZE, dtype=torch.uint8, device="cuda:0"), content()[LEAD:]
    for num, size in ((1, 4096), (128, 4096), (129, 4096), (1360, 4096), (1361, 2048), (4000, 2048)):
        order, starts = np.random.default_rng(num).permutation(num), np.arange(num, dtype=np.int64) * size
        target.zero_()
        torch.cuda.synchronize()
        with full_gpu():
            with pytest.raises(torch.cuda.OutOfMemoryError):
                torch.empty(num * 24, dtype=torch.uint8, device="cuda:0")
            event = gpu.read(np.stack([base + offset + starts[order], target.data_ptr() + starts, np.full(num, size)], axis=1))
        event.synchronize()
        got = target.cpu()
        assert torch.equal(got[: num * size].view(num, size), source[: num * size].view(num, size)[order])
        assert not got[num * size :].any()
    gpu.close(base)
