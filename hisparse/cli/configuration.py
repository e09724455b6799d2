"""The configuration that a command line means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hisparse.config import HiSparseConfig, load_config
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
    source: Path | dict[str, Any] = config
    if config.is_file() and "applications:" in config.read_text():
        source = _from_serve_file(config)
    return load_config(source, overrides)


def _from_serve_file(path: Path) -> dict[str, Any]:
    data = yaml.safe_load(path.read_text())
    try:
        args = dict(data["applications"][0]["args"])
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{path}: a Serve file needs the configuration in applications[0].args") from error
    http = data.get("http_options") or {}
    args["serve"] = {key: http[key] for key in ("host", "port") if key in http} | dict(args.get("serve") or {})
    return args
