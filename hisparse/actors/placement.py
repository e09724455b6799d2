"""Which resources one engine reserves, and the one group that holds them.

All actors of an engine sit on one node, in one placement group. Inside a Serve replica that group is the replica's own
(Serve creates it from `bundles`); a second, nested group would wait for ever for resources that are already reserved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hisparse.actors import handles
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError

HEAD_CPUS = 0.1
"""Of the bundle that replica, coordinator and keeper share. Small on purpose: two engines start on 2 cores."""
RANK_CPUS = 0.1
"""Of the bundle of each rank."""
ACTOR_CPUS = 0.03
"""Asked by the coordinator and by the keeper, inside the head bundle; the replica itself asks for none."""


def bundles(config: HiSparseConfig) -> list[dict[str, float]]:
    """Bundle 0 for the head, then one per tensor-parallel rank, with a GPU (or a share of one) when it computes there."""
    rank = {"CPU": RANK_CPUS}
    if rank_gpus(config):
        rank["GPU"] = rank_gpus(config)
    return [{"CPU": HEAD_CPUS}] + [dict(rank) for _ in range(config.tensor_parallel_size)]


def rank_gpus(config: HiSparseConfig) -> float:
    """GPUs that each rank's actor asks for. Ray shows it no others."""
    return config.model.gpu_share if config.model.device == "cuda" else 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """The group of one engine. `owned`: created here, to be removed with the engine."""

    group: Any
    owned: bool

    @classmethod
    def acquire(cls, config: HiSparseConfig, *, timeout_s: float) -> Placement:
        """Uses the group this process runs in, else creates one.

        Raises:
            ConfigError: the given group has too few bundles, or none could be had in time (nothing is left behind).
        """
        wanted = bundles(config)
        current = handles.current_placement()
        if current is None:
            return cls(handles.create_placement(wanted, timeout_s=timeout_s), True)
        given = len(current.bundle_specs)
        if given < len(wanted):
            raise ConfigError(
                f"the placement group of this replica has {given} bundles, tensor_parallel_size = "
                f"{config.tensor_parallel_size} needs {len(wanted)} (one for the replica, one per rank); "
                "deploy with the bundles of hisparse.actors.placement.bundles(config)"
            )
        return cls(current, False)

    def rank_bundle(self, rank: int) -> int:
        return 1 + rank

    def release(self) -> None:
        """Gives the resources back if they were reserved here."""
        if self.owned:
            handles.remove_placement(self.group)
