"""Work that goes on when its caller is cancelled or has nobody left to answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)

_tasks: set[asyncio.Task[Any]] = set()
"""An event loop keeps no reference of its own on a task."""


def spawn(work: Coroutine[Any, Any, Any]) -> None:
    """Runs `work` to its end even when the caller is being cancelled; failures are logged."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_done)


def _done(task: asyncio.Task[Any]) -> None:
    _tasks.discard(task)
    if not task.cancelled() and task.exception() is not None:
        logger.warning("background work failed: %s", task.exception())
