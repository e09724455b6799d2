"""The OpenAPI document of a running server: requests, answers, errors and security as they are here, limits included."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from hisparse import __version__
from hisparse.serve.facts import ServerFacts
from hisparse.serve.guard import OPEN_PATHS
from hisparse.serve.requests import ChatRequest, CompletionRequest
from hisparse.serve.responses import ChatChunk, ErrorResponse

_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "A field is missing, unknown, impossible or not supported; `param` names it.",
    401: "Missing or wrong API key.",
    403: "No API keys are configured, and the client is not on the server's machine.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body, or prompt and answer together, are too long; the message has the limit.",
    415: "The body's Content-Type is not application/json.",
    429: "Queues are full; retry later.",
    500: "A bug of the server; its log has the details.",
    503: "An engine failed or is not ready; the message has the reason. Retry later.",
    504: "The request did not finish before its deadline.",
}
GENERATION_ERRORS = (400, 404, 408, 413, 415, 429, 503, 504)
_REQUEST_ID = {"X-Request-Id": {"description": "Names the request in the server's logs.", "required": True,
                                "schema": {"type": "string"}}}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "required": True, "schema": {"type": "integer"}}}


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """For `openapi_extra` of a route that parses its body itself."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers(kind: type[BaseModel], *errors: int, chunk: type[BaseModel] | None = None) -> dict[int | str, dict[str, Any]]:
    """For `responses` of a route.

    Args:
        errors: statuses besides those that every route has. chunk: what its events carry, if it can stream.
    """
    found: dict[int | str, dict[str, Any]] = {200: {"model": kind, "description": "The answer."}}
    if chunk is not None:
        found[200]["content"] = {"text/event-stream": {"schema": _event_of(chunk)}}
    return found | {status: error_answer(status) for status in errors}


def _event_of(chunk: type[BaseModel]) -> dict[str, Any]:
    """One server-sent event."""
    contents = [{"$ref": _REF.format(model=kind.__name__)} for kind in (chunk, ErrorResponse)]
    data = {"anyOf": [{"const": "[DONE]", "description": "The last event of a whole answer."},
                      {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": contents}}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def error_answer(status: int) -> dict[str, Any]:
    return {"model": ErrorResponse, "description": _ERRORS[status]}


def describe(api: FastAPI, facts: ServerFacts, *, keys: bool, strangers: bool) -> None:
    """Makes `api.openapi()` the document of this server.

    Args:
        keys: API keys are asked for. strangers: without keys, other machines are served all the same.
    """
    refused = 401 if keys else 403

    def document() -> dict[str, Any]:
        if api.openapi_schema is None:
            api.openapi_schema = _document(api, facts, keys=keys, refused=None if strangers and not keys else refused)
        return api.openapi_schema

    api.openapi = document  # type: ignore[method-assign]


def _document(api: FastAPI, facts: ServerFacts, *, keys: bool, refused: int | None) -> dict[str, Any]:
    found = get_openapi(
        title="hisparse", version=__version__, routes=api.routes,
        description=f"OpenAI-compatible API of {facts.model}, at most {facts.max_model_len} tokens of prompt and answer.")
    components = found.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    _, requests = models_json_schema([(CompletionRequest, "validation"), (ChatRequest, "validation"),
                                      (ChatChunk, "serialization"), (ErrorResponse, "serialization")], ref_template=_REF)
    schemas |= requests["$defs"]
    for name in ("HTTPValidationError", "ValidationError"):  # this server never answers 422
        schemas.pop(name, None)
    for name in ("CompletionRequest", "ChatRequest"):
        _narrow(schemas[name]["properties"], facts)
    if keys:
        components["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
    for path, operations in found["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            for status in (500, *([refused] if refused and path not in OPEN_PATHS else [])):
                schema = {"$ref": _REF.format(model="ErrorResponse")}
                responses[str(status)] = {"description": _ERRORS[status], "content": {"application/json": {"schema": schema}}}
            for status, response in responses.items():
                retry = _RETRY_AFTER if status in ("429", "503") and path not in OPEN_PATHS else {}
                response["headers"] = _REQUEST_ID | retry
            if keys:
                operation["security"] = [{"apiKey": []}, *([{}] if path in OPEN_PATHS else [])]
    return found


def _narrow(properties: dict[str, Any], facts: ServerFacts) -> None:
    """Limits that are this server's, not the API's."""
    properties["model"]["const"] = facts.model
    for name in ("max_tokens", "max_completion_tokens"):
        for choice in properties.get(name, {}).get("anyOf", ()):
            if choice.get("type") == "integer":
                choice["maximum"] = facts.max_model_len - 1
    if facts.vocab_size is not None and "prompt" in properties:
        for ids in _arrays_of_ids(properties["prompt"]):
            ids["items"] = ids["items"] | {"maximum": facts.vocab_size - 1}
            ids["maxItems"] = facts.max_model_len - 1


def _arrays_of_ids(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Each array of token ids within the schema of a prompt; they are replaced by copies that are not shared."""
    arrays = []
    for at, choice in enumerate(schema["anyOf"]):
        items = choice.get("items", {})
        if items.get("type") == "integer":
            schema["anyOf"][at] = dict(choice)
            arrays.append(schema["anyOf"][at])
        elif items.get("type") == "array":
            schema["anyOf"][at] = choice | {"items": dict(items)}
            arrays.append(schema["anyOf"][at]["items"])
    return arrays
