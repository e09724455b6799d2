"""READs over mapped GPU memory: what goes which way, and that a mapping ends after its READs. The GPU is played by arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from hisparse.errors import TransferError
from hisparse.pd.loopback import LoopbackNetwork, LoopbackTransport
from hisparse.pd.mapped_reads import IDLE_S, PIECE_BYTES, MappedReads
from hisparse.pd.transport import Descriptors, PeerLost
from tests.pd.rig import FakeClock

SIZE = 3 * PIECE_BYTES
LEAD = 4096
"""Bytes of an allocation in front of the registered ones."""


class Event:
    def __init__(self, gpu: Gpu, pieces: Descriptors) -> None:
        self._gpu, self._pieces = gpu, pieces.copy()

    def run(self) -> None:
        for far, near, size in self._pieces.tolist():
            assert any(base <= far and far + size <= base + room for base, room in self._gpu.mapped.items()), "not mapped now"
            ctypes.memmove(near, far, size)

    def query(self) -> bool:
        return self not in self._gpu.running


class Gpu:
    """A process's view: its allocation, whatever it has mapped, and READs that run when told to."""

    def __init__(self, seed: int) -> None:
        self.bytes = np.random.default_rng(seed).integers(0, 256, LEAD + SIZE, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.mapped: dict[int, int] = {}
        self.running: list[Event] = []
        self.opens = True
        self.closed: list[int] = []

    def export(self, address: int, num_bytes: int) -> tuple[bytes, int]:
        return self.address.to_bytes(8, "little").ljust(64, b"\0"), address - self.address

    def open(self, handle: bytes) -> tuple[int, int]:
        if not self.opens:
            raise RuntimeError("cuIpcOpenMemHandle: CUDA_ERROR_INVALID_CONTEXT")
        base = int.from_bytes(handle[:8], "little")
        self.mapped[base] = LEAD + SIZE
        return base, LEAD + SIZE

    def close(self, address: int) -> None:
        assert not self.running, "a mapping was ended under a READ"
        del self.mapped[address]
        self.closed.append(address)

    def read(self, pieces: Descriptors) -> Event:
        assert (pieces % 16 == 0).all() and (pieces[:, 2] <= PIECE_BYTES).all()
        self.running.append(Event(self, pieces))
        return self.running[-1]

    def wait(self) -> None:
        while self.running:
            self.running.pop().run()


class Plain(LoopbackTransport):
    """Whose GPU memory is the CPU's."""

    def register(self, address: int, num_bytes: int, device: int | None = None) -> None:
        super().register(address, num_bytes)


class Pair:
    """A prefill and a decode agent, each with GPU memory of SIZE bytes and CPU memory of 64."""

    def __init__(self, *, hosts: tuple[str, str] = ("a", "a"), exports: bool = True,
                 export: Callable[[int, int], tuple[bytes, int]] | None = None) -> None:
        self.network = LoopbackNetwork()
        self.p, self.d = Gpu(1), Gpu(2)
        if export is not None:
            self.p.export = export  # type: ignore[method-assign]
        self.cpu = np.arange(128, dtype=np.uint8).reshape(2, 64)
        self.plain = Plain("d", network=self.network)
        self.prefill = MappedReads(Plain("p", network=self.network), self.p if exports else None, host=hosts[0])
        self.clock = FakeClock()
        self.decode = MappedReads(self.plain, self.d, host=hosts[1], clock=self.clock)
        for transport, gpu, cpu in ((self.prefill, self.p, self.cpu[0]), (self.decode, self.d, self.cpu[1])):
            transport.register(gpu.address + LEAD, SIZE, 0)
            transport.register(int(cpu.ctypes.data), 64)

    def connect(self) -> None:
        self.decode.connect("p", self.prefill.metadata())

    def gpu_reads(self, *pieces: tuple[int, int, int]) -> Descriptors:
        """From (offset at prefill, offset at decode, bytes)."""
        return np.array([(self.p.address + LEAD + far, self.d.address + LEAD + near, size) for far, near, size in pieces])

    def same(self, far: int, near: int, size: int) -> bool:
        return bool((self.p.bytes[LEAD + far :][:size] == self.d.bytes[LEAD + near :][:size]).all())


WHOLE = ((0, SIZE // 2, SIZE // 2), (SIZE // 2, 0, SIZE // 2))


def test_gpu_memory_is_read_over_the_mapping_and_nothing_else() -> None:
    pair = Pair()
    pair.connect()
    before = pair.d.bytes[:LEAD].copy()
    read = pair.decode.read("p", pair.gpu_reads(*WHOLE))
    assert not pair.decode.poll(read) and not pair.same(*WHOLE[0])
    pair.d.wait()
    assert pair.decode.poll(read) and all(pair.same(*piece) for piece in WHOLE) and not pair.plain.posted
    assert (pair.d.bytes[:LEAD] == before).all()
    with pytest.raises(TransferError, match="was released"):
        pair.decode.poll(read)
    other = pair.decode.read("p", np.array([[pair.cpu[0].ctypes.data, pair.cpu[1].ctypes.data, 64]]))
    assert pair.decode.poll(other) and (pair.cpu[1] == np.arange(64)).all() and len(pair.plain.posted) == 1


@pytest.mark.parametrize("why", ["other host", "cannot be opened", "cannot be exported", "exports nothing", "beyond the end",
                                 "odd address", "odd length", "into CPU memory", "partly registered"])
def test_whatever_cannot_be_mapped_is_for_the_transport(why: str, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(address: int, num_bytes: int) -> tuple[bytes, int]:
        raise RuntimeError("cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE")

    pair = Pair(hosts=("a", "b") if why == "other host" else ("a", "a"), exports=why != "exports nothing",
                export=refuse if why == "cannot be exported" else None)
    pair.d.opens = why != "cannot be opened"
    if why == "beyond the end":
        pair.p.export = lambda address, num_bytes: (pair.p.address.to_bytes(8, "little").ljust(64, b"\0"), LEAD + 16)
        pair.prefill.register(pair.p.address + LEAD, SIZE, 0)
        pair.prefill._exported = pair.prefill._exported[-1:]
    pair.connect()
    reads = pair.gpu_reads(*WHOLE)
    if why == "odd address":
        reads[:, 1] += (-8, 8)
        reads[:, 2] -= 16
    elif why == "odd length":
        reads[:, 2] -= 8
    elif why == "into CPU memory":
        reads = np.array([[pair.p.address + LEAD, pair.cpu[1].ctypes.data, 64]])
    elif why == "partly registered":
        reads[0, 0] -= 16
        with pytest.raises(TransferError, match="not registered"):
            pair.decode.read("p", reads)
        return
    read = pair.decode.read("p", reads)
    assert pair.decode.poll(read) and len(pair.plain.posted) == 1 and not pair.d.running
    assert not pair.d.mapped, "a mapping that nobody uses"
    expected = why in ("cannot be opened", "cannot be exported", "beyond the end")
    assert any("UCX" in record.message for record in caplog.records) == expected, "what was configured is not to be had"


@pytest.mark.parametrize("end", ["disconnect", "close"])
def test_a_mapping_ends_after_its_reads_and_a_released_one_writes_no_more(end: str) -> None:
    pair = Pair()
    pair.connect()
    read = pair.decode.read("p", pair.gpu_reads(*WHOLE))
    pair.decode.disconnect("p") if end == "disconnect" else pair.decode.close()
    assert not pair.d.running and not pair.d.mapped and pair.d.closed == [pair.p.address]
    with pytest.raises(TransferError, match="was released"):
        pair.decode.poll(read)
    pair.decode.disconnect("p")
    pair.decode.close()
    assert pair.d.closed == [pair.p.address]


def test_an_endpoint_that_does_not_close_keeps_its_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.connect()
    read = pair.decode.read("p", pair.gpu_reads(*WHOLE))
    with monkeypatch.context() as patch:
        def refuse(self: LoopbackTransport, peer: str) -> None:
            raise TransferError("cannot be closed now")
        patch.setattr(LoopbackTransport, "disconnect", refuse)
        with pytest.raises(TransferError):
            pair.decode.disconnect("p")
    assert pair.d.mapped and not pair.decode.poll(read)
    pair.decode.disconnect("p")
    assert not pair.d.mapped


def test_a_dead_peer_is_still_mapped_but_its_generations_cannot_be_read() -> None:
    pair = Pair()
    pair.connect()
    pair.network.kill("p")
    read = pair.decode.read("p", pair.gpu_reads(*WHOLE))
    pair.d.wait()
    assert pair.decode.poll(read)
    with pytest.raises(TransferError):
        pair.decode.poll(pair.decode.read("p", np.array([[pair.cpu[0].ctypes.data, pair.cpu[1].ctypes.data, 64]])))


def test_a_read_that_the_device_does_not_take_fails_alone_and_is_over_when_its_endpoint_is_closed(
        monkeypatch: pytest.MonkeyPatch) -> None:
    pair, plain = Pair(), Gpu.read

    def take_half(self: Gpu, pieces: Descriptors) -> Event:
        plain(self, pieces[:1])
        raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")

    pair.connect()
    with monkeypatch.context() as patch:
        patch.setattr(Gpu, "read", take_half)
        with pytest.raises(PeerLost, match="from p: CUDA_ERROR_OUT_OF_MEMORY"):
            pair.decode.read("p", pair.gpu_reads(*WHOLE))
    assert pair.d.running and pair.d.mapped, "half of it is still under way"
    pair.decode.disconnect("p")
    assert not pair.d.running and not pair.d.mapped
    pair.connect()
    read = pair.decode.read("p", pair.gpu_reads(*WHOLE))
    pair.d.wait()
    assert pair.decode.poll(read) and all(pair.same(*piece) for piece in WHOLE)


def test_a_restarted_peer_is_mapped_anew() -> None:
    pair = Pair()
    pair.connect()
    pair.decode.disconnect("p")
    pair.connect()
    read = pair.decode.read("p", pair.gpu_reads(*WHOLE))
    pair.d.wait()
    assert pair.decode.poll(read) and len(pair.d.mapped) == 1


def test_memory_is_mapped_for_reads_and_for_a_while_after_the_last_one() -> None:
    pair = Pair()
    pair.connect()
    assert not pair.d.mapped, "nothing was read"
    read = pair.decode.read("p", pair.gpu_reads(*WHOLE))
    pair.clock.advance(10 * IDLE_S)
    pair.decode.notices()
    assert pair.d.mapped, "a READ is under way"
    pair.d.wait()
    assert pair.decode.poll(read)
    pair.clock.advance(0.9 * IDLE_S)
    pair.decode.notices()
    assert pair.d.mapped and pair.decode.read("p", pair.gpu_reads(*WHOLE))
    pair.d.wait()
    pair = Pair()
    pair.connect()
    read = pair.decode.read("p", pair.gpu_reads(WHOLE[0]))
    pair.d.wait()
    assert pair.decode.poll(read)
    pair.clock.advance(IDLE_S)
    pair.decode.notices()
    assert not pair.d.mapped and pair.d.closed == [pair.p.address], "a dead peer's memory would not be free"
    read = pair.decode.read("p", pair.gpu_reads(WHOLE[1]))
    pair.d.wait()
    assert pair.decode.poll(read) and pair.d.mapped and all(pair.same(*piece) for piece in WHOLE)


def test_refused_metadata_maps_nothing() -> None:
    pair = Pair()
    data = pair.prefill.metadata()
    for bad in (data[:20], data[:60]):
        with pytest.raises(TransferError, match="metadata"):
            pair.decode.connect("p", bad)
    with pytest.raises(TransferError, match="metadata"):
        pair.decode.connect("q", data)
    assert not pair.d.mapped
    with pytest.raises(TransferError, match="not connected"):
        pair.decode.read("q", pair.gpu_reads(*WHOLE))
    pair.connect()
    with pytest.raises(TransferError, match="connected already"):
        pair.connect()
    pair.decode.read("p", pair.gpu_reads(*WHOLE))
    assert len(pair.d.mapped) == 1


def test_transports_without_a_gpu_pass_everything_on() -> None:
    network = LoopbackNetwork()
    near = MappedReads(LoopbackTransport("d", network=network), None)
    far = MappedReads(LoopbackTransport("p", network=network), None)
    memory = np.arange(32, dtype=np.uint8)
    far.register(int(memory.ctypes.data), 16)
    near.register(int(memory.ctypes.data) + 16, 16)
    near.connect("p", far.metadata())
    assert near.poll(near.read("p", np.array([[memory.ctypes.data, memory.ctypes.data + 16, 16]])))
    assert (memory[:16] == memory[16:]).all()
    near.notify("p", b"hello")
    assert far.notices() == [b"hello"]
    network.kill("p")
    with pytest.raises(TransferError):
        near.poll(near.read("p", np.array([[memory.ctypes.data, memory.ctypes.data + 16, 16]])))
    near.close()
