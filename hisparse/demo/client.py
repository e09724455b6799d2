"""Sends the prompts as a user would: the `openai` client, streaming, all at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hisparse.demo.prompts import DemoPrompt

STAGGER_S = 0.15
"""Between two sends, so that requests arrive in the order given; all of them are open at once."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """One streamed answer. Times in seconds from the moment the request was sent. `stats`: the response's `hisparse` field."""

    prompt: DemoPrompt
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    stats: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def tokens_per_s(self) -> float:
        return (self.completion_tokens - 1) / max(self.total_s - self.first_token_s, 1e-9)


def ask_all(base_url: str, model: str, prompts: Sequence[DemoPrompt], *,
            on_done: Callable[[Answer], None] | None = None, later: Sequence[DemoPrompt] = ()) -> list[Answer]:
    """Asks every prompt of `prompts` concurrently, then those of `later`; in the order given."""
    return asyncio.run(_ask_all(base_url, model, prompts, later, on_done))


async def _ask_all(base_url: str, model: str, prompts: Sequence[DemoPrompt], later: Sequence[DemoPrompt],
                   on_done: Callable[[Answer], None] | None) -> list[Answer]:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key="unused", timeout=240.0, max_retries=0) as client:
        answers: list[Answer] = []
        for group in (prompts, later):
            asked = (_ask(client, model, prompt, i * STAGGER_S, on_done) for i, prompt in enumerate(group))
            answers += await asyncio.gather(*asked)
        return answers


async def _ask(client: Any, model: str, prompt: DemoPrompt, delay_s: float,
               on_done: Callable[[Answer], None] | None) -> Answer:
    answer = Answer(prompt=prompt)
    await asyncio.sleep(delay_s)
    began = time.perf_counter()
    try:
        stream = await client.completions.create(
            model=model, prompt=prompt.text, max_tokens=prompt.max_tokens, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        async for chunk in stream:
            for choice in chunk.choices:
                if choice.text and not answer.first_token_s:
                    answer.first_token_s = time.perf_counter() - began
                answer.text += choice.text
            if chunk.usage is not None:
                answer.prompt_tokens = chunk.usage.prompt_tokens
                answer.completion_tokens = chunk.usage.completion_tokens
                details = chunk.usage.prompt_tokens_details
                answer.cached_tokens = (details.cached_tokens or 0) if details else 0
            extra = (chunk.model_extra or {}).get("hisparse")
            if extra:
                answer.stats = dict(extra["choices"][0])
                answer.token_ids = answer.stats.pop("token_ids", [])
    except Exception as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.total_s = time.perf_counter() - began
    if on_done is not None:
        on_done(answer)
    return answer
