"""OpenAI's response bodies as pydantic models.

They are written with `exclude_unset`, so an explicit null is written and an absent field is not.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    """Tokens of the prompts (each once, however many choices it has) and of all answers, the ones that ended them included."""

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
    """Our own field `hisparse`: per choice, what happened to its request; and fields that were sent and have no effect."""

    choices: list[dict[str, Any]]
    warnings: list[str] | None = None


class CompletionLogprobs(BaseModel):
    """Of the tokens whose whole text is in the answer. `text_offset` counts characters from the start of the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class _Response(BaseModel):
    id: str
    created: int = Field(description="Seconds since 1970.")
    model: str
    system_fingerprint: str = Field(description="Changes with the model, its configuration and the version of the server.")
    usage: Usage | None = None
    hisparse: Details | None = None


class CompletionResponse(_Response):
    """Whole answer and stream chunk of `/v1/completions` alike."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = Field(description="Of a special token null: it has no text.")


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of the tokens whose whole text is in the answer."""

    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatResponse(_Response):
    """Whole answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(_Response):
    """Stream chunk of `/v1/chat/completions`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int = Field(description="When the checkpoint was written; seconds since 1970.")
    owned_by: str
    max_model_len: int = Field(description="Tokens of prompt and answer together, at most.")


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    """Every answer that is not 2xx, and the last event of a stream that failed; but not what `/health` says with 503."""

    error: ErrorDetail


class Health(BaseModel):
    status: Literal["ok", "starting", "unhealthy"]
    reason: str | None = None
    engines: list[dict[str, Any]] | None = Field(None, description="Not for callers without a key, where keys are in use.")


class Stats(BaseModel):
    model: str
    metrics: list[str] = Field(description="URLs of the nodes' Prometheus endpoints.")
    engines: list[dict[str, Any]]
