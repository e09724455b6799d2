"""The Serve app: ingress -> decode -> prefill. `hisparse.serve:build_app` is the import path of every deployment."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig

from hisparse.actors import logs
from hisparse.actors.memory_plan import MemoryPlan
from hisparse.actors.placement import bundles
from hisparse.actors.stop_budget import StopBudget
from hisparse.config import AutoscalingConfig, HiSparseConfig, load_config
from hisparse.metrics.ray_sink import make_sink
from hisparse.serve.backend import Ingress, current_backend
from hisparse.serve.ingress import create_api
from hisparse.serve.replicas import DecodeReplica, PrefillReplica
from hisparse.telemetry.make import make_tracer

HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 15.0
MAX_START_RETRIES = 2
WAIT_LOOP_S = 0.5
"""How often a stopping replica looks whether its requests have ended."""
TARGET_SEATS = 0.7
"""Share of the seats that autoscaling wants taken, unless told otherwise."""
LEAST_LOOK_BACK_S = 15.0
"""Over which autoscaling averages; Serve's replicas report every 10 s."""


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
        return create_api(config, current_backend, make_sink(config.serve), make_tracer(config.telemetry, "ingress"),
                          proxied=True)

    def engine_options(replica_config: HiSparseConfig, count: int, scaling: AutoscalingConfig | None) -> dict[str, Any]:
        plan = MemoryPlan.of(replica_config)  # a wrong path or an impossible size fails here, not in a replica
        return {
            **replica_count(replica_config, count, scaling), "max_ongoing_requests": capacity + 64,
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
        if _most(config.serve.prefill_replicas, config.serve.prefill_autoscaling) > 1:
            options["request_router_config"] = retry_routing()
        prefill = _deploy(PrefillReplica, "prefill", **options).bind(prefill_config)
        decode_args: tuple[Any, ...] = (decode_config, prefill)
    else:
        decode_config = _of_engine(config, "colocated")
        decode_args = (decode_config,)
    options = engine_options(decode_config, config.serve.decode_replicas, config.serve.decode_autoscaling)
    most = _most(config.serve.decode_replicas, config.serve.decode_autoscaling)
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


def retry_routing() -> RequestRouterConfig:
    """Prefill engines are told apart by their load alone, and by where the last attempt for a request was."""
    router: Any = "hisparse.serve.affinity.RetryRouter"
    return RequestRouterConfig(request_router_class=router)


def _most(count: int, scaling: AutoscalingConfig | None) -> int:
    """Replicas of a role that there can be at once."""
    return count if scaling is None else scaling.max_replicas


def replica_count(config: HiSparseConfig, count: int, scaling: AutoscalingConfig | None) -> dict[str, Any]:
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


def _deploy(cls: Any, name: str, **options: Any) -> serve.Deployment:
    """A deployment of `cls`."""
    deployment: serve.Deployment = serve.deployment(name=name, **options)(cls)
    return deployment
