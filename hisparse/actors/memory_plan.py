"""What one engine reserves and how many requests that carries, from its configuration alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hisparse.actors.stop_budget import StopBudget
from hisparse.cache.admission import check_device_pool, request_blocks
from hisparse.cache.loads import TAIL_PAGES
from hisparse.config import HiSparseConfig, check_ranks, host_blocks, hot_rows, hot_rows_max, kv_layout
from hisparse.layout import WasteReport, rows_text

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Of one replica. Concurrency is for requests of `max_model_len` tokens and ignores the seat limit.

    Attributes:
        device_bytes: per rank; every rank holds the whole latent KV.
        hot_rows, hot_rows_max: of one request's region at its start and at most, per hot group; () when HiSparse is off.
        hot_bytes: hot region of one request at its start, all hot groups.
        requests_device_only: whose every page fits the device pool. requests_hisparse: with host-backed pages.
        stop_s: how long the orderly end of a replica may take; see StopBudget.
        packing: which layers share a block, and the bytes of it that hold nothing.
    """

    role: str
    block_size_tokens: int
    kv_bytes_per_token: int
    indexer_bytes_per_token: int
    device_blocks: int
    device_bytes: int
    host_blocks: int
    host_bytes: int
    hot_rows: tuple[int, ...]
    hot_rows_max: tuple[int, ...]
    hot_bytes: int
    max_model_len: int
    requests_device_only: int
    requests_hisparse: int
    seats: int
    stop_s: float
    waste_fraction: float
    packing: WasteReport

    @classmethod
    def of(cls, config: HiSparseConfig) -> MemoryPlan:
        """Raises ConfigError when model or sizes are impossible."""
        check_ranks(config)
        layout = kv_layout(config)
        length = config.model.max_model_len
        check_device_pool(layout, config.cache, max_model_len=length,
                          max_query_tokens=config.scheduler.prefill_chunk_tokens)
        usable = config.cache.device_blocks - 1
        num_host = host_blocks(config.cache, layout, length)
        rows = hot_rows(config.cache, layout) if config.cache.enabled else ()
        rows_max = hot_rows_max(config.cache, layout) if config.cache.enabled else ()
        hot = sum(layout.hot_blocks(count) for count in rows)
        host_backed = 0
        if config.cache.enabled:
            on_device = request_blocks(layout, pages=layout.pages(length), resident_pages=TAIL_PAGES, region_blocks=hot)
            host_backed = min(usable // on_device, (num_host - 1) // layout.pages(length))
        return cls(
            role=config.pd.role, block_size_tokens=layout.block_size,
            kv_bytes_per_token=layout.host_block_bytes // layout.block_size,
            indexer_bytes_per_token=layout.indexer_page_bytes // layout.block_size,
            device_blocks=config.cache.device_blocks, device_bytes=layout.device_bytes(config.cache.device_blocks),
            host_blocks=num_host, host_bytes=num_host * layout.host_block_bytes, hot_rows=rows,
            hot_rows_max=rows_max, hot_bytes=layout.device_bytes(hot), max_model_len=length,
            requests_device_only=usable // layout.device_blocks_resident(length), requests_hisparse=host_backed,
            seats=config.scheduler.max_num_seqs,
            stop_s=StopBudget.of(config, num_host * layout.host_block_bytes).total_s, waste_fraction=layout.waste_fraction,
            packing=layout.waste_report(),
        )

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) pairs for people."""
        return [
            ("latent KV per token", f"{self.kv_bytes_per_token:,} B"),
            ("indexer keys per token", f"{self.indexer_bytes_per_token:,} B"),
            ("device pool, per rank", f"{self.device_bytes / MIB:,.1f} MiB in {self.device_blocks:,} blocks"),
            ("host pool", f"{self.host_bytes / MIB:,.1f} MiB in {self.host_blocks:,} pages"),
            ("hot region per request", f"{self.hot_bytes / MIB:,.1f} MiB ({self._region_text()})"),
            ("hot region grows to at most", rows_text(self.hot_rows_max)),
            ("bytes of a page that hold nothing", f"{self.waste_fraction:.1%}"),
            ("bytes of an indexer block that hold nothing", f"{self.packing.groups[0].fraction:.1%}"),
            (f"requests of {self.max_model_len:,} tokens, all resident", f"{self.requests_device_only:,}"),
            (f"requests of {self.max_model_len:,} tokens, host-backed", f"{self.requests_hisparse:,}"),
            ("seats (scheduler.max_num_seqs)", f"{self.seats:,}"),
            ("time to stop a replica, at most", f"{self.stop_s:,.0f} s"),
        ]

    def packing_text(self) -> str:
        """Table of the groups: used and wasted bytes, hot rows, layers. At most 80 columns."""
        return self.packing.text(self.hot_rows)

    def _region_text(self) -> str:
        if not self.hot_rows:
            return "HiSparse is off"
        if len(set(self.hot_rows)) == 1:
            return f"{rows_text(self.hot_rows)} per hot group"
        return f"{rows_text(self.hot_rows)}, {sum(self.hot_rows):,} in {len(self.hot_rows)} hot groups"
