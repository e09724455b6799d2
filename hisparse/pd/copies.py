"""Copy engines of an importer: whoever runs a copy out of staging, and the event that says when it is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class CopyEvent(Protocol):
    """Of a copy that was handed to a copy engine."""

    def done(self) -> bool: ...


class _Done:
    def done(self) -> bool:
        return True


def copy_now(copy: Callable[[], None]) -> CopyEvent:
    """The CPU copy engine: the copy is over when this returns."""
    copy()
    return _Done()
