"""What ingress, decode and prefill replicas send each other: small, importable, picklable."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hisparse.serve.errors import ApiError
from hisparse.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """Ingress to decode: one prompt, one continuation. Exactly one of text, token_ids, messages is given.

    Attributes:
        messages: (role, content) pairs of a chat.
        max_tokens: None = `default_tokens`, or as many as fit into the context; replaces `sampling.max_tokens`.
        default_tokens: None = no other bound than the context.
        timeout_s: time left until the request's deadline. tenant: who asks, for reports; "" = no keys are in use.
        trace: W3C trace context of the caller's span; None = nobody records it.
        retry_of: request id of the first attempt, whose replica is to be avoided; None = this is the first.
    """

    request_id: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[tuple[str, str], ...] | None = None
    max_tokens: int | None = None
    default_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str | None = None
    timeout_s: float = 300.0
    tenant: str = ""
    trace: Mapping[str, str] | None = None
    retry_of: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One output token, its log probability, and the likeliest alternatives.

    Attributes:
        token: bytes, because it may be a part of a character; or the name of a special token, which has no text.
    """

    token: bytes | str
    logprob: float
    top: tuple[tuple[bytes | str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Decode to ingress: one increment of an answer. The last one has a finish reason or an error.

    Attributes:
        logprobs: of the tokens whose whole text has been given out with this increment.
        finish_reason: "stop" or "length", OpenAI's words.
        stats: on the last increment: RequestStats as a dictionary, and how the prompt was prefilled.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    error: ApiError | None = None
    stats: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCall:
    """Decode to prefill: compute the prompt's KV and hold it under a lease.

    Attributes:
        retry_of: request id of the first attempt for the same request; None = this is the first. The replica of the last one
            is to be avoided: it did not answer, or its pages could not be read.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    cache_salt: str | None = None
    timeout_s: float = 300.0
    tenant: str = ""
    trace: Mapping[str, str] | None = None
    retry_of: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillAnswer:
    """Prefill to decode: where to read the KV, or why not.

    Attributes:
        engine: the coordinator that holds the lease, to release it without a transfer.
    """

    request_id: str
    kv_transfer_params: Mapping[str, Any] | None = None
    engine: Any = None
    error: ApiError | None = None


class Backend(Protocol):
    """What the API needs of the service behind it; a fake one serves the tests."""

    def generate(self, call: GenerateCall) -> AsyncIterator[Chunk]: ...
    async def abort(self, request_id: str) -> None: ...
    async def engines(self, check: bool) -> list[dict[str, Any]]: ...
    async def residency(self) -> list[dict[str, Any]]: ...
    async def metrics_endpoints(self) -> list[str]: ...
