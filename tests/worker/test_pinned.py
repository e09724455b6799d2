"""Registration in chunks: borders, order, failures half-way, and who may hold the pool. The registrar is a fake."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

from hisparse.errors import ConfigError, InvariantError
from hisparse.pd.loopback import LoopbackTransport
from hisparse.worker import HostPool, host_memory
from hisparse.worker.pinned import chunk_sizes
from tests.worker.rig import make_layout

LAYOUT = make_layout(block_size=64)
PAGE = 4096


class FakeDriver:
    """Registers memory by writing it down; a "device" address is the host's plus an offset."""

    def __init__(self, fail_at: int | None = None, reason: str = "CUDA_ERROR_OUT_OF_MEMORY", shift=lambda i: 0) -> None:
        self.fail_at, self.reason, self.shift = fail_at, reason, shift
        self.log: list[tuple[str, int, int]] = []
        self.live: dict[int, int] = {}
        self.refuse: set[int] = set()

    def register(self, address, num_bytes, device):
        assert address % PAGE == 0 and num_bytes % PAGE == 0 and num_bytes > 0
        for at, size in self.live.items():
            assert address >= at + size or address + num_bytes <= at, "ranges overlap"
        if len(self.live) == self.fail_at:
            raise RuntimeError(self.reason)
        self.live[address] = num_bytes
        self.log.append(("+", address, num_bytes))

    def unregister(self, address, device):
        self.log.append(("-", address, self.live.pop(address)))
        if address in self.refuse:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")

    def device_address(self, address, device):
        return address + self.shift(list(self.live).index(address))

    def tensor_at(self, address, num_bytes, device):
        import ctypes

        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


@pytest.fixture
def pool():
    pool = HostPool.private(LAYOUT, 40, poison=True)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("total", "unit", "chunk", "want"),
    [
        (100 << 10, 10 << 10, 50 << 10, [40 << 10, 40 << 10, 20 << 10]),
        (100 << 10, 10 << 10, 1, [20 << 10] * 5),
        (100 << 10, 10 << 10, 1 << 40, [100 << 10]),
        (PAGE, 41_984, PAGE, [PAGE]),
        (10 * 167_936, 41_984, 400_000, [335_872] * 5),
    ],
)
def test_borders_are_those_of_units_and_pages(total, unit, chunk, want):
    assert chunk_sizes(total, unit_bytes=unit, page_bytes=PAGE, chunk_bytes=chunk) == want
    for border in itertools.accumulate(want[:-1]):
        assert border % unit == 0 and border % PAGE == 0
    assert sum(want) == total
    with pytest.raises(InvariantError, match="cannot cut"):
        chunk_sizes(total, unit_bytes=0, page_bytes=PAGE, chunk_bytes=chunk)


def test_no_page_of_a_layer_lies_in_two_registrations(pool):
    driver, seen = FakeDriver(), []
    pool.pin("cpu", registrar=driver, chunk_bytes=3 * PAGE, progress=lambda done, total: seen.append((done, total)))
    assert pool.is_pinned and pool._pinned.num_chunks == len(driver.live) > 5
    assert sum(driver.live.values()) >= pool.nbytes and seen[-1][0] == seen[-1][1] == sum(driver.live.values())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen}) and len(seen) == len(driver.live)
    for layer in range(LAYOUT.shape.num_layers):
        for block in range(40):
            first = pool.address + LAYOUT.host_page_byte_offset(layer, block, 40)
            last = first + LAYOUT.layer_page_bytes - 1
            assert len({at for at, size in driver.live.items() if at <= first < at + size or at <= last < at + size}) == 1
        pool.rows(layer)[9] = layer
        assert float(pool.device_rows(layer)[9, 0]) == layer and pool.device_rows(layer).shape == pool.rows(layer).shape
    body = pool.device_body
    assert [float(body[layer * 40 * 64 + 9, 0]) for layer in range(7)] == list(range(7)) and body.shape[0] == 7 * 40 * 64
    assert pool.device_masks.shape == (40,) and not pool.device_masks.any()
    pool.row_masks[3] = 5
    assert not pool.device_masks.any()
    pool.close()
    signs = [sign for sign, _, _ in driver.log]
    assert signs == ["+"] * (len(signs) // 2) + ["-"] * (len(signs) // 2) and not driver.live
    assert [at for _, at, _ in driver.log[len(signs) // 2 :]] == [at for _, at, _ in driver.log[: len(signs) // 2]][::-1]


@pytest.mark.parametrize(("reason", "fix"), [
    ("CUDA_ERROR_OUT_OF_MEMORY", "lower cache.host_pool_gib, or raise the locked-memory limit"),
    ("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "NIXL must come after CUDA"),
    ("CUDA_ERROR_INVALID_VALUE", "only if the file is in a tmpfs"),
    ("CUDA_ERROR_UNKNOWN", "kernel log"),
])
def test_a_chunk_that_is_refused_leaves_nothing_pinned(pool, reason, fix):
    driver = FakeDriver(fail_at=3, reason=reason)
    with pytest.raises(ConfigError, match=rf"cannot pin chunk 4 of \d+ of .* \(12288 bytes at offset 36864 of .*{fix}"):
        pool.pin("cpu", registrar=driver, chunk_bytes=3 * PAGE)
    assert not driver.live and [sign for sign, _, _ in driver.log] == ["+"] * 3 + ["-"] * 3 and not pool.is_pinned
    assert pool.device_rows(0) is pool.rows(0)
    pool.pin("cpu", registrar=FakeDriver(), chunk_bytes=3 * PAGE)


def test_chunks_that_kernels_would_not_see_as_one_range_are_refused(pool):
    driver = FakeDriver(shift=lambda i: PAGE * (i == 2))
    with pytest.raises(ConfigError, match="chunk 3 of the host pool is at .* kernels need one range"):
        pool.pin("cpu", registrar=driver, chunk_bytes=3 * PAGE)
    assert not driver.live and not pool.is_pinned
    whole = FakeDriver(shift=lambda i: 0x1000000)  # another address than the host's is fine
    whole.tensor_at = lambda address, n, device: torch.zeros(n, dtype=torch.uint8)
    pool.pin("cpu", registrar=whole)
    assert pool._pinned.num_chunks == 1


def test_every_chunk_is_released_even_if_one_is_refused(pool):
    driver = FakeDriver()
    pool.pin("cpu", registrar=driver, chunk_bytes=3 * PAGE)
    driver.refuse = {list(driver.live)[2]}
    with pytest.raises(InvariantError, match="unpinning the host pool: 12288 bytes at 0x.*INVALID_VALUE"):
        pool.unpin()
    assert not driver.live and not pool.is_pinned
    pool.unpin()


def test_a_pool_that_is_forgotten_is_released():
    """An engine that fails to start never closes its pool; the next one may get the same address."""
    driver = FakeDriver()
    HostPool.private(LAYOUT, 40).pin("cpu", registrar=driver, chunk_bytes=3 * PAGE)
    gc.collect()
    assert not driver.live and "-" in {sign for sign, _, _ in driver.log}


def test_cuda_registers_first_and_last(pool):
    pool.hold("nixl")
    with pytest.raises(InvariantError, match=r"cannot be pinned: it is held by \['nixl'\]; CUDA registers first"):
        pool.pin("cpu", registrar=FakeDriver())
    pool.release("nixl")
    pool.pin("cpu", registrar=FakeDriver())
    with pytest.raises(InvariantError, match="pinned already"):
        pool.pin("cpu", registrar=FakeDriver())
    pool.hold("nixl")
    for end in (pool.unpin, pool.close):
        with pytest.raises(InvariantError, match="while nixl has it registered"):
            end()
    assert pool.is_pinned
    pool.release("nixl")
    with pytest.raises(InvariantError, match="does not hold"):
        pool.release("nixl")
    pool.close()
    with pytest.raises(InvariantError, match="closed"):
        pool.hold("nixl")
    with pytest.raises(InvariantError, match="it is closed"):
        pool.pin("cpu", registrar=FakeDriver())


def test_the_pd_connector_holds_the_pool_while_it_has_it_registered(pool):
    """From before its transport registers until the transport is closed."""
    from hisparse.config import PDConfig
    from hisparse.pd.worker import PDConnectorWorker
    from hisparse.worker import DeviceCache

    held: list[tuple[str, int]] = []

    class Watching(LoopbackTransport):
        def register(self, address, num_bytes, device=None):
            held.append(("register", len(pool._held_by)))
            super().register(address, num_bytes)

        def close(self):
            held.append(("close", len(pool._held_by)))
            super().close()

    worker = PDConnectorWorker(LAYOUT, PDConfig(role="decode"), cache=DeviceCache(LAYOUT, 8), host_pool=pool, engine_id="e",
                               incarnation=1, rank=0, host_writer=True, make_transport=Watching)
    worker.handshake()
    with pytest.raises(InvariantError, match="has it registered"):
        pool.close()
    worker.shutdown()
    assert {name for name, _ in held} == {"register", "close"} and all(count == 1 for _, count in held)
    pool.close()


def test_the_limit_of_locked_memory_comes_first(pool, monkeypatch):
    monkeypatch.setattr(host_memory.resource, "getrlimit", lambda _: (PAGE, PAGE))
    monkeypatch.setattr(host_memory, "may_lock_all", lambda: False)
    driver = FakeDriver()
    with pytest.raises(ConfigError, match="RLIMIT_MEMLOCK is 4096"):
        pool.pin("cpu", registrar=driver)
    assert not driver.log
    monkeypatch.setattr(host_memory, "may_lock_all", lambda: True)  # the limit does not bind such a process
    pool.pin("cpu", registrar=driver)


def test_the_capability_to_lock_is_read_from_the_kernel(tmp_path):
    status = tmp_path / "status"
    for caps, may in (("0000000000004000", True), ("000001ffffffffff", True), ("00000000a80425fb", False)):
        status.write_text(f"Name:\tx\nCapEff:\t{caps}\n")
        assert host_memory.may_lock_all(status) is may
    status.write_text("Name:\tx\n")
    assert host_memory.may_lock_all(status) is False


def test_the_cpu_needs_no_registration(pool):
    pool.pin("cpu")
    assert not pool.is_pinned and pool.device_rows(3) is pool.rows(3)
    pool.row_masks[5] = 9
    assert pool.device_masks.tolist()[5] == 9
    pool.device_masks[6] = 3
    assert int(pool.row_masks[6]) == 3


def test_populating_keeps_what_is_there(monkeypatch):
    import mmap

    for known in (True, False):
        memory = mmap.mmap(-1, 10 * PAGE)
        memory[5 * PAGE] = 17
        seen = []
        if not known:
            monkeypatch.setattr(host_memory, "_populate_pages", lambda address, size: False)
        host_memory.populate(memory, 10 * PAGE, chunk_bytes=3 * PAGE, threads=2, progress=lambda *at, to=seen: to.append(at))
        assert memory[5 * PAGE] == 17 and seen == [(n * PAGE, 10 * PAGE) for n in (3, 6, 9, 10)]


def test_pinning_takes_turns(tmp_path):
    import fcntl
    import os

    with host_memory.pin_turn(tmp_path):
        (lock,) = tmp_path.iterdir()
        fd = os.open(lock, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
