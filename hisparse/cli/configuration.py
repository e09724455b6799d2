"""The configuration that a command line means."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from hisparse.config import Document, HiSparseConfig, load_config
from hisparse.errors import ConfigError


def read_configuration(config: Path | None, model: str | None, sets: list[str]) -> HiSparseConfig:
    """From a configuration file or a Serve file (its first application's `args`), a model, and `section.key=value`s.

    Raises:
        ConfigError: see `load_config`; or neither or both of file and model are given.
    """
    if (config is None) == (model is None):
        raise ConfigError("give either CONFIG.yaml or --model PATH ('recall' is the bundled checkpoint)")
    overrides: dict[str, Any] = {}
    for item in sets:
        path, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set takes section.key=value, got {item!r}")
        node = overrides
        *sections, leaf = path.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = yaml.safe_load(value)
    if model is not None:
        return load_config({"model": {"path": model}}, overrides)
    assert config is not None
    document = Document.read(config)
    if isinstance(document.data, dict) and "applications" in document.data:
        document = _of_serve_file(document)
    return load_config(document, overrides)


def _of_serve_file(whole: Document) -> Document:
    """The configuration in a Ray Serve file; its HTTP address counts unless the configuration has one."""
    try:
        found = whole.at("applications", 0, "args")
        args = dict(found.data)
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{whole.name}: a Serve file needs the configuration in applications[0].args") from error
    http = whole.data.get("http_options") or {}
    address = {key: http[key] for key in ("host", "port") if key in http}
    if address:
        args["serve"] = address | dict(args.get("serve") or {})
    return dataclasses.replace(found, data=args)
