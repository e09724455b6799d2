"""The thread that turns an engine: the only caller of an `EngineCore` once it runs.

Everybody else hands it functions (`call`), which run between two steps, and receives outputs through one callback.
A failed engine ends every request with an error and answers later calls with `EngineDeadError`; it never hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hisparse.engine.garbage import IdleCollector
from hisparse.errors import EngineDeadError
from hisparse.types import RequestOutput, SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")

REST_S = 0.5
"""Longest wait of a loop that has nothing to do; after it, garbage is collected."""


class Stats(Protocol):
    """Of an engine, as a dictionary of gauges and counters."""

    def asdict(self) -> dict[str, Any]: ...


class Residency(Protocol):
    """A sample of where requests live, reported later and elsewhere."""

    def report(self) -> dict[str, Any]: ...


class Core(Protocol):
    """What the loop and the coordinator use of `EngineCore`."""

    idle: bool
    """The last step ran no token: only then the loop waits before the next."""

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams, *,
                    cache_salt: str | None = None, priority: int = 0,
                    kv_transfer_params: Mapping[str, Any] | None = None, do_remote_decode: bool = False,
                    prefill_failed: str | None = None, prefill_retries: int = 0) -> None: ...
    def resume(self, request_id: str, *, kv_transfer_params: Mapping[str, Any] | None = None, prefill_failed: str = "",
               retries_left: int = 0) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def drain(self) -> int: ...
    def step(self) -> list[RequestOutput]: ...
    def take_outputs(self) -> list[RequestOutput]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> Stats: ...
    def residency(self) -> Residency: ...
    def problem(self) -> str: ...
    def check(self) -> None: ...
    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Answer to a probe, from the loop's own counters.

    Attributes:
        turns: of the loop since start; a loop that does not turn is stuck, whatever else still answers.
        beat_age_s: since the last turn began or ended.
    """

    ok: bool
    reason: str
    turns: int
    beat_age_s: float


class EngineLoop:
    """Runs a core in its own thread.

    Args:
        deliver: called on the loop's thread with the increments of one turn; must not block.
        stall_s: a loop without a turn for so long is unhealthy.
        idle_wait_s: longest wait between turns that did nothing (only transfers or leases are open).
        collector: of this process's garbage, from the start of the loop to its end; None = Python's own rules.
    """

    def __init__(self, core: Core, deliver: Callable[[list[RequestOutput]], None], *, stall_s: float = 60.0,
                 idle_wait_s: float = 0.02, collector: IdleCollector | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._core, self._deliver, self._clock = core, deliver, clock
        self._stall_s, self._idle_wait_s, self._collector = stall_s, idle_wait_s, collector
        self._calls: deque[tuple[Callable[[Core], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._dead: str | None = None
        self._problem = ""  # the core's; written by the loop's thread only
        self._turns = 0  # written by the loop's thread only
        self._beat = clock()
        self._thread = threading.Thread(target=self._run, name="hisparse-engine-loop", daemon=True)

    def start(self) -> None:
        if self._collector is not None:
            self._collector.begin()
        self._beat = self._clock()
        self._thread.start()

    def call(self, function: Callable[[Core], T]) -> Future[T]:
        """Runs `function(core)` between two steps; its result or exception arrives in the future."""
        future: Future[T] = Future()
        with self._wake:
            if self._dead is None and not self._stopping:
                self._calls.append((function, future))
                self._wake.notify()
                return future
        future.set_exception(EngineDeadError(self._dead or "the engine is shutting down"))
        return future

    def health(self) -> Health:
        """Never blocks."""
        age = self._clock() - self._beat
        if self._dead is not None:
            reason = self._dead
        elif self._stopping:
            reason = "the engine is shutting down"
        elif age > self._stall_s:
            reason = f"the engine loop has not turned for {age:.1f} s (limit {self._stall_s:g} s): a step is stuck"
        elif self._problem:
            reason = self._problem
        else:
            reason = ""
        return Health(ok=not reason, reason=reason, turns=self._turns, beat_age_s=age)

    @property
    def dead(self) -> str | None:
        """Why the engine failed; None while it lives."""
        return self._dead

    def stop(self, timeout_s: float) -> bool:
        """Ends the loop after the turn under way, then shuts the core down on the loop's thread; True when it ended."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------------------------------------- the thread
    def _run(self) -> None:
        wait_s = self._idle_wait_s / 16
        try:
            while not self._stopping:
                called = self._run_calls()
                self._turns += 1
                self._beat = self._clock()
                if not self._core.has_work():
                    if not self._sleep(REST_S) and self._collector is not None:
                        self._collector.rest()
                    continue
                outputs = self._core.step()
                self._problem = self._core.problem()
                self._beat = self._clock()
                if outputs:
                    self._deliver(outputs)
                if self._collector is not None:
                    self._collector.worked()
                if called or outputs or not self._core.idle:
                    wait_s = self._idle_wait_s / 16
                else:
                    self._sleep(wait_s)
                    wait_s = min(2 * wait_s, self._idle_wait_s)
        except BaseException as error:
            logger.exception("the engine failed")
            self._die(str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}")
        else:
            self._die("the engine was shut down")
        self._end_core()

    def _end_core(self) -> None:
        try:
            self._core.shutdown()
            self._deliver(self._core.take_outputs())
        except Exception:
            logger.exception("shutdown of the engine")
        if self._collector is not None:
            self._collector.end()

    def _run_calls(self) -> bool:
        with self._wake:
            calls, self._calls = list(self._calls), deque()
        for function, future in calls:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(self._core)
            except Exception as error:  # the caller's to handle
                future.set_exception(error)
            else:
                future.set_result(result)
        return bool(calls)

    def _sleep(self, seconds: float) -> bool:
        """Whether a call or the end came before the time was over."""
        with self._wake:
            return bool(self._calls) or self._stopping or self._wake.wait(seconds)

    def _die(self, reason: str) -> None:
        with self._wake:
            self._dead = reason
            calls, self._calls = list(self._calls), deque()
        for _, future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineDeadError(reason))
        self._deliver(self._core.take_outputs())
