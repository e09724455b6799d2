"""Kinds of request fields: whole numbers, prompts, stop strings, and fields of OpenAI that this server cannot honour.

What a field accepts, what the OpenAPI document says of it and what the docs list have this one source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError, core_schema

MAX_CHOICES = 16
"""Prompts x n of one request."""
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_TOKEN_ID = 2**31 - 1
MAX_TOP_LOGPROBS = 20

Prompt = str | list[int] | list[str] | list[list[int]]


class Unsupported:
    """Marks a field that OpenAI has and this server does not: accepted with a neutral value (or null), else refused."""

    def __init__(self, *neutral: Any) -> None:
        self.neutral = (None, *neutral)

    def _check(self, value: Any) -> Any:
        if any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in self.neutral):
            return value
        raise PydanticCustomError("unsupported", "is not supported by this server; leave it out")

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": list(self.neutral), "description": "Not supported: any other value is refused."}


class Ignored:
    """Marks a field that is accepted, checked and without effect; an answer's `hisparse.warnings` says so."""


def _integral(value: Any) -> Any:
    """JSON has one kind of number: 5.0 is a whole one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_WHOLE = BeforeValidator(_integral)
# Bounds stand before the validator, and at the number instead of at "number or null": else they do not get into the schema.
AtLeastOne = Annotated[int, Field(ge=1), _WHOLE]
AtLeastZero = Annotated[int, Field(ge=0), _WHOLE]
NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES), _WHOLE]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), _WHOLE]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), _WHOLE]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID), _WHOLE]


def is_text(value: Any) -> bool:
    """A string that can be encoded: JSON can smuggle in halves of surrogate pairs, which are no characters."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _token_ids(value: Sequence[Any]) -> list[int]:
    kinds = set(map(type, value))  # at the speed of C: there may be millions
    ids = [_integral(item) for item in value] if kinds == {int, float} or kinds == {float} else list(value)
    if value and not (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= MAX_TOKEN_ID):
        raise PydanticCustomError("prompt", "token ids must be whole numbers of at least 0")
    return ids


def _prompt(value: Any) -> Prompt:
    """By hand: a union would try every kind and collect an error for each of millions of items."""
    if isinstance(value, str):
        value = _texts([value])[0]
    elif isinstance(value, list) and value:
        first = value[0]
        if isinstance(first, str):
            value = _texts(value)
        elif isinstance(first, list):
            if not all(isinstance(item, list) for item in value):
                raise PydanticCustomError("prompt", "must be of one kind: strings, token ids, or lists of token ids")
            _check_count(value)
            value = [_token_ids(item) for item in value]
        else:
            value = _token_ids(value)
    elif not isinstance(value, list):
        raise PydanticCustomError("prompt", "must be a string, a list of strings, token ids, or lists of token ids")
    if not value or (isinstance(value, list) and isinstance(value[0], (str, list)) and not all(value)):
        raise PydanticCustomError("prompt", "is empty; send a string or a list of token ids")
    return value  # type: ignore[no-any-return]


def _texts(value: list[Any]) -> list[str]:
    if not all(isinstance(item, str) for item in value):
        raise PydanticCustomError("prompt", "must be of one kind: strings, token ids, or lists of token ids")
    _check_count(value)
    if not all(map(is_text, value)):
        raise PydanticCustomError("prompt", "has half a surrogate pair, which is no character")
    return value


def _check_count(value: list[Any]) -> None:
    if len(value) > MAX_CHOICES:
        raise PydanticCustomError("prompt", "has {count} prompts, at most {limit} are possible; send several requests",
                                  {"count": len(value), "limit": MAX_CHOICES})


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not (isinstance(stops, list) and len(stops) <= MAX_STOPS
            and all(is_text(item) and 0 < len(item) <= MAX_STOP_CHARS for item in stops)):
        raise PydanticCustomError("stop", "must be at most {count} non-empty strings of at most {chars} characters",
                                  {"count": MAX_STOPS, "chars": MAX_STOP_CHARS})
    return stops


_ID_SCHEMA = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
_IDS_SCHEMA = {"type": "array", "items": _ID_SCHEMA, "minItems": 1}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_STOP_SCHEMA = _TEXT_SCHEMA | {"maxLength": MAX_STOP_CHARS}

PromptField = Annotated[
    Prompt, PlainValidator(_prompt),
    WithJsonSchema({"anyOf": [
        _TEXT_SCHEMA, _IDS_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1, "maxItems": MAX_CHOICES},
        {"type": "array", "items": _IDS_SCHEMA, "minItems": 1, "maxItems": MAX_CHOICES},
    ], "description": f"One prompt, or up to {MAX_CHOICES}: text or token ids."}),
]
StopField = Annotated[
    list[str], PlainValidator(_stops),
    WithJsonSchema({"anyOf": [_STOP_SCHEMA, {"type": "array", "items": _STOP_SCHEMA, "maxItems": MAX_STOPS}, {"type": "null"}],
                    "description": "Ends the answer before the first of these strings; may span tokens."}),
]
