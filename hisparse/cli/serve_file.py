"""A Ray Serve file, and the configuration in it."""

from __future__ import annotations

import dataclasses
from typing import Any

from hisparse.config import Document
from hisparse.errors import ConfigError

IMPORT_PATH = "hisparse.serve:build_app"


def is_serve_file(document: Document) -> bool:
    return isinstance(document.data, dict) and "applications" in document.data


def configuration_of(whole: Document) -> Document:
    """The configuration in the file's application of ours; the file's HTTP address counts unless the configuration has one.

    Raises:
        ConfigError: none of ours or several, two of one name, or no configuration.
    """
    given = whole.data["applications"]
    applications = [item if isinstance(item, dict) else {} for item in given] if isinstance(given, list) else []
    _check_names(whole, applications)
    ours = [i for i, item in enumerate(applications) if item.get("import_path", IMPORT_PATH) == IMPORT_PATH]
    if len(ours) != 1:
        raise ConfigError(f"{whole.name}: 'hisparse serve' runs one application, with its configuration in "
                          f"applications[0].args; this file has {len(ours)} with import_path {IMPORT_PATH}. 'serve run' and "
                          "'serve deploy' take any number")
    try:
        part = whole.at("applications", ours[0], "args")
        args = dict(part.data)
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{whole.name}: a Serve file needs the configuration in applications[{ours[0]}].args") from error
    http = whole.data.get("http_options") or {}
    address = {key: http[key] for key in ("host", "port") if key in http}
    if address:
        args["serve"] = address | dict(args.get("serve") or {})
    return dataclasses.replace(part, data=args)


def _check_names(whole: Document, applications: list[dict[str, Any]]) -> None:
    lines: dict[Any, int] = {}
    for i, item in enumerate(applications):
        if "name" in item:
            line = whole.lines["applications", i, "name"]
            if item["name"] in lines:
                raise ConfigError(f"{whole.name}, line {line}: two applications are named {item['name']!r}, the first in line "
                                  f"{lines[item['name']]}; give each a name and a route_prefix of its own")
            lines[item["name"]] = line
