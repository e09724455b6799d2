"""The same probes on every node of a Ray cluster, and whether the cluster has room for the configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hisparse.actors.handles import Node, cluster_nodes, gather, start_actor
from hisparse.config import GIB
from hisparse.doctor.findings import Finding, Needs, Status
from hisparse.errors import HiSparseError

NODE_TIMEOUT_S = 240.0
HIDDEN = ("CUDA_VISIBLE_DEVICES",)
"""Ray hides GPUs from an actor that reserved none; the doctor looks at all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """Findings of one node."""

    name: str
    findings: tuple[Finding, ...]


class NodeDoctor:
    """Runs the probes of one node in a fresh process, beside whatever the node does."""

    def examine(self, needs: str, timeout_s: float) -> str:
        environment = {key: value for key, value in os.environ.items() if key not in HIDDEN}
        done = subprocess.run([sys.executable, "-m", "hisparse.doctor"], input=needs, capture_output=True, text=True,
                              timeout=timeout_s, env=environment, check=False)
        if done.returncode:
            raise HiSparseError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        return done.stdout.strip().splitlines()[-1]


def examine_cluster(needs: Needs, *, timeout_s: float = NODE_TIMEOUT_S) -> list[NodeReport]:
    """First the cluster, then its nodes by address. A node that cannot be examined is a FAIL of that node."""
    nodes = cluster_nodes()
    reports = [NodeReport(name="cluster", findings=tuple(judge(nodes, needs)))]
    actors = [start_actor(NodeDoctor, label=f"doctor on {node.name}", node_id=node.node_id) for node in nodes]
    started = [actor.start("examine", json.dumps(needs.asdict()), timeout_s) for actor in actors]
    for node, actor, pending in zip(nodes, actors, started, strict=True):
        try:
            (text,) = gather([pending], timeout_s + 30)
            findings = tuple(Finding.parse(item) for item in json.loads(text))
        except Exception as error:
            findings = (Finding(check="node", status=Status.FAIL, text=f"cannot be examined: {error}",
                                fix="install the same hisparse there, and look at the node with 'ray status'"),)
        finally:
            actor.kill()
        reports.append(NodeReport(name=f"{node.name} ({node.address})", findings=findings))
    return reports


def judge(nodes: Sequence[Node], needs: Needs) -> list[Finding]:
    """Whether all nodes together have the CPUs and GPUs that the configuration reserves."""
    have = {kind: sum(node.resources.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU")}
    store = sum(node.resources.get("object_store_memory", 0.0) for node in nodes) / GIB
    text = f"nodes {len(nodes)}, CPU {have['CPU']:g}, GPU {have['GPU']:g}, object store {store:,.1f} GiB"
    missing = [f"{want:g} {kind}" for kind, want in (("CPU", needs.num_cpus), ("GPU", needs.num_gpus)) if want > have[kind]]
    if missing:
        return [Finding(check="Ray resources", status=Status.FAIL, text=f"{text}; the configuration reserves "
                        f"{' and '.join(missing)}", fix="add nodes, or lower tensor_parallel_size or the number of replicas")]
    return [Finding(check="Ray resources", status=Status.OK, text=text)]

