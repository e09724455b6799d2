"""The lightning indexer on the GPU: paged keys, their scores, and the exact top-k (kernels/indexer_*.cu)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hisparse.errors import ConfigError, InvariantError
from hisparse.ops.cuda import topk
from hisparse.ops.cuda.module import Instance, Kernel, kernel
from hisparse.ops.cuda.topk import num_processors, select_topk

WORKSPACE_BYTES = 256 << 20
"""Most bytes of scores at once: rows are scored and selected in groups of at most this many / (4 * max_len)."""
MAX_ROWS = 1024
"""Most rows of one launch of the scores kernel, which lists them in shared memory."""
FP8_DIM = 128
"""Values of an fp8 key, which has one scale: 132 bytes."""
_DTYPES = {torch.bfloat16: 0, torch.float32: 1, torch.uint8: 2}
_UNIT = 32
"""Keys that a warp scores at once, while as many are on their way to it."""
_QUERY_BYTES = 48 << 10
"""Most bytes of queries of a run: rows of a seat that share one reading of its keys. A CTA holds two runs."""


def scores_instance(*, heads: int, dim: int, block_size: int, keys: torch.dtype, long_seats: bool,
                    long_lengths: bool) -> Instance:
    """The variant of the scores kernel for a shape and a dtype of the pages."""
    run = max(1, min(16, _QUERY_BYTES // _query_bytes(heads, dim, keys)))
    return Instance("indexer_scores.cu", "indexer_scores", {
        "HEADS": heads, "DIM": dim, "BLOCK_SIZE": block_size, "KEYS": _DTYPES[keys], "WARPS": _warps(dim, keys), "RUN": run,
        "LONG_SEATS": int(long_seats), "LONG_LENGTHS": int(long_lengths),
    })


def _query_bytes(heads: int, dim: int, keys: torch.dtype) -> int:
    """Of one row, its heads padded to a multiple of 8."""
    return -(-heads // 8) * 8 * dim * (4 if keys == torch.float32 else 2)


def _warps(dim: int, keys: torch.dtype) -> int:
    """Of a CTA. On an H200, 8 are as fast over bfloat16 keys, but slower over fp8 ones and in prefill; 16 lack registers."""
    return 8 if keys == torch.float32 else 12 * 128 // max(dim, 128)


def keys_instance(*, dim: int, block_size: int, given: torch.dtype, pages: torch.dtype, long_seats: bool,
                  long_positions: bool) -> Instance:
    """The variant of the kernel that writes keys."""
    return Instance("indexer_keys.cu", "indexer_keys", {
        "DIM": dim, "BLOCK_SIZE": block_size, "FROM_FLOAT32": int(given == torch.float32), "TO": _DTYPES[pages],
        "LONG_SEATS": int(long_seats), "LONG_POSITIONS": int(long_positions),
    })


INSTANCES = (
    *(scores_instance(heads=heads, dim=dim, block_size=64, keys=dtype, long_seats=False, long_lengths=True)
      for heads, dim in ((32, 128), (4, 64)) for dtype in (torch.float32, torch.bfloat16)),
    *(scores_instance(heads=heads, dim=128, block_size=64, keys=torch.uint8, long_seats=False, long_lengths=True)
      for heads in (32, 64)),
    *(keys_instance(dim=128, block_size=64, given=torch.bfloat16, pages=dtype, long_seats=False, long_positions=True)
      for dtype in _DTYPES),
    *topk.INSTANCES,
)


def write_keys(keys: Tensor, pages: Tensor, table: Tensor, seats: Tensor, positions: Tensor, writes: Tensor,
               status: Tensor | None = None) -> None:
    """Stores the keys of this forward's rows in their pages. Mutates `pages`; does not read anything back.

    Args:
        keys: float32 or bfloat16 [n, dim], rounded to the dtype of `pages`.
        pages: float32 or bfloat16 [blocks, block_size, dim], or fp8: uint8 [blocks, block_size, 132]; a view whose last
            dimension is contiguous.
        table: int32 [seats, pages], block of a page, 0 = none. seats, positions: int32 or int64 [n].
        writes: bool [n]; other rows, and rows of seat -1, are skipped. Written rows name distinct positions.
        status: int32 [4]; NO_INDEXER_PAGE is set, and the row skipped, where a written position has no page.
    Stream: torch's current stream; no synchronisation; may be captured after a first call of the same shape.
    Raises:
        InvariantError: shapes or dtypes differ from the above.
    """
    num, dim = keys.shape
    _check_pages(pages, dim)
    _check_rows(num, table=table, seats=seats, positions=positions)
    if keys.dtype not in (torch.float32, torch.bfloat16) or writes.dtype != torch.bool or writes.shape != (num,):
        raise InvariantError(f"keys must be float32 or bfloat16 and writes bool [{num}], got {keys.dtype}, {writes.dtype}")
    if not num:
        return
    run = _keys_kernel(dim, pages.shape[1], keys.dtype, pages.dtype, seats.dtype == torch.int64,
                       positions.dtype == torch.int64, torch.cuda.current_device())
    run((-(-num // 4),), 128, [keys.contiguous(), pages, pages.stride(0), pages.stride(1), table, table.stride(0),
                               table.shape[1], seats, positions, writes, num, status])


def index_topk(q: Tensor, weights: Tensor, pages: Tensor, table: Tensor, seats: Tensor, lengths: Tensor, top_k: int,
               scale: float, *, max_len: int, out: Tensor | None = None, status: Tensor | None = None,
               workspace_bytes: int = WORKSPACE_BYTES) -> Tensor:
    """The `top_k` best positions of every query row, ascending; semantics of `hisparse.ops.reference.index_topk`.

    Scores are float32 sums of exact products (bfloat16 or float32 inputs), so the result can differ from another order of
    summation only where scores are closer than its rounding. The same inputs always give the same result.

    Args:
        q: [n, heads, dim], float32 for float32 keys, else bfloat16. weights: float32 [n, heads].
        pages: float32 or bfloat16 [blocks, block_size, dim], or fp8: uint8 [blocks, block_size, 132] without gaps between
            the rows of a page; a view whose rows (fp8: pages) start at multiples of 16 bytes.
        table: int32 [seats, pages], block of a page, 0 = none.
        seats: int32 or int64 [n], -1 = padding row. Consecutive rows of one seat share the reads of its keys.
        lengths: int32 or int64 [n], positions [0, length) compete; a row of at most top_k positions reads no keys.
        scale: greater than 0.
        max_len: at least every length; sizes the launch and the workspace, while the work follows the lengths.
            A longer row is cut and sets the status word.
        out: int32 [n, top_k], contiguous, written completely.
        status: int32 [4]; NO_INDEXER_PAGE where a page below a length is missing: its positions score -inf.
        workspace_bytes: most bytes of scores (4 * max_len a row) at once; more rows are done one group after the other.
    Returns:
        int32 [n, top_k], -1 behind the last position; all -1 for a padding row.
    Stream: torch's current stream; no synchronisation; may be captured after a first call of the same shape.
    Raises:
        InvariantError: shapes or dtypes differ from the above. ConfigError: the device lacks shared memory for this shape.
    """
    num = q.shape[0]
    if out is None:
        out = torch.empty(num, top_k, dtype=torch.int32, device=q.device)
    if max_len <= top_k:
        return select_topk(q.new_empty(num, 4, dtype=torch.float32), seats, lengths, top_k, max_len=max_len, out=out,
                           status=status)
    width = -(-max_len // 32) * 32
    group = max(1, min(num, MAX_ROWS, workspace_bytes // (4 * width)))
    scores = torch.empty(group, width, dtype=torch.float32, device=q.device)
    for start in range(0, num, group):
        part = slice(start, min(start + group, num))
        index_scores(q[part], weights[part], pages, table, seats[part], lengths[part], top_k, scale, max_len=max_len,
                     out=scores, status=status)
        select_topk(scores, seats[part], lengths[part], top_k, max_len=max_len, out=out[part], status=status)
    return out


def index_scores(q: Tensor, weights: Tensor, pages: Tensor, table: Tensor, seats: Tensor, lengths: Tensor, top_k: int,
                 scale: float, *, max_len: int, out: Tensor, status: Tensor | None = None,
                 programs: int | None = None) -> Tensor:
    """Scores of at most MAX_ROWS rows: out[row, position] of positions [0, length) of rows longer than `top_k`; nothing else.

    Args: as `index_topk`, and out: float32 [>= n, >= max_len], rows contiguous. programs: CTAs; default one per processor.
    Returns:
        `out`.
    Raises:
        InvariantError: shapes or dtypes differ from the above. ConfigError: the device lacks shared memory for this shape.
    """
    num, heads, dim = q.shape
    size = pages.shape[1]
    _check_pages(pages, dim)
    _check_rows(num, table=table, seats=seats, lengths=lengths)
    wanted = torch.float32 if pages.dtype == torch.float32 else torch.bfloat16
    if q.dtype != wanted or weights.dtype != torch.float32 or weights.shape != (num, heads):
        raise InvariantError(f"q must be {wanted} for keys of {pages.dtype}, weights float32 [{num}, {heads}], got {q.dtype}, "
                             f"{weights.dtype} {list(weights.shape)}")
    if max_len > table.shape[1] * size or num > MAX_ROWS:
        raise InvariantError(f"{num} rows of up to {max_len} positions; {MAX_ROWS} rows and {table.shape[1]} pages fit")
    if out.dtype != torch.float32 or out.stride(1) != 1 or out.shape[0] < num or out.shape[1] < max_len:
        raise InvariantError(f"scores must be float32 [{num}, >= {max_len}], got {out.dtype} {list(out.shape)}")
    item, fp8 = pages.element_size(), pages.dtype == torch.uint8
    unaligned = any(value % 16 for value in (pages.data_ptr(), pages.stride(0) * item, 0 if fp8 else pages.stride(1) * item))
    if unaligned or (fp8 and (pages.stride(1) != pages.shape[2] or size % 32)):
        raise InvariantError(f"indexer keys must start at multiples of 16 bytes, fp8 ones lie without gaps in pages of a "
                             f"multiple of 32, got pages {list(pages.shape)} with strides {pages.stride()}")
    if not num:
        return out
    if programs is None:
        programs = min(num_processors(q.device), num * -(-max_len // _UNIT))
    run, shared = _scores_kernel(heads, dim, size, pages.dtype, seats.dtype == torch.int64,
                                 lengths.dtype == torch.int64, torch.cuda.current_device())
    run((programs,), 32 * _warps(dim, pages.dtype), [
        _aligned(q), weights.contiguous(), pages, pages.stride(0) * item, pages.stride(1) * item, table, table.stride(0),
        seats, lengths, num, top_k, float(scale), max_len, out, out.stride(0), status,
    ], shared_bytes=shared)
    return out


def _aligned(q: Tensor) -> Tensor:
    q = q.contiguous()
    return q if q.data_ptr() % 16 == 0 else q.clone()


def _check_pages(pages: Tensor, dim: int) -> None:
    if pages.dtype not in _DTYPES:
        known = ", ".join(map(str, _DTYPES))
        raise ConfigError(f"indexer keys on CUDA are one of {known}, got {pages.dtype}: set cache.indexer_dtype")
    fp8 = pages.dtype == torch.uint8
    width = dim + 4 if fp8 else dim
    if pages.ndim != 3 or pages.shape[2] != width or pages.stride(2) != 1 or dim % 32 or (fp8 and dim != FP8_DIM):
        raise InvariantError(f"pages of keys of {dim} values (a multiple of 32, fp8 {FP8_DIM}) must be [blocks, block_size, "
                             f"{width}], got {pages.dtype} {list(pages.shape)}")


def _check_rows(num: int, *, table: Tensor, **rows: Tensor) -> None:
    if table.dtype != torch.int32 or table.ndim != 2 or table.stride(1) != 1:
        raise InvariantError(f"the block table must be int32 [seats, pages], got {table.dtype} {list(table.shape)}")
    for name, value in rows.items():
        if value.dtype not in (torch.int32, torch.int64) or value.shape != (num,) or not value.is_contiguous():
            raise InvariantError(f"{name} must be contiguous int32 or int64 [{num}], got {value.dtype} {list(value.shape)}")


@functools.cache
def _scores_kernel(heads: int, dim: int, block_size: int, keys: torch.dtype, long_seats: bool, long_lengths: bool,
                   device: int) -> tuple[Kernel, int]:
    made = scores_instance(heads=heads, dim=dim, block_size=block_size, keys=keys, long_seats=long_seats,
                           long_lengths=long_lengths)
    run = kernel(made.source, made.function, **made.defines)
    slot = 0 if keys == torch.float32 else _UNIT * (FP8_DIM + 4 if keys == torch.uint8 else dim * 2)
    shared = made.defines["WARPS"] * slot + 2 * made.defines["RUN"] * _query_bytes(heads, dim, keys)
    most = run.most_shared_bytes()
    if shared > most:
        raise ConfigError(
            f"cuda:{device} cannot score indexer keys of {dim} values ({keys}) with {heads} heads: a CTA needs {shared} bytes "
            f"of shared memory for queries and keys, and has {most}; load the model in bfloat16 if it is in float32, else run "
            "it on the CPU (model.device)")
    run.allow_shared_bytes(shared)
    return run, shared


@functools.cache
def _keys_kernel(dim: int, block_size: int, given: torch.dtype, pages: torch.dtype, long_seats: bool, long_positions: bool,
                 device: int) -> Kernel:
    made = keys_instance(dim=dim, block_size=block_size, given=given, pages=pages, long_seats=long_seats,
                         long_positions=long_positions)
    return kernel(made.source, made.function, **made.defines)
