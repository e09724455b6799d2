"""Ranks without a model: every command is acknowledged, tokens follow from the prompt. For tests of scheduling alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hisparse.connector.offloading import OffloadAck, OffloadOutput
from hisparse.types import AckKind, HiSparseWorkerOutput, SampledToken, StepCommand, StepResult, TransferAck

VOCAB = 256


def next_token(last: int, position: int) -> int:
    """The token that follows `last` at `position`: what a deterministic model would say, whatever was preempted."""
    return (last * 31 + position * 7 + 3) % (VOCAB - 2) + 2


class FakeExecutor:
    """One rank.

    Args:
        copy_steps: steps until a spill is completed (0 = with its own step).
        on_command: sees every command before it is answered; may raise.
    """

    num_ranks = 1

    def __init__(self, incarnation: int, *, copy_steps: int = 1, block_size: int = 64,
                 on_command: Callable[[StepCommand], None] | None = None) -> None:
        self.incarnation, self.copy_steps, self.block_size = incarnation, copy_steps, block_size
        self.on_command = on_command
        self.commands: list[StepCommand] = []
        self._copies: deque[tuple[int, int]] = deque()  # (step at which it completes, transfer id)
        self._results: deque[list[StepResult]] = deque()
        self.down = False

    def submit(self, command: StepCommand) -> None:
        if self.on_command is not None:
            self.on_command(command)
        self.commands.append(command)
        kv: dict[str, Any] = {}
        acks = []
        offload = command.kv.get("hisparse")
        if offload is not None:
            for spill in offload.spills:
                acks.append(self._ack(spill.id, AckKind.ENQUEUED))
                self._copies.append((command.step + self.copy_steps, spill.id))
            for transfer in (*offload.restores, *offload.page_copies):
                acks.append(self._ack(transfer.id, AckKind.COMPLETED))
        while self._copies and self._copies[0][0] <= command.step:
            acks.append(self._ack(self._copies.popleft()[1], AckKind.COMPLETED))
        if acks:
            kv["hisparse"] = HiSparseWorkerOutput(rank=0, incarnation=self.incarnation, acks=tuple(acks))
        jobs = command.kv.get("offloading")
        if jobs is not None:
            kv["offloading"] = OffloadOutput(rank=0, acks=tuple(
                OffloadAck(job_id=job.job_id) for job in (*jobs.loads, *jobs.stores)))
        sampled = {
            chunk.request_id: SampledToken(token_id=next_token(chunk.token_ids[-1],
                                                               chunk.first_position + len(chunk.token_ids) - 1))
            for chunk in command.chunks if chunk.sample
        }
        self._results.append([StepResult(step=command.step, rank=0, incarnation=self.incarnation, sampled=sampled, kv=kv)])

    def _ack(self, transfer_id: int, kind: AckKind) -> TransferAck:
        return TransferAck(incarnation=self.incarnation, rank=0, transfer_id=transfer_id, kind=kind,
                           row_mask=(1 << self.block_size) - 1)

    def collect(self, timeout_s: float) -> list[StepResult]:
        return self._results.popleft()

    def shutdown(self) -> None:
        self.down = True


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What a request must return, however it was scheduled."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens) - 1))
    return tokens[len(prompt):]
