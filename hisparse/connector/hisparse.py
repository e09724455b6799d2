"""HiSparseConnector: carries the coordinator's command to the workers and acknowledgements back. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from hisparse.connector.base import LoadEvents
from hisparse.errors import InvariantError
from hisparse.types import HiSparseWorkerOutput, ResolveStats, SparseKVOffloadCommand

if TYPE_CHECKING:  # the worker needs torch, the scheduler half's process does not
    from hisparse.worker import HiSparseWorker

NAME = "hisparse"
"""Key of the command in `StepCommand.kv` and of the outputs in `StepResult.kv`."""


class SparseKVPlanner(Protocol):
    """What the scheduler half needs of the KV cache manager."""

    @property
    def last_command(self) -> SparseKVOffloadCommand | None:
        """What the last `plan_step` returned; None before the first and when HiSparse is off."""

    def on_worker_output(self, outputs: Sequence[HiSparseWorkerOutput]) -> None:
        """Takes acknowledgements."""

    def has_pending_work(self) -> bool:
        """True while transfers are planned or in flight."""

    def check(self) -> None:
        """Raises InvariantError unless the accounts are consistent."""


class HiSparseConnectorScheduler:
    """Scheduler half. The engine lets the manager plan the step; `build_metadata` hands its command out, once.

    Requests end in the manager (`free`), so `request_closed` has nothing to do here; loads are restores inside a
    command, so `update` never reports one.
    """

    name = NAME

    def __init__(self, manager: SparseKVPlanner) -> None:
        self._manager = manager
        self._sent_step = -1

    def build_metadata(self, step: int) -> SparseKVOffloadCommand | None:
        """The command of the last plan_step. None when HiSparse is off.

        Raises:
            InvariantError: the command is of another step, or was handed out before.
        """
        command = self._manager.last_command
        if command is not None:
            if command.step != step or step <= self._sent_step:
                raise InvariantError(
                    f"metadata asked for step {step}: the last planned command is of step {command.step}, "
                    f"the last one sent of step {self._sent_step}"
                )
            self._sent_step = step
        return command

    def update(self, outputs: Sequence[HiSparseWorkerOutput]) -> LoadEvents:
        """Feeds acknowledgements to the manager."""
        self._manager.on_worker_output(outputs)
        return LoadEvents()

    def request_closed(self, request_id: str) -> None:
        """Nothing to do: pins of transfers in flight belong to the manager."""

    def has_pending_work(self) -> bool:
        return self._manager.has_pending_work()

    def check(self) -> None:
        self._manager.check()


class HiSparseConnectorWorker:
    """Worker half of one rank."""

    name = NAME

    def __init__(self, worker: HiSparseWorker) -> None:
        self._worker = worker

    def start_step(self, metadata: SparseKVOffloadCommand | None) -> None:
        self._worker.start_step(metadata)

    def end_step(self) -> None:
        self._worker.end_step()

    def output(self) -> HiSparseWorkerOutput | None:
        """Acknowledgements and counts since the last call; None when there are neither."""
        output = self._worker.output()
        return output if output.acks or output.request_stats or output.stats != ResolveStats() else None

    def shutdown(self) -> None:
        self._worker.shutdown()
