"""Drives ranks with commands written by hand: a scheduler that only does what a test tells it to.

Every physical block is used once and seats get theirs interleaved, so that no position equals its row by luck.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hisparse.config import HiSparseConfig, hot_rows, kv_layout, load_config
from hisparse.engine.executor import LocalExecutor
from hisparse.engine.rank import ConnectorFactory
from hisparse.types import (
    AckKind,
    BlockTableUpdate,
    HotRows,
    MirrorSpan,
    NewBlocks,
    ResolveStats,
    SampledToken,
    SamplingParams,
    ScheduledChunk,
    SeatReset,
    SparseKVOffloadCommand,
    SparseKVPageTransfer,
    StepCommand,
)

BLOCK = 16
VOCAB = 512
INCARNATION = 0x5EED


def engine_config(path: Path, **overrides: object) -> HiSparseConfig:
    """A small engine; keywords override, e.g. cache={"hot_rows": 64}, tensor_parallel_size=2."""
    base = {
        "model": {"path": str(path), "max_model_len": 512},
        "cache": {"block_size": BLOCK, "device_blocks": 600, "host_pool_gib": 0.02, "hot_rows": 32,
                  "offload_indexer": False},
        "scheduler": {"max_num_seqs": 8, "prefill_chunk_tokens": 256},
    }
    return load_config(base, overrides, environ={})


@dataclass
class Seat:
    """One request by hand. `device[g]` / `host`: block per page, in page order."""

    seat: int
    token_ids: list[int]
    computed: int = 0
    indexer: list[int] = field(default_factory=list)
    device: list[list[int]] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)
    """[vocab] of every sampled token."""
    num_prompt: int = 0

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.num_prompt :]


class HandDriver:
    """One executor, a few seats.

    Args:
        mirror: every decode row is mirrored to its host page.
    """

    def __init__(self, config: HiSparseConfig, *, mirror: bool = False,
                 connectors: Sequence[ConnectorFactory] = ()) -> None:
        self.config, self.mirror = config, mirror
        self.layout = kv_layout(config)
        self.executor = LocalExecutor(config, incarnation=INCARNATION, connectors=connectors)
        self._free_device = itertools.count(1)
        self._free_host = itertools.count(1)
        self._ids = itertools.count(1)
        self._step = itertools.count(1)
        self._updates: list[BlockTableUpdate] = []
        self._hot: list[HotRows] = []
        self._resets: list[SeatReset] = []
        self._spills: list[SparseKVPageTransfer] = []
        self._new_device: list[int] = []
        self._new_host: list[int] = []
        self.completed: set[int] = set()
        self.stats = ResolveStats()

    def close(self) -> None:
        self.executor.shutdown()

    def __enter__(self) -> HandDriver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what a test orders
    def open(self, seat: int, prompt: Sequence[int]) -> Seat:
        self._resets.append(SeatReset(seat=seat))
        device: list[list[int]] = [[] for _ in self.layout.residents]
        return Seat(seat=seat, token_ids=list(prompt), num_prompt=len(prompt), device=device)

    def prefill(self, seat: Seat, chunks: Sequence[int], *, with_decode: Sequence[Seat] = ()) -> None:
        """Runs the prompt in the given chunks; the last one samples. Each step also decodes `with_decode`."""
        for size in chunks:
            chunk = self._chunk(seat, size, sample=seat.computed + size == seat.num_prompt)
            self.step([chunk, *(self._chunk(other, 1, sample=True) for other in with_decode)], [seat, *with_decode])

    def decode(self, seats: Sequence[Seat], count: int) -> None:
        """`count` tokens more for each seat, all seats in one batch."""
        for _ in range(count):
            self.step([self._chunk(seat, 1, sample=True) for seat in seats], seats)

    def replay(self, seat: Seat) -> torch.Tensor:
        """Runs the last computed token again without writing; returns its logprobs."""
        last = seat.computed - 1
        chunk = ScheduledChunk(request_id=f"r{seat.seat}", seat=seat.seat, first_position=last, writes=False,
                               token_ids=(seat.token_ids[last],), sample=True, sampling=_FULL)
        return _logprobs(self._run([chunk], ())[f"r{seat.seat}"])

    def spill(self, seat: Seat, pages: Sequence[int], *, copy_bytes: bool = True) -> None:
        """Copies whole pages to their host blocks and waits until every one is complete."""
        ids = [next(self._ids) for _ in pages]
        self._spills += [
            SparseKVPageTransfer(id=i, host_block=seat.host[page], copy_bytes=copy_bytes,
                                 device_blocks=tuple(blocks[page] for blocks in seat.device))
            for i, page in zip(ids, pages)
        ]
        deadline = time.monotonic() + 20
        while not self.completed.issuperset(ids):
            assert time.monotonic() < deadline, f"spills {set(ids) - self.completed} did not complete"
            self._run([], ())
            time.sleep(0.005)  # leaves the copy thread a core

    def give_hot_region(self, seat: Seat) -> None:
        for g, rows in enumerate(hot_rows(self.config.cache, self.layout)):
            group = self.layout.hots[g]
            blocks = tuple(self._device_block() for _ in range(self.layout.hot_blocks(rows)))
            self._updates.append(BlockTableUpdate(group_id=group.group_id, seat=seat.seat, first_page=0, ids=blocks,
                                                  num_pages=len(blocks)))
            self._hot.append(HotRows(seat=seat.seat, hot_group=g, rows=rows))

    def drop(self, seat: Seat, pages: Sequence[int]) -> None:
        """Takes resident pages out of the tables: from now on only the host has them."""
        for group, blocks in zip(self.layout.residents, seat.device):
            for page in pages:
                blocks[page] = 0
                self._updates.append(BlockTableUpdate(group_id=group.group_id, seat=seat.seat, first_page=page,
                                                      ids=(0,), num_pages=len(blocks)))

    # ---- one step
    def step(self, chunks: Sequence[ScheduledChunk], seats: Sequence[Seat]) -> None:
        for seat, chunk in zip(seats, chunks):
            self._cover(seat, chunk.first_position + len(chunk.token_ids))
        mirrors = []
        if self.mirror:
            for seat, chunk in zip(seats, chunks):
                block_size = self.layout.block_size
                page = chunk.first_position // block_size
                last = (chunk.first_position + len(chunk.token_ids) - 1) // block_size
                hosts = tuple(seat.host[page : last + 1])
                mirrors.append(MirrorSpan(seat=seat.seat, first_page=page, host_blocks=hosts))
        sampled = self._run(chunks, tuple(mirrors))
        for seat, chunk in zip(seats, chunks):
            seat.computed += len(chunk.token_ids)
            if chunk.sample:
                token = sampled[chunk.request_id]
                seat.token_ids.append(token.token_id)
                seat.logprobs.append(_logprobs(token))

    def _chunk(self, seat: Seat, size: int, *, sample: bool) -> ScheduledChunk:
        tokens = tuple(seat.token_ids[seat.computed : seat.computed + size])
        return ScheduledChunk(request_id=f"r{seat.seat}", seat=seat.seat, first_position=seat.computed,
                              token_ids=tokens, sample=sample, sampling=_FULL,
                              plain_tables=not any(0 in blocks for blocks in seat.device))

    def _cover(self, seat: Seat, num_tokens: int) -> None:
        """Blocks for every page below num_tokens."""
        tables = [(self.layout.indexer.group_id, seat.indexer)]
        tables += [(group.group_id, blocks) for group, blocks in zip(self.layout.residents, seat.device)]
        for group_id, blocks in tables:
            first = len(blocks)
            while len(blocks) < self.layout.pages(num_tokens):
                blocks.append(self._device_block())
            self._grow(group_id, seat, first, blocks)
        first = len(seat.host)
        while len(seat.host) < self.layout.pages(num_tokens):
            seat.host.append(next(self._free_host))
        self._new_host += seat.host[first:]
        self._grow(self.layout.source.group_id, seat, first, seat.host)

    def _grow(self, group_id: int, seat: Seat, first: int, blocks: list[int]) -> None:
        if len(blocks) > first:
            self._updates.append(BlockTableUpdate(group_id=group_id, seat=seat.seat, first_page=first,
                                                  ids=tuple(blocks[first:]), num_pages=len(blocks)))

    def _device_block(self) -> int:
        block = next(self._free_device)
        assert block < self.config.cache.device_blocks, "the test needs more device blocks"
        self._new_device.append(block)
        return block

    def _run(self, chunks: Sequence[ScheduledChunk], mirrors: tuple[MirrorSpan, ...]) -> Mapping[str, SampledToken]:
        step = next(self._step)
        updates, hot, resets, spills = self._updates, self._hot, self._resets, self._spills
        new_device, new_host = self._new_device, self._new_host
        self._updates, self._hot, self._resets, self._spills, self._new_device, self._new_host = [], [], [], [], [], []
        if self.config.cache.enabled:
            command = StepCommand(step=step, chunks=tuple(chunks), kv={"hisparse": SparseKVOffloadCommand(
                step=step, new_device_blocks=_fresh(new_device), new_host_blocks=_fresh(new_host),
                table_updates=tuple(updates), hot_rows=tuple(hot), seat_resets=tuple(resets), mirrors=mirrors,
                spills=tuple(spills),
            )})
        else:
            groups = {self.layout.indexer.group_id, *(group.group_id for group in self.layout.residents)}
            command = StepCommand(step=step, chunks=tuple(chunks),
                                  table_updates=tuple(update for update in updates if update.group_id in groups))
        self.executor.submit(command)
        results = self.executor.collect(60.0)
        assert [result.rank for result in results] == list(range(self.executor.num_ranks))
        assert all(not result.sampled for result in results[1:])
        output = results[0].kv.get("hisparse")  # None = nothing to say
        if output is not None:
            for ack in output.acks:
                assert ack.kind is not AckKind.FAILED, f"transfer {ack.transfer_id} failed with mask {ack.row_mask:#x}"
                if ack.kind is AckKind.COMPLETED:
                    self.completed.add(ack.transfer_id)
            self.stats = self.stats + output.stats
        return results[0].sampled


_FULL = SamplingParams(temperature=0.0, logprobs=VOCAB)


def _fresh(blocks: Sequence[int]) -> NewBlocks:
    return NewBlocks(ids=tuple(blocks), generations=tuple(INCARNATION + 1 for _ in blocks))


def _logprobs(token: SampledToken) -> torch.Tensor:
    out = torch.empty(VOCAB)
    ids, values = zip(*token.top_logprobs)
    out[list(ids)] = torch.tensor(values)
    return out
