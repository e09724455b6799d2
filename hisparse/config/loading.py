"""From a file, the environment and keywords to one object, or to errors that say what to do."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hisparse.config.document import Document
from hisparse.config.effects import without_effect
from hisparse.config.mistakes import Lines, explain
from hisparse.config.options import PREFIX, options
from hisparse.config.otel import with_otel
from hisparse.config.sections import HiSparseConfig
from hisparse.config.spellings import translate
from hisparse.errors import ConfigError


def load_config(source: str | Path | dict[str, Any] | Document, overrides: dict[str, Any] | None = None,
                environ: dict[str, str] | None = None) -> HiSparseConfig:
    """Resolves YAML file or dictionary, then `HISPARSE_SECTION__FIELD` variables, then keyword overrides.

    Warns (logger "hisparse", once a process) of options that are set and have no effect.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or impossible value; names path, value and limit, all at once.
    """
    if isinstance(source, dict):
        source = Document(name="", data=source)
    elif not isinstance(source, Document):
        source = Document.read(Path(source))
    if not isinstance(source.data, dict):
        what = "nothing" if source.data is None else type(source.data).__name__
        raise ConfigError(f"{source.name or 'the configuration'} must be a mapping of sections, got {what}; it begins e.g. with"
                          "\nmodel:\n  path: recall")
    environ = dict(os.environ) if environ is None else environ
    data = merge(translate(source.data, warn_once), translate(_from_environ(environ), warn_once))
    data = merge(with_otel(data, environ), translate(overrides or {}, warn_once))
    config = resolved(data, name=source.name, lines=source.lines)
    if config.prefill:
        resolved(merge(config.model_dump(), config.prefill) | {"prefill": {}}, name=source.name, lines=source.lines,
                 inside="prefill")
    for text in without_effect(data, config):
        warn_once(text)
    return config


def resolved(data: dict[str, Any], *, name: str = "", lines: Lines | None = None, inside: str = "") -> HiSparseConfig:
    """The object for data that nothing is added to. Raises ConfigError; for the arguments see `explain`."""
    try:
        return HiSparseConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error, name=name, lines=lines, inside=inside)) from error


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`top` over `base`, section by section; neither is changed."""
    out = dict(base)
    for key, value in top.items():
        out[key] = merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def _from_environ(environ: dict[str, str]) -> dict[str, Any]:
    known = {option.variable for option in options().values()}
    meant = {name.replace("__", "_"): name for name in known}
    out: dict[str, Any] = {}
    for name, value in environ.items():
        if not name.startswith(PREFIX) or ("__" not in name and name not in known):
            if name in meant:
                warn_once(f"the variable {name} has no effect: sections are set apart by two underscores, {meant[name]}")
            continue
        node = out
        *sections, leaf = name.removeprefix(PREFIX).lower().split("__")
        for section in sections:
            node = node.setdefault(section, {})
        try:
            node[leaf] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"the variable {name} is not valid YAML: {str(error).splitlines()[0]}") from error
    return out


@functools.cache
def warn_once(message: str) -> None:
    """On the logger of hisparse, once a process."""
    logging.getLogger("hisparse").warning("%s", message)
