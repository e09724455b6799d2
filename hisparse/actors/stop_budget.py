"""How long the orderly end of an engine may take, from its configuration: what a replica and its pod must be given."""

from __future__ import annotations

from dataclasses import dataclass

from hisparse.config import HiSparseConfig

UNPIN_BYTES_PER_S = 4 << 30
"""Of pinned memory that a process gives back; a process that is killed meanwhile stays in the kernel for as long."""
LOOP_S = 10.0
"""For the engine loop: abort what is left, tell prefill, take last outputs."""
RANKS_S = 10.0
"""For the ranks, beside the unpinning of their pool: run queued copies, deregister it from the transport."""
KEEPER_S = 10.0
"""For the keeper, which unlinks the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopBudget:
    """Limits of the stages of `EngineActors.stop`, in order. Seconds."""

    drain_s: float
    loop_s: float
    ranks_s: float
    keeper_s: float

    @classmethod
    def of(cls, config: HiSparseConfig, host_pool_bytes: int) -> StopBudget:
        """Args: host_pool_bytes: of the pool that this engine maps."""
        pinned = host_pool_bytes if config.model.device != "cpu" else 0
        return cls(drain_s=config.serve.drain_timeout_s, loop_s=LOOP_S, ranks_s=RANKS_S + pinned / UNPIN_BYTES_PER_S,
                   keeper_s=KEEPER_S)

    @property
    def total_s(self) -> float:
        return self.drain_s + self.loop_s + self.ranks_s + self.keeper_s
