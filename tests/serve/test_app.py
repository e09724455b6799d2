"""The application graph and its YAML, without starting anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

import hisparse.serve
from hisparse.actors.placement import bundles
from hisparse.config import load_config
from hisparse.errors import ConfigError

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
