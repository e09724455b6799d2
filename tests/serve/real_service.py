"""The API over one small real engine in this process: everything of a replica but Ray.

The bundled checkpoint, its tokenizer, `EngineCore` in its loop's thread behind the coordinator's front, and `DecodeService`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import openai
import torch
import uvicorn
from fastapi import FastAPI

from hisparse.actors.coordinator import CoordinatorActor
from hisparse.config import HiSparseConfig, load_config, model_path
from hisparse.engine.core import EngineCore
from hisparse.engine.sampler import Sampler, SampleRow
from hisparse.engine.tokenizer import Tokenizer
from hisparse.serve.calls import Chunk, GenerateCall
from hisparse.serve.decode import DecodeService
from hisparse.serve.ingress import create_api
from hisparse.testing.local_engine import LocalEngine
from hisparse.types import StepCommand
from tests.engine.fake_executor import FakeExecutor


def real_config(*, max_model_len: int = 512, **serve: Any) -> HiSparseConfig:
    return load_config({
        "model": {"path": "recall", "max_model_len": max_model_len},
        "cache": {"device_blocks": 160, "host_pool_gib": 0.03},
        "scheduler": {"max_num_seqs": 4, "max_waiting": 16},
        "serve": {"prefill_replicas": 0, "request_timeout_s": 60.0} | serve,
    }, environ={})


class ScriptedRank(FakeExecutor):
    """Logits from a random generator instead of a model: a step takes a millisecond. Tokens are drawn by the real sampler."""

    def submit(self, command: StepCommand) -> None:
        super().submit(command)
        (result,) = self._results.pop()
        rows, logits = [], []
        for chunk in command.chunks:
            if chunk.sample:
                position = chunk.first_position + len(chunk.token_ids)
                rows.append(SampleRow(request_id=chunk.request_id, position=position, params=chunk.sampling))
                generator = torch.Generator().manual_seed(chunk.token_ids[-1] * 65537 + position)
                logits.append(torch.randn(1024, generator=generator) * 4)
        if rows:
            tokens = Sampler(salt=1).sample(torch.stack(logits), rows)
            result = replace(result, sampled={row.request_id: token for row, token in zip(rows, tokens)})
        self._results.append([result])


class RealBackend:
    """See `Backend`. Its engine runs until `close`.

    Args:
        scripted: everything but the model.
    """

    def __init__(self, config: HiSparseConfig, *, scripted: bool = False) -> None:
        self.tokenizer = Tokenizer(model_path(config.model))
        self._coordinator = CoordinatorActor()

        def build() -> EngineCore:
            if not scripted:
                return LocalEngine(config, tokenizer=self.tokenizer).core
            return EngineCore(config, ScriptedRank(7), engine_id="scripted", incarnation=7, tokenizer=self.tokenizer)

        asyncio.run(self._coordinator.start({}, build))
        self._decode = DecodeService(config, self._coordinator, self.tokenizer, None)
        self.aborted: list[str] = []

    async def generate(self, call: GenerateCall) -> AsyncIterator[Chunk]:
        async for chunk in self._decode.generate(call):
            yield chunk

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        await self._coordinator.abort(request_id)

    async def engines(self, check: bool) -> list[dict[str, Any]]:
        return [{"engine": "local", **await self._coordinator.stats(check)}]

    async def metrics_endpoints(self) -> list[str]:
        return []

    def stats(self) -> dict[str, Any]:
        return asyncio.run(self._coordinator.stats(True))

    def settled(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """Statistics once nothing is open; every account adds up then."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.stats()
            if not any(found[key] for key in ("running", "waiting", "loading", "held")):
                assert found["check"] == "ok", found["check"]
                cache = found["cache"]
                assert cache["device_blocks_free"] == cache["device_blocks_total"]
                return found
            assert time.monotonic() < deadline, f"still busy: {found}"
            time.sleep(0.02)

    def close(self) -> None:
        self.settled()
        assert asyncio.run(self._coordinator.shutdown())


@dataclass(frozen=True)
class Served:
    """A running HTTP server."""

    url: str
    backend: RealBackend

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def async_client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)


@contextmanager
def serving_here(config: HiSparseConfig) -> Iterator[Served]:
    """The API on a free port of the loopback interface."""
    backend = RealBackend(config)
    with listening(create_api(config, lambda: backend)) as url:
        yield Served(url, backend)
    backend.close()


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """An app on a free port of the loopback interface, until the block ends."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


def wait_for(done: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
