"""Batches on the DMA stream: completion by asking each batch, fences, failures. The streams are fake."""

from __future__ import annotations

import pytest

from hisparse.errors import InvariantError, TransferError
from hisparse.worker import Mark, Place, StepEvent, StreamCopies, Streams


class FakeStreams(Streams):
    """Writes down what is recorded and waited for; the test says what is reached."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.log: list[tuple[str, object]] = []
        self.done: list[Mark] = []
        self.broken: list[Mark] = []

    def record(self, event, place):
        self.log.append(("record", (event, place)))
        return super().record(event, place)

    def wait(self, mark, place):
        super().wait(mark, place)
        self.log.append(("wait", (mark, place)))

    def reached(self, mark):
        if mark in self.broken:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return mark in self.done


@pytest.fixture
def world():
    streams = FakeStreams()
    return streams, StreamCopies(streams), Mark(StepEvent.FORWARD_DONE)


def launcher(streams, masks):
    def launch(kept):
        streams.log.append(("launch", tuple(kept)))
        return lambda: [masks[i] for i in kept]

    return launch


def marks(copies):
    return [batch.done for batch in copies._batches]


def test_a_batch_is_one_launch_between_two_events(world):
    streams, copies, forward = world
    copies.submit([5, 6, 7], launcher(streams, [1, 2, 3]), forward)
    assert streams.log == [
        ("wait", (forward, Place.DMA)), ("launch", (0, 1, 2)), ("record", (StepEvent.SPILLS_DONE, Place.DMA)),
    ]
    assert copies.num_pending == 3 and copies.take_done() == []
    streams.done = marks(copies)
    assert [(r.transfer_id, r.row_mask, r.error) for r in copies.take_done()] == [(5, 1, None), (6, 2, None), (7, 3, None)]
    assert copies.num_pending == 0 and copies.take_done() == []
    copies.submit([5], launcher(streams, [4]), forward)  # an id that is done may be used again


def test_a_late_batch_holds_up_no_other(world):
    streams, copies, forward = world
    for i in range(3):
        copies.submit([i], launcher(streams, [10 + i]), forward)
    streams.done = marks(copies)[1:]
    assert [r.transfer_id for r in copies.take_done()] == [1, 2] and copies.num_pending == 1
    with pytest.raises(TransferError, match=r"1 transfers did not complete within 0.01 s: \[0\]"):
        copies.drain(0.01)
    with pytest.raises(TransferError):
        copies.close(0.01)
    streams.done += marks(copies)
    copies.close(1)
    assert [r.row_mask for r in copies.take_done()] == [10]
    with pytest.raises(InvariantError, match="transfer 9 submitted to a closed copy queue"):
        copies.submit([9], launcher(streams, [0]), forward)


def test_a_fence_makes_the_compute_stream_wait_and_not_the_cpu(world):
    streams, copies, forward = world
    copies.submit([1], launcher(streams, [0]), forward)
    copies.submit([2, 3], launcher(streams, [0, 0]), forward)
    first, second = marks(copies)
    streams.log.clear()
    copies.wait(3, 0.0)
    copies.wait(77, 0.0)
    assert streams.log == [("wait", (second, Place.COMPUTE))]
    streams.done = [second]
    copies.take_done()
    copies.wait(3, 0.0)
    copies.wait(1, 0.0)
    assert streams.log[1:] == [("wait", (first, Place.COMPUTE))]


def test_failures_are_outcomes(world):
    streams, copies, forward = world

    def hook(transfer_id):
        if transfer_id in (2, 9):
            raise OSError("the bus is on fire")

    copies.hook = hook
    copies.submit([1, 2, 3], launcher(streams, [1, 2, 3]), forward)
    assert ("launch", (0, 2)) in streams.log
    assert [(r.transfer_id, r.error) for r in copies.take_done()] == [(2, "OSError: the bus is on fire")]
    copies.submit([9], launcher(streams, [0]), forward)  # nothing left to launch
    assert [r.transfer_id for r in copies.take_done()] == [9] and copies.num_pending == 2

    def broken(kept):
        raise ValueError("no such page")

    copies.submit([4, 5], broken, forward)
    assert [(r.transfer_id, r.error) for r in copies.take_done()] == [(i, "ValueError: no such page") for i in (4, 5)]
    streams.broken = marks(copies)
    done = copies.take_done()
    assert [r.transfer_id for r in done] == [1, 3] and all("unspecified launch failure" in r.error for r in done)
    assert copies.num_pending == 0
    copies.close(0)


def test_an_id_in_flight_is_refused(world):
    streams, copies, forward = world
    copies.submit([1, 2], launcher(streams, [0, 0]), forward)
    with pytest.raises(InvariantError, match="transfer 2 is already in flight"):
        copies.submit([3, 2], launcher(streams, [0, 0]), forward)
    assert copies.num_pending == 2
