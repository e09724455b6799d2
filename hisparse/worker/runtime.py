"""One index group's host and hot views and replacement state: its leader resolves, its followers replay."""

from __future__ import annotations

from torch import Tensor

from hisparse import ops
from hisparse.errors import InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.ops import HotState, Resolution
from hisparse.trace.recorder import SelectionRecorder
from hisparse.worker.batch import RowBatch
from hisparse.worker.counters import Counters
from hisparse.worker.device_cache import DeviceCache
from hisparse.worker.host_pool import HostPool
from hisparse.worker.streams import Place, StepEvent, Streams
from hisparse.worker.tables import KVTables


class HiSparseRuntime:
    """Replacement state of one index group. Followers have none: they repeat their leader's copies.

    Args:
        index_group: index into `layout.shape.index_groups`.
        host_pool: None when HiSparse is off; then every context must be resident.
        hashed: keep no table of positions (CUDA).
        recorder: shown what decode batches select; None = nobody looks.

    Attributes:
        hot_group: index into `layout.hots` of the group whose blocks and sizes this one uses.
        state: HotState with as many slots as a region of its hot group may have, or None without a host pool.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        index_group: int,
        *,
        cache: DeviceCache,
        host_pool: HostPool | None,
        tables: KVTables,
        counters: Counters,
        streams: Streams,
        hashed: bool = False,
        recorder: SelectionRecorder | None = None,
    ) -> None:
        self.index_group = index_group
        self.leader = layout.shape.index_groups[index_group].leader
        self.hot_group = layout.layer_group[self.leader]
        self._layout = layout
        self._cache = cache
        self._host = host_pool
        self._tables = tables
        self._counters = counters
        self._streams = streams
        self._recorder = recorder
        self._ops = ops.backend(cache.device)
        self.state: HotState | None = None
        if host_pool is not None:
            slots = tables.hot(self.hot_group).shape[1] * layout.block_size
            self.state = HotState.empty(
                tables.max_seats, slots, tables.pages * layout.block_size, cache.device, hashed=hashed
            )

    def resolve(self, layer: int, topk: Tensor, batch: RowBatch) -> Resolution:
        """Where the rows that `topk` [n, k] names are, in the rows of `layer` once its copies are made.

        The leader resolves, leaves the Resolution in `batch.plans`, and has its copies repeated in the rows of every follower
        at once, beside the layers in between; a follower takes the Resolution from there and waits for its copies
        (`topk` is the leader's and is not looked at again).
        Mutates the hot state, hot rows of the group's layers, and `batch`. Stream: the current one, and *prefetch* for
        followers; the CPU waits for none.
        Raises:
            InvariantError: a follower without its leader's plan, or a leader twice in one batch. Without `batch.status`
                also: no page behind a position, or a region too small for a request's first row; with it those are
                NO_PAGE, NO_HOT_BLOCK and NO_FIT.
        """
        found: Resolution | None = batch.plans.get(self.index_group)
        if layer != self.leader:
            if found is None:
                raise InvariantError(f"layer {layer} attends before its leader, layer {self.leader}, did in this batch")
            if layer in batch.prefetched:
                self._streams.wait(batch.prefetched[layer], Place.COMPUTE)
        else:
            if found is not None:
                raise InvariantError(f"layer {layer} attends twice in one batch; make a RowBatch for each forward")
            found = batch.plans[self.index_group] = self._resolve_leader(topk, batch)
            if self._uses_hot_region(batch):
                self._prefetch(found, batch)
            self._count(found, batch)
            if self._recorder is not None and not batch.is_prefill:
                self._recorder.see(layer, topk, batch.seats, batch.positions)
        return found

    def check(self) -> None:
        """Raises InvariantError unless the state is consistent with itself and with the region sizes."""
        if self.state is not None:
            self.state.check(self._tables.hot_rows[self.hot_group].long())

    def _resolve_leader(self, topk: Tensor, batch: RowBatch) -> Resolution:
        layout, tables = self._layout, self._tables
        resident_table = tables.resident(self.hot_group)
        row_offset = layout.layer_row_offset[self.leader]
        if topk.shape[0] != batch.num_rows:
            raise InvariantError(f"top-k of {topk.shape[0]} rows for a batch of {batch.num_rows}")
        if self._host is None or self.state is None or not self._uses_hot_region(batch):
            source = None if self._host is None or batch.plain_tables else tables.source
            by_page: Resolution = self._ops.resolve_pages(
                topk,
                batch.seats,
                batch.context_len,
                resident_table=resident_table,
                source_table=source,
                block_size=layout.block_size,
                rows_per_block=layout.rows_per_block,
                row_offset=row_offset,
                status=batch.status,
            )
            return by_page
        hot_rows = tables.hot_rows[self.hot_group]
        found: Resolution = self._ops.resolve(
            topk,
            batch.seats,
            batch.context_len,
            resident_table=resident_table,
            source_table=tables.source,
            hot_table=tables.hot(self.hot_group),
            hot_rows=hot_rows,
            state=self.state,
            block_size=layout.block_size,
            rows_per_block=layout.rows_per_block,
            row_offset=row_offset,
            rows=self._cache.rows,
            host_rows=self._host.device_rows(self.leader),
            rows_per_request=batch.rows_per_request,
            status=batch.status,
        )
        if batch.status is None and not bool(found.fits.all()):
            self._check_first_rows(found.fits, batch, hot_rows)
        return found

    def _prefetch(self, found: Resolution, batch: RowBatch) -> None:
        """The followers' copies, in the order in which their layers come."""
        assert self._host is not None
        layout, streams = self._layout, self._streams
        followers = [layer for layer in layout.shape.index_groups[self.index_group].layers if layer != self.leader]
        if not followers:
            return
        streams.wait(streams.record(StepEvent.PLAN_READY, Place.COMPUTE), Place.PREFETCH)
        with streams.on(Place.PREFETCH):
            for layer in followers:
                delta = layout.layer_row_offset[layer] - found.row_offset
                self._ops.replay(found.plan, delta, self._cache.rows, self._host.device_rows(layer))
                batch.prefetched[layer] = streams.record(StepEvent.PREFETCHED, Place.PREFETCH)

    def _uses_hot_region(self, batch: RowBatch) -> bool:
        return self.state is not None and not batch.plain_tables and not batch.is_prefill

    def _count(self, found: Resolution, batch: RowBatch) -> None:
        """What served each row, for every layer of the group since they all read the same rows. The last group adds them all
        up, in a few launches instead of a dozen for each group."""
        batch.tiers += (found.resident, found.hot, found.miss)
        if len(batch.plans) == len(self._layout.shape.index_groups):
            self._counters.add_tiers(batch.seats, batch.tiers)

    def _check_first_rows(self, fits: Tensor, batch: RowBatch, hot_rows: Tensor) -> None:
        """A later verification row may be refused (its drafts are then not accepted); the first one must fit."""
        seen: set[int] = set()
        for row, seat in enumerate(batch.seats.tolist()):
            if seat not in seen and seat >= 0 and not bool(fits[row]):
                raise InvariantError(
                    f"seat {seat} selects more non-resident rows than its hot region of {int(hot_rows[seat])} holds "
                    f"(hot group {self.hot_group}, position {int(batch.positions[row])}): it needed a region"
                )
            seen.add(seat)
