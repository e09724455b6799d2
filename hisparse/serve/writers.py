"""Chunks to OpenAI's response objects: whole answers and server-sent events, for completions and for chat."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from hisparse.serve.api import (
    ChatChoice,
    ChatChunkChoice,
    ChatResponse,
    CompletionChoice,
    CompletionResponse,
    Details,
    Usage,
)
from hisparse.serve.calls import Chunk, TokenLogprob
from hisparse.serve.errors import ApiError

DONE = "data: [DONE]\n\n"


def event(item: BaseModel | dict[str, Any]) -> str:
    """One server-sent event."""
    text = item.model_dump_json(exclude_unset=True) if isinstance(item, BaseModel) else json.dumps(item)
    return f"data: {text}\n\n"


def error_event(error: ApiError) -> str:
    """An error after the first token, when the status is on the wire already."""
    return event(error.body())


@dataclass(slots=True)
class _Choice:
    """What one choice has produced so far."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    finish_reason: str | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    started: bool = False

    def add(self, chunk: Chunk) -> None:
        self.text.append(chunk.text)
        self.logprobs.extend(chunk.logprobs)
        self.token_ids.extend(chunk.token_ids)
        self.num_chars += len(chunk.text)
        self.finish_reason = chunk.finish_reason
        self.stats = dict(chunk.stats or {})


class Writer:
    """State of one response. Subclasses know the two shapes.

    Args:
        request_id: of the HTTP request; part of the response's id.
        num_prompts: usage counts each prompt once, however many choices it has.
        token_ids: put the output ids into the `hisparse` field.
    """

    prefix = ""

    def __init__(self, model: str, request_id: str, *, num_choices: int, num_prompts: int = 1, include_usage: bool = False,
                 logprobs: bool = False, token_ids: bool = False) -> None:
        self.id = f"{self.prefix}-{request_id}"
        self.created = int(time.time())
        self.model = model
        self.choices = [_Choice() for _ in range(num_choices)]
        self.per_prompt = num_choices // num_prompts
        self.include_usage = include_usage
        self.with_logprobs = logprobs
        self.with_token_ids = token_ids

    def add(self, index: int, chunk: Chunk) -> None:
        """Takes an increment of a choice."""
        self.choices[index].add(chunk)

    @property
    def usage(self) -> Usage:
        firsts = self.choices[:: self.per_prompt]
        return Usage.of(
            sum(choice.stats.get("prompt_tokens", 0) for choice in firsts),
            sum(len(choice.token_ids) for choice in self.choices),
            sum(choice.stats.get("cached_tokens", 0) for choice in firsts),
        )

    @property
    def details(self) -> Details:
        ids = [{"token_ids": choice.token_ids} if self.with_token_ids else {} for choice in self.choices]
        return Details(choices=[{**choice.stats, **extra} for choice, extra in zip(self.choices, ids)])

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def events(self, index: int, chunk: Chunk) -> Iterator[str]:
        """Server-sent events of one increment; after the last one also usage and the terminator."""
        choice = self.choices[index]
        offset = choice.num_chars
        first = not choice.started
        choice.started = True
        self.add(index, chunk)
        extra: dict[str, Any] = {"usage": None} if self.include_usage else {}
        if self.finished and not self.include_usage:
            extra["hisparse"] = self.details
        yield event(self._chunk(index, chunk, first, offset, extra))
        if self.finished:
            if self.include_usage:
                yield event(self._last())
            yield DONE

    def whole(self) -> BaseModel:
        """The answer of a request without streaming."""
        raise NotImplementedError

    def _chunk(self, index: int, chunk: Chunk, first: bool, offset: int, extra: dict[str, Any]) -> BaseModel:
        raise NotImplementedError

    def _last(self) -> BaseModel:
        """The chunk without choices that carries the usage."""
        raise NotImplementedError


class CompletionWriter(Writer):
    """`/v1/completions`."""

    prefix = "cmpl"

    def _response(self, choices: list[CompletionChoice], **extra: Any) -> CompletionResponse:
        return CompletionResponse(id=self.id, object="text_completion", created=self.created, model=self.model,
                                  choices=choices, **extra)

    def _logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.token)
        return {
            "tokens": [token.token for token in tokens], "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.top) or {token.token: token.logprob} for token in tokens],
            "text_offset": offsets,
        }

    def _chunk(self, index: int, chunk: Chunk, first: bool, offset: int, extra: dict[str, Any]) -> BaseModel:
        return self._response([CompletionChoice(index=index, text=chunk.text, finish_reason=chunk.finish_reason,
                                                logprobs=self._logprobs(chunk.logprobs, offset))], **extra)

    def _last(self) -> BaseModel:
        return self._response([], usage=self.usage, hisparse=self.details)

    def whole(self) -> BaseModel:
        choices = [
            CompletionChoice(index=i, text="".join(choice.text), finish_reason=choice.finish_reason,
                             logprobs=self._logprobs(choice.logprobs, 0))
            for i, choice in enumerate(self.choices)
        ]
        return self._response(choices, usage=self.usage, hisparse=self.details)


def _chat_token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class ChatWriter(Writer):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"

    def _response(self, kind: Any, choices: Any, **extra: Any) -> ChatResponse:
        return ChatResponse(id=self.id, object=kind, created=self.created, model=self.model, choices=choices, **extra)

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        return {"content": [{
            **_chat_token(token.token, token.logprob),
            "top_logprobs": [_chat_token(text, value) for text, value in token.top],
        } for token in tokens], "refusal": None}

    def _chunk(self, index: int, chunk: Chunk, first: bool, offset: int, extra: dict[str, Any]) -> BaseModel:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if chunk.text or first:
            delta["content"] = chunk.text
        choice = ChatChunkChoice(index=index, delta=delta, finish_reason=chunk.finish_reason,
                                 logprobs=self._logprobs(chunk.logprobs))
        return self._response("chat.completion.chunk", [choice], **extra)

    def _last(self) -> BaseModel:
        return self._response("chat.completion.chunk", [], usage=self.usage, hisparse=self.details)

    def whole(self) -> BaseModel:
        choices = [
            ChatChoice(index=i, finish_reason=choice.finish_reason, logprobs=self._logprobs(choice.logprobs),
                       message={"role": "assistant", "content": "".join(choice.text), "refusal": None})
            for i, choice in enumerate(self.choices)
        ]
        return self._response("chat.completion", choices, usage=self.usage, hisparse=self.details)
