"""A service that runs for the length of a block, as `hisparse serve` and the demo start it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ray import serve
from ray.exceptions import RayError

from hisparse.actors.engine import actor_prefix
from hisparse.actors.handles import find_actors, gather
from hisparse.config import HiSparseConfig
from hisparse.errors import HiSparseError
from hisparse.serve.app import build_app
from hisparse.serve.ending import ENDING_S, shut_down
from hisparse.serve.keys import KeyRing

logger = logging.getLogger(__name__)


@contextmanager
def serving(config: HiSparseConfig, *, port: int, name: str = "hisparse") -> Iterator[None]:
    """The running service of this configuration on a Ray cluster that is there already; ends with the block.

    Raises:
        HiSparseError: Serve runs there already (its apps and its port are not ours to change), or a replica could not
            start; with the reason.
    """
    check_no_other_serve()
    KeyRing(config.serve)  # a file that cannot be read is an error here, not in a replica
    application = build_app(config.model_dump())
    serve.start(http_options={"host": config.serve.host, "port": port})
    try:
        try:
            serve.run(application, name=name, route_prefix="/")
        except RuntimeError as error:
            raise HiSparseError(f"the service did not start: {_why(name) or error}") from error
        yield
    finally:
        drain_engines(name, config.serve.drain_timeout_s)
        shut_down()


def drain_engines(app: str, timeout_s: float) -> None:
    """Every engine of an app at once, before Serve ends it: late requests are refused at once, open streams go on."""
    engines = find_actors(actor_prefix(app))
    try:
        gather([engine.start("drain", timeout_s) for engine in engines], timeout_s + 10.0)
    except Exception as error:  # Serve ends them in any case
        logger.warning("drain of the engines: %s", error)


def check_no_other_serve() -> None:
    """Refuses a cluster on which Serve runs; one that is just ending (no application is left) gets its time."""
    deadline_s = time.monotonic() + ENDING_S
    while True:
        try:
            running = serve.status()
        except RayError:  # its controller went away meanwhile
            return
        if not running.proxies and not running.applications:
            return
        if running.applications or time.monotonic() > deadline_s:
            names = ", ".join(sorted(running.applications)) or "no application"
            raise HiSparseError(f"Ray Serve already runs on this cluster ({names}); use 'serve deploy' with a Serve file to "
                                "add this service to it, or end it with 'serve shutdown'")
        time.sleep(0.5)


def _why(name: str) -> str:
    """Why the deployments of an application failed: the last line of each replica's traceback."""
    application = serve.status().applications.get(name)
    reasons = []
    for deployment, item in sorted(application.deployments.items() if application is not None else ()):
        errors = [line for line in item.message.splitlines() if "Error: " in line and not line.startswith(" ")]
        if errors:
            reasons.append(f"{deployment}: {errors[-1].partition('Error: ')[2]}")
    return "; ".join(reasons)
