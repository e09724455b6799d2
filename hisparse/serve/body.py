"""A request body from bytes: bounded JSON, then its model; and errors that name the field and never repeat a text.

Error bodies end up in logs of clients and gateways, so they describe what was sent instead of quoting prompts.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hisparse.serve.errors import ApiError
from hisparse.serve.fields import is_text

MAX_KEYS = 256
"""Of one JSON object: with it the number of problems that a body can have is bounded."""
_UNION_TAGS = ("text", "parts")

R = TypeVar("R", bound=BaseModel)


def check_media_type(value: str) -> None:
    """Only JSON is read. It also keeps web pages from posting here behind their reader's back: a browser asks first
    before it sends this type to another site.

    Raises:
        ApiError: 415.
    """
    kind = value.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the body must be JSON: send 'Content-Type: application/json', got {kind[:60] or 'none'}",
                       "Content-Type")


def parse_body(body: bytes, kind: type[R]) -> R:
    """A request body as its model.

    Raises:
        ApiError: 400 with the field, what was expected and what was given.
    """
    try:
        data = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_no_number)
    except RecursionError as error:
        raise ApiError(400, "the body is not valid JSON: nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, f"the body must be a JSON object, got {describe(data)}", code="invalid_json")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise explain(error) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys, at most {MAX_KEYS} are possible")
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    if not all(map(is_text, found)):
        raise ValueError("a key has half a surrogate pair, which is no character")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def explain(error: ValidationError) -> ApiError:
    """The first problem, as a client is told of it."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = [str(part) for at, part in enumerate(first["loc"])
            if not (part in _UNION_TAGS and at > 0 and first["loc"][at - 1] == "content")]
    kind, where = first["type"], ".".join(path)
    field = path[0] if path else None
    if kind == "extra_forbidden":
        return ApiError(400, f"unknown field {where[:200]!a}; remove it or fix its spelling", where[:200], "unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{where} is required", where, "missing_required_parameter")
    message = "must be an object" if kind == "model_type" else first["msg"]
    if kind == "unsupported":
        return ApiError(400, f"{where} {message}", where, "unsupported_value")
    if not path:  # a rule about several fields is named after the one at fault
        return ApiError(400, f"{kind}: {message}", kind)
    return ApiError(400, f"{where}: {message} (got {describe(first['input'])})", field)


def describe(value: Any) -> str:
    """A JSON value, without its text."""
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
