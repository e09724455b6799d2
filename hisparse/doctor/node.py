"""Every probe of one node, in the order of the report."""

from __future__ import annotations

from collections.abc import Iterator

from hisparse.actors.memory_plan import MemoryPlan
from hisparse.actors.placement import bundles
from hisparse.config import HiSparseConfig
from hisparse.doctor import gpu, packages, transport
from hisparse.doctor.findings import Finding, Needs, Probe, examine
from hisparse.doctor.host import Host, probe_port


def probes(host: Host | None = None) -> list[tuple[str, Probe]]:
    """Named probes; a name is that of the finding when the probe breaks."""
    host = host or Host()
    return [
        ("python", packages.probe_python), ("packages", packages.probe_packages),
        ("GPU", gpu.probe_devices), ("NVRTC", gpu.probe_compiler),
        ("host memory", host.memory), ("shared memory", host.shared_memory), ("locked memory", host.locked_memory),
        ("huge pages", host.huge_pages), ("NUMA", host.numa), ("leftovers", host.leftovers),
        ("HTTP port", probe_port), ("NIXL agent", transport.probe_nixl), ("copy rate", gpu.probe_rates),
    ]


def examine_node(needs: Needs) -> Iterator[Finding]:
    """All of them on this machine."""
    return examine(probes(), needs)


def needs_of(config: HiSparseConfig) -> Needs:
    """What the configuration asks of a node on which all of its replicas run.

    Raises:
        ConfigError: the configuration is impossible by itself.
    """
    serve = config.serve
    replicas = {"prefill": serve.prefill_replicas, "decode": serve.decode_replicas} if serve.prefill_replicas else {
        "colocated": serve.decode_replicas}
    shared = memory = pinned = 0
    cpus = gpus = 0.0
    for role, count in replicas.items():
        engine = config.for_role(role)  # type: ignore[arg-type]
        plan, ranks, cuda = MemoryPlan.of(engine), engine.tensor_parallel_size, engine.model.device == "cuda"
        shared += count * plan.host_bytes * (engine.cache.host_pool != "private")
        memory += count * (plan.host_bytes + (0 if cuda else ranks * plan.device_bytes))
        pinned += count * plan.host_bytes * ranks * cuda
        for bundle in bundles(engine):
            cpus += count * bundle.get("CPU", 0.0)
            gpus += count * bundle.get("GPU", 0.0)
    return Needs(shared_bytes=shared, memory_bytes=memory, pinned_bytes=pinned, num_cpus=round(cpus, 3),
                 num_gpus=round(gpus, 3), cuda=config.model.device == "cuda", host=serve.host, port=serve.port)
