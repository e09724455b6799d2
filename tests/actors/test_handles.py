from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError, TaskCancelledError

from hisparse.actors.handles import translate
from hisparse.errors import EngineDeadError, RequestError


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("execute", "traceback", cause)


@pytest.mark.parametrize(("error", "kind", "text"), [
    (GetTimeoutError("late"), TimeoutError, "rank 0 did not answer"),
    (ActorDiedError(), EngineDeadError, "rank 0 is dead"),
    (task_error(RequestError("too long", field="prompt", status=413)), RequestError, "too long"),
    (task_error(RequestError("too long")).as_instanceof_cause(), RequestError, "too long"),
    (task_error(task_error(KeyError("x"))), KeyError, "x"),
    (TaskCancelledError(), asyncio.CancelledError, ""),
    (ValueError("mine"), ValueError, "mine"),
])
def test_rays_exceptions_become_ours(error: Exception, kind: type[BaseException], text: str) -> None:
    ours = translate(error, "rank 0")
    assert type(ours) is kind and text in str(ours)
