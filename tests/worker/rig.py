"""A worker with NaN everywhere it should not read, a command builder, and a dense truth to compare attention with."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hisparse.config import CacheConfig
from hisparse.layout import IndexGroup, KVCacheLayout, ModelShape
from hisparse.types import (
    AckKind,
    BlockTableUpdate,
    HiSparseWorkerOutput,
    HotRows,
    MirrorSpan,
    NewBlocks,
    SparseKVOffloadCommand,
)
from hisparse.worker import HostPool, RowBatch, WorkerParts, build_worker

BLOCK = 4
HEADS = 2
GROUPS = ((0, 1), (2,), (3, 4, 5), (6,))


def make_shape(groups: tuple[tuple[int, ...], ...] = GROUPS, *, top_k: int = 6) -> ModelShape:
    return ModelShape(
        model_type="glm_moe_dsa",
        num_layers=sum(len(g) for g in groups),
        num_heads=HEADS,
        kv_lora_rank=8,
        rope_dim=4,
        index_head_dim=4,
        top_k=top_k,
        max_positions=256,
        vocab_size=32,
        index_groups=tuple(IndexGroup(leader=g[0], layers=g) for g in groups),
    )


def make_layout(
    groups: tuple[tuple[int, ...], ...] = GROUPS,
    *,
    num_groups: int | None = 2,
    top_k: int = 6,
    dtype: str = "float32",
    block_size: int = BLOCK,
    wide: bool = False,
) -> KVCacheLayout:
    """`wide`: rows of 16 elements, a multiple of 16 bytes in every dtype."""
    shape = make_shape(groups, top_k=top_k)
    if wide:
        shape = dataclasses.replace(shape, kv_lora_rank=12)
    return KVCacheLayout.build(shape, block_size=block_size, dtype=dtype, num_groups=num_groups)


class Rig:
    """One rank. `step(...)` sends a command, runs `forward` inside it and returns the worker's output."""

    def __init__(
        self,
        layout: KVCacheLayout | None = None,
        *,
        device_blocks: int = 64,
        host_blocks: int = 32,
        seats: int = 4,
        max_model_len: int = 64,
        hot_rows: int | tuple[int, ...] = 8,
        hot_rows_max: int | tuple[int, ...] = 16,
        rank: int = 0,
        num_ranks: int = 1,
        host_pool: HostPool | None = None,
        hook: Callable[[int], None] | None = None,
        enabled: bool = True,
        device: str = "cpu",
    ) -> None:
        layout = layout or make_layout()
        config = CacheConfig(
            block_size=layout.block_size, hot_rows=hot_rows, hot_rows_max=hot_rows_max, enabled=enabled, transfer_deadline_s=5.0
        )
        if enabled and host_pool is None:
            host_pool = HostPool.private(layout, host_blocks, poison=True)
        self._take(
            layout,
            build_worker(
                layout,
                config,
                num_device_blocks=device_blocks,
                num_host_blocks=host_blocks,
                max_seats=seats,
                max_model_len=max_model_len,
                rank=rank,
                num_ranks=num_ranks,
                incarnation=77,
                host_pool=host_pool,
                device=device,
                copy_hook=hook,
                poison_new_blocks=True,
            ),
        )

    @classmethod
    def around(cls, layout: KVCacheLayout, parts: WorkerParts) -> Rig:
        """A rig of parts that were built elsewhere."""
        rig = cls.__new__(cls)
        rig._take(layout, parts)
        return rig

    def _take(self, layout: KVCacheLayout, parts: WorkerParts) -> None:
        self.layout, self.parts = layout, parts
        self.cache, self.host, self.tables, self.handles = parts.cache, parts.host_pool, parts.tables, parts.handles
        self._steps = itertools.count(1)

    @property
    def worker(self):
        assert self.parts.worker is not None
        return self.parts.worker

    def command(
        self,
        *,
        resident: dict[tuple[int, int], tuple[int, ...]] | None = None,
        source: dict[int, tuple[int, ...]] | None = None,
        hot: dict[tuple[int, int], tuple[int, ...]] | None = None,
        hot_rows: dict[tuple[int, int], int] | None = None,
        mirrors: dict[int, tuple[int, ...]] | None = None,
        new_device: tuple[int, ...] = (),
        new_host: tuple[int, ...] = (),
        **rest: Any,
    ) -> SparseKVOffloadCommand:
        """Whole table rows by (seat, group) or seat; everything else as in SparseKVOffloadCommand."""
        layout = self.layout
        updates = (
            [
                BlockTableUpdate(group_id=layout.residents[g].group_id, seat=s, first_page=0, ids=ids, num_pages=len(ids))
                for (s, g), ids in (resident or {}).items()
            ]
            + [
                BlockTableUpdate(group_id=layout.source.group_id, seat=s, first_page=0, ids=ids, num_pages=len(ids))
                for s, ids in (source or {}).items()
            ]
            + [
                BlockTableUpdate(group_id=layout.hots[g].group_id, seat=s, first_page=0, ids=ids, num_pages=len(ids))
                for (s, g), ids in (hot or {}).items()
            ]
        )
        return SparseKVOffloadCommand(
            step=next(self._steps),
            table_updates=tuple(updates),
            new_device_blocks=NewBlocks(ids=new_device, generations=tuple(900 + i for i in new_device)),
            new_host_blocks=NewBlocks(ids=new_host, generations=tuple(500 + i for i in new_host)),
            hot_rows=tuple(HotRows(seat=s, hot_group=g, rows=n) for (s, g), n in (hot_rows or {}).items()),
            mirrors=tuple(MirrorSpan(seat=s, first_page=0, host_blocks=b) for s, b in (mirrors or {}).items()),
            **rest,
        )

    def step(self, forward: Callable[[], None] | None = None, **command: Any) -> HiSparseWorkerOutput:
        self.worker.start_step(self.command(**command))
        if forward is not None:
            forward()
        self.worker.end_step()
        return self.worker.output()

    def finish_copies(self) -> HiSparseWorkerOutput:
        self.worker.copies.drain(5.0)
        return self.worker.output()

    def append(self, batch: RowBatch, value: Callable[[int, Tensor], Tensor]) -> None:
        """Every layer appends rows filled with `value(layer, positions)` [n]."""
        for handle in self.handles:
            rows = value(handle.layer, batch.positions).to(torch.float32)[:, None].repeat(1, self.layout.row.values)
            handle.append(rows, batch)

    def attended_value(self, layer: int, seat: int, position: int, batch_kind: str = "decode") -> float:
        """What attention reads of one row in one layer: with a single position the softmax weight is 1."""
        last = self.tables.pages * self.layout.block_size - 1
        batch = RowBatch.build(
            [seat], [last], writes=False, is_prefill=batch_kind == "prefill", plain_tables=batch_kind == "plain"
        )
        q = torch.ones(1, HEADS, self.layout.row.values)
        group = next(g for g in self.layout.shape.index_groups if layer in g.layers)
        topk = torch.tensor([[position, -1, -1]], dtype=torch.int32)
        out = {member: self.handles[member].attend(q, topk, batch, 0.1) for member in group.layers}[layer]
        assert bool((out == out[0, 0, 0]).all())
        return float(out[0, 0, 0])

    def shutdown(self) -> None:
        if self.parts.worker is not None:
            self.worker.check()
            self.worker.shutdown()


def acked(output: HiSparseWorkerOutput, kind: AckKind) -> list[int]:
    return [ack.transfer_id for ack in output.acks if ack.kind is kind]


def dense_attention(q: Tensor, rows: Tensor, topk: Tensor, context_len: Tensor, scaling: float, latent_dim: int) -> Tensor:
    """Softmax in float64 over the distinct entries' positions, one query row at a time. rows [tokens, elems] per row."""
    out = torch.zeros(q.shape[0], q.shape[1], latent_dim, dtype=torch.float64)
    for i in range(q.shape[0]):
        chosen = [p for p in topk[i].tolist() if 0 <= p < int(context_len[i])]
        if chosen:
            kv = rows[i, chosen].double()
            out[i] = (q[i].double() @ kv.T * scaling).softmax(-1) @ kv[:, :latent_dim]
    return out


def shared_pool(layout: KVCacheLayout, num_blocks: int, path: Path) -> HostPool:
    return HostPool.shared(layout, num_blocks, path, poison=True)
