"""Chunks to OpenAI's response objects: whole answers and server-sent events, for completions and for chat."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from hisparse.serve.calls import Chunk, TokenLogprob
from hisparse.serve.errors import ApiError
from hisparse.serve.responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatResponse,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    Delta,
    Details,
    TopLogprob,
    Usage,
)
from hisparse.serve.responses import TokenLogprob as ChatTokenLogprob

DONE = "data: [DONE]\n\n"


def event(item: BaseModel | dict[str, Any]) -> str:
    """One server-sent event."""
    text = item.model_dump_json(exclude_unset=True) if isinstance(item, BaseModel) else json.dumps(item)
    return f"data: {text}\n\n"


def error_event(error: ApiError) -> str:
    """An error after the first token, when the status is on the wire already."""
    return event(error.body())


def token_text(token: bytes | str) -> str:
    r"""A token as text; a part of a character as OpenAI writes it, e.g. "bytes:\xe2\x80"."""
    if isinstance(token, str):
        return token
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


@dataclass(slots=True)
class _Choice:
    """What one choice has produced so far."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    started: bool = False
    num_chars: int = 0
    """Of the tokens whose offset is known; counted by `decoder`, because a token may be a part of a character."""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf8")("replace"))

    def add(self, chunk: Chunk) -> None:
        self.text.append(chunk.text)
        self.logprobs.extend(chunk.logprobs)
        self.token_ids.extend(chunk.token_ids)
        self.finish_reason = chunk.finish_reason
        self.stats = dict(chunk.stats or {})

    def offset_of_next(self, token: TokenLogprob) -> int:
        offset = self.num_chars
        if isinstance(token.token, bytes):
            self.num_chars += len(self.decoder.decode(token.token))
        return offset


class Writer:
    """State of one response. Subclasses know the two shapes.

    Args:
        request_id: of the HTTP request; part of the response's id.
        fingerprint: of the server; see `ServerFacts`.
        num_prompts: usage counts each prompt once, however many choices it has.
        token_ids: put the output ids into the `hisparse` field.
        warnings: for the same field.
    """

    prefix = ""

    def __init__(self, model: str, request_id: str, *, fingerprint: str, num_choices: int, num_prompts: int = 1,
                 include_usage: bool = False, logprobs: bool = False, token_ids: bool = False,
                 warnings: Sequence[str] = ()) -> None:
        self.id = f"{self.prefix}-{request_id}"
        self.head = {"id": self.id, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self.choices = [_Choice() for _ in range(num_choices)]
        self.per_prompt = num_choices // num_prompts
        self.include_usage = include_usage
        self.with_logprobs = logprobs
        self.with_token_ids = token_ids
        self.warnings = list(warnings)

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
        choices = [{**choice.stats, **extra} for choice, extra in zip(self.choices, ids)]
        return Details(choices=choices, warnings=self.warnings) if self.warnings else Details(choices=choices)

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def events(self, index: int, chunk: Chunk) -> Iterator[str]:
        """Server-sent events of one increment; after the last one also usage and the terminator. Text that is held back
        (half a character, the possible start of a stop string) makes an increment without an event."""
        choice = self.choices[index]
        first = not choice.started
        self.add(index, chunk)
        extra: dict[str, Any] = {"usage": None} if self.include_usage else {}
        if self.finished and not self.include_usage:
            extra["hisparse"] = self.details
        if first or chunk.text or chunk.logprobs or chunk.finish_reason is not None:
            choice.started = True
            yield event(self._chunk(index, chunk, first, extra))
        if self.finished:
            if self.include_usage:
                yield event(self._last())
            yield DONE

    def whole(self) -> BaseModel:
        """The answer of a request without streaming."""
        raise NotImplementedError

    def _chunk(self, index: int, chunk: Chunk, first: bool, extra: dict[str, Any]) -> BaseModel:
        raise NotImplementedError

    def _last(self) -> BaseModel:
        """The chunk without choices that carries the usage."""
        raise NotImplementedError


class CompletionWriter(Writer):
    """`/v1/completions`."""

    prefix = "cmpl"

    def _response(self, choices: list[CompletionChoice], **extra: Any) -> CompletionResponse:
        return CompletionResponse(object="text_completion", choices=choices, **self.head, **extra)

    def _logprobs(self, choice: _Choice, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        if not self.with_logprobs:
            return None
        return CompletionLogprobs(
            tokens=[token_text(item.token) for item in tokens], token_logprobs=[item.logprob for item in tokens],
            top_logprobs=[_with_own(item) for item in tokens], text_offset=[choice.offset_of_next(item) for item in tokens])

    def _chunk(self, index: int, chunk: Chunk, first: bool, extra: dict[str, Any]) -> BaseModel:
        logprobs = self._logprobs(self.choices[index], chunk.logprobs)
        return self._response([CompletionChoice(index=index, text=chunk.text, finish_reason=chunk.finish_reason,
                                                logprobs=logprobs)], **extra)

    def _last(self) -> BaseModel:
        return self._response([], usage=self.usage, hisparse=self.details)

    def whole(self) -> BaseModel:
        choices = [
            CompletionChoice(index=i, text="".join(choice.text), finish_reason=choice.finish_reason,
                             logprobs=self._logprobs(choice, choice.logprobs))
            for i, choice in enumerate(self.choices)
        ]
        return self._response(choices, usage=self.usage, hisparse=self.details)


def _with_own(item: TokenLogprob) -> dict[str, float]:
    """The alternatives, and the token itself where it is none of the likeliest."""
    return {token_text(token): value for token, value in (*item.top, (item.token, item.logprob))}


def _top(token: bytes | str, logprob: float) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": logprob, "bytes": list(token) if isinstance(token, bytes) else None}


class ChatWriter(Writer):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if not self.with_logprobs:
            return None
        return ChatLogprobs(refusal=None, content=[
            ChatTokenLogprob(**_top(item.token, item.logprob), top_logprobs=[TopLogprob(**_top(*other)) for other in item.top])
            for item in tokens
        ])

    def _chunk(self, index: int, chunk: Chunk, first: bool, extra: dict[str, Any]) -> BaseModel:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if chunk.text or first:
            delta["content"] = chunk.text
        choice = ChatChunkChoice(index=index, delta=Delta(**delta), finish_reason=chunk.finish_reason,
                                 logprobs=self._logprobs(chunk.logprobs))
        return ChatChunk(object="chat.completion.chunk", choices=[choice], **self.head, **extra)

    def _last(self) -> BaseModel:
        return ChatChunk(object="chat.completion.chunk", choices=[], usage=self.usage, hisparse=self.details, **self.head)

    def whole(self) -> BaseModel:
        choices = [
            ChatChoice(index=i, finish_reason=choice.finish_reason, logprobs=self._logprobs(choice.logprobs),
                       message=AnswerMessage(role="assistant", content="".join(choice.text), refusal=None))
            for i, choice in enumerate(self.choices)
        ]
        return ChatResponse(object="chat.completion", choices=choices, usage=self.usage, hisparse=self.details, **self.head)
