"""One engine as a set of actors: keeper, ranks, coordinator; started together, ended together.

`EngineActors` is what a Serve replica, a test or another driver holds. It ends with the process that started it.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hisparse.actors import logs
from hisparse.actors.coordinator import CoordinatorActor, EngineRequest
from hisparse.actors.executor import RayExecutor
from hisparse.actors.handles import Actor, gather, start_actor
from hisparse.actors.keeper import KeeperActor, Segment, remove
from hisparse.actors.placement import ACTOR_CPUS, RANK_CPUS, Placement, rank_gpus
from hisparse.actors.rank_worker import RankInfo, RankSetup, RankWorkerActor
from hisparse.actors.stop_budget import StopBudget
from hisparse.config import GIB, HiSparseConfig, hot_rows, kv_layout, model_path, served_name
from hisparse.engine.tokenizer import Tokenizer
from hisparse.errors import ConfigError, EngineDeadError
from hisparse.types import RequestOutput

if TYPE_CHECKING:
    from hisparse.engine.core import EngineCore

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Who an engine is: the id is distinct among all engines of all hosts, the incarnation among all starts."""

    engine_id: str
    incarnation: int
    app: str

    @classmethod
    def new(cls, role: str, app: str = "hisparse") -> EngineIdentity:
        return cls(engine_id=f"{role}-{secrets.token_hex(6)}", incarnation=secrets.randbits(64), app=app)

    @property
    def actor_name(self) -> str:
        """Of the coordinator; see `actor_prefix`."""
        return f"{actor_prefix(self.app)}{self.engine_id}"


def actor_prefix(app: str) -> str:
    """What the names of an app's coordinators start with."""
    return f"coordinator/{app}/"


def build_core(config: HiSparseConfig, identity: EngineIdentity, ranks: Sequence[Actor],
               infos: Sequence[RankInfo]) -> EngineCore:
    """The engine over rank actors, in the coordinator's process."""
    from hisparse.engine.core import EngineCore
    from hisparse.pd.scheduler import PDConnectorScheduler

    logs.configure(config.serve, engine=identity.engine_id)
    pd = None
    if config.pd.role != "colocated":
        pd = PDConnectorScheduler(kv_layout(config), config.pd, engine_id=identity.engine_id,
                                  incarnation=identity.incarnation, num_ranks=len(ranks))
        pd.set_endpoints([info.endpoint for info in infos if info.endpoint is not None])
    return EngineCore(
        config, RayExecutor(ranks, config.serve.step_timeout_s), engine_id=identity.engine_id,
        incarnation=identity.incarnation, pd=pd, tokenizer=Tokenizer(model_path(config.model)),
    )


@dataclass(slots=True)
class EngineActors:
    """The running actors of one engine."""

    config: HiSparseConfig
    identity: EngineIdentity
    placement: Placement | None = None
    keeper: Actor | None = None
    ranks: list[Actor] = field(default_factory=list)
    coordinator: Actor | None = None
    segment: Segment | None = None

    @classmethod
    def start(cls, config: HiSparseConfig, identity: EngineIdentity) -> EngineActors:
        """Blocks until the engine answers, within `serve.start_timeout_s`.

        Raises:
            ConfigError: model, sizes or resources do not fit.
            EngineDeadError, TimeoutError: an actor died or did not answer. Whatever the error, nothing is left running.
        """
        engine = cls(config, identity)
        try:
            engine._start()
            engine._report()
        except BaseException:
            engine.stop()
            raise
        return engine

    def _start(self) -> None:
        config, limit_s = self.config, self.config.serve.start_timeout_s
        self.placement = Placement.acquire(config, timeout_s=min(limit_s, 60.0))
        group, name = self.placement.group, self.identity.engine_id
        capacity = config.scheduler.max_num_seqs + config.scheduler.max_waiting
        # All processes boot side by side; only then do they wait for each other.
        for rank in range(config.tensor_parallel_size):
            self.ranks.append(start_actor(
                RankWorkerActor, config, label=f"rank {rank} of {name}", placement=group,
                bundle=self.placement.rank_bundle(rank), num_cpus=RANK_CPUS, num_gpus=rank_gpus(config),
            ))
        coordinator = self.coordinator = start_actor(
            CoordinatorActor, config.serve.step_timeout_s, "hisparse.engine.core", label=f"coordinator of {name}",
            name=self.identity.actor_name, placement=group, bundle=0, num_cpus=ACTOR_CPUS, max_concurrency=capacity + 64,
        )
        if config.cache.enabled and config.cache.host_pool != "private":
            self.keeper = start_actor(KeeperActor, name, label=f"keeper of {name}", placement=group, bundle=0,
                                      num_cpus=ACTOR_CPUS)
            self._share_pool(self.keeper, limit_s)
        with tempfile.TemporaryDirectory(prefix="hisparse-rendezvous-") as scratch:
            setups = [
                RankSetup(engine_id=name, incarnation=self.identity.incarnation, rank=rank, segment=self.segment,
                          front=coordinator, rendezvous=f"file://{Path(scratch) / 'store'}")
                for rank in range(len(self.ranks))
            ]
            infos = gather([actor.start("setup", setup) for actor, setup in zip(self.ranks, setups)], limit_s)
        about = {"rank_pids": [info.pid for info in infos], "host_pool": self.segment.path if self.segment else None,
                 "host_pool_bytes": sum({info.host_pool: info.host_pool_bytes for info in infos}.values()),
                 "hot_region_rows": list(hot_rows(config.cache, kv_layout(config))) if config.cache.enabled else []}
        coordinator.call("start", about, build_core, config, self.identity, self.ranks, infos, timeout_s=limit_s)

    def _share_pool(self, keeper: Actor, timeout_s: float) -> None:
        """One segment for all ranks; a single rank may do with memory of its own (`auto`), e.g. where /dev/shm is small."""
        try:
            self.segment = keeper.call("create", self.config, timeout_s=timeout_s)
        except ConfigError as error:
            if self.config.cache.host_pool == "shared" or self.config.tensor_parallel_size > 1:
                raise
            logger.warning("engine %s uses private memory for its host pool, because %s", self.identity.engine_id, error)
            keeper.kill()
            self.keeper = None

    def _private_bytes(self) -> int:
        return int(self.config.cache.host_pool_gib * GIB) if self.config.cache.enabled else 0

    @property
    def front(self) -> Actor:
        """The coordinator. Raises EngineDeadError before the start and after the stop."""
        if self.coordinator is None:
            raise EngineDeadError(f"engine {self.identity.engine_id} is not running")
        return self.coordinator

    @property
    def labels(self) -> dict[str, str]:
        """Of the engine's metrics."""
        return {"model": served_name(self.config.model), "role": self.config.pd.role, "engine": self.identity.engine_id}

    def _report(self) -> None:
        from hisparse.metrics.ray_sink import RaySink

        if self.config.serve.metrics_interval_s:
            self.front.call("report", RaySink, self.labels, self.config.serve.metrics_interval_s, timeout_s=CALL_TIMEOUT_S)

    def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        """See `CoordinatorActor.generate`. The caller bounds the wait and calls `abort` when it stops listening."""
        return self.front.stream("generate", request)

    async def complete(self, request: EngineRequest, *, timeout_s: float) -> RequestOutput:
        """See `CoordinatorActor.complete`."""
        output: RequestOutput = await self.front.acall("complete", request, timeout_s=timeout_s)
        return output

    async def resume(self, request_id: str, kv_transfer_params: Mapping[str, Any] | None, prefill_failed: str,
                     retries_left: int) -> None:
        """See `CoordinatorActor.resume`."""
        await self.front.acall("resume", request_id, kv_transfer_params, prefill_failed, retries_left,
                               timeout_s=CALL_TIMEOUT_S)

    async def abort(self, request_id: str) -> None:
        """Stops a request; on a prefill engine also ends its lease. Unknown ids are ignored."""
        await self.front.acall("abort", request_id, timeout_s=CALL_TIMEOUT_S)

    async def stats(self, check: bool = False) -> dict[str, Any]:
        """See `CoordinatorActor.stats`."""
        report: dict[str, Any] = await self.front.acall("stats", check, timeout_s=CALL_TIMEOUT_S)
        return report

    async def probe(self) -> dict[str, Any]:
        """`health`, also of an engine whose coordinator does not answer."""
        try:
            return await self.health()
        except (EngineDeadError, TimeoutError) as error:
            return {"ok": False, "reason": str(error)}

    async def health(self) -> dict[str, Any]:
        """See `CoordinatorActor.health`."""
        report: dict[str, Any] = await self.front.acall("health", timeout_s=CALL_TIMEOUT_S)
        return report

    def drain(self, timeout_s: float) -> dict[str, Any]:
        """See `CoordinatorActor.drain`. Blocks; an engine that is dead or gone has nothing to drain."""
        if self.coordinator is None:
            return {}
        try:
            report: dict[str, Any] = self.coordinator.call("drain", timeout_s, timeout_s=timeout_s + CALL_TIMEOUT_S)
            return report
        except (EngineDeadError, TimeoutError) as error:
            logger.warning("drain of engine %s: %s", self.identity.engine_id, error)
            return {}

    def stop(self) -> None:
        """Ends the loop, which aborts what is open; then the ranks, which run their copies, deregister and unpin the pool; then
        the keeper unlinks it. Who does not answer within its part of `StopBudget` is killed. Idempotent; `drain` comes before.
        """
        coordinator, ranks, keeper = self.coordinator, self.ranks, self.keeper
        self.coordinator, self.ranks, self.keeper = None, [], None
        budget = StopBudget.of(self.config, self.segment.nbytes if self.segment is not None else self._private_bytes())
        stages = (([coordinator], "shutdown", budget.loop_s), (ranks, "shutdown", budget.ranks_s),
                  ([keeper], "stop", budget.keeper_s))
        for actors, method, limit_s in stages:
            alive = [actor for actor in actors if actor is not None]
            try:
                gather([actor.start(method) for actor in alive], limit_s)
            except Exception as error:
                logger.warning("stop of engine %s: %s", self.identity.engine_id, error)
            for actor in alive:
                actor.kill()
        if self.segment is not None:
            remove(self.segment)
            self.segment = None
        if self.placement is not None:
            self.placement.release()
            self.placement = None
