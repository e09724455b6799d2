"""Many requests: by so many clients that each ask again when they have an answer, or at a rate, whether answers come or not."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hisparse.bench.load.client import Answer, Service
from hisparse.bench.load.prompts import Prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of one quantity over requests."""

    p50: float
    p90: float
    p99: float
    best: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Example: of 1..100: p50 50.5, p90 90, p99 99. Nothing: all 0."""
        ordered = sorted(values) or [0.0]

        def rank(share: float) -> float:  # the least value that so many of all do not exceed
            return ordered[math.ceil(share * len(ordered)) - 1]

        return cls(p50=statistics.median(ordered), p90=rank(0.9), p99=rank(0.99), best=ordered[0], max=ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One level of load.

    Attributes:
        name: "8 clients" or "4 requests/s". answers: of every request. wall_s: from the first request to the last answer.
        late_s: how much later than due the generator sent one, at most. cpu_share: of one core, that the generator took.
    """

    name: str
    answers: tuple[Answer, ...]
    wall_s: float
    late_s: float
    cpu_share: float

    @property
    def done(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.failure]

    @property
    def output_tokens_per_s(self) -> float:
        return sum(answer.output_tokens for answer in self.done) / self.wall_s

    @property
    def requests_per_s(self) -> float:
        return len(self.done) / self.wall_s

    @property
    def first_token(self) -> Spread:
        return Spread.of([answer.first_token_s for answer in self.done])

    @property
    def token_gap(self) -> Spread:
        return Spread.of([gap for answer in self.done if (gap := answer.token_gap_s) is not None])

    @property
    def longest_gap(self) -> Spread:
        return Spread.of([max(answer.gaps_s) for answer in self.done if answer.gaps_s])

    @property
    def latency(self) -> Spread:
        return Spread.of([answer.total_s for answer in self.done])

    @property
    def cached_share(self) -> float:
        prompt = sum(answer.prompt_tokens for answer in self.done)
        return sum(answer.cached_tokens for answer in self.done) / prompt if prompt else 0.0

    @property
    def failures(self) -> Counter[str]:
        return Counter(answer.failure for answer in self.answers if answer.failure)


Told = Callable[[Answer], None]


async def closed_loop(service: Service, prompts: Prompts, output_tokens: int, *, clients: int, num_requests: int, first: int,
                      told: Told) -> Phase:
    """`clients` at a time; `first`: number of the first prompt."""
    numbers, answers = itertools.count(first), []

    async def client() -> None:
        while (number := next(numbers)) < first + num_requests:
            answers.append(await service.ask(prompts.text(number), output_tokens))
            told(answers[-1])

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(client() for _ in range(min(clients, num_requests))))
    wall = time.perf_counter() - began
    return Phase(name=f"{clients} client{'s' * (clients > 1)}", answers=tuple(answers), wall_s=wall, late_s=0.0,
                 cpu_share=(time.process_time() - cpu) / wall)


async def open_loop(service: Service, prompts: Prompts, output_tokens: int, *, rate: float, num_requests: int, first: int,
                    seed: int, told: Told) -> Phase:
    """Requests at random times (Poisson) with `rate` a second. Times count from when a request was due, not from when it was
    sent, so that a generator that falls behind does not flatter the service."""
    draw, late = random.Random(f"{seed} arrivals"), [0.0]
    began, cpu = time.perf_counter(), time.process_time()

    async def one(number: int, due_s: float, text: str) -> Answer:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        late.append(time.perf_counter() - due_s)
        answer = await service.ask(text, output_tokens, due_s=due_s)
        told(answer)
        return answer

    texts = [prompts.text(first + i) for i in range(num_requests)]
    began = due = time.perf_counter()
    tasks = []
    for i, text in enumerate(texts):
        tasks.append(asyncio.create_task(one(i, due, text)))
        due += draw.expovariate(rate)
    answers = await asyncio.gather(*tasks)
    wall = time.perf_counter() - began
    return Phase(name=f"{rate:g} requests/s", answers=tuple(answers), wall_s=wall, late_s=max(late),
                 cpu_share=(time.process_time() - cpu) / wall)
