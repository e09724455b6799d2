"""Serve replicas of the two roles. Each owns the actors of one engine, and ends with them."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from hisparse.actors import logs
from hisparse.actors.engine import EngineActors, EngineIdentity
from hisparse.config import HiSparseConfig, model_path
from hisparse.engine.tokenizer import Tokenizer
from hisparse.metrics import RequestFeed
from hisparse.metrics.ray_sink import make_sink
from hisparse.serve.background import spawn
from hisparse.serve.calls import Chunk, GenerateCall, PrefillAnswer, PrefillCall
from hisparse.serve.decode import DecodeService
from hisparse.serve.errors import ENGINE_UNAVAILABLE
from hisparse.serve.prefill import PrefillClient, PrefillService
from hisparse.telemetry.make import make_tracer

logger = logging.getLogger(__name__)

LEAVE_S = 1.0
"""For answers that are on their way, when a replica ends because its engine has failed."""


class EngineReplica:
    """A Serve replica that owns the actors of one engine."""

    def __init__(self, config: HiSparseConfig) -> None:
        app = serve.get_replica_context().app_name
        identity = EngineIdentity.new(config.pd.role, app)
        logs.configure(config.serve, replica=identity.engine_id)
        self._drain_timeout_s, self._leaving = config.serve.drain_timeout_s, False
        self.engine = EngineActors.start(config, identity)
        self.feed = RequestFeed(make_sink(config.serve), time.monotonic, **self.engine.labels)
        self.tracer = make_tracer(config.telemetry, identity.engine_id, **{"service.instance.id": identity.engine_id})
        logger.info("engine %s is ready", identity.engine_id)

    async def check_health(self) -> None:
        """Serve's probe: through the engine loop's turn counter. Raising makes Serve replace the replica."""
        health = await self.engine.health()
        if not health["ok"]:
            raise RuntimeError(f"engine {self.engine.identity.engine_id} is unhealthy: {health['reason']}")

    async def abort(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    async def leave_if_dead(self) -> None:
        """Ends this process when its engine has failed. An idle replica looks attractive to routers: until Serve has noticed by
        its health checks, most requests would come here only to be sent away.
        """
        health = await self.engine.probe()
        if health["ok"] or health.get("starting") or self._leaving:
            return
        self._leaving = True
        logger.error("engine %s has failed, and so this replica ends: %s", self.engine.identity.engine_id, health["reason"])
        await asyncio.to_thread(self.engine.stop)
        await asyncio.to_thread(self.tracer.shutdown)
        await asyncio.sleep(LEAVE_S)
        os._exit(1)

    async def __del__(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is not None and not self._leaving:
            self._leaving = True  # a late request finds no engine; this process must not end in the middle of the stop
            await asyncio.to_thread(engine.drain, self._drain_timeout_s)
            await asyncio.to_thread(engine.stop)
            await asyncio.to_thread(self.tracer.shutdown)


class PrefillReplica(EngineReplica):
    """See `PrefillService`."""

    def __init__(self, config: HiSparseConfig) -> None:
        super().__init__(config)
        self._service = PrefillService(self.engine, self.feed, self.tracer)

    async def prefill(self, call: PrefillCall) -> PrefillAnswer:
        answer = await self._service.prefill(call)
        if answer.error is not None and answer.error.code == ENGINE_UNAVAILABLE:
            spawn(self.leave_if_dead())
        return answer


class DecodeReplica(EngineReplica):
    """See `DecodeService`."""

    def __init__(self, config: HiSparseConfig, prefill: DeploymentHandle[Any] | None = None) -> None:
        client = None
        if prefill is not None:
            async def send(call: PrefillCall) -> PrefillAnswer:
                response: Any = prefill.prefill.remote(call)
                try:
                    answer: PrefillAnswer = await response
                    return answer
                except asyncio.CancelledError:
                    response.cancel()
                    raise

            client = PrefillClient(send, config.pd)
        super().__init__(config)
        self._service = DecodeService(config, self.engine, Tokenizer(model_path(config.model)), client, self.feed, self.tracer)

    async def generate(self, call: GenerateCall) -> AsyncIterator[Chunk]:
        async for chunk in self._service.generate(call):
            if chunk.error is not None and chunk.error.code == ENGINE_UNAVAILABLE:
                spawn(self.leave_if_dead())
            yield chunk
