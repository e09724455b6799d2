"""The application graph and its YAML, without starting anything."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

import hisparse.serve
from hisparse.actors.memory_plan import MemoryPlan
from hisparse.actors.placement import bundles
from hisparse.config import load_config
from hisparse.errors import ConfigError, EngineDeadError

DEPLOY = Path(__file__).parents[2] / "deploy" / "ray"


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_serve_files_fit_rays_schema_and_our_models(path: Path) -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    application = schema.applications[0]
    module, _, name = (application.import_path or "").partition(":")
    assert module == "hisparse.serve" and getattr(hisparse.serve, name) is hisparse.serve.build_app
    config = load_config(dict(application.args), environ={})
    assert config.for_role("prefill").scheduler != config.for_role("decode").scheduler, "the overrides are in force"
    hisparse.serve.build_app(dict(application.args))


def deployments(args: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def walk(application: Any) -> None:
        deployment = application._bound_deployment
        found[deployment.name] = deployment
        for item in (*deployment.init_args, *deployment.init_kwargs.values()):
            if hasattr(item, "_bound_deployment"):
                walk(item)

    walk(hisparse.serve.build_app(args))
    return found


def test_prefill_and_decode() -> None:
    found = deployments({"model": {"path": "recall"}, "tensor_parallel_size": 2, "serve": {"decode_replicas": 3},
                         "scheduler": {"max_num_seqs": 4, "max_waiting": 10}})
    assert set(found) == {"ingress", "decode", "prefill"}
    decode = found["decode"]
    assert decode.num_replicas == 3 and decode.init_args[0].pd.role == "decode"
    assert found["prefill"].init_args[0].pd.role == "prefill"
    options = decode.deployment_config if hasattr(decode, "deployment_config") else decode._deployment_config
    assert options.max_ongoing_requests >= 14, "Serve must not queue what the engine would answer with 429"
    assert decode._replica_config.placement_group_bundles == bundles(decode.init_args[0])
    assert decode._replica_config.placement_group_strategy == "STRICT_PACK"


def test_each_role_scales_by_its_own_limits() -> None:
    """Serve's own configuration objects and its own default policy: how many replicas would it want?"""
    from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy as policy
    from ray.serve.config import AutoscalingContext

    found = deployments({
        "model": {"path": "recall"}, "scheduler": {"max_num_seqs": 20},
        "prefill": {"scheduler": {"max_num_seqs": 4}},
        "serve": {"decode_replicas": 9, "decode_autoscaling": {"min_replicas": 2, "max_replicas": 6, "upscale_delay_s": 3},
                  "prefill_autoscaling": {"max_replicas": 3, "target_requests": 2, "downscale_delay_s": 60}}})

    def wanted(name: str, replicas: int, requests: float) -> float:
        config = found[name]._deployment_config.autoscaling_config
        context = AutoscalingContext(**dict.fromkeys(AutoscalingContext.__init__.__annotations__)  # type: ignore[arg-type]
                                     | {"config": config, "current_num_replicas": replicas, "target_num_replicas": replicas,
                                        "total_num_requests": requests, "policy_state": {},
                                        "capacity_adjusted_min_replicas": config.min_replicas,
                                        "capacity_adjusted_max_replicas": config.max_replicas})
        return policy(context)[0]

    decode, prefill = (found[name]._deployment_config.autoscaling_config for name in ("decode", "prefill"))
    assert (decode.min_replicas, decode.initial_replicas, decode.max_replicas) == (2, 6, 6)
    assert (prefill.min_replicas, prefill.initial_replicas, prefill.max_replicas) == (1, 1, 3)
    assert (decode.upscale_delay_s, decode.downscale_delay_s) == (3, 300) and prefill.downscale_delay_s == 60
    assert decode.look_back_period_s < 30, "the load of half a minute ago is no reason to wait longer than upscale_delay_s"
    assert wanted("decode", 2, 2 * 14) == pytest.approx(2), "0.7 of 20 seats is the aim"
    assert wanted("decode", 2, 56) == pytest.approx(4) and wanted("decode", 4, 14) == pytest.approx(1)
    assert wanted("prefill", 1, 6) == pytest.approx(3), "its own target, its own seats"
    assert found["ingress"]._deployment_config.max_ongoing_requests >= 6 * 20, "room for every replica there may be"
    fixed = deployments({"model": {"path": "recall"}})
    assert all(fixed[name]._deployment_config.autoscaling_config is None for name in ("decode", "prefill"))


@pytest.mark.parametrize(("serve", "routed", "retried"), [
    ({}, False, False), ({"decode_replicas": 2}, True, False), ({"decode_autoscaling": {"max_replicas": 2}}, True, False),
    ({"prefill_replicas": 2}, False, True), ({"prefill_autoscaling": {"max_replicas": 2}}, False, True)])
def test_several_decode_replicas_are_chosen_by_prefix_and_prefill_replicas_by_where_an_attempt_failed(
        serve: dict[str, Any], routed: bool, retried: bool) -> None:
    from hisparse.serve.affinity import PrefixRouter, RetryRouter

    found = deployments({"model": {"path": "recall"}, "scheduler": {"max_num_seqs": 12}, "serve": serve})
    routers = {name: found[name]._deployment_config.request_router_config for name in ("decode", "prefill")}
    assert (routers["decode"].get_request_router_class() is PrefixRouter) == routed
    assert (routers["prefill"].get_request_router_class() is RetryRouter) == retried
    assert not routed or routers["decode"].request_router_kwargs == {"slack": 6}


@pytest.mark.parametrize(("serve", "text"), [
    ({"decode_autoscaling": {"min_replicas": 3, "max_replicas": 2}}, r"decode_autoscaling: max_replicas \(2\) must be"),
    ({"prefill_replicas": 0, "prefill_autoscaling": {}}, "no effect without prefill replicas"),
    ({"decode_autoscaling": {"min_replicas": 0}}, "greater than or equal to 1"),
])
def test_scaling_that_cannot_be_is_refused(serve: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config({"model": {"path": "recall"}, "serve": serve}, environ={})


def test_an_engine_that_has_never_answered_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator has its name before its process can answer; one that answered before and does not now is in trouble."""
    from hisparse.serve import backend

    class Coordinator:
        label, outcome = "coordinator/a/decode-1", Exception()

        async def acall(self, method: str, check: bool, timeout_s: float) -> dict[str, Any]:
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return self.outcome

    actor: Any = Coordinator()
    monkeypatch.setattr(backend, "find_actors", lambda prefix: [actor])
    service = backend.ServeBackend(None, "a")  # type: ignore[arg-type]

    def health(outcome: Any) -> dict[str, Any]:
        actor.outcome = outcome
        (engine,) = asyncio.run(service.engines(False))
        assert engine["engine"] == "decode-1"
        return dict(engine["health"])

    assert health(TimeoutError("late"))["starting"]
    assert health({"health": {"ok": True}}) == {"ok": True}
    assert health(TimeoutError("late")) == {"ok": False, "reason": "late"}
    assert health(EngineDeadError("gone")) == {"ok": False, "reason": "gone"}


def test_serve_gives_a_stopping_replica_the_time_it_needs() -> None:
    sizes = {"model": {"path": "recall", "dtype": "bfloat16", "device": "cuda"}, "cache": {"host_pool_gib": 8},
             "prefill": {"cache": {"host_pool_gib": 4}}, "serve": {"drain_timeout_s": 120}}
    found = deployments(sizes)
    given = {name: found[name]._deployment_config.graceful_shutdown_timeout_s for name in found}
    needed = {role: MemoryPlan.of(load_config(sizes, environ={}).for_role(role)).stop_s  # type: ignore[arg-type]
              for role in ("prefill", "decode")}
    assert all(given[role] > needed[role] >= 150 for role in needed) and given["ingress"] > 120
    assert given["decode"] - given["prefill"] == pytest.approx(1.0, abs=0.01), "4 GiB more to unpin"


@pytest.mark.parametrize("replicas", [0, 1])
def test_engines_never_get_the_keys(replicas: int) -> None:
    found = deployments({"model": {"path": "recall"},
                         "serve": {"prefill_replicas": replicas, "api_keys": ["sk-1"], "host": "::"}})
    engines = [deployment.init_args[0] for name, deployment in found.items() if name != "ingress"]
    assert len(engines) == 1 + replicas
    assert all(not engine.serve.api_keys and engine.serve.host == "::" for engine in engines)


def test_colocated() -> None:
    found = deployments({"model": {"path": "recall"}, "serve": {"prefill_replicas": 0}})
    assert set(found) == {"ingress", "decode"} and found["decode"].init_args[0].pd.role == "colocated"


@pytest.mark.parametrize(("args", "text"), [
    ({"model": {"path": "/nope"}}, "no checkpoint"),
    ({"model": {"path": "recall"}, "serve": {"replicas": 2}}, "serve.replicas: unknown key"),
    ({"model": {"path": "recall"}, "cache": {"host_pool_gib": 0.001}}, "host_pool_gib"),
    ({"model": {"path": "recall"}, "prefill": {"cache": {"hot_rows": 1}}}, "hot_rows"),
    ({"model": {"path": "recall"}, "cache": {"device_blocks": 80}}, "device_blocks = 80 cannot hold one request"),
])
def test_impossible_configurations_fail_before_anything_starts(args: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        hisparse.serve.build_app(args)


def test_replicas_and_ingress_stay_small() -> None:
    """They are several processes per node, and need neither torch nor a model."""
    code = "import hisparse.serve, sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
