"""Every option as data: what its type, limits, unit and scope are. Read from the sections, so that nothing can be forgotten."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from hisparse.config.sections import HiSparseConfig

PREFIX = "HISPARSE_"
"""Of the variables of the environment."""

_UNITS_BY_END = {"_s": "seconds", "_tokens": "tokens", "_bytes": "bytes", "_gib": "GiB", "_pages": "pages", "_blocks": "blocks",
                 "_replicas": "replicas", "_ratio": "ratio", "_share": "share"}
_UNITS = {
    "model.max_model_len": "tokens", "cache.block_size": "tokens", "cache.num_groups": "groups", "cache.hot_rows": "rows",
    "cache.hot_rows_total": "rows", "cache.hot_rows_max": "rows", "cache.watermark": "share",
    "scheduler.max_num_seqs": "requests", "scheduler.max_waiting": "requests", "trace.requests": "requests",
    "trace.steps": "steps", "pd.staging_slots": "slots",
    "pd.max_retries": "retries", "tensor_parallel_size": "ranks",
}
_SCOPES = {"model": "replica", "cache": "replica", "scheduler": "replica", "engine": "rank", "trace": "replica",
           "pd": "replica", "serve": "service", "tensor_parallel_size": "replica"}
_SCOPES_OF_OPTIONS = {
    "model.gpu_share": "rank", "model.name": "service", "cache.device_blocks": "rank", "cache.hot_rows": "request",
    "cache.hot_rows_total": "request", "cache.hot_rows_weights": "request", "cache.hot_rows_max": "request",
    "cache.host_reserve_tokens": "request", "cache.host_reservation": "request", "cache.transfer_deadline_s": "rank",
    "pd.staging_slots": "rank", "pd.staging_slot_pages": "rank", "pd.lease_s": "request", "pd.transfer_deadline_s": "request",
    "pd.max_retries": "request", "pd.local_prefill_tokens": "request", "model.max_model_len": "request",
    "serve.request_timeout_s": "request", "serve.max_body_bytes": "request", "serve.start_timeout_s": "replica",
    "serve.step_timeout_s": "replica", "serve.metrics_interval_s": "replica", "scheduler.prefill_chunk_tokens": "request",
    "serve.api_keys_file": "node",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        path: "cache.hot_rows". kind: of value, for people. default: as YAML has it, "required" if there is none.
        limits: e.g. ">= 2"; "" = none. unit: "" = none. scope: for what the value counts, e.g. each rank.
    """

    path: str
    kind: str
    default: str
    limits: str
    unit: str
    scope: str
    description: str

    @property
    def section(self) -> str:
        """"" for an option at the top."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def variable(self) -> str:
        """Of the environment. Example: HISPARSE_CACHE__HOT_ROWS."""
        return PREFIX + self.path.replace(".", "__").upper()


@functools.cache
def options() -> dict[str, Option]:
    """All of them by path, in the order of the sections."""
    return {option.path: option for option in _of(HiSparseConfig, "")}


@functools.cache
def sections() -> dict[str, type[BaseModel]]:
    """Sections by name."""
    found = {}
    for name, field in HiSparseConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found[name] = field.annotation
    return found


def _of(model: type[BaseModel], above: str) -> Iterator[Option]:
    for name, field in model.model_fields.items():
        path = f"{above}{name}"
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _of(inner, f"{path}.")
        else:
            yield _option(path, field)


def _option(path: str, field: FieldInfo) -> Option:
    unit = _UNITS.get(path) or next((unit for end, unit in _UNITS_BY_END.items() if path.endswith(end)), "")
    return Option(path=path, kind=_kind(field.annotation), default=_default(field), limits=_limits(field), unit=unit,
                  scope=_SCOPES_OF_OPTIONS.get(path) or _SCOPES.get(path.partition(".")[0], "service"),
                  description=field.description or "")


def _kind(annotation: Any) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(inner[0])
    if origin is typing.Literal:
        return " or ".join(str(value) for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(member) for member in inner)
    if origin is tuple:
        return f"list of {_kind(inner[0])}"
    if origin is dict:
        return "sections"
    return {int: "integer", float: "number", bool: "true or false", str: "text", SecretStr: "text",
            type(None): "null"}.get(annotation, str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return "[]" if value == () else "{}" if value == {} else str(value)


def _limits(field: FieldInfo) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [f"{signs[name]} {getattr(item, name):g}" for item in field.metadata for name in signs if hasattr(item, name)]
    return ", ".join(found)
