"""The host pool in the device's address space: chunks, both directions, two processes, failures that leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch

from hisparse.errors import ConfigError
from hisparse.layout import KVCacheLayout
from hisparse.ops.cuda import mapped
from hisparse.worker import HostPool, host_memory
from tests.worker.rig import make_layout, make_shape

pytestmark = pytest.mark.gpu
PAGE = 4096
CUDA = torch.device("cuda", 0)


def layout(dtype: str = "float32") -> KVCacheLayout:
    return make_layout(dtype=dtype, block_size=64, wide=True)


@pytest.fixture
def pool():
    pool = HostPool.private(layout(), 40, poison=True)
    yield pool
    torch.cuda.synchronize()
    pool.close()


@pytest.fixture
def shm():
    """A folder in memory: a mapped file can be registered only there."""
    with tempfile.TemporaryDirectory(dir=host_memory.SHM) as path:
        yield Path(path)


def check_both_ways(pool: HostPool, first: float = 0.0) -> None:
    for layer in range(pool.layout.shape.num_layers):
        here, there = pool.rows(layer), pool.device_rows(layer)
        assert there.is_cuda and there.shape == here.shape and there.dtype == here.dtype and there.stride() == here.stride()
        here[77] = first + layer
        there[78] = first + layer + 0.5
    torch.cuda.synchronize()
    for layer in range(pool.layout.shape.num_layers):
        assert float(pool.device_rows(layer)[77, 3]) == first + layer
        assert float(pool.rows(layer)[78, 3]) == first + layer + 0.5


@pytest.mark.parametrize(("chunk_bytes", "num_chunks"), [(3 * PAGE, 94), (10 * PAGE, 28), (1 << 30, 1)])
def test_kernels_and_cpu_see_the_same_bytes_across_chunks(pool, chunk_bytes, num_chunks):
    pool.pin("cuda", chunk_bytes=chunk_bytes)
    assert pool.is_pinned and pool._pinned.num_chunks == num_chunks
    check_both_ways(pool)
    body = pool.device_body
    assert body.data_ptr() == pool.device_rows(0).data_ptr() and body.shape[0] == 7 * 40 * 64
    generator = torch.Generator().manual_seed(0)
    content = torch.randn(body.shape, generator=generator)
    every = torch.arange(body.shape[0], device="cuda")
    body.index_copy_(0, every, content.cuda())
    index = torch.randperm(body.shape[0], generator=generator).cuda()
    assert torch.equal(body.index_select(0, index), content.cuda().index_select(0, index))
    torch.cuda.synchronize()
    assert torch.equal(torch.cat([pool.rows(layer) for layer in range(7)]), content)
    body.index_fill_(0, index[:100], 3.0)
    torch.cuda.synchronize()
    content[index[:100].cpu()] = 3.0
    assert torch.equal(torch.cat([pool.rows(layer) for layer in range(7)]), content)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_row_types(dtype):
    pool = HostPool.private(layout(dtype), 8)
    pool.pin("cuda")
    check_both_ways(pool)
    pool.close()


def test_after_the_end_nothing_is_registered(pool):
    pool.pin("cuda", chunk_bytes=3 * PAGE)
    address, chunks = pool.address, [at for at, _ in pool._pinned._chunks]
    assert mapped.device_address(chunks[-1], CUDA) == pool.device_body.data_ptr() + chunks[-1] - address
    pool.unpin()
    for at in chunks:
        with pytest.raises(mapped.RegistrationError):
            mapped.device_address(at, CUDA)
    assert pool.device_rows(0) is pool.rows(0)
    pool.pin("cuda")  # and it can be registered again
    check_both_ways(pool, 50.0)


def test_a_range_that_is_taken_is_named_and_nothing_stays_pinned(pool):
    """Somebody registered a page in the fourth chunk. The device works on as if nothing had happened."""
    taken = pool.address + 10 * PAGE
    mapped.register(taken, PAGE, CUDA)
    with pytest.raises(ConfigError, match=r"cannot pin chunk 4 of .*ALREADY_REGISTERED.*NIXL must come after CUDA"):
        pool.pin("cuda", chunk_bytes=3 * PAGE)
    for i in range(3):
        with pytest.raises(mapped.RegistrationError):
            mapped.device_address(pool.address + i * 3 * PAGE, CUDA)
    assert float((torch.zeros(5, device="cuda") + 1).sum()) == 5.0
    mapped.unregister(taken, CUDA)
    pool.pin("cuda", chunk_bytes=3 * PAGE)
    check_both_ways(pool)


def test_a_failure_in_the_middle_releases_the_earlier_chunks(pool, monkeypatch):
    real, calls = mapped.register, []

    def limited(address, num_bytes, device):
        calls.append(address)
        if len(calls) == 5:
            raise mapped.RegistrationError("cuMemHostRegister_v2", "CUDA_ERROR_OUT_OF_MEMORY")
        real(address, num_bytes, device)

    monkeypatch.setattr(mapped, "register", limited)
    with pytest.raises(ConfigError, match=r"chunk 5 of .*OUT_OF_MEMORY; lower cache.host_pool_gib"):
        pool.pin("cuda", chunk_bytes=3 * PAGE)
    for at in calls:
        with pytest.raises(mapped.RegistrationError):
            mapped.device_address(at, CUDA)
    monkeypatch.undo()
    pool.pin("cuda")
    check_both_ways(pool)


def test_the_drivers_copies_stay_within_a_chunk(pool):
    """Why borders are those of pages: a page can always be copied by the driver, a range over a border cannot."""
    pool.pin("cuda", chunk_bytes=3 * PAGE)
    size = pool.layout.block_size
    for block in range(40):
        pool.device_rows(1)[block * size : (block + 1) * size].copy_(torch.full((size, 16), float(block), device="cuda"))
    torch.cuda.synchronize()
    assert pool.rows(1)[::size, 0].tolist() == [float(block) for block in range(40)]
    with pytest.raises(Exception, match="invalid argument"):
        pool.device_rows(1).clone()
    assert float(pool.device_rows(1).sum()) == 16.0 * size * sum(range(40))  # a kernel reads over every border


def test_a_file_that_is_not_in_memory_is_refused_with_the_reason(tmp_path):
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True).stdout.strip()
    if kind == "tmpfs":
        pytest.skip("temporary files are in memory here")
    pool = HostPool.shared(layout(), 8, tmp_path / "hisparse-disk.pool")
    with pytest.raises(ConfigError, match="only if the file is in a tmpfs"):
        pool.pin("cuda")
    assert not pool.is_pinned
    pool.close()


def test_two_processes_register_one_shared_pool(shm):
    """Each at its own address; what one device writes, the other's kernels and CPU read."""
    owner = HostPool.shared(layout(), 40, host_memory.pool_path("gpu-two", shm), poison=True)
    owner.pin("cuda", chunk_bytes=10 * PAGE)
    code = """
        import sys, torch
        from hisparse.worker import HostPool
        from tests.gpu.test_host_pool import layout
        pool = HostPool.attach(layout(), 40, sys.argv[1])
        pool.pin("cuda", chunk_bytes=3 * 4096)
        print("ready", flush=True); sys.stdin.readline()
        assert [float(pool.device_rows(layer)[5, 2]) for layer in range(7)] == [layer + 0.25 for layer in range(7)]
        for layer in range(7):
            pool.device_rows(layer)[6] = layer + 0.75
        torch.cuda.synchronize()
        print("done", flush=True); sys.stdin.readline()
        pool.close()
    """
    peer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(owner.path)], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert peer.stdout.readline() == "ready\n"
    for layer in range(7):
        owner.device_rows(layer)[5] = layer + 0.25
    torch.cuda.synchronize()
    peer.stdin.write("\n")
    peer.stdin.flush()
    assert peer.stdout.readline() == "done\n"
    assert [float(owner.device_rows(layer)[6, 2]) for layer in range(7)] == [layer + 0.75 for layer in range(7)]
    assert float(owner.rows(6)[6, 0]) == 6.75
    peer.stdin.close()
    assert peer.wait(30) == 0
    owner.close()
    owner.unlink()


def test_the_layout_has_pages_of_4096_bytes():
    assert layout().layer_page_bytes == PAGE and make_shape().num_layers == 7
