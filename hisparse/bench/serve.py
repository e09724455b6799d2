"""Load on a running OpenAI-compatible service, beside one client alone in the same run.

Prompts are random words, so many that the service counts about the wanted tokens; a share of each may be common to all. Answers
have a fixed length. A request counts only if its stream ended as it should, with a finish reason, usage and [DONE].
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from hisparse.bench import report
from hisparse.bench.load.client import Answer, Service, first_model
from hisparse.bench.load.phase import Phase, Spread, closed_loop, open_loop
from hisparse.bench.load.prompts import PROBE_WORDS, Prompts, probe
from hisparse.bench.progress import Progress
from hisparse.errors import ConfigError, HiSparseError

BUSY = 0.8
"""Share of a core from which on the load generator may be what is measured."""
LATE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked.

    Attributes:
        url: of the service, without /v1. model: None = the first of /v1/models. concurrency: levels, one after the other.
        rate: requests a second instead of `concurrency`. num_requests: of each level. alone: requests of the baseline.
        shared: share of each prompt that all have in common. seed: None = another one each time, so that nothing is cached.
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    api_key: str | None = None
    concurrency: tuple[int, ...] = (1, 4, 8)
    rate: float | None = None
    num_requests: int = 32
    alone: int = 4
    prompt_tokens: int = 1024
    output_tokens: int = 64
    shared: float = 0.0
    chat: bool = False
    ignore_eos: bool = True
    seed: int | None = None
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.shared <= 1:
            raise ConfigError(f"--shared-prefix must be in 0..1 (a share of each prompt), got {self.shared:g}")
        if self.rate is not None and self.rate <= 0:
            raise ConfigError(f"--rate must be above 0 requests a second, got {self.rate:g}")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url must begin with http:// or https://, got {self.url!r}")


def run(load: Load, *, progress: Progress | None = None) -> tuple[dict[str, Any], list[Phase]]:
    """Facts of the run and its phases, the baseline first.

    Raises:
        HiSparseError: nothing answers, the model is not there, or the baseline's requests failed; with the reason.
    """
    return asyncio.run(_run(load, progress or Progress()))


async def _run(load: Load, progress: Progress) -> tuple[dict[str, Any], list[Phase]]:
    seed = secrets.randbelow(1 << 32) if load.seed is None else load.seed
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    base = load.url.rstrip("/").removesuffix("/v1") + "/v1"
    async with httpx.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=load.timeout_s,
                                 trust_env=False) as client:
        service = Service(client=client, model=load.model or await first_model(client), chat=load.chat,
                          ignore_eos=load.ignore_eos)
        prompts = await _prompts(service, load, seed)
        levels: list[float] = [load.rate] if load.rate is not None else list(load.concurrency)
        progress.expect(load.alone + load.num_requests * len(levels))

        def told(answer: Answer) -> None:
            progress.step(answer.failure or f"{answer.total_s:.2f} s, first token after {answer.first_token_s:.2f} s")

        phases = [await closed_loop(service, prompts, load.output_tokens, clients=1, num_requests=load.alone, first=1,
                                    told=told)]
        if len(phases[0].done) < load.alone:
            raise HiSparseError(f"a client alone was not served: {next(iter(phases[0].failures))}")
        first = 1 + load.alone
        for level in levels:
            if load.rate is not None:
                phase = await open_loop(service, prompts, load.output_tokens, rate=level, num_requests=load.num_requests,
                                        first=first, seed=seed, told=told)
            else:
                phase = await closed_loop(service, prompts, load.output_tokens, clients=int(level),
                                          num_requests=load.num_requests, first=first, told=told)
            phases.append(phase)
            first += load.num_requests
    facts = report.facts("serve") | {
        "url": load.url, "model": service.model, "prompt_tokens": load.prompt_tokens, "output_tokens": load.output_tokens,
        "shared_prefix": load.shared, "endpoint": "chat completions" if load.chat else "completions", "seed": seed}
    return facts, phases


async def _prompts(service: Service, load: Load, seed: int) -> Prompts:
    """Two requests that do not count: one to learn the length of a word, one that brings what prompts share to the cache."""
    answer = await service.ask(probe(seed), 1)
    if answer.failure:
        raise HiSparseError(f"the service does not answer a prompt of {PROBE_WORDS} words: {answer.failure}")
    prompts = Prompts(num_tokens=load.prompt_tokens, shared=load.shared, seed=seed,
                      tokens_per_word=answer.prompt_tokens / PROBE_WORDS)
    answer = await service.ask(prompts.text(0), load.output_tokens)
    if answer.failure:
        raise HiSparseError(f"the service does not answer {load.prompt_tokens} + {load.output_tokens} tokens: {answer.failure}")
    return prompts


def rows(phases: Sequence[Phase]) -> list[report.Row]:
    """Every number of every phase, beside the same of one client alone."""
    alone, found = phases[0], []
    for phase in phases:
        for what, spread, before in (("time to first token", phase.first_token, alone.first_token),
                                     ("time between tokens", phase.token_gap, alone.token_gap),
                                     ("longest wait for a token", phase.longest_gap, alone.longest_gap),
                                     ("whole answer", phase.latency, alone.latency)):
            found.append(_time_row(f"{_name(phase, alone)}: {what}", spread, before, phase, alone))
        for what, value, before_value, unit in (
                ("output", phase.output_tokens_per_s, alone.output_tokens_per_s, "tokens/s"),
                ("answers", phase.requests_per_s, alone.requests_per_s, "requests/s")):
            found.append(report.Row(case=f"{_name(phase, alone)}: {what}", value=value, unit=unit, more_is_better=True,
                                    yardstick=None if phase is alone else (before_value, "x alone"), detail=_detail(phase)))
    return found


def _name(phase: Phase, alone: Phase) -> str:
    return "alone" if phase is alone else phase.name


def _time_row(case: str, spread: Spread, before: Spread, phase: Phase, alone: Phase) -> report.Row:
    return report.Row(case=case, value=spread.p50 * 1e3, unit="ms", best=spread.best * 1e3, p90=spread.p90 * 1e3,
                      max=spread.max * 1e3, detail={"p99": spread.p99 * 1e3},
                      yardstick=(before.p50 * 1e3, "x alone") if phase is not alone and before.p50 else None)


def _detail(phase: Phase) -> dict[str, Any]:
    done = phase.done
    return {"requests": len(phase.answers), "answered": len(done), "failures": dict(phase.failures),
            "prompt_tokens": sum(answer.prompt_tokens for answer in done),
            "cached_tokens": sum(answer.cached_tokens for answer in done), "wall_s": phase.wall_s, "late_s": phase.late_s,
            "cpu_share": phase.cpu_share}


def warnings(phases: Sequence[Phase]) -> list[str]:
    """What makes numbers of this run doubtful."""
    found = [f"{phase.name}: this load generator took {phase.cpu_share:.0%} of a core; the service may be faster than shown"
             for phase in phases if phase.cpu_share > BUSY]
    return found + [f"{phase.name}: requests were sent up to {phase.late_s * 1e3:.0f} ms late; times include it"
                    for phase in phases if phase.late_s > LATE_S]
