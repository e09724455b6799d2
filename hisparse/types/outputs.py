"""What an engine gives out for a request: increments, how it ended, what happened to it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hisparse.types.answers import ResolveStats
from hisparse.types.pages import Landing
from hisparse.types.steps import SampledToken


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """What happened to one request, for usage fields, the demo table and tests."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    landing: Landing | None = None
    preemptions: int = 0
    import_failures: int = 0
    imported_tokens: int = 0
    spilled_pages: int = 0
    """Pages whose write-back to host was planned while the request ran."""
    queue_s: float | None = None
    """From its arrival at the engine to its first admission; None = it was never admitted."""
    resolve: ResolveStats = field(default_factory=ResolveStats)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimeline:
    """When an engine did what with a request. Seconds since its arrival; None = not yet, or never.

    Attributes:
        arrived_unix_s: on the wall clock. admitted_s: first admission. loaded_s: end of its import from prefill, whatever the
            outcome; None = nothing was imported, or it is under way.
    """

    arrived_unix_s: float
    admitted_s: float | None = None
    loaded_s: float | None = None
    first_token_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One increment of one request: tokens and text since the last increment."""

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    new_text: str = ""
    logprobs: tuple[SampledToken, ...] = ()
    """Of the tokens whose text is given out now (of all new ones without a tokenizer): none that ended the output, neither
    an end of sequence nor a part of a stop string."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    retry: bool = False
    """The error says nothing about the request: another engine may answer it."""
    stats: RequestStats | None = None
    """Set on the last increment."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """Prefill role: where and until when decode can read the prompt's KV. Set on the last increment."""
    retry_prefill: str | None = None
    """Decode role, no increment: why the prompt's KV did not come from prefill. Whoever asked prefill asks again and tells
    the engine by `resume`; the request waits, holding nothing, until then."""
    timeline: RequestTimeline | None = None
    """Set on the first increment that has a token, and on the last one."""
