"""A decode engine without a model over real NIXL, whose READs a test can hold at a chosen one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hisparse.config import PDConfig
from hisparse.connector.base import LoadEvents
from hisparse.pd.connector import PDConnectorScheduler, PDConnectorWorker
from hisparse.pd.transport import Descriptors, Transport
from hisparse.types import ImportTarget, Landing, RequestPages
from tests.integration.nixl_prefill import SEED
from tests.pd.device_rank import rank_on
from tests.pd.halves import Halves
from tests.pd.rig import LAYOUT, RankMemory, expected_page, pick_pages

LOWER_DEVICE, LOWER_HOST = 64, 32
PAGES = 6
TOKENS = 22
HELD = [True, False, True, True, False, True]
"""Which pages prefill serves from its GPU pages; the others from its host pool."""
SOURCE = pick_pages(5, PAGES, TOKENS, resident=HELD, host=[not held for held in HELD])


class GatedTransport:
    """Calls `gate(number, descriptors)` on the transfer thread before each READ is posted. `posted`, `done`: so far."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.gate: Callable[[int, Descriptors], None] = lambda number, descriptors: None
        self.posted = self.done = 0

    @classmethod
    def of(cls, worker: PDConnectorWorker) -> GatedTransport:
        """In front of the transport that a worker half has; its thread is idle."""
        metered = worker._thread._metered
        assert metered is not None
        gated = cls(metered._transport)
        metered._transport = gated  # type: ignore[assignment]
        return gated

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def restart(self, gate: Callable[[int, Descriptors], None] = lambda number, descriptors: None) -> None:
        """From here on READs are counted from 0."""
        self.gate, self.posted, self.done = gate, 0, 0

    def read(self, peer: str, descriptors: Descriptors) -> Any:
        self.gate(self.posted, descriptors)
        handle = self._transport.read(peer, descriptors)
        self.posted += 1
        return handle

    def poll(self, handle: Any) -> bool:
        done = self._transport.poll(handle)
        self.done += done
        return done


class Decode(Halves):
    """Both halves and the rank's memory, in this process. One staging slot at a time: a staged READ waits for the last.

    Args:
        device: where the packed allocation lies. config: of PDConfig.
    """

    def __init__(self, *, incarnation: int = 77, device: str = "cpu", **config: Any) -> None:
        settings = PDConfig(role="decode", staging_slots=2, staging_slot_pages=2, **config)
        self.memory = rank_on(device, 2, device_blocks=2 * LOWER_DEVICE, host_blocks=2 * LOWER_HOST)
        self.worker = PDConnectorWorker(LAYOUT, settings, cache=self.memory.cache, host_pool=self.memory.pool,
                                        engine_id="d", incarnation=incarnation, rank=0, host_writer=True)
        self.scheduler = PDConnectorScheduler(LAYOUT, settings, engine_id="d", incarnation=incarnation, num_ranks=1)
        self.scheduler.set_endpoints([self.worker.handshake()])
        self.transport = GatedTransport.of(self.worker)
        self.ended: dict[str, str] = {}

    def step(self) -> LoadEvents:
        """Also keeps the ends of loads: "" or the reason, by request."""
        events = super().step()
        self.ended |= dict.fromkeys(events.loaded, "") | dict(events.failed)
        return events

    def run(self, request_id: str, timeout_s: float, *, watch: Callable[[], None] = lambda: None) -> tuple[str, float]:
        """Steps until the request's load ends: ("" or the reason, seconds)."""
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            self.step()
            watch()
            if request_id in self.ended:
                self.step()
                return self.ended[request_id], time.monotonic() - started
            time.sleep(0.002)
        raise AssertionError(f"{request_id} neither loaded nor failed within {timeout_s} s")

    @contextlib.contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """Imports that begin inside have so long."""
        settings = self.scheduler._config
        self.scheduler._config = settings.model_copy(update={"transfer_deadline_s": seconds})
        try:
            yield
        finally:
            self.scheduler._config = settings

    def offer(self, request_id: str, params: Mapping[str, Any]) -> None:
        """Prefill's answer is here; nothing is read yet."""
        assert self.scheduler.add_remote(request_id, params) == TOKENS

    def start(self, request_id: str, params: Mapping[str, Any] | None, landing: Landing, seed: int, *,
              upper: bool = False) -> RequestPages:
        """Begins an import into pages of the lower half of both pools, or of the upper one: never the same page. No params:
        they were offered before."""
        if params is not None:
            self.offer(request_id, params)
        resident = [True] * PAGES if landing is Landing.RESIDENT else [i == PAGES - 1 for i in range(PAGES)]
        target = pick_pages(seed, PAGES, TOKENS, resident=resident, host=[True] * PAGES)
        if upper:
            target = replace(
                target, indexer_blocks=_raised(target.indexer_blocks, LOWER_DEVICE),
                resident_blocks=tuple(_raised(group, LOWER_DEVICE) for group in target.resident_blocks),
                host_blocks=_raised(target.host_blocks, LOWER_HOST))
        assert self.scheduler.choose_landing(request_id, landing is Landing.RESIDENT, True) is landing
        self.scheduler.start_import(request_id, ImportTarget(landing=landing, pages=target))
        return target

    def scribble(self, target: RequestPages, value: int) -> None:
        """The pages belong to somebody else, who fills them."""
        self.memory.overwrite(target, value)

    def untouched(self, target: RequestPages, value: int) -> bool:
        """Nobody wrote to the pages since `scribble`."""
        return self.memory.holds(target, value)

    def check_bytes(self, target: RequestPages, landing: Landing) -> None:
        """Every page is what prefill's memory held before any fault, by the content rule of `RankMemory`."""
        far, near = RankMemory(SEED), self.memory
        for i in range(PAGES):
            assert (near.indexer_row(target.indexer_blocks[i]) == far.indexer_row(SOURCE.indexer_blocks[i])).all()
            for layer in range(LAYOUT.shape.num_layers):
                want = expected_page(far, SOURCE, i, layer)
                if landing is Landing.HOST:
                    assert (near.host_row(layer, target.host_blocks[i]) == want).all()
                blocks = [group[i] for group in target.resident_blocks]
                if all(blocks):
                    assert (near.resident_row(layer, blocks) == want).all()
        if landing is Landing.HOST:
            masks = near.pool.row_masks[list(target.host_blocks)]
            assert [int(mask) for mask in masks] == [0b1111] * (PAGES - 1) + [0b11], "22 tokens: 2 rows in page 5"

    def check_quiet(self) -> None:
        """Nothing is in flight, every staging slot is free, the transfer thread goes on."""
        stats = self.scheduler.stats()
        slots = 4 if self.memory.memory.on_cuda else 2
        assert stats.imports_in_flight == 0 and stats.staging_slots_free == stats.staging_slots == slots
        assert self.scheduler.problem() == "" and stats.imports_overdue == 0
        self.worker._thread.raise_error()


def _raised(blocks: tuple[int, ...], by: int) -> tuple[int, ...]:
    return tuple(block + by if block else 0 for block in blocks)
