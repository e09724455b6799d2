"""OpenAI's request bodies as pydantic models: what each endpoint takes, ignores and refuses.

Types are strict: "5" is no number and 1 is no boolean. Unknown fields are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from hisparse.serve.fields import (
    MAX_CHOICES,
    AtLeastOne,
    AtLeastZero,
    Ignored,
    NumChoices,
    NumLogprobs,
    PromptField,
    Seed,
    StopField,
    TokenId,
    Unsupported,
)
from hisparse.types import SamplingParams

MAX_STOP_TOKENS = 64
COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that names none: OpenAI's default."""
_TEXT = {"type": "text"}


class _FirstProblem(FailFast):
    """Ends a list's check at its first bad item; a body has room for millions. Hashable, for members of unions."""

    __hash__ = object.__hash__


_FIRST = _FirstProblem()


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    @property
    def ignored(self) -> list[str]:
        """Names of fields that were sent and have no effect."""
        return [name for name in sorted(self.model_fields_set)
                if Ignored in type(self).model_fields[name].metadata and getattr(self, name) is not None]


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, Unsupported(False)] = None


class _Common(_Body):
    """Fields of both endpoints. `top_k`, `ignore_eos`, `stop_token_ids`, `cache_salt` and
    `return_token_ids` (output ids in the response's `hisparse` field) extend OpenAI's."""

    model: str = Field(min_length=1, description="The name that GET /v1/models lists.")
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream: true.")
    max_tokens: AtLeastOne | None = Field(None, description="Tokens of the answer at most.")
    temperature: float | None = Field(None, ge=0, le=2, description="0: the likeliest token. Default 1.")
    top_p: float | None = Field(None, ge=0, le=1, description="Draw from the smallest set of tokens that has this probability.")
    seed: Seed | None = Field(None, description="Makes draws repeatable; choice i has seed + i.")
    n: NumChoices | None = Field(None, description="Choices of each prompt.")
    stop: StopField = Field(default_factory=list)
    user: Annotated[str | None, Ignored] = None
    top_k: AtLeastZero | None = Field(None, description="Draw from the k likeliest tokens; 0: from all.")
    stop_token_ids: Annotated[list[TokenId], _FIRST, Field(max_length=MAX_STOP_TOKENS)] | None = Field(
        None, description="Tokens that end the answer.")
    ignore_eos: bool | None = Field(None, description="Go on after the model's end of sequence.")
    return_token_ids: bool | None = Field(None, description="Put the ids of the answer's tokens into its hisparse field.")
    cache_salt: str | None = Field(None, min_length=1, max_length=256,
                                   description="Share cached prefixes only with requests of the same salt.")
    frequency_penalty: Annotated[Any, Unsupported(0)] = None
    presence_penalty: Annotated[Any, Unsupported(0)] = None
    logit_bias: Annotated[Any, Unsupported({})] = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> _Common:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "is only allowed when stream is true")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report per token; None = no log probabilities at all."""
        raise NotImplementedError

    @property
    def warnings(self) -> list[str]:
        """What the client should know although the request is fine."""
        return [f"{name} has no effect on this server" for name in self.ignored]

    def sampling(self, choice: int = 0) -> SamplingParams:
        """Sampling of one choice; a seed gives each choice its own random stream."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=None if self.seed is None else self.seed + choice,
            stop=tuple(self.stop), stop_token_ids=tuple(self.stop_token_ids or ()), ignore_eos=bool(self.ignore_eos),
            logprobs=self.num_logprobs,
        )


class CompletionRequest(_Common):
    """`POST /v1/completions`."""

    prompt: PromptField
    logprobs: NumLogprobs | None = Field(None, description="Log probabilities of the tokens and of so many alternatives.")
    best_of: Annotated[Any, Unsupported(1)] = None
    echo: Annotated[Any, Unsupported(False)] = None
    suffix: Annotated[Any, Unsupported("")] = None

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionRequest:
        if len(self.prompts) * self.num_choices > MAX_CHOICES:
            raise PydanticCustomError("prompt", "{prompts} prompts x n = {n} exceeds {limit} choices per request; send several "
                                      "requests", {"prompts": len(self.prompts), "n": self.num_choices, "limit": MAX_CHOICES})
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one."""
        value: Any = self.prompt
        if isinstance(value, str) or isinstance(value[0], int):
            return [value]
        return list(value)


class TextPart(_Body):
    type: Literal["text"]
    text: str


def _kind_of_content(value: Any) -> str:
    return "parts" if isinstance(value, list) else "text"


class ChatMessage(_Body):
    """One message; only text can be served. The nulls that answers of OpenAI's client carry are accepted."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Annotated[str, Tag("text")] | Annotated[list[TextPart], _FIRST, Tag("parts")],
                       Discriminator(_kind_of_content)]
    name: Annotated[str | None, Ignored] = None
    refusal: Annotated[Any, Unsupported()] = None
    audio: Annotated[Any, Unsupported()] = None
    annotations: Annotated[Any, Unsupported([])] = None
    function_call: Annotated[Any, Unsupported()] = None
    tool_calls: Annotated[Any, Unsupported([])] = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Common):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], _FIRST] = Field(min_length=1)
    max_completion_tokens: AtLeastOne | None = Field(None, description="Tokens of the answer at most; default: what fits.")
    logprobs: bool | None = Field(None, description="Report log probabilities of the tokens.")
    top_logprobs: NumLogprobs | None = Field(None, description="Alternatives for each token; only with logprobs: true.")
    metadata: Annotated[dict[str, str] | None, Ignored] = None
    parallel_tool_calls: Annotated[bool | None, Ignored] = None
    prompt_cache_key: Annotated[str | None, Ignored] = None
    prompt_cache_retention: Annotated[str | None, Ignored] = None
    safety_identifier: Annotated[str | None, Ignored] = None
    service_tier: Annotated[str | None, Ignored] = None
    audio: Annotated[Any, Unsupported()] = None
    function_call: Annotated[Any, Unsupported("none")] = None
    functions: Annotated[Any, Unsupported([])] = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    prediction: Annotated[Any, Unsupported()] = None
    reasoning_effort: Annotated[Any, Unsupported()] = None
    response_format: Annotated[Any, Unsupported(_TEXT)] = None
    store: Annotated[Any, Unsupported(False)] = None
    tool_choice: Annotated[Any, Unsupported("none", "auto")] = None
    tools: Annotated[Any, Unsupported([])] = None
    verbosity: Annotated[Any, Unsupported()] = None
    web_search_options: Annotated[Any, Unsupported()] = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "is only allowed when logprobs is true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise PydanticCustomError("max_tokens", "is the old name of max_completion_tokens; send only one of them")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def warnings(self) -> list[str]:
        nested = sorted({f"messages[].{name}" for message in self.messages for name in message.ignored})
        return [*super().warnings, *(f"{name} has no effect on this server" for name in nested)]
