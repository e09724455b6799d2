"""One streamed request to an OpenAI-compatible service, timed as its user sees it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from hisparse.errors import HiSparseError


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came back. Times in seconds from the moment at which the request was due.

    Attributes:
        first_token_s: until the first text. gaps_s: between texts. total_s: until the stream's end.
        failure: why this is no answer, e.g. "429"; "" = it is one.
    """

    first_token_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    failure: str = ""

    @property
    def refused(self) -> bool:
        """The service said that it is full."""
        return self.failure.startswith(("429", "503"))

    @property
    def token_gap_s(self) -> float | None:
        """Mean time between two tokens; None for a single one."""
        return sum(self.gaps_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """How to ask. `chat`: /v1/chat/completions. `ignore_eos`: answers have exactly the wanted length."""

    client: httpx.AsyncClient
    model: str
    chat: bool
    ignore_eos: bool

    async def ask(self, prompt: str, output_tokens: int, *, due_s: float | None = None) -> Answer:
        """Never raises for what the service does: see `Answer.failure`. `due_s`: on `time.perf_counter`; default now."""
        answer, began = Answer(), time.perf_counter() if due_s is None else due_s
        try:
            await self._stream(prompt, output_tokens, began, answer)
        except httpx.HTTPError as error:
            answer.failure = f"{type(error).__name__} {error}".strip()
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            answer.failure = f"the stream is not OpenAI's: {type(error).__name__} {error}"
        answer.total_s = time.perf_counter() - began
        return answer

    async def _stream(self, prompt: str, output_tokens: int, began: float, answer: Answer) -> None:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        body = asked | {"model": self.model, "max_tokens": output_tokens, "temperature": 0, "stream": True,
                        "stream_options": {"include_usage": True}} | ({"ignore_eos": True} if self.ignore_eos else {})
        last, ended, reason, usage = 0.0, False, None, None
        async with self.client.stream("POST", "/chat/completions" if self.chat else "/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                answer.failure = f"{response.status_code}: {_message(response)}"
                return
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                now, data = time.perf_counter() - began, line[5:].strip()
                if data == "[DONE]":
                    ended = True
                    break
                event = json.loads(data)
                if "error" in event:
                    answer.failure = f"error in the stream: {event['error'].get('message', event['error'])}"
                    return
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    reason = choice.get("finish_reason") or reason
                    text = (choice.get("delta") or {}).get("content") if self.chat else choice.get("text")
                    if text and last:
                        answer.gaps_s.append(now - last)
                    elif text:
                        answer.first_token_s = now
                    last = now if text else last
        if not ended or reason is None or usage is None or not last:
            missing = "[DONE]" if not ended else "a finish_reason" if reason is None else "usage" if usage is None else "text"
            answer.failure = f"the stream ended without {missing}"
            return
        answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if self.ignore_eos and answer.output_tokens != output_tokens:
            answer.failure = (f"{answer.output_tokens} tokens instead of {output_tokens}: the service does not know "
                              "ignore_eos; use --no-ignore-eos")


async def first_model(client: httpx.AsyncClient) -> str:
    """Of /v1/models. Raises HiSparseError: nothing answers there, or not a service of this kind."""
    try:
        response = await client.get("/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        hint = "; give its key with --api-key or OPENAI_API_KEY" if error.response.status_code in (401, 403) else ""
        raise HiSparseError(f"{error.request.url} answered {error.response.status_code}: {_message(error.response)}{hint}"
                            ) from error
    except httpx.HTTPError as error:
        raise HiSparseError(f"no service answers at {client.base_url} ({error}); start one with 'hisparse serve', or give "
                            "--url") from error
    except (ValueError, LookupError, TypeError) as error:
        raise HiSparseError(f"{client.base_url}models is not a list of models; --url is the base without /v1, e.g. "
                            "http://127.0.0.1:8000") from error


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return response.text[:200] or response.reason_phrase
