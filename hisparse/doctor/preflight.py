"""What would keep a service from starting on this node, found before anything is started."""

from __future__ import annotations

from collections.abc import Iterable

from hisparse.doctor.findings import Finding, Needs, Status, examine
from hisparse.doctor.host import Host, probe_port


def problems(needs: Needs, *, host: Host | None = None, with_port: bool = True) -> list[Finding]:
    """Failures of memory, shared memory, locked memory and the port, if all replicas come to this node.

    Args:
        with_port: False = only the memory.
    """
    host = host or Host()
    probes = [("host memory", host.memory), ("shared memory", host.shared_memory), ("locked memory", host.locked_memory)]
    if with_port:
        probes.append(("HTTP port", lambda needs: probe_port(needs, ours_is_fine=False)))
    return [found for found in examine(probes, needs) if found.status is Status.FAIL]


def text_of(findings: Iterable[Finding]) -> str:
    """One line each, with the fix below it."""
    return "\n".join(f"  {found.check}: {found.text}\n    fix: {found.fix}" for found in findings)
