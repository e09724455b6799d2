"""A stream held up until the test lets it go on, and a step that must not wait for the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

HELD_S = 5
MOST_HELD = 64
STEP_S = 2.5
"""A step that takes longer than this has waited, in a call that torch does not know of. Loading a kernel for the first time is
such a call, so a test lets its steps run once before it holds up anything."""
_SOURCE = """
extern "C" __global__ void hold(const volatile int* open, long long limit_ns) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        __nanosleep(2000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (!*open && now - start < limit_ns);
}
"""


class Gate:
    """`hold(stream)`: what the stream is given from then on waits for `open()`, or HELD_S at most."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._kernel = cupy.RawKernel(_SOURCE, "hold", backend="nvrtc")
        self._flags = torch.zeros(MOST_HELD, dtype=torch.int32, pin_memory=True)
        self._used = 0
        self.hold(torch.cuda.current_stream())  # compiled and loaded while nothing is held up
        self.open()
        torch.cuda.synchronize()

    def hold(self, stream: Any) -> None:
        flag = self._flags[self._used]
        flag.fill_(0)
        self._used += 1
        pointer = self._cupy.cuda.Stream.from_external(_Stream(stream))
        with pointer:
            self._kernel((1,), (1,), (flag.data_ptr(), self._cupy.int64(HELD_S * 10**9)))

    def open(self) -> None:
        """Lets go everything that is held."""
        self._flags.fill_(1)

    def close(self) -> None:
        self.open()
        torch.cuda.synchronize()
        self._used = 0


class _Stream:
    def __init__(self, stream: Any) -> None:
        self._pointer, self.device = stream.cuda_stream, stream.device_index

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Nothing inside may wait for the device: torch's own checks raise, and so do the explicit calls."""

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a step waited for the device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", refused)
        patch.setattr(torch.cuda.Stream, "synchronize", refused)
        patch.setattr(torch.cuda.Event, "synchronize", refused)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        started = time.monotonic()
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
        assert time.monotonic() - started < STEP_S, "a step waited for the device"
