"""The fused resolver on CUDA, and look-up through block tables alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.ops.cuda.module import Instance, Kernel, kernel
from hisparse.ops.cuda.room import PORTABLE_CLUSTER, find_room
from hisparse.ops.values import DeviceMissPlan, HotState, Resolution

INT32_ROWS = 1 << 31
GROUP_SLOTS = 16
MAX_ENTRIES = 32766
"""Entries of one request's rows: a claim's code has 16 bits."""
_CLUSTERS = ((2, 16), (16, 8), (64, 4), (128, 2))
"""(requests, CTAs of each), measured on an H200: few requests need many CTAs to keep the host link busy."""
_UNROLL = {8: 2}
"""Loads of a thread in flight by cluster size, else 4; measured, too. With 8, most copies are up to 10 % slower."""


def _hash_capacity(entries: int, cluster: int) -> int:
    """Of a CTA's part; at most half full with the slots and everything that a launch may miss."""
    return 1 << (2 * entries // cluster - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How a resolve is launched; a function of batch size, rows per request and table sizes only.

    Attributes:
        cluster: CTAs per request. threads: of a CTA. top_k: columns rounded up to a bucket.
        groups: groups of 16 slots whose counters a thread holds. eager: load the position table before the region's size
            is known (lower latency, more traffic). ctas_per_sm: what registers must leave room for. unroll: loads of a thread
            in flight.
    """

    cluster: int
    threads: int
    top_k: int
    query_rows: int
    groups: int
    eager: int
    ctas_per_sm: int
    unroll: int = 4
    hash_capacity: int = 0

    @classmethod
    def choose(cls, requests: int, query_rows: int, top_k: int, slots: int, *, hashed: bool = False) -> Geometry:
        """`hashed`: the state has no position table, so each launch builds one in shared memory.

        Raises:
            InvariantError: the rows of one request have more entries than a claim can name.
        """
        bucket = max(256, 1 << (top_k - 1).bit_length())
        if query_rows * bucket > MAX_ENTRIES:
            raise InvariantError(
                f"{query_rows} rows of top-{top_k} per request have more than {MAX_ENTRIES} entries; split the request's rows"
            )
        threads = 256
        cluster = next((size for limit, size in _CLUSTERS if requests <= limit), 1)
        while cluster > 1 and bucket // cluster < 128:
            cluster //= 2
        while query_rows * bucket // cluster // threads > 8 and cluster < 8:
            cluster *= 2
        groups = 1
        while groups * threads * GROUP_SLOTS < slots:
            groups *= 2
        capacity = 0
        if hashed:
            cluster = max(cluster, 2)
            while cluster < 8 and (slots + query_rows * bucket) // cluster > 6144:
                cluster *= 2
            capacity = _hash_capacity(slots + query_rows * bucket, cluster)
        ctas_per_sm = 1 if capacity else 3 if cluster == 4 and query_rows * groups == 1 else 2
        return cls(cluster=cluster, threads=threads, top_k=bucket, query_rows=query_rows, groups=groups,
                   eager=int(cluster >= 8), ctas_per_sm=ctas_per_sm, unroll=_UNROLL.get(cluster, 4), hash_capacity=capacity)

    def portable(self, slots: int) -> Geometry:
        """This one in clusters of 8 CTAs, the most that CUDA promises room for."""
        entries = slots + self.query_rows * self.top_k
        return replace(self, cluster=PORTABLE_CLUSTER, unroll=_UNROLL.get(PORTABLE_CLUSTER, 4),
                       hash_capacity=_hash_capacity(entries, PORTABLE_CLUSTER) if self.hash_capacity else 0)

    def shared_bytes(self, slots: int, hot_blocks: int) -> int:
        """Dynamic shared memory of a CTA; the order is that of the kernel."""
        entries = self.query_rows * (self.top_k // self.cluster)
        bitmaps = self.query_rows * (self.groups * self.threads // 2) * (1 if self.cluster == 1 else 2)
        words = bitmaps + slots // 32 + hot_blocks
        pairs = 2 * (entries + 1) + self.hash_capacity
        return 16 * entries + 4 * words + 8 * pairs + 2 * self.query_rows * self.top_k

    def instance(self, row_bytes: int, block_size: int) -> Instance:
        return Instance("resolve.cu", "resolve", {
            "ROW_BYTES": row_bytes, "TOP_K": self.top_k, "CLUSTER": self.cluster, "THREADS": self.threads,
            "QUERY_ROWS": self.query_rows, "GROUPS_PER_THREAD": self.groups, "BLOCK_SHIFT": block_size.bit_length() - 1,
            "UNROLL": self.unroll, "EAGER_LOOKUP": self.eager, "CTAS_PER_SM": self.ctas_per_sm,
            "HASH_CAPACITY": self.hash_capacity,
        })


def resolve(
    topk: Tensor,
    seats: Tensor,
    seq_len: Tensor,
    *,
    resident_table: Tensor,
    source_table: Tensor,
    hot_table: Tensor,
    hot_rows: Tensor,
    state: HotState,
    block_size: int,
    rows_per_block: int,
    row_offset: int,
    rows: Tensor,
    host_rows: Tensor,
    rows_per_request: int = 1,
    status: Tensor | None = None,
    out_row_ids: Tensor | None = None,
    out_valid: Tensor | None = None,
    geometry: Geometry | None = None,
) -> Resolution:
    """As `hisparse.ops.reference.resolve`, in one launch; what cannot be raised goes into `status`.

    Args:
        topk: int32 [n, k], any strides. seats: int32 [n]. seq_len: int32 or int64 [n].
        resident_table, source_table: int32 [seats, pages]; hot_table: int32 [seats, blocks]; hot_rows: int32 [seats].
        rows: [device rows, row_elems], changed. host_rows: the same row format, CUDA tensor over mapped host memory.
        rows_per_request: consecutive rows that share a seat (or are -1); n is a multiple of it. No seat occurs in two
            requests.
        status: int32 [4] or None, see `hisparse.ops.status`.
        geometry: for benchmarks; the result does not depend on it.
    Returns:
        Resolution with int32 tensors; its plan is a DeviceMissPlan.
    Mutates: rows, state, status.
    Stream: the current one; no synchronisation; safe in a CUDA graph after one launch outside.
    Raises:
        InvariantError: shapes, dtypes or strides that the kernel does not take.
    """
    n, k = topk.shape
    slots, positions = state.slot_tag.shape[1], resident_table.shape[1] * block_size
    row_bytes = _check(topk, seats, seq_len, resident_table, source_table, rows, host_rows)
    _check_hot(hot_table, hot_rows, state, positions)
    if rows_per_request < 1 or n % rows_per_request:
        raise InvariantError(f"{n} rows are no multiple of rows_per_request = {rows_per_request}")
    device = topk.device
    ids = _output(out_row_ids, (n, k), device)
    valid = _output(out_valid, (n,), device)
    fits = torch.empty(n, dtype=torch.uint8, device=device)
    plan = torch.empty((2, n, k), dtype=torch.int32, device=device)
    counts = torch.empty((3, n), dtype=torch.int32, device=device)
    if n and k:
        requests = n // rows_per_request
        geometry = geometry or Geometry.choose(requests, rows_per_request, k, slots, hashed=state.is_hashed)
        launch, geometry, shared = _loaded(geometry, row_bytes, block_size, slots, hot_table.shape[1], device.index)
        launch(
            (requests * geometry.cluster,), geometry.threads,
            (topk, topk.stride(0), topk.stride(1), k, seats, seq_len, int(seq_len.dtype == torch.int64),
             resident_table, resident_table.stride(0), source_table, source_table.stride(0), resident_table.shape[1],
             hot_table, hot_table.stride(0), hot_table.shape[1], hot_rows,
             state.slot_tag, state.pos_slot, state.use, state.hand, slots, positions,
             rows_per_block, row_offset, rows, host_rows,
             ids, valid, fits, plan[0], plan[1], counts[0], counts[1], counts[2], status),
            shared,
        )
    else:
        ids.fill_(-1)
        for tensor in (valid, counts):
            tensor.zero_()
        fits.fill_(1)
    return Resolution(
        row_ids=ids, host_ids=None, valid=valid, fits=fits.view(torch.bool),
        plan=DeviceMissPlan(host_rows=plan[0], device_rows=plan[1], counts=counts[2]),
        resident=counts[0], hot=counts[1], miss=counts[2], row_offset=row_offset,
    )


def resolve_pages(
    topk: Tensor,
    seats: Tensor,
    seq_len: Tensor,
    *,
    resident_table: Tensor,
    source_table: Tensor | None,
    block_size: int,
    rows_per_block: int,
    row_offset: int,
    status: Tensor | None = None,
) -> Resolution:
    """As `hisparse.ops.reference.resolve_pages`; `host_ids` is None only when `source_table` is.

    Stream: the current one; no synchronisation; capture-safe.
    Raises:
        InvariantError: shapes or dtypes that the kernel does not take.
    """
    n, k = topk.shape
    _check(topk, seats, seq_len, resident_table, source_table, None, None)
    device = topk.device
    ids = torch.empty((n, k), dtype=torch.int32, device=device)
    host_ids = None if source_table is None else torch.empty_like(ids)
    counts = torch.zeros((3, n), dtype=torch.int32, device=device)
    if n:
        launch = kernel("lookup.cu", "lookup", THREADS=256, BLOCK_SHIFT=block_size.bit_length() - 1)
        launch((n,), 256, (
            topk, topk.stride(0), topk.stride(1), k, seats, seq_len, int(seq_len.dtype == torch.int64),
            resident_table, resident_table.stride(0), source_table, 0 if source_table is None else source_table.stride(0),
            resident_table.shape[1], rows_per_block, row_offset, ids, host_ids, counts[0], counts[1], status,
        ))
    return Resolution(
        row_ids=ids, host_ids=host_ids, valid=counts[0], fits=torch.ones(n, dtype=torch.bool, device=device),
        plan=DeviceMissPlan(host_rows=ids[:, :0], device_rows=ids[:, :0], counts=counts[2]),
        resident=counts[1], hot=counts[2], miss=counts[2], row_offset=row_offset,
    )


@functools.cache
def _loaded(geometry: Geometry, row_bytes: int, block_size: int, slots: int, hot_blocks: int,
            device: int) -> tuple[Kernel, Geometry, int]:
    """The kernel, the geometry to launch it with (smaller clusters where the device lacks room), and its shared memory.

    Raises:
        ConfigError: the device has no room for any.
    """
    while True:
        instance, shared = geometry.instance(row_bytes, block_size), geometry.shared_bytes(slots, hot_blocks)
        loaded = kernel(instance.source, instance.function, **instance.defines)
        if find_room(loaded, f"cuda:{device} cannot run the resolver", cluster=geometry.cluster, threads=geometry.threads,
                     shared_bytes=shared, fix=", or offload nothing there (cache.enabled: false)"):
            return loaded, geometry, shared
        geometry = geometry.portable(slots)


def _output(given: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if given is None:
        return torch.empty(shape, dtype=torch.int32, device=device)
    if given.shape != shape or given.dtype != torch.int32 or not given.is_contiguous():
        raise InvariantError(f"an output must be contiguous int32 {list(shape)}, got {given.dtype} {list(given.shape)}")
    return given


def _check(topk: Tensor, seats: Tensor, seq_len: Tensor, resident: Tensor, source: Tensor | None, rows: Tensor | None,
           host_rows: Tensor | None) -> int:
    """Bytes of a row (0 without rows)."""
    n = topk.shape[0]
    if topk.ndim != 2 or topk.dtype != torch.int32:
        raise InvariantError(f"topk must be int32 [n, k], got {topk.dtype} {list(topk.shape)}")
    for name, tensor, kinds in (("seats", seats, (torch.int32,)), ("seq_len", seq_len, (torch.int32, torch.int64))):
        if tensor.shape != (n,) or tensor.dtype not in kinds or not tensor.is_contiguous():
            raise InvariantError(f"{name} must be contiguous {kinds} [{n}], got {tensor.dtype} {list(tensor.shape)}")
    for name, table in (("resident_table", resident), ("source_table", source)):
        if table is not None and (table.ndim != 2 or table.dtype != torch.int32 or table.stride(1) != 1
                                  or table.shape != resident.shape):
            raise InvariantError(f"{name} must be int32 {list(resident.shape)}, got {table.dtype} {list(table.shape)}")
    if rows is None or host_rows is None:
        return 0
    for name, tensor in (("rows", rows), ("host_rows", host_rows)):
        if tensor.ndim != 2 or not tensor.is_contiguous() or tensor.dtype != rows.dtype or tensor.shape[1] != rows.shape[1]:
            raise InvariantError(f"{name} must be contiguous {rows.dtype} [*, {rows.shape[1]}], got {tensor.dtype} "
                                 f"{list(tensor.shape)}")
        if tensor.shape[0] >= INT32_ROWS:
            raise InvariantError(f"{name} has {tensor.shape[0]} rows; row ids are int32, so at most {INT32_ROWS - 1}")
    row_bytes = rows.shape[1] * rows.element_size()
    if row_bytes % 16 or rows.data_ptr() % 16 or host_rows.data_ptr() % 16:
        raise InvariantError(f"rows of {row_bytes} bytes at {rows.data_ptr():#x} and {host_rows.data_ptr():#x} must be "
                             "multiples of 16 bytes")
    return row_bytes


def _check_hot(hot_table: Tensor, hot_rows: Tensor, state: HotState, positions: int) -> None:
    if not state.is_hashed and state.pos_slot.shape[1] != positions:
        raise InvariantError(f"the state knows {state.pos_slot.shape[1]} positions, the tables hold {positions}")
    if hot_table.ndim != 2 or hot_table.dtype != torch.int32 or hot_table.stride(1) != 1:
        raise InvariantError(f"hot_table must be int32 [seats, blocks], got {hot_table.dtype} {list(hot_table.shape)}")
    if hot_rows.ndim != 1 or hot_rows.dtype != torch.int32 or not hot_rows.is_contiguous():
        raise InvariantError(f"hot_rows must be contiguous int32 [seats], got {hot_rows.dtype} {list(hot_rows.shape)}")
    if state.slot_tag.shape[1] % 64 or state.slot_tag.shape[1] > 1 << 15:
        raise InvariantError(f"a state of {state.slot_tag.shape[1]} slots; make it with HotState.empty(device='cuda'), at most "
                             f"{1 << 15} slots")


INSTANCES = (
    *(Geometry.choose(requests, 1, 2048, 4096).instance(row_bytes, 64)
      for requests in (1, 64, 256) for row_bytes in (656, 1152)),
    Geometry.choose(16, 4, 2048, 8192).instance(656, 64),
    Geometry.choose(4, 1, 32, 128).instance(320, 64),
    Geometry.choose(1, 8, 2048, 32768).instance(1152, 64),
    *(Geometry.choose(requests, 1, 2048, 4096, hashed=True).instance(656, 64) for requests in (1, 256)),
    Geometry.choose(512, 2, 1024, 6144).instance(1152, 16),
    Instance("lookup.cu", "lookup", {"THREADS": 256, "BLOCK_SHIFT": 6}),
)
