"""Events and their table, staging rings, and the counters' snapshots, as far as they need no device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hisparse.errors import InvariantError
from hisparse.worker import Mark, PeerWrites, PinnedRing, Place, StepEvent, Streams
from hisparse.worker import streams as module
from hisparse.worker.staging import MAX_SLOTS


def documented() -> dict[str, tuple[str, str, str]]:
    rows = [line.strip("| ").split(" | ") for line in module.__doc__.splitlines() if line.startswith("| ")]
    return {name: (writers, readers, means) for name, writers, readers, means in rows[1:]}


def test_the_documented_table_is_the_one_in_force():
    assert documented() == {
        event.name: (", ".join(p.value for p in event.writers), ", ".join(p.value for p in event.readers), event.meaning)
        for event in StepEvent
    }
    assert all(Place.HOST not in event.writers for event in StepEvent)


@pytest.mark.parametrize("event", StepEvent)
def test_only_its_writers_record_and_only_its_readers_wait(event):
    streams = Streams("cpu")
    for place in Place:
        if place in event.writers:
            assert streams.record(event, place).event is event
        else:
            with pytest.raises(InvariantError, match=f"{event.name} is recorded by .*, not by {place.value}"):
                streams.record(event, place)
    mark = streams.record(event, event.writers[0])
    for place in Place:
        if place in event.readers and place is not Place.HOST:
            streams.wait(mark, place)
        elif place is Place.HOST and place in event.readers:
            assert streams.reached(mark)
        elif place is Place.HOST:
            with pytest.raises(InvariantError, match="not by host"):
                streams.reached(mark)
        else:
            with pytest.raises(InvariantError, match=f"{event.name} is read by .*, not by {place.value}"):
                streams.wait(mark, place)


def test_the_cpu_has_no_streams():
    streams = Streams("cpu")
    assert not streams.is_cuda and streams.raw(Place.DMA) is None
    with streams.on(Place.DMA), streams.on(Place.PREFETCH):
        pass
    streams.drain(0.0)
    with pytest.raises(InvariantError, match="the host is no stream"):
        streams.raw(Place.HOST)
    writer = PeerWrites("cpu")
    writer.record()
    assert writer.handle == b""
    peer = PeerWrites("cpu", writer.handle)
    peer.wait()
    with pytest.raises(InvariantError, match="no handle to give on"):
        _ = peer.handle
    with pytest.raises(InvariantError, match="in order already"):
        writer.wait()
    with pytest.raises(InvariantError, match="does not record"):
        PeerWrites("cpu", b"x").record()


# ---- staging


class LateStreams(Streams):
    """On the CPU, but a mark is reached only when the test says so."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.marks: list[Mark] = []
        self.done: set[int] = set()

    def record(self, event, place):
        mark = super().record(event, place)
        self.marks.append(mark)
        return mark

    def reached(self, mark):
        return self.marks.index(mark) in self.done


def ring(streams, **kw):
    return PinnedRing(streams, make_buffer=lambda n: torch.full((n,), 7, dtype=torch.uint8), **kw)


def test_a_buffer_is_filled_again_only_when_it_was_read():
    streams = LateStreams()
    r = ring(streams, slots=2, slot_bytes=64)
    seen = [r.upload(np.full(3, i, dtype=np.int32))[0] for i in range(2)]
    first, second = (slot.buffer for slot in r._slots)
    r.upload(np.full(3, 2, dtype=np.int32))
    assert r.num_slots == 3 and first[:4].view(torch.int32).tolist() == [0] and second[:4].view(torch.int32).tolist() == [1]
    streams.done = {1}
    r.upload(np.full(3, 3, dtype=np.int32))
    assert r.num_slots == 3 and second[:4].view(torch.int32).tolist() == [3] and first[:4].view(torch.int32).tolist() == [0]
    assert [t.tolist() for t in seen] == [[0] * 3, [1] * 3]  # uploads are copies
    streams.done = {0, 1, 2, 3}
    for i in range(10):
        r.upload(np.full(3, i, dtype=np.int32))
        streams.done.add(len(streams.marks) - 1)
    assert r.num_slots == 3


def test_buffers_never_run_out_quietly():
    streams = LateStreams()
    r = ring(streams, slots=1, slot_bytes=16)
    for i in range(MAX_SLOTS):
        r.upload(np.full(2, i, dtype=np.int64))
    with pytest.raises(InvariantError, match=f"read none of the last {MAX_SLOTS} uploads"):
        r.upload(np.zeros(1))
    assert sorted(int(slot.buffer[:8].view(torch.int64)) for slot in r._slots) == list(range(MAX_SLOTS))


def test_one_upload_of_many_arrays_and_large_ones():
    r = ring(Streams("cpu"), slots=1, slot_bytes=32)
    arrays = (np.arange(5, dtype=np.int32).reshape(5, 1), np.zeros(0, dtype=np.int64), np.array([True, False]),
              np.arange(1000, dtype=np.int64)[::2], np.array(3.5))
    out = r.upload(*arrays)
    assert [tuple(t.shape) for t in out] == [a.shape for a in arrays] and all(t.data_ptr() % 8 == 0 for t in out)
    assert all(np.array_equal(t.numpy(), a) and t.numpy().dtype == a.dtype for t, a in zip(out, arrays, strict=True))
    plain = PinnedRing(Streams("cpu")).upload(*arrays)
    assert all(np.array_equal(t.numpy(), a) for t, a in zip(plain, arrays, strict=True))
