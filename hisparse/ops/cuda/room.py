"""Whether a device has room for a cluster of CTAs, asked when a kernel is loaded: a launch that finds none fails."""

from __future__ import annotations

from hisparse.errors import ConfigError
from hisparse.ops.cuda.module import Kernel

PORTABLE_CLUSTER = 8
"""CTAs of a cluster that CUDA promises room for."""


def find_room(loaded: Kernel, what: str, *, cluster: int, threads: int, shared_bytes: int, fix: str = "") -> bool:
    """Allows a launch what it needs, and asks whether the current device can run it. False = take PORTABLE_CLUSTER instead.

    Args: what: how the error begins. threads, shared_bytes: of a CTA. fix: what else can be done where it has no room.
    Raises:
        ConfigError: no room for a cluster of PORTABLE_CLUSTER CTAs or fewer.
    """
    if cluster > PORTABLE_CLUSTER:
        loaded.allow_large_clusters()
    loaded.allow_shared_bytes(shared_bytes)
    found = loaded.has_room(cluster, threads, shared_bytes)
    if not found and cluster <= PORTABLE_CLUSTER:
        raise ConfigError(
            f"{what}: it has no room for a cluster of {cluster} CTAs of {threads} threads and {shared_bytes} bytes of shared "
            f"memory; use a whole GPU or a larger MIG slice{fix}")
    return found
