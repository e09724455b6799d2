"""What stands behind the HTTP API in a service: the decode deployment, and the coordinators of all engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from hisparse.actors.engine import actor_prefix
from hisparse.actors.handles import find_actors, metrics_endpoints, translate
from hisparse.serve.calls import Chunk, GenerateCall
from hisparse.serve.failover import with_failover

STATS_TIMEOUT_S = 5.0


class ServeBackend:
    """The API's `Backend` over Serve handles; statistics come from every engine of the app."""

    def __init__(self, decode: DeploymentHandle[Any], app: str) -> None:
        self._decode, self._app = decode, app
        self._answered: set[str] = set()

    def generate(self, call: GenerateCall) -> AsyncIterator[Chunk]:
        """Before the first token a request may move to another replica."""
        return with_failover(self._attempt, call)

    async def _attempt(self, call: GenerateCall) -> AsyncGenerator[Chunk]:
        response: Any = self._decode.options(stream=True).generate.remote(call)
        done = False
        try:
            async for chunk in response:
                yield chunk
            done = True
        except Exception as error:
            raise translate(error, "the decode replica") from error
        finally:
            if not done:
                response.cancel()

    async def abort(self, request_id: str) -> None:
        """Cancelling the response aborts at the replica that has the request; nothing else is to be done."""

    async def engines(self, check: bool) -> list[dict[str, Any]]:
        return await self._ask_all("stats", check)

    async def residency(self) -> list[dict[str, Any]]:
        return await self._ask_all("residency")

    async def _ask_all(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """The answer of every engine's coordinator, by name; who does not answer is unhealthy."""
        prefix = actor_prefix(self._app)
        actors = await asyncio.to_thread(find_actors, prefix)

        async def ask(actor: Any) -> dict[str, Any]:
            name = actor.label.removeprefix(prefix)
            try:
                report = {"engine": name, **await actor.acall(method, *args, timeout_s=STATS_TIMEOUT_S)}
            except TimeoutError as error:
                if name in self._answered:
                    return {"engine": name, "health": {"ok": False, "reason": str(error)}}
                # A name is there before its process: imports take seconds, and more beside engines at work.
                return {"engine": name, "health": {"ok": False, "starting": True, "reason": "its process has not answered yet"}}
            except Exception as error:
                return {"engine": name, "health": {"ok": False, "reason": str(error)}}
            self._answered.add(name)
            return report

        return list(await asyncio.gather(*(ask(actor) for actor in actors)))

    async def metrics_endpoints(self) -> list[str]:
        return await asyncio.to_thread(metrics_endpoints)


class Ingress:
    """The HTTP deployment: `create_api` over the decode deployment."""

    def __init__(self, decode: DeploymentHandle[Any]) -> None:
        self.backend = ServeBackend(decode, serve.get_replica_context().app_name)


def current_backend() -> ServeBackend:
    """Of the ingress replica that this process is."""
    ingress: Any = serve.get_replica_context().servable_object
    backend: ServeBackend = ingress.backend
    return backend
