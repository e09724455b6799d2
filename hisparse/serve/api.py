"""OpenAI's requests and responses as pydantic models, and the parsing of a request body.

A field OpenAI has and this engine cannot honour is accepted only with its neutral value; everything else is refused by
name. Responses are written with `exclude_unset`, so an explicit null is written and an absent field is not.
"""

from __future__ import annotations

import json
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hisparse.serve.errors import ApiError
from hisparse.types import SamplingParams

MAX_CHOICES = 16
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0), "presence_penalty": (None, 0), "logit_bias": (None, {}), "suffix": (None, ""),
    "echo": (None, False), "best_of": (None, 1), "tools": (None, []), "tool_choice": (None, "none", "auto"),
    "functions": (None, []), "function_call": (None, "none"), "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}), "modalities": (None, ["text"]), "audio": (None,),
    "reasoning_effort": (None,), "service_tier": (None, "auto", "default"), "store": (None, False),
    "metadata": (None, {}), "prediction": (None,),
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False, frozen=True)


class StreamOptions(_Body):
    include_usage: bool = False


class _Common(_Body):
    """Fields of both endpoints. `top_k`, `ignore_eos`, `stop_token_ids`, `cache_salt` and
    `return_token_ids` (output ids in the response's `hisparse` field) extend OpenAI's."""

    model: str = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = Field(default_factory=list, max_length=64)
    ignore_eos: bool = False
    return_token_ids: bool = False
    user: str | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_CHOICES or any(not item or len(item) > 1024 for item in stops):
            raise ValueError(f"at most {MAX_CHOICES} non-empty strings of at most 1024 characters")
        return value

    @model_validator(mode="after")
    def _check_stream_options(self) -> _Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report per token; None = no log probabilities at all."""
        raise NotImplementedError

    def sampling(self, choice: int = 0) -> SamplingParams:
        """Sampling of one choice; a seed gives each choice its own random stream."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=None if self.seed is None else self.seed + choice,
            stop=stop, stop_token_ids=tuple(self.stop_token_ids), ignore_eos=self.ignore_eos,
            logprobs=self.num_logprobs,
        )


class CompletionRequest(_Common):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one."""
        value: Any = self.prompt
        if isinstance(value, str) or (value and isinstance(value[0], int)):
            return [value]
        return list(value)


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One message; only text can be served."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Common):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


R = TypeVar("R", bound=_Common)


def parse_body(body: bytes, kind: type[R]) -> R:
    """A request body as its model.

    Raises:
        ApiError: 400 with the field, what was expected and what was given.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(data).__name__}", code="invalid_json")
    for field in set(data) & set(_NEUTRAL):
        if not any(data[field] == value and isinstance(data[field], bool) == isinstance(value, bool)
                   for value in _NEUTRAL[field]):
            raise ApiError(400, f"{field} is not supported by this server; leave it out", field, "unsupported_value")
        del data[field]
    try:
        request = kind.model_validate(data)
    except ValidationError as error:
        raise _explain(error) from error
    if isinstance(request, CompletionRequest):
        _check_prompts(request)
    return request


def _check_prompts(request: CompletionRequest) -> None:
    prompts = request.prompts
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ApiError(400, "the prompt is empty; send a string or a list of token ids", "prompt")
    if len(prompts) * request.num_choices > MAX_CHOICES:
        raise ApiError(400, f"{len(prompts)} prompts x n = {request.num_choices} exceeds {MAX_CHOICES} choices per "
                            "request; send several requests", "prompt")


def _explain(error: ValidationError) -> ApiError:
    first = error.errors()[0]
    # The names of union members are no part of a field's path.
    path = [part for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    field = str(path[0]) if path else None
    where = ".".join(str(part) for part in path[:3] if part not in ("str", "list")) or "body"
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {where}; remove it or fix its spelling", where, "unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{where} is required", where, "missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if field is None and "stream_options" in message:
        field = where = "stream_options"
    return ApiError(400, f"{where}: {message} (got {_short(first['input'])})", field)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --------------------------------------------------------------------------------------------------- responses


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        return cls(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens,
                   total_tokens=prompt_tokens + completion_tokens,
                   prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens))


class Details(BaseModel):
    """Our own field `hisparse`: per choice, what happened to its request (see `RequestStats`)."""

    choices: list[dict[str, Any]]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class CompletionResponse(BaseModel):
    """Whole answer and stream chunk of `/v1/completions` alike."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    hisparse: Details | None = None


class ChatChoice(BaseModel):
    index: int
    message: dict[str, Any]
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: dict[str, Any]
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice] | list[ChatChunkChoice]
    usage: Usage | None = None
    hisparse: Details | None = None
