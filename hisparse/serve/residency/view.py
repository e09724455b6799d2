"""What one viewer sees of a sample: bounded, compact, and without other tenants' names."""

from __future__ import annotations

import hashlib
import heapq
import hmac
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hisparse.serve.residency.hub import Sample

MAX_ENGINES = 64
MAX_ROWS = 512
"""Requests in one frame over all engines: those that hold most pages; the others are counted."""
MAX_LANDINGS = 12
MAX_ENDED = MAX_PENDING = 8
MAX_TEXT_CHARS = 96
"""Of an id; reasons of failures may have `MAX_REASON_CHARS`."""
MAX_REASON_CHARS = 300

COLUMNS = ("engine", "id", "tenant", "state", "prompt_tokens", "tokens", "pages", "device", "both", "host", "importing",
           "spilling", "hot_rows", "landing", "preemptions", "resident", "hot", "miss", "strip")
"""Of a row of `requests`; `engine` is an index into `engines`."""
_COPIED = COLUMNS[3:15]
_FACTS = ("role", "block_size", "open", "totals", "rows", "pools", "pages", "groups", "transfers")
_SECRET = secrets.token_bytes(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """Who looks. `sees_all`: an operator, or there are no keys; else only ids of `tenant`'s own requests are shown."""

    tenant: str = ""
    sees_all: bool = False


def frame(sample: Sample, viewer: Viewer, *, model: str, interval_s: float) -> dict[str, Any]:
    """The sample as one viewer gets it, JSON types only.

    Keys: number, at_s, interval_s, model, problem, columns, engines (facts without lists), requests (rows of `COLUMNS`),
    requests_hidden, landings, ended, pending (newest or oldest first, each with `engine`), masked (some id is not shown).
    """
    engines = [item for item in sample.engines if isinstance(item, Mapping)][:MAX_ENGINES]
    names = [_Names(viewer, item.get("tenants") or {}) for item in engines]
    rows = [(item["pages"], index, item) for index, engine in enumerate(engines) for item in engine.get("requests", ())]
    listed = heapq.nlargest(MAX_ROWS, rows, key=lambda row: row[0])
    hidden = len(rows) - len(listed) + sum(engine.get("requests_hidden", 0) for engine in engines)

    def merged(kind: str, most: int, age: Callable[[dict[str, Any]], float]) -> list[dict[str, Any]]:
        found = [names[index].applied(item) | {"engine": index}
                 for index, engine in enumerate(engines) for item in _records(engine, kind)]
        return sorted(found, key=age)[:most]

    built = {
        "number": sample.number, "at_s": round(sample.at_s, 3), "interval_s": interval_s, "model": model,
        "problem": sample.problem[:MAX_REASON_CHARS], "columns": COLUMNS, "engines": [_engine(item) for item in engines],
        "requests": [_row(index, item, names[index]) for _, index, item in listed], "requests_hidden": hidden,
        "landings": merged("landings", MAX_LANDINGS, lambda item: -item["at_s"]),
        "ended": merged("ended", MAX_ENDED, lambda item: -item["at_s"]),
        "pending": merged("pending", MAX_PENDING, lambda item: -item["age_s"]),
    }
    return built | {"masked": any(item.masked for item in names)}


def sse(event: str, data: Mapping[str, Any], number: int | None = None) -> str:
    """One server-sent event. The data is one line of ASCII, so nothing in it can end the event."""
    head = f"event: {event}\n" + (f"id: {number}\n" if number is not None else "")
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n"


class _Names:
    """Ids and tenants as the viewer may see them. `masked`: something was hidden."""

    def __init__(self, viewer: Viewer, tenants: Mapping[str, str]) -> None:
        self._viewer, self._tenants = viewer, tenants
        self.masked = False

    def may_see(self, request_id: str) -> bool:
        tenant = self._tenants.get(request_id, "")
        return self._viewer.sees_all or bool(tenant and tenant == self._viewer.tenant)

    def shown(self, request_id: str) -> tuple[str, str]:
        """(id, tenant); another tenant's request has an id of no meaning, the same in every sample."""
        if self.may_see(request_id):
            return request_id[:MAX_TEXT_CHARS], self._tenants.get(request_id, "")[:MAX_TEXT_CHARS]
        self.masked = True
        return "other-" + hmac.new(_SECRET, request_id.encode(), hashlib.sha256).hexdigest()[:8], ""

    def applied(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """A record with its id as shown. Why another tenant's import failed is told in one word, `failure`."""
        request_id = str(item["request_id"])
        shown, tenant = self.shown(request_id)
        record = dict(item) | {"request_id": shown, "tenant": tenant}
        if "failure" in record:
            record["reason"] = str(record["reason"])[:MAX_REASON_CHARS] if self.may_see(request_id) else ""
        return record


def _engine(report: Mapping[str, Any]) -> dict[str, Any]:
    health = report.get("health", {})
    facts = {name: report[name] for name in _FACTS if name in report}
    return {"name": str(report.get("engine", ""))[:MAX_TEXT_CHARS], "ok": bool(health.get("ok")),
            "reason": str(health.get("reason", ""))[:MAX_REASON_CHARS], "reported": "role" in report,
            "late": bool(report.get("late", "role" not in report)), **facts}


def _row(index: int, item: Mapping[str, Any], names: _Names) -> list[Any]:
    return [index, *names.shown(item["id"]), *(item[name] for name in _COPIED), *item["rows"], item["strip"]]


def _records(engine: Mapping[str, Any], kind: str) -> Iterable[Mapping[str, Any]]:
    items: list[Any] = engine.get(kind, [])
    if kind != "pending":
        return items
    return [{"request_id": name, "page": page, "phase": phase, "age_s": round(age_s, 3)} for name, page, phase, age_s in items]
