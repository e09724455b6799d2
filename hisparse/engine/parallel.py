"""Tensor parallelism: attention heads are split over ranks, everything else is computed by each of them.

All ranks see the same inputs and run the same operations, so hidden states, indexer scores and top-k are bit-identical
on every rank and no decision can diverge.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hisparse.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadParallel:
    """One rank's place. `group` is a process group of `size` ranks from `join_group`; None when size is 1."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank must be in 0..{self.size - 1}, got {self.rank}")
        if self.size > 1 and self.group is None:
            raise ConfigError(f"{self.size} ranks need a process group; see join_group()")

    def heads(self, num_heads: int) -> slice:
        """The heads this rank attends for. Raises ConfigError unless `num_heads` divides by the number of ranks."""
        check_heads(num_heads, self.size)
        share = num_heads // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def from_first(self, data: bytes) -> bytes:
        """Rank 0's `data`, on every rank. Collective; blocks."""
        box = [data]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather_heads(self, part: Tensor) -> Tensor:
        """[n, heads / size, dim] of every rank -> [n, heads, dim] on every rank. Collective.

        Stream: on CUDA queued on the current stream, and may be captured; on the CPU it blocks.
        """
        if self.size == 1:
            return part
        n, share, dim = part.shape
        if part.is_cuda:
            whole = part.new_empty(self.size, n, share, dim)
            dist.all_gather_into_tensor(whole, part.contiguous(), group=self.group)
            return whole.transpose(0, 1).reshape(n, self.size * share, dim)
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.stack(parts, dim=1).view(n, self.size * share, dim)

    def barrier(self) -> None:
        """Returns when every rank's CPU is here; says nothing of its device. Collective; blocks."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1), group=self.group)  # dist.barrier would use, and wait for, the device


def check_heads(num_heads: int, size: int) -> None:
    """Raises ConfigError unless `num_heads` attention heads can be split over `size` ranks."""
    if num_heads % size:
        raise ConfigError(
            f"tensor_parallel_size = {size} does not divide the model's {num_heads} attention heads; use one of "
            f"{[n for n in range(1, num_heads + 1) if num_heads % n == 0]}"
        )


def join_group(rank: int, size: int, init_method: str, timeout_s: float) -> dist.ProcessGroup | None:
    """Joins the default group of this process and returns it; None when `size` is 1. CPU tensors go through gloo, CUDA tensors
    through NCCL.

    Args:
        init_method: e.g. `file:///dev/shm/x` or `tcp://127.0.0.1:port`, the same on every rank.
        timeout_s: of joining and of every collective: a dead peer raises RuntimeError after it, never hangs.
    """
    if size == 1:
        return None
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size,
                            timeout=timedelta(seconds=timeout_s))
    return dist.group.WORLD


def leave_group(group: dist.ProcessGroup | None) -> None:
    """Ends what `join_group` began. Idempotent."""
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)
