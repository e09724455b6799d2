"""A YAML file with the line of every key, so that a mistake can be shown where it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hisparse.errors import ConfigError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What a file holds.

    Attributes:
        name: of the file. data: as Python values. lines: of every key and list item, from 1, by path from the top.
    """

    name: str
    data: Any
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Document:
        """Raises ConfigError, with line and column, for what is no YAML, has a key twice, or cannot be read."""
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"it is no text: {error.reason}"
            raise ConfigError(f"cannot read the configuration {path}: {reason}") from error
        lines: dict[KeyPath, int] = {}
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            if node is not None:
                _walk(node, (), lines, str(path))
            return cls(name=str(path), data=yaml.safe_load(text), lines=lines)
        except yaml.YAMLError as error:
            raise ConfigError(_why_no_yaml(path, text, error)) from error

    def at(self, *path: str | int) -> Document:
        """The part below `path`. Raises LookupError or TypeError if there is none."""
        data = self.data
        for part in path:
            data = data[part]
        lines = {keys[len(path):]: line for keys, line in self.lines.items() if keys[: len(path)] == path}
        return Document(name=self.name, data=data, lines=lines)


def _walk(node: yaml.Node, at: KeyPath, lines: dict[KeyPath, int], name: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            word, line = str(key.value), key.start_mark.line + 1
            if word in seen and word != "<<":
                raise ConfigError(f"{name}, line {line}: {word} is set twice, first in line {seen[word]}; remove one of them")
            seen[word] = line
            lines[(*at, word)] = line
            _walk(value, (*at, word), lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            lines[(*at, i)] = value.start_mark.line + 1
            _walk(value, (*at, i), lines, name)


def _why_no_yaml(path: Path, text: str, error: yaml.YAMLError) -> str:
    problem = str(getattr(error, "problem", None) or error).replace("\n", " ")
    hint = "; YAML is indented with spaces, not tabs" if "\\t" in problem else ""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"{path}: not valid YAML: {problem}{hint}"
    line = [*text.splitlines(), ""][min(mark.line, len(text.splitlines()))].expandtabs(1).rstrip()
    return (f"{path}, line {mark.line + 1}, column {mark.column + 1}: not valid YAML: {problem}{hint}\n    {line}\n    "
            f"{' ' * mark.column}^")
