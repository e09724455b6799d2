"""The OpenAPI document against the server: schemathesis sends what the document allows and what it forbids.

Behind the API is everything of a replica but the model, whose logits come from a random generator so that a step takes a
millisecond: what passes validation must also survive the tokenizer, admission, the scheduler and cache manager, the sampler,
stop strings and the writers. Nothing here depends on what a model would have said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi.routing import APIRoute
from schemathesis.generation import GenerationMode

from hisparse.serve.ingress import create_api
from tests.serve.conftest import small_config
from tests.serve.fakes import FakeBackend
from tests.serve.openapi_cases import OURS, bounded, checks, meant
from tests.serve.real_service import RealBackend, real_config

KEY = {"Authorization": "Bearer k-1"}
CONFIG = real_config(max_model_len=64, api_keys=["k-1"])
_running: list[RealBackend] = []
_answers: dict[str, set[int]] = defaultdict(set)
APP = create_api(CONFIG, lambda: _running[0])
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP, headers=KEY, config=checks())
# What a schema of OpenAPI 3.1 may say, as far as we say it.
KEYWORDS = {"type", "title", "description", "default", "enum", "const", "anyOf", "oneOf", "items", "properties", "required",
            "additionalProperties", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "$ref"}


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[RealBackend]:
    backend = RealBackend(CONFIG, scripted=True)
    _running.append(backend)
    yield backend
    _running.clear()
    backend.close()
    for path, statuses in _answers.items():
        assert {200, 400} <= statuses, f"{path} was not tried from both sides: {statuses}"


@SCHEMA.include(path=OURS, method="POST").parametrize()
@bounded(40)
def test_posts_are_as_the_document_says(case: Any) -> None:
    if case.meta.generation.mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
        case.body = meant(case.body)
    _answers[case.path].add(case.call_and_validate(headers=KEY).status_code)


@SCHEMA.include(path=OURS, method="GET").parametrize()
@bounded(20)
def test_gets_are_as_the_document_says(case: Any) -> None:
    """Unknown query parameters are ignored, as everywhere."""
    case.call_and_validate(headers=KEY, excluded_checks=[schemathesis.checks.negative_data_rejection])


def schemas(value: Any) -> Iterator[dict[str, Any]]:
    """Every schema below a schema."""
    yield value
    for nested in (*value.get("anyOf", ()), *value.get("oneOf", ()), *value.get("properties", {}).values(),
                   value.get("items"), value.get("additionalProperties")):
        if isinstance(nested, dict):
            yield from schemas(nested)


def test_bounds_reach_the_document() -> None:
    """A bound that pydantic cannot translate stays behind as a word that no reader of schemas knows."""
    document = create_api(small_config(), FakeBackend).openapi()
    for name, schema in document["components"]["schemas"].items():
        for item in schemas(schema):
            assert set(item) <= KEYWORDS, f"{name}: {set(item) - KEYWORDS}"
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert fields["model"]["const"] == "recall"
    assert {"type": "integer", "minimum": 1, "maximum": 511} in fields["max_tokens"]["anyOf"], "max_model_len is 512"
    assert {"type": "integer", "minimum": 1, "maximum": 16} in fields["n"]["anyOf"]
    assert fields["prompt"]["anyOf"][1]["items"] == {"type": "integer", "minimum": 0, "maximum": 1023}, "the vocabulary"
    assert fields["echo"]["enum"] == [None, False]


def test_security_is_described_as_it_is() -> None:
    keyed, local, free = (create_api(small_config(**serve), FakeBackend).openapi()
                          for serve in ({"api_keys": ["k"]}, {}, {"allow_no_keys": True}))
    assert keyed["components"]["securitySchemes"] == {"apiKey": {"type": "http", "scheme": "bearer"}}
    for path, operations in keyed["paths"].items():
        for operation in operations.values():
            assert operation["security"] == [{"apiKey": []}, *([{}] if path == "/health" else [])]
    for document, refused in ((keyed, {"401"}), (local, {"403"}), (free, set())):
        for path, operations in document["paths"].items():
            for operation in operations.values():
                statuses = set(operation["responses"])
                assert statuses & {"401", "403"} == (set() if path == "/health" else refused) and "422" not in statuses


def test_every_route_is_in_the_document_or_says_why_not() -> None:
    app = create_api(small_config(), FakeBackend)
    hidden = {route.path for route in app.routes if isinstance(route, APIRoute) and not route.include_in_schema}
    assert set(OURS) <= set(app.openapi()["paths"])
    assert not any(path.startswith("/v1") for path in hidden), "what clients use is not hidden"
