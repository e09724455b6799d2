"""What schemathesis is told of our API beyond its document."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from schemathesis.config import SchemathesisConfig

OURS = ["/v1/models", "/v1/models/{name}", "/v1/completions", "/v1/chat/completions", "/health", "/stats"]


def checks() -> SchemathesisConfig:
    """How many tokens a text has is no matter of a schema, so what it allows may be 413."""
    return SchemathesisConfig.from_dict({
        "checks": {"positive_data_acceptance": {"expected-statuses": [200, 404, 413]},
                   "negative_data_rejection": {"expected-statuses": [400, 401, 404, 413, 415]}},
    })


def bounded(examples: int) -> Any:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None,
                    suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])


def meant(body: dict[str, Any]) -> dict[str, Any]:
    """A body that also keeps the rules between fields, which a schema does not say (docs/api.md does); and a short answer."""
    body = copy.deepcopy(body)
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    if body.get("max_completion_tokens") is not None:
        body.pop("max_tokens", None)
    if isinstance(body.get("prompt"), list):
        body.pop("n", None)
        body["prompt"] = body["prompt"][:3] if isinstance(body["prompt"][0], (str, list)) else body["prompt"]
    for name, limit in (("n", 3), ("max_tokens", 6), ("max_completion_tokens", 6)):
        if body.get(name) is not None:
            body[name] = min(body[name], limit)
    if "messages" in body:
        body["messages"].append({"role": "user", "content": "Why?"})
        body.setdefault("max_completion_tokens", body.pop("max_tokens", 6))
    return body
