"""The configuration that a command line means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hisparse.cli.serve_file import configuration_of, is_serve_file
from hisparse.config import Document, HiSparseConfig, load_config
from hisparse.config.loading import merge
from hisparse.errors import ConfigError


def read_configuration(config: Path | None, model: str | None, sets: list[str]) -> HiSparseConfig:
    """From a configuration file or a Serve file (its application's `args`), a model, and `section.key=value`s.

    Raises:
        ConfigError: see `load_config`; or neither or both of file and model are given.
    """
    if (config is None) == (model is None):
        raise ConfigError("give either CONFIG.yaml or --model PATH ('recall' is the bundled checkpoint)")
    overrides = _overrides(sets)
    if model is not None:
        return load_config({"model": {"path": model}}, overrides)
    assert config is not None
    document = Document.read(config)
    return load_config(configuration_of(document) if is_serve_file(document) else document, overrides)


def _overrides(sets: list[str]) -> dict[str, Any]:
    """Example: ["cache.hot_rows=[64, 128]"] -> {"cache": {"hot_rows": [64, 128]}}."""
    found: dict[str, Any] = {}
    for item in sets:
        path, equals, value = item.partition("=")
        *sections, leaf = path.split(".")
        if not equals or not all([*sections, leaf]):
            raise ConfigError(f"--set takes section.key=value, got {item!r}")
        try:
            given: Any = {leaf: yaml.safe_load(value)}
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {item}: the value is not valid YAML: {getattr(error, 'problem', error)}") from error
        for section in reversed(sections):
            given = {section: given}
        found = merge(found, given)
    return found
