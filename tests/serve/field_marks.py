"""Which fields of a request's model are `Ignored` or `Unsupported`."""

from __future__ import annotations

from pydantic import BaseModel

from hisparse.serve.fields import Ignored, Unsupported


def fields_marked(kind: type[BaseModel], mark: type[Ignored] | type[Unsupported]) -> set[str]:
    return {name for name, field in kind.model_fields.items()
            if any(item is mark or isinstance(item, mark) for item in field.metadata)}
