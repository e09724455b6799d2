"""Engines without Ray: one colocated engine, or a prefill/decode pair in one process. For tests and small scripts."""

from __future__ import annotations

import functools
import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hisparse.config import HiSparseConfig, kv_layout
from hisparse.engine.core import EngineCore
from hisparse.engine.executor import LocalExecutor
from hisparse.engine.protocols import Tokenizer
from hisparse.pd.connector import PDConnectorScheduler, make_pd_worker
from hisparse.types import FinishReason, RequestOutput, RequestStats, SampledToken, SamplingParams


@dataclass(slots=True, kw_only=True)
class Generation:
    """Everything one request gave."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[SampledToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: RequestStats | None = None
    kv_transfer_params: Mapping[str, Any] | None = None

    def add(self, output: RequestOutput) -> None:
        self.token_ids += output.new_token_ids
        self.text += output.new_text
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason or self.finish_reason
        self.error = output.error or self.error
        self.stats = output.stats or self.stats
        self.kv_transfer_params = output.kv_transfer_params or self.kv_transfer_params


class LocalEngine:
    """One engine and what it answered so far.

    Args:
        config: with `pd.role` set. tokenizer: for text; None = ids only.
    """

    def __init__(self, config: HiSparseConfig, *, engine_id: str = "local", tokenizer: Tokenizer | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        incarnation = secrets.randbits(63)
        pd, makers = None, []
        if config.pd.role != "colocated":
            pd = PDConnectorScheduler(kv_layout(config), config.pd, engine_id=engine_id, incarnation=incarnation,
                                      num_ranks=config.tensor_parallel_size, clock=clock)
            makers = [functools.partial(make_pd_worker, config=config, engine_id=engine_id, incarnation=incarnation)]
        self.executor = LocalExecutor(config, incarnation=incarnation, connectors=makers)
        if pd is not None:
            pd.set_endpoints(self.executor.handshakes)
        self.pd = pd
        self.core = EngineCore(config, self.executor, engine_id=engine_id, incarnation=incarnation, pd=pd,
                               tokenizer=tokenizer, clock=clock)
        self.answers: dict[str, Generation] = {}

    def add(self, request_id: str, prompt: Sequence[int], sampling: SamplingParams, **options: Any) -> None:
        self.core.add_request(request_id, prompt, sampling, **options)
        self.answers[request_id] = Generation()

    def step(self) -> list[RequestOutput]:
        outputs = self.core.step()
        for output in outputs:
            self.answers[output.request_id].add(output)
        return outputs

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, **options: Any) -> list[Generation]:
        """All prompts at once, to the end."""
        ids = [f"r{next(_IDS)}" for _ in prompts]
        for request_id, prompt in zip(ids, prompts):
            self.add(request_id, prompt, sampling, **options)
        self.run_until(lambda: all(self.answers[i].finish_reason for i in ids))
        return [self.answers[i] for i in ids]

    def run_until(self, done: Callable[[], bool], *, timeout_s: float = 240.0) -> None:
        """Steps until `done()`. Raises TimeoutError with the engine's counters."""
        deadline = time.monotonic() + timeout_s
        while not done():
            if not self.step():
                time.sleep(0.0005)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine is stuck: {self.core.stats()}")

    def drain(self, *, timeout_s: float = 60.0) -> None:
        """Steps until nothing is open, then checks every account."""
        self.run_until(lambda: not self.core.has_work(), timeout_s=timeout_s)
        self.core.check()

    def close(self) -> None:
        self.core.shutdown()


class LocalPair:
    """A prefill engine and a decode engine that reads from it, stepped in turn. Engine ids must differ."""

    def __init__(self, prefill: LocalEngine, decode: LocalEngine) -> None:
        self.prefill, self.decode = prefill, decode

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Generation]:
        """All prompts at once through prefill, then decode."""
        ids = [f"r{next(_IDS)}" for _ in prompts]
        one = SamplingParams(max_tokens=1)
        for request_id, prompt in zip(ids, prompts):
            self.prefill.add(request_id, prompt, one, do_remote_decode=True)
        waiting = dict(zip(ids, prompts))
        deadline = time.monotonic() + 240.0
        while waiting or not all(self.decode.answers[i].finish_reason for i in ids):
            for output in self.prefill.step():
                if output.finish_reason is not None:
                    self.decode.add(output.request_id, waiting.pop(output.request_id), sampling,
                                    kv_transfer_params=output.kv_transfer_params)
            self.decode.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"stuck: {self.prefill.core.stats()} {self.decode.core.stats()}")
        return [self.decode.answers[i] for i in ids]

    def drain(self, *, timeout_s: float = 60.0) -> None:
        """Steps both until nothing is open or leased, then checks every account."""
        deadline = time.monotonic() + timeout_s
        while self.prefill.core.has_work() or self.decode.core.has_work():
            self.prefill.step()
            self.decode.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not drained: {self.prefill.core.stats()} {self.decode.core.stats()}")
            time.sleep(0.0005)
        self.prefill.core.check()
        self.decode.core.check()

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


_IDS = itertools.count()
