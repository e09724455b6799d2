"""Small engines, the outside oracle, and the accounts that must balance, for tests of failures, reuse and stress."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hisparse.cache.admission import min_device_blocks
from hisparse.config import GIB, HiSparseConfig, kv_layout, load_config
from hisparse.pd.loopback import DEFAULT_NETWORK, LoopbackFaults
from hisparse.testing.local_engine import Generation, LocalEngine
from hisparse.testing.reference_decode import ReferenceModel, ReferenceRun
from hisparse.types import FinishReason, RequestOutput, SamplingParams

BLOCK = 16
CHUNK = 32
VOCAB = 512
EXCUSED: list[str] = []
"""Mismatches behind a near tie of the reference, in this process."""


def engine_config(path: Path, role: str = "colocated", *, slack: int | None = None, host_pages: int = 400,
                  max_len: int = 320, chunk: int = CHUNK, **sections: Mapping[str, Any]) -> HiSparseConfig:
    """Pages of 16 tokens, loopback transport.

    Args:
        slack: device blocks beyond the smallest pool in which one longest request can run; None = room for everything.
        host_pages: of the host pool, beside its null page.
    """
    config = load_config({
        "model": {"path": str(path), "max_model_len": max_len},
        "cache": {"block_size": BLOCK, "device_blocks": 4000, "hot_rows": 48},
        "scheduler": {"max_num_seqs": 8, "prefill_chunk_tokens": chunk, "max_step_tokens": 128},
        "pd": {"role": role, "transport": "loopback"},
    }, environ={})
    layout = kv_layout(config)
    cache: dict[str, Any] = {"host_pool_gib": (host_pages + 1.5) * layout.host_block_bytes / GIB}
    if slack is not None:
        cache["device_blocks"] = slack + min_device_blocks(
            layout, config.cache, max_model_len=max_len, max_query_tokens=chunk)
    config = load_config(config.model_dump(), {"cache": cache}, environ={})
    return load_config(config.model_dump(), dict(sections), environ={})


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(2, VOCAB) for _ in range(length))


@functools.cache
def _model(path: Path) -> ReferenceModel:
    return ReferenceModel(path)


@functools.cache
def reference(path: Path, prompt: tuple[int, ...], num_tokens: int) -> ReferenceRun:
    """What unmodified transformers says."""
    return _model(path).decode(prompt, num_tokens, prefill_chunks=CHUNK)


def check_tokens(name: str, path: Path, prompt: Sequence[int], tokens: Sequence[int], *, complete: int | None) -> None:
    """The tokens are the reference's; the first difference may only lie behind a near tie of the reference.

    Args:
        complete: number of tokens that must be there; None = any prefix of the reference's.
    """
    if complete is not None:
        assert len(tokens) == complete, f"{name}: {len(tokens)} tokens of {complete}"
    run = reference(path, tuple(prompt), complete if complete is not None else max(len(tokens), 1))
    for i, (got, want) in enumerate(zip(tokens, run.token_ids)):
        if got == want:
            continue
        assert run.first_excusable() <= i, (
            f"{name}: token {i} is {got}, unmodified transformers says {want} after a prompt of {len(prompt)} tokens "
            f"(logit gap {run.steps[i].logit_gap:.2e}, index gap {min(run.steps[i].index_gaps):.2e}, "
            f"smallest gap in the prompt {run.prefill_index_gap:.2e})")
        EXCUSED.append(f"{name}: token {i}")
        return


def assert_full(engine: LocalEngine) -> None:
    """Nothing is open, nothing is held, every block of both pools is free, every account balances."""
    core = engine.core
    core.check()
    stats = core.stats()
    cache = stats.cache
    assert not core.requests and stats.held == stats.running == stats.waiting == stats.loading == 0, stats
    assert cache["device_blocks_free"] == cache["device_blocks_total"], f"device blocks leaked: {cache}"
    assert cache["host_blocks_free"] == cache["host_blocks_total"], f"host blocks leaked: {cache}"
    assert cache["requests_open"] == cache["transfers_in_flight"] == cache["loads_in_flight"] == 0, cache
    if engine.pd is not None:
        pd = engine.pd.stats()
        assert pd.leases_held == pd.imports_in_flight == 0, pd


@dataclass
class Served:
    """A request of a test, and what it must give."""

    prompt: tuple[int, ...]
    max_tokens: int
    salt: str | None = None
    priority: int = 0
    aborted: bool = False


@dataclass
class Rig:
    """A colocated engine (prefill is None) or a pair, and every request put in."""

    path: Path
    decode: LocalEngine
    prefill: LocalEngine | None = None
    served: dict[str, Served] = field(default_factory=dict)
    at_prefill: set[str] = field(default_factory=set)
    refused: dict[str, Exception] = field(default_factory=dict)
    tamper: Callable[[str, Mapping[str, Any]], Any] | None = None
    """Changes a prefill answer on its way to decode; None as its answer drops it."""
    watch: Callable[[], None] | None = None
    """Called after every step."""

    @property
    def engines(self) -> list[LocalEngine]:
        return [engine for engine in (self.prefill, self.decode) if engine is not None]

    @property
    def faults(self) -> LoopbackFaults:
        """Levers of the decode side's reads."""
        return DEFAULT_NETWORK.agents[self.decode.executor.handshakes[0].agent].faults

    def put(self, name: str, prompt: Sequence[int], max_tokens: int, *, salt: str | None = None, priority: int = 0) -> None:
        self.served[name] = Served(tuple(prompt), max_tokens, salt, priority)
        if self.prefill is None:
            self.decode.add(name, prompt, greedy(max_tokens), cache_salt=salt, priority=priority)
        else:
            self.at_prefill.add(name)
            self.prefill.add(name, prompt, greedy(1), cache_salt=salt, priority=priority, do_remote_decode=True)

    def hand_over(self, output: RequestOutput) -> None:
        """A prefill request ended: decode gets its answer."""
        name = output.request_id
        if name not in self.at_prefill:
            return
        self.at_prefill.discard(name)
        if output.finish_reason is FinishReason.ABORT or self.served[name].aborted:
            return
        params: Any = output.kv_transfer_params
        if self.tamper is not None:
            params = self.tamper(name, params)
            if params is None:
                return
        request = self.served[name]
        try:
            self.decode.add(name, request.prompt, greedy(request.max_tokens), cache_salt=request.salt,
                            priority=request.priority, kv_transfer_params=params)
        except Exception as error:
            self.refused[name] = error

    def step(self) -> bool:
        """One step of each engine. False = nothing came out."""
        moved = False
        if self.prefill is not None:
            for output in self.prefill.step():
                moved = True
                if output.finish_reason is not None:
                    self.hand_over(output)
        return bool(self.decode.step()) or moved

    def abort(self, name: str) -> None:
        """Like a client that went away: both engines hear of it."""
        self.served[name].aborted = True
        for engine in self.engines:
            engine.core.abort(name)

    def ended(self, name: str) -> bool:
        answer = self.decode.answers.get(name)
        return self.served[name].aborted or name in self.refused or (
            answer is not None and answer.finish_reason is not None)

    def until(self, done: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            if not self.step():
                time.sleep(0.0003)
            if self.watch is not None:
                self.watch()
            assert time.monotonic() < deadline, f"stuck: {[engine.core.stats() for engine in self.engines]}"

    def run(self) -> None:
        """To the end of every request; then nothing may be left anywhere."""
        self.until(lambda: all(self.ended(name) for name in self.served))
        self.drain()

    def drain(self) -> None:
        self.until(lambda: not any(engine.core.has_work() for engine in self.engines))
        for engine in self.engines:
            assert_full(engine)

    def check(self, *names: str) -> None:
        """Tokens of the named (default: all that were not aborted or refused) equal the reference."""
        for name in names or [n for n, s in self.served.items() if not s.aborted and n not in self.refused]:
            request, answer = self.served[name], self.decode.answers[name]
            assert answer.finish_reason is FinishReason.LENGTH, f"{name}: {answer}"
            check_tokens(name, self.path, request.prompt, answer.token_ids, complete=request.max_tokens)

    def check_aborted(self) -> None:
        """What an aborted request returned before is the beginning of the reference's answer."""
        for name, request in self.served.items():
            answer = self.decode.answers.get(name)
            if request.aborted and answer is not None:
                check_tokens(name, self.path, request.prompt, answer.token_ids, complete=None)

    def answer(self, name: str) -> Generation:
        return self.decode.answers[name]

    def close(self) -> None:
        for engine in reversed(self.engines):
            engine.close()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
