"""The end of a Serve instance, without a word when all is well."""

from __future__ import annotations

import logging
import time

import ray
from ray.exceptions import RayError
from ray.serve.context import _get_global_client, _set_global_client

logger = logging.getLogger(__name__)

ENDING_S = 60.0
"""For replicas to drain and for the controller to end."""
POLL_S = 0.1
CONTROLLER = "SERVE_CONTROLLER_ACTOR"
"""Of Serve, in its namespace."""


def shut_down(timeout_s: float = ENDING_S) -> None:
    """Ends Ray Serve on this cluster and returns when its controller is gone. Idempotent; Ray's errors are logged.

    `serve.shutdown()` does the same with a call that stays open until the controller kills itself. Ray reports such a call as a
    failed task, on the driver's stdout. Here the controller answers first, and then is watched.
    """
    try:
        client = _get_global_client(raise_if_no_controller_running=False)
        if client is None:
            return
        client.shutdown_cached_handles()  # type: ignore[no-untyped-call]
        ray.get(client._controller.graceful_shutdown.remote(wait=False), timeout=timeout_s)
        if not _gone(timeout_s):
            logger.warning("Ray Serve did not end within %g s; see 'ray status' and its controller's log", timeout_s)
    except RayError as error:
        logger.warning("Ray Serve could not be ended in order: %s", error)
    finally:
        _set_global_client(None)  # type: ignore[no-untyped-call]


def _gone(timeout_s: float) -> bool:
    """Whether the controller ended within that time."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            ray.get_actor(CONTROLLER, namespace="serve")
        except ValueError:
            return True
        time.sleep(POLL_S)
    return False
