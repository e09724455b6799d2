"""One sampling for however many viewers; none while nobody looks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from hisparse.serve.errors import ApiError

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
SAMPLE_TIMEOUT_S = 8.0
MAX_VIEWERS = 32
"""Each holds one of the ingress's places for open requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What every engine reported at one moment.

    Attributes:
        number: from 1, without gaps. at_s: Unix time. engines: see `CoordinatorActor.residency`, with "engine", its name. Of
            one that is busy with a long step, the report before, with "late": True.
        problem: why there is no report; "" = there is one.
    """

    number: int
    at_s: float
    engines: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""


class ResidencyHub:
    """Asks the engines once per interval while somebody watches, and hands each viewer the newest sample.

    A viewer that is slow skips samples; nothing waits for it and nothing is kept for it.

    Args:
        ask: every engine's report. interval_s: between the end of one sampling and the next.
    """

    def __init__(self, ask: Callable[[], Awaitable[list[dict[str, Any]]]], *, interval_s: float = INTERVAL_S,
                 max_viewers: int = MAX_VIEWERS, wall_clock: Callable[[], float] = time.time) -> None:
        self._ask, self._interval_s, self._max_viewers, self._wall_clock = ask, interval_s, max_viewers, wall_clock
        self._viewers = self._number = 0
        self._latest: Sample | None = None
        self._reports: dict[str, dict[str, Any]] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def num_viewers(self) -> int:
        return self._viewers

    async def watch(self) -> AsyncGenerator[Sample, None]:
        """Samples as they come, the newest first of all; endless.

        Raises:
            ApiError: 429, too many viewers.
        """
        if self._viewers >= self._max_viewers:
            raise ApiError(429, f"{self._viewers} viewers watch already, as many as one ingress serves; close a page")
        self._viewers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        seen = 0
        try:
            while True:
                while self._latest is None or self._latest.number <= seen:
                    await self._news.wait()
                seen = self._latest.number
                yield self._latest
        finally:
            self._viewers -= 1
            if self._viewers == 0 and self._task is not None:
                self._task.cancel()
                self._task = self._latest = None  # the next viewer must not see an old one
                self._reports = {}

    async def _run(self) -> None:
        while True:
            self._number += 1
            self._latest = await self._sample(self._number)
            news, self._news = self._news, asyncio.Event()
            news.set()
            await asyncio.sleep(self._interval_s)

    async def _sample(self, number: int) -> Sample:
        try:
            engines = [self._or_before(item) for item in await asyncio.wait_for(self._ask(), SAMPLE_TIMEOUT_S)]
            self._reports = {str(item.get("engine")): item for item in engines}
            return Sample(number=number, at_s=self._wall_clock(), engines=engines)
        except Exception as error:
            logger.warning("no residency sample: %s: %s", type(error).__name__, error)
            return Sample(number=number, at_s=self._wall_clock(), problem=ApiError.of(error).message)

    def _or_before(self, engine: dict[str, Any]) -> dict[str, Any]:
        """An engine that is well and says nothing else has not lost its requests: it will answer after its step."""
        before = self._reports.get(str(engine.get("engine")), {})
        if "role" in engine or "role" not in before or not engine.get("health", {}).get("ok"):
            return engine
        return before | engine | {"late": True}
