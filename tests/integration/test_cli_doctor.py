"""`hisparse doctor --ray` for real: every probe runs on the node of the session's cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_node_is_examined(cluster: str) -> None:
    done = subprocess.run([sys.executable, "-m", "hisparse.cli", "doctor", "deploy/ray/local.yaml", "--ray", "--json",
                           "--set", "serve.port=0"], cwd=ROOT, env=os.environ | {"RAY_ADDRESS": cluster}, capture_output=True,
                          text=True, timeout=280, check=False)
    assert done.stdout, done.stderr
    data = json.loads(done.stdout)
    assert data["nodes"][0]["node"] == "cluster" and len(data["nodes"]) == 2
    (resources,) = data["nodes"][0]["findings"]
    assert resources["status"] == "ok" and "nodes 1, CPU 2" in resources["text"]
    found = {item["check"]: item for item in data["nodes"][1]["findings"]}
    for check in ("python", "torch", "ray", "nixl", "host memory", "shared memory", "NIXL agent", "NVRTC", "HTTP port"):
        assert found[check]["status"] == "ok", found[check]
    assert "compiles for sm_" in found["NVRTC"]["text"] and "1 MiB registered" in found["NIXL agent"]["text"]
    assert "1.0 GiB needed" in found["host memory"]["text"] or "MiB needed" in found["host memory"]["text"]
    failed = [item for item in found.values() if item["status"] == "fail"]
    assert done.returncode == (1 if failed else 0) and data["ok"] is not bool(failed)
    assert all(item["fix"] for item in found.values() if item["status"] in ("warn", "fail"))


def test_without_a_cluster_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "hisparse.cli", "doctor", "--ray"], cwd=ROOT,
                          env=os.environ | {"RAY_ADDRESS": "127.0.0.1:1"}, capture_output=True, text=True, timeout=60,
                          check=False)
    assert done.returncode == 1 and "ray start --head" in done.stderr and "Traceback" not in done.stderr, done.stderr
