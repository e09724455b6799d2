"""The Serve app: ingress -> decode -> prefill. `hisparse.serve:build_app` is the import path of every deployment."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from hisparse.actors import logs
from hisparse.actors.engine import EngineActors, EngineIdentity, actor_prefix
from hisparse.actors.handles import find_actors, gather, metrics_endpoints, translate
from hisparse.actors.memory_plan import MemoryPlan
from hisparse.actors.placement import bundles
from hisparse.actors.stop_budget import StopBudget
from hisparse.config import AutoscalingConfig, HiSparseConfig, load_config, model_path
from hisparse.engine.tokenizer import Tokenizer
from hisparse.errors import HiSparseError
from hisparse.metrics import NullSink, RequestFeed, Sink
from hisparse.metrics.ray_sink import RaySink
from hisparse.serve.calls import Chunk, GenerateCall, PrefillAnswer, PrefillCall
from hisparse.serve.decode import DecodeService
from hisparse.serve.ending import ENDING_S, shut_down
from hisparse.serve.errors import ENGINE_UNAVAILABLE
from hisparse.serve.failover import with_failover
from hisparse.serve.generation import spawn
from hisparse.serve.ingress import create_api
from hisparse.serve.keys import KeyRing
from hisparse.serve.prefill import PrefillClient, PrefillService
from hisparse.telemetry.make import make_tracer

logger = logging.getLogger(__name__)

HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 15.0
MAX_START_RETRIES = 2
STATS_TIMEOUT_S = 5.0
LEAVE_S = 1.0
"""For answers that are on their way, when a replica ends because its engine has failed."""
WAIT_LOOP_S = 0.5
"""How often a stopping replica looks whether its requests have ended."""
TARGET_SEATS = 0.7
"""Share of the seats that autoscaling wants taken, unless told otherwise."""
LEAST_LOOK_BACK_S = 15.0
"""Over which autoscaling averages; Serve's replicas report every 10 s."""


class _EngineReplica:
    """A Serve replica that owns the actors of one engine."""

    def __init__(self, config: HiSparseConfig) -> None:
        app = serve.get_replica_context().app_name
        identity = EngineIdentity.new(config.pd.role, app)
        logs.configure(config.serve, replica=identity.engine_id)
        self._drain_timeout_s, self._leaving = config.serve.drain_timeout_s, False
        self.engine = EngineActors.start(config, identity)
        self.feed = RequestFeed(_sink(config), time.monotonic, **self.engine.labels)
        self.tracer = make_tracer(config.telemetry, identity.engine_id, **{"service.instance.id": identity.engine_id})
        logger.info("engine %s is ready", identity.engine_id)

    async def check_health(self) -> None:
        """Serve's probe: through the engine loop's turn counter. Raising makes Serve replace the replica."""
        health = await self.engine.health()
        if not health["ok"]:
            raise RuntimeError(f"engine {self.engine.identity.engine_id} is unhealthy: {health['reason']}")

    async def abort(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    async def leave_if_dead(self) -> None:
        """Ends this process when its engine has failed. An idle replica looks attractive to routers: until Serve has noticed by
        its health checks, most requests would come here only to be sent away.
        """
        health = await self.engine.probe()
        if health["ok"] or health.get("starting") or self._leaving:
            return
        self._leaving = True
        logger.error("engine %s has failed, and so this replica ends: %s", self.engine.identity.engine_id, health["reason"])
        await asyncio.to_thread(self.engine.stop)
        await asyncio.to_thread(self.tracer.shutdown)
        await asyncio.sleep(LEAVE_S)
        os._exit(1)

    async def __del__(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is not None and not self._leaving:
            self._leaving = True  # a late request finds no engine; this process must not end in the middle of the stop
            await asyncio.to_thread(engine.drain, self._drain_timeout_s)
            await asyncio.to_thread(engine.stop)
            await asyncio.to_thread(self.tracer.shutdown)


class PrefillReplica(_EngineReplica):
    """See `PrefillService`."""

    def __init__(self, config: HiSparseConfig) -> None:
        super().__init__(config)
        self._service = PrefillService(self.engine, self.feed, self.tracer)

    async def prefill(self, call: PrefillCall) -> PrefillAnswer:
        answer = await self._service.prefill(call)
        if answer.error is not None and answer.error.code == ENGINE_UNAVAILABLE:
            spawn(self.leave_if_dead())
        return answer


class DecodeReplica(_EngineReplica):
    """See `DecodeService`."""

    def __init__(self, config: HiSparseConfig, prefill: DeploymentHandle[Any] | None = None) -> None:
        client = None
        if prefill is not None:
            async def send(call: PrefillCall) -> PrefillAnswer:
                response: Any = prefill.prefill.remote(call)
                try:
                    answer: PrefillAnswer = await response
                    return answer
                except asyncio.CancelledError:
                    response.cancel()
                    raise

            client = PrefillClient(send, config.pd)
        super().__init__(config)
        self._service = DecodeService(config, self.engine, Tokenizer(model_path(config.model)), client, self.feed, self.tracer)

    async def generate(self, call: GenerateCall) -> AsyncIterator[Chunk]:
        async for chunk in self._service.generate(call):
            if chunk.error is not None and chunk.error.code == ENGINE_UNAVAILABLE:
                spawn(self.leave_if_dead())
            yield chunk


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


def _current_backend() -> ServeBackend:
    ingress: Any = serve.get_replica_context().servable_object
    backend: ServeBackend = ingress.backend
    return backend


def build_app(args: dict[str, Any]) -> serve.Application:
    """The application of one configuration (the `args` of a Serve YAML file, or a dumped HiSparseConfig).

    Raises:
        ConfigError: unknown keys, impossible values, or no such checkpoint.
    """
    config = load_config(dict(args))
    make_tracer(config.telemetry, "check").shutdown()  # a missing package fails here, not in a replica
    capacity = config.scheduler.max_num_seqs + config.scheduler.max_waiting

    def build_api() -> FastAPI:
        logs.configure(config.serve, replica="ingress")
        return create_api(config, _current_backend, _sink(config), make_tracer(config.telemetry, "ingress"), proxied=True)

    def engine_options(replica_config: HiSparseConfig, count: int, scaling: AutoscalingConfig | None) -> dict[str, Any]:
        plan = MemoryPlan.of(replica_config)  # a wrong path or an impossible size fails here, not in a replica
        return {
            **replicas(replica_config, count, scaling), "max_ongoing_requests": capacity + 64,
            "ray_actor_options": {"num_cpus": 0},
            "placement_group_bundles": bundles(replica_config), "placement_group_strategy": "STRICT_PACK",
            "max_constructor_retry_count": MAX_START_RETRIES,
            "health_check_period_s": HEALTH_PERIOD_S, "health_check_timeout_s": HEALTH_TIMEOUT_S,
            "graceful_shutdown_wait_loop_s": WAIT_LOOP_S,
            "graceful_shutdown_timeout_s": StopBudget.of(replica_config, plan.host_bytes).total_s + 4 * WAIT_LOOP_S,
        }

    if config.serve.prefill_replicas:
        prefill_config, decode_config = _of_engine(config, "prefill"), _of_engine(config, "decode")
        options = engine_options(prefill_config, config.serve.prefill_replicas, config.serve.prefill_autoscaling)
        prefill = _deploy(PrefillReplica, "prefill", **options).bind(prefill_config)
        decode_args: tuple[Any, ...] = (decode_config, prefill)
    else:
        decode_config = _of_engine(config, "colocated")
        decode_args = (decode_config,)
    options = engine_options(decode_config, config.serve.decode_replicas, config.serve.decode_autoscaling)
    scaling = config.serve.decode_autoscaling
    most = config.serve.decode_replicas if scaling is None else scaling.max_replicas
    if most > 1:
        options["request_router_config"] = prefix_routing(decode_config)
    decode = _deploy(DecodeReplica, "decode", **options).bind(*decode_args)
    application: serve.Application = _deploy(
        serve.ingress(build_api)(Ingress), "ingress", max_ongoing_requests=capacity * most + 64,
        ray_actor_options={"num_cpus": 0}, graceful_shutdown_wait_loop_s=WAIT_LOOP_S,
        graceful_shutdown_timeout_s=config.serve.drain_timeout_s + 4 * WAIT_LOOP_S,
    ).bind(decode)
    return application


def prefix_routing(config: HiSparseConfig) -> RequestRouterConfig:
    """Requests go where their prefix is, up to half of the seats more than where there is least to do."""
    router: Any = "hisparse.serve.affinity.PrefixRouter"  # Serve's own type for it names no string
    return RequestRouterConfig(request_router_class=router,
                               request_router_kwargs={"slack": max(config.scheduler.max_num_seqs // 2, 1)})


def replicas(config: HiSparseConfig, count: int, scaling: AutoscalingConfig | None) -> dict[str, Any]:
    """Serve's options for a fixed number of replicas of a role, or for one that follows the load."""
    if scaling is None:
        return {"num_replicas": count}
    target = scaling.target_requests or TARGET_SEATS * config.scheduler.max_num_seqs
    return {"autoscaling_config": {
        "min_replicas": scaling.min_replicas, "max_replicas": scaling.max_replicas,
        "initial_replicas": min(max(count, scaling.min_replicas), scaling.max_replicas),
        "target_ongoing_requests": target,
        "upscale_delay_s": scaling.upscale_delay_s, "downscale_delay_s": scaling.downscale_delay_s,
        "look_back_period_s": max(scaling.upscale_delay_s, LEAST_LOOK_BACK_S),
    }}


def _of_engine(config: HiSparseConfig, role: Literal["colocated", "prefill", "decode"]) -> HiSparseConfig:
    """What the replicas of a role get: without API keys, which only the ingress needs."""
    own = config.for_role(role)
    return own.model_copy(update={"serve": own.serve.model_copy(update={"api_keys": ()})})


def _sink(config: HiSparseConfig) -> Sink:
    return RaySink() if config.serve.metrics_interval_s else NullSink()


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


def _deploy(cls: Any, name: str, **options: Any) -> serve.Deployment:
    """A deployment of `cls`."""
    deployment: serve.Deployment = serve.deployment(name=name, **options)(cls)
    return deployment
