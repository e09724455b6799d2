"""The two engines of the benchmark, without a model: pools with known content, worker half, scheduler half."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hisparse.config import PDConfig
from hisparse.layout import IndexGroup, KVCacheLayout, ModelShape
from hisparse.pd.connector import PDConnectorScheduler, PDConnectorWorker
from hisparse.pd.transport import Transport
from hisparse.types import ImportTarget, Landing, PageGenerations, RequestPages
from hisparse.worker import host_memory
from hisparse.worker.device_cache import DeviceCache
from hisparse.worker.host_pool import HostPool

Ids = npt.NDArray[np.int64]
WAIT_S = 60.0
GENERATION = 77
POLL_S = 0.001
"""Between steps that run no token an engine's loop waits as long, and longer; polling is time of the transfer thread."""


def layout_of(name: str) -> KVCacheLayout:
    """`tiny`: 6 layers of the tiny checkpoints' 320-byte rows. `mla`: 8 layers of 656-byte fp8_ds_mla rows."""
    layers, latent, rope, head, kind = (6, 64, 16, 32, "auto") if name == "tiny" else (8, 512, 64, 128, "fp8_ds_mla")
    groups = tuple(IndexGroup(leader=i, layers=(i, i + 1)) for i in range(0, layers, 2))
    shape = ModelShape(model_type="glm_moe_dsa", num_layers=layers, num_heads=8, kv_lora_rank=latent, rope_dim=rope,
                       index_head_dim=head, top_k=2048, max_positions=1 << 17, vocab_size=512, index_groups=groups)
    if name == "tiny":
        return KVCacheLayout.build(shape, block_size=64, dtype="float32")
    return KVCacheLayout.build(shape, block_size=64, dtype="bfloat16", row_format=kind, indexer_dtype="uint8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One side of an import; picklable."""

    name: str
    layout: str
    device: str
    num_pages: int
    resident: bool
    host: bool
    config: dict[str, Any]

    @property
    def kv(self) -> KVCacheLayout:
        return layout_of(self.layout)

    def pages(self, seed: int, runs: int) -> RequestPages:
        """Ids of the request's pages: in runs of consecutive ids, and the runs in random order."""
        rng, groups = np.random.default_rng(seed), self.kv.num_resident_groups
        sets = 1 + (groups if self.resident else 0)
        device = _runs(rng, sets * self.num_pages, runs)
        host = _runs(rng, self.num_pages, runs) if self.host else np.zeros(self.num_pages, np.int64)
        parts = device.reshape(sets, self.num_pages).tolist()
        return RequestPages(
            first_page=0, num_tokens=self.num_pages * 64, indexer_blocks=tuple(parts[0]),
            resident_blocks=tuple(map(tuple, parts[1:])) if self.resident else ((0,) * self.num_pages,) * groups,
            host_blocks=tuple(host.tolist()))

    @property
    def num_device_blocks(self) -> int:
        groups = self.kv.num_resident_groups
        return 1 + self.num_pages * (1 + (groups if self.resident else 0))


def _runs(rng: np.random.Generator, count: int, run: int) -> Ids:
    ids: Ids = np.arange(1, count + 1, dtype=np.int64)
    starts = rng.permutation(-(-count // run)) * run
    return np.concatenate([ids[start : start + run] for start in starts])


class Engine:
    """Pools and both connector halves of one engine with one rank."""

    def __init__(self, setup: Setup, *, make_transport: Callable[[str], Transport] | None = None) -> None:
        self.setup, self.layout = setup, setup.kv
        if setup.device != "cpu":
            torch.cuda.set_device(setup.device)
        self.cache = DeviceCache(self.layout, setup.num_device_blocks, setup.device, poison=False)
        self.cache.bytes.fill_(1)
        num_host = setup.num_pages + 1 if setup.host else 2
        self.pool = HostPool.shared(self.layout, num_host, host_memory.pool_path(f"bench-{setup.name}-{os.getpid()}"))
        self.pool.unlink()
        self.pool.pin(setup.device)
        self.cache.generations[:] = GENERATION
        self.pool.generations[:] = GENERATION
        settings = PDConfig(role="prefill" if setup.name == "p" else "decode", transfer_deadline_s=WAIT_S, **setup.config)
        incarnation = int.from_bytes(os.urandom(7), "big")
        self._older = {thread.ident for thread in threading.enumerate()}
        self.worker = PDConnectorWorker(self.layout, settings, cache=self.cache, host_pool=self.pool, engine_id=setup.name,
                                        incarnation=incarnation, rank=0, host_writer=True, make_transport=make_transport)
        self.scheduler = PDConnectorScheduler(self.layout, settings, engine_id=setup.name, incarnation=incarnation, num_ranks=1)
        self.scheduler.set_endpoints([self.worker.handshake()])
        self._step = 0

    # ---- content: every 8-byte word says which block (or host page) and which word of it
    def fill(self) -> None:
        words = self.layout.block_bytes // 8
        index = torch.arange(words, device=self.cache.device)
        blocks = self.cache.bytes.view(torch.int64)
        for first in range(0, blocks.shape[0], 256):
            ids = torch.arange(first, min(first + 256, blocks.shape[0]), device=self.cache.device)
            blocks[first : first + 256] = (ids << 32)[:, None] | index
        page = self.layout.layer_page_bytes // 8
        for layer in range(self.layout.shape.num_layers):
            host = self.pool.rows(layer).view(torch.uint8).view(-1, page * 8).view(torch.int64)
            host[:] = (torch.arange(host.shape[0]) << 32)[:, None] | (layer * page + torch.arange(page)) | (1 << 62)

    def assert_imported(self, source: RequestPages, target: RequestPages, landing: Landing, *, from_host: bool) -> None:
        """Every byte of every page. Raises AssertionError."""
        layout, page = self.layout, self.layout.layer_page_bytes // 8
        blocks = self.cache.bytes.view(torch.int64)
        device = blocks.device

        def ids(values: Any) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        width = layout.indexer_page_bytes // 8
        want = (ids(source.indexer_blocks) << 32)[:, None] | torch.arange(width, device=device)
        assert torch.equal(blocks[ids(target.indexer_blocks), :width], want), "indexer pages are wrong"
        for layer, g in enumerate(layout.layer_group):
            start = layout.layer_byte_offset(layer) // 8
            if from_host:
                want = (ids(source.host_blocks) << 32)[:, None] | (layer * page + torch.arange(page, device=device)) | (1 << 62)
            else:
                want = (ids(source.resident_blocks[g]) << 32)[:, None] | (start + torch.arange(page, device=device))
            if landing is Landing.HOST:
                host = self.pool.rows(layer).view(torch.uint8).view(-1, page * 8).view(torch.int64)
                assert torch.equal(host[ids(target.host_blocks).cpu()], want.cpu()), f"host pages of layer {layer} are wrong"
            else:
                got = blocks[ids(target.resident_blocks[g]), start : start + page]
                assert torch.equal(got, want), f"resident pages of layer {layer} are wrong"

    # ---- steps
    def step(self) -> tuple[frozenset[str], dict[str, str]]:
        self._step += 1
        self.worker.start_step(self.scheduler.build_metadata(self._step))
        self.worker.end_step()
        output = self.worker.output()
        events = self.scheduler.update([output] if output is not None else [])
        return events.loaded, dict(events.failed)

    def grant(self, request_id: str, pages: RequestPages) -> dict[str, Any]:
        def known(ids: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(GENERATION if i else 0 for i in ids)

        generations = PageGenerations(indexer=known(pages.indexer_blocks), host=known(pages.host_blocks),
                                      resident=tuple(known(group) for group in pages.resident_blocks))
        return dict(self.scheduler.grant(request_id, pages, generations, prompt_digest="d" * 64))

    def load(self, request_id: str, params: dict[str, Any], pages: RequestPages, landing: Landing) -> tuple[float, float]:
        """Seconds from the plan to the acknowledgement, and CPU seconds of the plan and of the transfer thread meanwhile.

        Raises RuntimeError when the import failed.
        """
        transfer_clock = time.pthread_getcpuclockid(self._transfer_thread())
        self.scheduler.add_remote(request_id, params)
        self.scheduler.choose_landing(request_id, landing is Landing.RESIDENT, True)
        began, busy_s = time.perf_counter(), -time.thread_time() - time.clock_gettime(transfer_clock)
        self.scheduler.start_import(request_id, ImportTarget(landing=landing, pages=pages))
        loaded, failed = self.step()
        busy_s += time.thread_time()
        while request_id not in loaded:
            if failed or time.perf_counter() - began > WAIT_S:
                raise RuntimeError(f"the import failed: {failed or 'not in time'}")
            time.sleep(POLL_S)
            loaded, failed = self.step()
        seconds = time.perf_counter() - began
        busy_s += time.clock_gettime(transfer_clock)
        self.scheduler.request_closed(request_id)
        self.step()
        return seconds, busy_s

    def _transfer_thread(self) -> int:
        return next(t.ident for t in threading.enumerate()
                    if t.name == "hisparse-pd-0" and t.ident is not None and t.ident not in self._older)

    def close(self) -> None:
        self.worker.shutdown()
        self.pool.close()


def serve(pipe: Connection, setup: Setup) -> None:
    """A prefill engine in a process of its own: obeys ("grant", id, seed, runs) and ("stop",)."""
    engine = Engine(setup)
    engine.fill()
    with contextlib.suppress(EOFError, BrokenPipeError):
        pipe.send("ready")
        while True:
            engine.step()
            engine.scheduler.take_expired()
            if not pipe.poll(0.005):
                continue
            order = pipe.recv()
            if order[0] != "grant":
                break
            pipe.send(engine.grant(order[1], setup.pages(order[2], order[3])))
    engine.close()
    with contextlib.suppress(BrokenPipeError):
        pipe.send("stopped")
