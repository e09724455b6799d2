"""Running steps on every rank: the protocol the engine uses, and its form without Ray."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hisparse.config import HiSparseConfig, host_blocks, kv_layout
from hisparse.engine.device import check_devices
from hisparse.engine.garbage import freeze_heap
from hisparse.engine.models.hf import check_model
from hisparse.engine.parallel import join_group, leave_group
from hisparse.engine.rank import ConnectorFactory, RankEngine
from hisparse.errors import ConfigError, EngineDeadError, InvariantError
from hisparse.types import StepCommand, StepResult
from hisparse.worker import HostPool, host_memory

START_TIMEOUT_S = 180.0
COLLECTIVE_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0


@runtime_checkable
class Executor(Protocol):
    """Steps are answered in the order in which they were submitted. Called from one thread."""

    @property
    def num_ranks(self) -> int: ...

    def submit(self, command: StepCommand) -> None:
        """Hands the step to every rank."""

    def collect(self, timeout_s: float) -> list[StepResult]:
        """Every rank's result of the oldest step that was not collected yet, by rank.

        Raises:
            EngineDeadError: a rank failed, died or did not answer in time; no later step can run.
        """

    def shutdown(self) -> None:
        """Drains and ends the ranks. Idempotent."""


class LocalExecutor:
    """All ranks on this machine: one rank runs inline, in `submit`; more are spawned processes that share a host pool.

    Args:
        incarnation: 64 bits, distinct per start; the same as the engine's cache manager got.
        connectors: makers of further worker connectors (P/D); with several ranks they must be picklable.
    Raises:
        ConfigError: the model or the sizes do not fit; nothing is left running.
    """

    def __init__(self, config: HiSparseConfig, *, incarnation: int,
                 connectors: Sequence[ConnectorFactory] = ()) -> None:
        check_model(config.model, num_ranks=config.tensor_parallel_size)
        check_devices(config.model, config.tensor_parallel_size)
        self._num_ranks = config.tensor_parallel_size
        self._inline: RankEngine | None = None
        self._ranks: _RankProcesses | None = None
        self._results: deque[list[StepResult] | EngineDeadError] = deque()
        self._dead: str | None = None
        if self._num_ranks == 1:
            self._inline = RankEngine(config, incarnation=incarnation, extra_connectors=connectors,
                                      host_pool=_private_pool(config))
        else:
            self._ranks = _RankProcesses(config, incarnation, connectors)

    @property
    def num_ranks(self) -> int:
        return self._num_ranks

    @property
    def rank_engine(self) -> RankEngine:
        """The inline rank. Raises ConfigError when there are several."""
        if self._inline is None:
            raise ConfigError(f"{self._num_ranks} ranks run in their own processes; there is no inline rank")
        return self._inline

    @property
    def handshakes(self) -> list[Any]:
        """Address of each rank's first connector that has one (P/D), by rank; [] = none has."""
        of_ranks = self._ranks.handshakes if self._ranks is not None else [self.rank_engine.handshakes]
        return [of_rank[0] for of_rank in of_ranks if of_rank]

    def submit(self, command: StepCommand) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if self._ranks is not None:
            self._ranks.send(command)
            return
        assert self._inline is not None
        try:
            self._results.append([self._inline.execute(command)])
        except Exception as error:
            self._dead = f"step {command.step}: {type(error).__name__}: {error}"
            failure = EngineDeadError(self._dead)
            failure.__cause__ = error
            self._results.append(failure)

    def collect(self, timeout_s: float) -> list[StepResult]:
        if self._ranks is not None:
            return self._ranks.receive(timeout_s)
        if not self._results:
            raise InvariantError("collect() without a step in flight")
        result = self._results.popleft()
        if isinstance(result, EngineDeadError):
            raise result
        return result

    def shutdown(self) -> None:
        self._dead = self._dead or "the executor was shut down"
        if self._inline is not None:
            self._inline.shutdown()
        if self._ranks is not None:
            self._ranks.stop()


def _private_pool(config: HiSparseConfig) -> HostPool | None:
    layout = kv_layout(config)
    blocks = host_blocks(config.cache, layout, config.model.max_model_len)
    return HostPool.private(layout, blocks) if config.cache.enabled else None


class _RankProcesses:
    """Parent side of the spawned ranks: one pipe each; a failure of one ends all, since peers wait in a collective.

    Args:
        main: what a rank runs; see `_rank_main` for its arguments and the messages it sends.
    """

    def __init__(self, config: HiSparseConfig, incarnation: int, connectors: Sequence[ConnectorFactory], *,
                 main: Callable[..., None] | None = None) -> None:
        if config.cache.host_pool == "private":
            raise ConfigError("cache.host_pool = private needs tensor_parallel_size = 1; ranks share a pool: use auto")
        size = config.tensor_parallel_size
        self._steps: deque[int] = deque()
        self._dead: str | None = None
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._pool: HostPool | None = None
        self._scratch = Path(tempfile.mkdtemp(prefix="hisparse-ranks-"))
        try:
            pool_path = self._make_pool(config)
            context = multiprocessing.get_context("spawn")
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=main or _rank_main, name=f"hisparse-rank-{rank}", daemon=True,
                    args=(theirs, config, rank, incarnation, pool_path, f"file://{self._scratch}/store",
                          tuple(connectors)),
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
            self.handshakes: list[tuple[Any, ...]] = self._gather(START_TIMEOUT_S, "start")
        except BaseException:
            self.stop()
            raise
        self._unlink()  # every rank has mapped it: nothing is left behind whatever dies now

    def _make_pool(self, config: HiSparseConfig) -> str | None:
        if not config.cache.enabled:
            return None
        layout = kv_layout(config)
        blocks = host_blocks(config.cache, layout, config.model.max_model_len)
        folder = Path(host_memory.SHM) if Path(host_memory.SHM).is_dir() else self._scratch
        host_memory.sweep(folder)
        path = host_memory.pool_path(self._scratch.name, folder)
        self._pool = HostPool.shared(layout, blocks, path)
        return str(path)

    def send(self, command: StepCommand) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        try:
            for pipe in self._pipes:
                pipe.send(command)
        except (OSError, ValueError) as error:
            self._fail(f"step {command.step}: a rank is gone ({error}); its exit codes are {self._exit_codes()}")
        self._steps.append(command.step)

    def receive(self, timeout_s: float) -> list[StepResult]:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if not self._steps:
            raise InvariantError("collect() without a step in flight")
        step = self._steps.popleft()
        results = self._gather(timeout_s, f"step {step}")
        wrong = [result.step for result in results if result.step != step]
        if wrong:
            raise InvariantError(f"asked for step {step}, a rank answered step {wrong[0]}")
        return results

    def _gather(self, timeout_s: float, what: str) -> list[Any]:
        """One message of every rank, by rank."""
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        rank_of: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while len(answers) < len(self._pipes):
            waiting = [pipe for pipe in self._pipes if rank_of[pipe] not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = [rank_of[pipe] for pipe in waiting]
                self._fail(f"{what}: no answer of ranks {missing} within {timeout_s:g} s; stuck or overloaded")
            for rank in [rank_of[pipe] for pipe in ready]:
                try:
                    kind, value = self._pipes[rank].recv()
                except (EOFError, OSError):
                    self._processes[rank].join(1.0)
                    self._fail(f"{what}: rank {rank} died with exit code {self._processes[rank].exitcode}")
                if kind == "config":
                    self.stop()
                    raise ConfigError(value)
                if kind == "error":
                    self._fail(f"{what}: rank {rank} failed: {value}")
                answers[rank] = value
        return [answers[rank] for rank in range(len(self._pipes))]

    def _fail(self, why: str) -> None:
        self._dead = why
        self.stop(grace_s=0.0)
        raise EngineDeadError(why)

    def _exit_codes(self) -> list[int | None]:
        return [process.exitcode for process in self._processes]

    def _unlink(self) -> None:
        if self._pool is not None:
            self._pool.unlink()
            self._pool.close()
            self._pool = None
        shutil.rmtree(self._scratch, ignore_errors=True)

    def stop(self, grace_s: float = STOP_TIMEOUT_S) -> None:
        """Ends the ranks: politely within `grace_s`, then by SIGKILL. Idempotent."""
        self._dead = self._dead or "the executor was shut down"
        for pipe in self._pipes:
            with contextlib.suppress(OSError, ValueError):
                pipe.send(None)
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._steps.clear()
        self._unlink()


def _rank_main(pipe: Connection, config: HiSparseConfig, rank: int, incarnation: int, pool_path: str | None,
               init_method: str, connectors: Sequence[ConnectorFactory]) -> None:
    """One spawned rank: builds, answers, then one answer per command until None or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which stops the ranks
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    size = config.tensor_parallel_size
    group, engine = None, None
    try:
        group = join_group(rank, size, init_method, COLLECTIVE_TIMEOUT_S)
        pool = None
        if pool_path is not None:
            layout = kv_layout(config)
            pool = HostPool.attach(layout, host_blocks(config.cache, layout, config.model.max_model_len), pool_path)
        engine = RankEngine(config, rank=rank, num_ranks=size, incarnation=incarnation, host_pool=pool,
                            extra_connectors=connectors, process_group=group)
        freeze_heap()  # the process is the rank's own; that of an inline rank is not
        pipe.send(("ok", engine.handshakes))
        while (command := pipe.recv()) is not None:
            pipe.send(("ok", engine.execute(command)))
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone
    except ConfigError as error:
        pipe.send(("config", str(error)))
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        if engine is not None:
            engine.shutdown()
        leave_group(group)
        pipe.close()
        if config.model.device == "cuda":
            os._exit(0)  # everything is released; what is left, destructors of NCCL and CUDA, may wait for each other for ever
