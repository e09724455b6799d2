"""The coordinator actor of one engine: an async front of the engine loop. Its event loop never waits for a step."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from hisparse.actors.engine_loop import Core, EngineLoop
from hisparse.actors.output_streams import OutputStreams, merge
from hisparse.config import GIB
from hisparse.engine.garbage import IdleCollector
from hisparse.errors import EngineDeadError, InvariantError
from hisparse.metrics import EngineFeed, Sink
from hisparse.types import RequestOutput, SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")

SAMPLE_TIMEOUT_S = 2.0
"""A step that runs for longer is waited for by nobody who only looks."""
MAX_TENANTS = 4096
"""Requests whose tenant is remembered, the latest."""
DRAIN_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request as an engine takes it. See `EngineCore.add_request`. `tenant`: who asks, for reports; "" = not known."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None
    do_remote_decode: bool = False
    prefill_failed: str | None = None
    prefill_retries: int = 0
    tenant: str = ""


class CoordinatorActor:
    """One per engine.

    Args:
        stall_s: a loop without a turn for so long is unhealthy.
        preload: module to import at once, while other actors boot; "" = none.
    """

    def __init__(self, stall_s: float = 60.0, preload: str = "") -> None:
        if preload:
            importlib.import_module(preload)
        self._stall_s = stall_s
        self._streams = OutputStreams()
        self._loop: EngineLoop | None = None
        self._about: Mapping[str, Any] = {}
        self._pinned: dict[int, tuple[int, int]] = {}
        self._reporting: asyncio.Task[None] | None = None
        self._tenants: OrderedDict[str, str] = OrderedDict()

    async def start(self, about: Mapping[str, Any], build: Callable[..., Core], *args: Any) -> int:
        """Makes the core with `build(*args)` in this process and starts its loop; returns the process id.

        Args:
            about: facts that `stats` repeats.
        """
        if self._loop is not None:
            raise InvariantError("the engine was started already")
        core = await asyncio.to_thread(build, *args)
        self._loop = EngineLoop(core, self._deliver, stall_s=self._stall_s, collector=IdleCollector())
        self._loop.start()
        self._about = dict(about)
        return os.getpid()

    async def report(self, make_sink: Callable[[], Sink], labels: Mapping[str, str], interval_s: float) -> None:
        """From now on puts the engine's statistics into a sink, every `interval_s` until the actor ends.

        Args:
            make_sink: called in this process. labels: model, role and engine.
        """
        feed = EngineFeed(make_sink(), **labels)
        self._reporting = asyncio.get_running_loop().create_task(self._report(feed, interval_s))

    async def _report(self, feed: EngineFeed, interval_s: float) -> None:
        while True:
            health = self._engine.health()
            feed.health(health.ok, health.beat_age_s)
            try:
                # The loop may be stuck in a step: then only health is reported, and the next round asks again.
                stats = await asyncio.wait_for(self._call(lambda core: core.stats().asdict()), max(interval_s, 1.0))
                feed.update(stats)
            except (TimeoutError, EngineDeadError):
                logger.debug("no statistics: %s", health.reason or "the engine is busy")
            except Exception:
                logger.exception("metrics of this turn are lost")
            await asyncio.sleep(interval_s)

    async def pinned(self, rank: int, done_bytes: int, total_bytes: int) -> None:
        """How far a rank has come with its pool, which is most of a start."""
        self._pinned[rank] = done_bytes, total_bytes

    def _starting(self) -> dict[str, Any]:
        """Health before the start."""
        done, total = (sum(column) / GIB for column in zip(*self._pinned.values())) if self._pinned else (0.0, 0.0)
        reason = f"pinning {done:.1f}/{total:.1f} GiB of host memory" if done < total else "loading"
        return {"ok": False, "starting": True, "reason": reason}

    @property
    def _engine(self) -> EngineLoop:
        if self._loop is None:
            raise EngineDeadError("the engine was not started")
        return self._loop

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        self._streams.deliver(outputs)
        if self._engine.dead is not None:
            self._streams.fail(self._engine.dead)

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        """Adds the request and yields its increments; the last one has a finish reason.

        Increments that wait already are merged into one. Whoever stops listening early aborts the request.

        Raises:
            RequestError: refused; nothing was kept.
            EngineDeadError: the engine has failed.
        """
        queue = self._streams.open(request.request_id)
        if request.tenant:
            self._tenants[request.request_id] = request.tenant
            while len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        finished = added = False
        try:
            await self._call(lambda core: core.add_request(
                request.request_id, request.prompt_token_ids, request.sampling, cache_salt=request.cache_salt,
                priority=request.priority, kv_transfer_params=request.kv_transfer_params,
                do_remote_decode=request.do_remote_decode, prefill_failed=request.prefill_failed,
                prefill_retries=request.prefill_retries,
            ))
            added = True
            while not finished:
                output = await queue.get()
                while output.finish_reason is None and not queue.empty():
                    output = merge(output, queue.get_nowait())
                finished = output.finish_reason is not None
                yield output
        except asyncio.CancelledError:
            added = True  # the call may still run
            raise
        finally:
            self._streams.close(request.request_id)
            if added and not finished:
                self._engine.call(lambda core: core.abort(request.request_id))

    async def complete(self, request: EngineRequest) -> RequestOutput:
        """The whole output at once; for prefill engines, whose last increment has `kv_transfer_params`."""
        whole: RequestOutput | None = None
        async for output in self.generate(request):
            whole = output if whole is None else merge(whole, output)
        if whole is None:
            raise InvariantError(f"request {request.request_id} ended without an output")
        return whole

    async def resume(self, request_id: str, kv_transfer_params: Mapping[str, Any] | None, prefill_failed: str,
                     retries_left: int) -> None:
        """See `EngineCore.resume`. Raises EngineDeadError when the engine has failed; its listener hears it, too."""
        await self._call(lambda core: core.resume(
            request_id, kv_transfer_params=kv_transfer_params, prefill_failed=prefill_failed, retries_left=retries_left))

    async def abort(self, request_id: str) -> None:
        """Stops a request, whoever listens; its listener gets a final output. On a prefill engine it also ends the
        lease of a request that is done. Unknown ids are ignored.
        """
        try:
            await self._call(lambda core: core.abort(request_id))
        except EngineDeadError:
            logger.debug("abort of %s: the engine is dead", request_id)

    async def stats(self, check: bool = False) -> dict[str, Any]:
        """Gauges, counters and health; with `check`, also the outcome of the conservation laws ("ok" or what broke)."""
        if self._loop is None:
            return {"pid": os.getpid(), "health": self._starting()}
        health = self._engine.health()
        report: dict[str, Any] = {**self._about, "pid": os.getpid(), "health": asdict(health)}
        if self._engine.dead is None:
            report |= await self._call(lambda core: core.stats().asdict())
            if check:
                report["check"] = await self._call(_check)
        return report

    async def residency(self) -> dict[str, Any]:
        """Health, and where every request lives (`ResidencySample.report`), with the tenants of the requests it names.

        Only health when the engine has failed or is busy with a step for longer than `SAMPLE_TIMEOUT_S`.
        """
        health = self._engine.health()
        view: dict[str, Any] = {"health": asdict(health)}
        if self._engine.dead is not None:
            return view
        try:
            sample = await asyncio.wait_for(self._call(lambda core: core.residency()), SAMPLE_TIMEOUT_S)
        except (TimeoutError, EngineDeadError):
            return view
        report = await asyncio.to_thread(sample.report)
        return view | report | {"tenants": {name: self._tenants[name] for name in _named(report) if name in self._tenants}}

    async def check(self) -> None:
        """Raises InvariantError unless every account of the engine is consistent."""
        await self._call(lambda core: core.check())

    async def health(self) -> dict[str, Any]:
        """From the loop's turn counter; never waits for a step. Before the start: `starting`, and what it is at."""
        return self._starting() if self._loop is None else asdict(self._engine.health())

    async def drain(self, timeout_s: float) -> dict[str, Any]:
        """Stops admission, ends what has not begun, and waits until streams, imports, write-backs and leases have ended.

        Args:
            timeout_s: after that it returns although something is open; `shutdown` ends it.
        Returns: `drained` (nothing is open), `cancelled` (requests that had not begun), `seconds`, and `open` by kind.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            cancelled = await self._call(lambda core: core.drain())
            while True:
                open_now = await self._call(_open_work)
                seconds = loop.time() - began_s
                if not open_now or seconds >= timeout_s:
                    break
                await asyncio.sleep(DRAIN_POLL_S)
        except EngineDeadError as error:
            logger.info("nothing to drain: %s", error)
            return {"drained": True, "cancelled": 0, "seconds": 0.0, "open": {}}
        report = {"drained": not open_now, "cancelled": cancelled, "seconds": round(seconds, 3), "open": open_now}
        logger.info("drained" if not open_now else "the drain is cut short", extra={"fields": report})
        return report

    async def shutdown(self, timeout_s: float = 10.0) -> bool:
        """Aborts what is open and ends the loop; True when it ended in time."""
        if self._reporting is not None:
            self._reporting.cancel()
        return self._loop is None or await asyncio.to_thread(self._loop.stop, timeout_s)

    async def _call(self, function: Callable[[Core], T]) -> T:
        future: Future[T] = self._engine.call(function)
        return await asyncio.wrap_future(future)


def _named(report: Mapping[str, Any]) -> set[str]:
    """Ids of the requests that a report lists."""
    return {*(item["id"] for item in report["requests"]), *(item[0] for item in report["pending"]),
            *(item["request_id"] for name in ("landings", "ended") for item in report[name])}


def _open_work(core: Core) -> dict[str, int]:
    """What a drain waits for, by kind; {} = nothing."""
    if not core.has_work():
        return {}
    stats = core.stats().asdict()
    counts = {kind: int(stats.get(kind, 0)) for kind in ("running", "waiting", "loading", "held")}
    return {kind: count for kind, count in counts.items() if count} or {"copies or notices": 1}


def _check(core: Core) -> str:
    try:
        core.check()
    except InvariantError as error:
        return str(error)
    return "ok"
