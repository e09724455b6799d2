"""One tensor-parallel rank of an engine as an actor: its process, its mapping of the host pool, its `RankEngine`.

Model code is imported inside the actor, so that whoever starts it stays small.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hisparse.actors import logs
from hisparse.actors.handles import Actor
from hisparse.actors.keeper import Segment
from hisparse.config import HiSparseConfig, host_blocks, kv_layout
from hisparse.engine.garbage import freeze_heap
from hisparse.errors import ConfigError, InvariantError
from hisparse.types import StepCommand, StepResult

if TYPE_CHECKING:
    import torch.distributed as dist

    from hisparse.engine.rank import RankEngine
    from hisparse.pd.endpoint import RankEndpoint
    from hisparse.worker.host_pool import HostPool

COLLECTIVE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """What a rank needs to start.

    Attributes:
        segment: of the shared host pool; None = a private pool, or none when HiSparse is off.
        rendezvous: where the ranks meet (a URL of torch.distributed), the same for all.
        front: the coordinator, which is told how far the pinning has come; None = nobody is.
    """

    engine_id: str
    incarnation: int
    rank: int
    segment: Segment | None
    rendezvous: str
    front: Actor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What a started rank tells: its process, the host pool it maps and, for prefill and decode, its transfer endpoint.

    Attributes:
        host_pool: names the memory behind the pool, the same for all ranks that map it; "" = none.
        host_pool_bytes: of that memory, headers included.
    """

    rank: int
    pid: int
    endpoint: RankEndpoint | None
    host_pool: str = ""
    host_pool_bytes: int = 0


def _tell(setup: RankSetup, done_bytes: int, total_bytes: int) -> None:
    if setup.front is not None:
        setup.front.start("pinned", setup.rank, done_bytes, total_bytes)


class RankWorkerActor:
    """Executes steps; decides nothing. A failed step is answered with its exception, and the engine ends."""

    def __init__(self, config: HiSparseConfig) -> None:
        import hisparse.engine.rank  # noqa: F401  # takes seconds: while the other actors boot, too

        self._config = config
        self._engine: RankEngine | None = None
        self._group: dist.ProcessGroup | None = None

    def pid(self) -> int:
        return os.getpid()

    def setup(self, setup: RankSetup) -> RankInfo:
        """Loads the model and opens the pools. Collective when there are several ranks: call every rank at once.

        Raises:
            ConfigError: the checkpoint or the sizes do not fit.
        """
        from hisparse.engine.parallel import join_group
        from hisparse.engine.rank import RankEngine
        from hisparse.pd.connector import make_pd_worker

        logs.configure(self._config.serve, engine=setup.engine_id, rank=setup.rank)
        if self._engine is not None:
            raise InvariantError(f"rank {setup.rank} of {setup.engine_id} was set up already")
        config, size = self._config, self._config.tensor_parallel_size
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks of an engine share a node
        self._group = join_group(setup.rank, size, setup.rendezvous, COLLECTIVE_TIMEOUT_S)

        make_pd = functools.partial(make_pd_worker, config=config, engine_id=setup.engine_id, incarnation=setup.incarnation)
        pool = self._open_pool(setup)
        self._engine = RankEngine(
            config, rank=setup.rank, num_ranks=size, incarnation=setup.incarnation, host_pool=pool,
            extra_connectors=() if config.pd.role == "colocated" else (make_pd,), process_group=self._group,
            on_pinned=functools.partial(_tell, setup),
        )
        freeze_heap()
        return RankInfo(rank=setup.rank, pid=os.getpid(), endpoint=next(iter(self._engine.handshakes), None),
                        host_pool="" if pool is None else str(pool.path or f"private memory of {os.getpid()}"),
                        host_pool_bytes=0 if pool is None else pool.mapped_bytes)

    def _open_pool(self, setup: RankSetup) -> HostPool | None:
        from hisparse.worker.host_pool import HostPool

        config = self._config
        if not config.cache.enabled:
            return None
        layout = kv_layout(config)
        num_blocks = host_blocks(config.cache, layout, config.model.max_model_len)
        if setup.segment is None:
            if config.tensor_parallel_size > 1:
                raise ConfigError("cache.host_pool = private needs tensor_parallel_size = 1; use auto")
            return HostPool.private(layout, num_blocks)
        if setup.segment.num_blocks != num_blocks:
            raise ConfigError(f"the shared host pool has {setup.segment.num_blocks} blocks, this rank expects "
                              f"{num_blocks}; all actors of an engine must have the same configuration")
        return HostPool.attach(layout, num_blocks, setup.segment.path)

    def execute(self, command: StepCommand) -> StepResult:
        """One step. See `RankEngine.execute`."""
        if self._engine is None:
            raise InvariantError("execute() before setup()")
        return self._engine.execute(command)

    def shutdown(self) -> None:
        """Drains copies and releases memory. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()
        if self._group is not None:
            from hisparse.engine.parallel import leave_group

            leave_group(self._group)
        self._group = None
