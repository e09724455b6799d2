"""What is wrong with a configuration, one line a problem: where, what, the limit, what was given, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from hisparse.config.options import options, sections
from hisparse.config.spellings import SPELLINGS

Lines = Mapping[tuple[str | int, ...], int]


def explain(error: ValidationError, *, name: str = "", lines: Lines | None = None, inside: str = "") -> str:
    """For people; never the value of a key.

    Args:
        name: of the file. lines: of its keys, by path. inside: the section all of it is below ("prefill").
    """
    problems = [_problem(item, lines or {}, inside) for item in error.errors()]
    head = f"{name}: " if name else ""
    return f"{head}invalid configuration:\n  " + "\n  ".join(problems)


def _problem(item: Any, lines: Lines, inside: str) -> str:
    parts = tuple(item["loc"])
    full = ((inside,) if inside else ()) + parts
    path = ".".join(str(part) for part in full) or "configuration"
    line = next((lines[full[:i]] for i in range(len(full), 0, -1) if full[:i] in lines), None)
    where = f"{path} (line {line})" if line is not None else path
    if item["type"] == "missing":
        fix = "; give model: {path: DIRECTORY}, or 'recall' for the bundled checkpoint" if parts[:1] == ("model",) else ""
        return f"{where}: is required{fix}"
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if item["type"] == "extra_forbidden":
        message = _unknown(parts)
    elif item["type"] in ("model_type", "model_attributes_type", "dict_type"):
        message = f"must be a section, with an option a line below it: {_some(parts)}"
    elif item["type"] == "literal_error":
        known = options().get(path)
        near = difflib.get_close_matches(str(item["input"]), known.kind.split(" or ") if known else [], n=1, cutoff=0.5)
        message += f"; did you mean {near[0]}?" if near else ""
    known = options().get(".".join(str(part) for part in parts))
    default = f"; default {known.default}" if known is not None and item["type"] != "value_error" and (
        known.default != "required") else ""
    if holds_secrets(path, item["input"]):
        return f"{where}: {message}{default}"
    return f"{where}: {message} (got {_short(item['input'])}{default})"


def _unknown(parts: tuple[str | int, ...]) -> str:
    """What an unknown key may have been meant for."""
    *above, leaf = (str(part) for part in parts)
    section = ".".join(above)
    here = [option.name for option in options().values() if option.section == section]
    here += [name for name in SPELLINGS if section == "cache"] + ([*sections()] if not section else [])
    near = difflib.get_close_matches(leaf, here, n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    other = [path for path, option in options().items() if option.name == leaf]
    if other:
        return f"unknown key here; it is {' or '.join(other)}"
    everywhere = {option.name: path for path, option in options().items()}
    near = difflib.get_close_matches(leaf, everywhere, n=1, cutoff=0.75)
    if near:
        return f"unknown key; did you mean {everywhere[near[0]]}?"
    return f"unknown key; {f'{section} has' if section else 'there are'} {', '.join(sorted(here))}"


def _some(parts: Iterable[str | int]) -> str:
    section = ".".join(str(part) for part in parts)
    names = [option.name for option in options().values() if option.section == section]
    return ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def holds_secrets(path: str, value: Any) -> bool:
    """Whether a value, or the path to it, may be an API key."""
    return "key" in path.rpartition(".")[2] or ".api_keys." in path or (
        isinstance(value, dict) and any(holds_secrets(str(name), item) for name, item in value.items()))
