"""The whole state of an object as plain values, to see whether anything at all changed."""

from __future__ import annotations

import enum
from array import array
from collections import deque
from collections.abc import Mapping, Set
from typing import Any

import numpy as np


def snapshot(root: object) -> list[Any]:
    """Every object reachable from `root`, numbered in the order found; dictionaries with the order of their keys."""
    numbers: dict[int, int] = {}
    found: list[Any] = []
    alive: list[object] = []

    def visit(value: object) -> Any:
        if value is None or isinstance(value, int | float | str | bytes | enum.Enum | type):
            return value
        if id(value) in numbers:
            return ("object", numbers[id(value)])
        numbers[id(value)] = number = len(found)
        alive.append(value)
        found.append(None)
        found[number] = (type(value).__name__, content(value))
        return ("object", number)

    def content(value: object) -> Any:
        if isinstance(value, np.ndarray | array):
            return value.tolist()
        if isinstance(value, bytearray):
            return bytes(value)
        if isinstance(value, Mapping):
            return [(visit(key), visit(item)) for key, item in value.items()]
        if isinstance(value, Set):
            return sorted((visit(item) for item in value), key=repr)
        if isinstance(value, list | tuple | deque):
            return [visit(item) for item in value]
        if callable(value) and not hasattr(type(value), "__slots__") and not hasattr(value, "__dict__"):
            return repr(type(value))
        names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        names += sorted(getattr(value, "__dict__", ()))
        return [(name, visit(getattr(value, name))) for name in names
                if name not in ("__weakref__", "__dict__") and hasattr(value, name)]

    visit(root)
    return found
