"""The prefill engine of a schedule: it writes prompts in any order, byte by byte, and answers when every rank has."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hisparse.types import RequestPages
from tests.pd.engines import Engine
from tests.pd.pools import NUM_LAYERS, Content


@dataclass
class Job:
    """A prompt at a prefill engine: pages, and what is still to be written to them."""

    prefill_id: str
    content: Content
    pages: RequestPages
    unsaid: list[int]
    """Ranks that have not got the command of the hand-out."""
    writes: list[tuple[int, int, int]] = field(default_factory=list)
    """(rank, layer, page) to do; layer -1 = indexer."""

    def is_written(self) -> bool:
        """Every write was observed."""
        return not self.writes and not self.unsaid


class Prefill(Engine):
    """Computes prompts and leases their pages."""

    def start(self) -> None:
        super().start()
        self.queue: deque[tuple[str, Content]] = deque()
        self.jobs: list[Job] = []
        self.leased: dict[str, RequestPages] = {}

    def begin(self) -> bool:
        """The next prompt gets pages, if there is room. Each page lives on the device, in the host pool, or in both."""
        if not self.queue:
            return False
        prefill_id, content = self.queue[0]
        count = self.layout.pages(content.num_tokens)
        kinds = [self.rng.choice(((True, False), (False, True), (True, True))) for _ in range(count)]
        pages = self.pools.take(content.num_tokens, [kind[0] for kind in kinds], [kind[1] for kind in kinds])
        if pages is None:
            return False
        self.queue.popleft()
        job = Job(prefill_id, content, pages, unsaid=list(range(self.num_ranks)))
        job.writes = [(rank, layer, page) for rank in range(self.num_ranks) for layer in range(-1, NUM_LAYERS)
                      for page in range(pages.num_pages)]
        self.rng.shuffle(job.writes)
        self.jobs.append(job)
        return True

    def write(self, most: int, job: Job | None = None) -> bool:
        """Some job (or that one) writes some of its bytes; a rank hears of a hand-out before it writes."""
        jobs = [job for job in self.jobs if not job.is_written()]
        if not jobs:
            return False
        job = job or self.rng.choice(jobs)
        for _ in range(min(most, len(job.writes))):
            rank, layer, page = job.writes.pop()
            if rank in job.unsaid:
                job.unsaid.remove(rank)
                self.hand_out(rank, job.pages)
            memory, layout, pages = self.memories[rank].memory, self.layout, job.pages
            data = job.content.page(layer, page, layout.block_size)
            assert memory.host is not None
            if layer < 0:
                memory.device[pages.indexer_blocks[page], : layout.indexer_page_bytes] = data
                continue
            block = pages.resident_blocks[layout.layer_group[layer]][page]
            if block:
                start = layout.layer_byte_offset(layer)
                memory.device[block, start : start + layout.layer_page_bytes] = data
            if pages.host_blocks[page] and self.writes_host(rank):
                memory.host[layer, pages.host_blocks[page]] = data
        return True

    def answer(self) -> tuple[str, dict[str, Any]] | None:
        """Leases what is written; (prefill id, kv_transfer_params)."""
        job = next((job for job in self.jobs if job.is_written()), None)
        if job is None:
            return None
        self.jobs.remove(job)
        self.leased[job.prefill_id] = job.pages
        params = self.pd.grant(job.prefill_id, job.pages, self.memories[0].generations_of(job.pages),
                               prompt_digest=job.content.digest)
        return job.prefill_id, json.loads(json.dumps(params))

    def collect(self, *, next_out: bool = False) -> None:
        """Pages of leases that ended are free at once."""
        for prefill_id in self.pd.take_expired():
            self.pools.give(self.leased.pop(prefill_id), next_out=next_out)

    def replace_ranks(self) -> None:
        """The ranks alone: every page is lost, so leases end, and prompts that were being computed begin anew."""
        old, jobs = self.outputs, self.jobs
        self.ranks_die()
        self.ranks_start()
        self.pd.workers_restarted(self.incarnation, self.endpoints)
        for mail, late in zip(self.outputs, old, strict=True):
            mail.extend(late)
        assert set(self.pd.take_expired()) >= set(self.leased), "a lease on pages that are gone"
        self.leased.clear()
        self.jobs = []
        self.queue.extendleft((job.prefill_id, job.content) for job in jobs)
