"""The lightning indexer over paged keys: writing keys, and the exact top-k positions of every query row."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.ops.status import NO_INDEXER_PAGE

E4M3_MAX = 448.0
_SCORE_ELEMENTS = 1 << 24
"""Most elements [rows, heads, positions] of scores at once; bounds the workspace to 64 MiB."""


def write_keys(keys: Tensor, pages: Tensor, table: Tensor, seats: Tensor, positions: Tensor, writes: Tensor,
               status: Tensor | None = None) -> None:
    """Stores the keys of this forward's rows in their pages. Mutates `pages`.

    Args:
        keys: [n, dim], converted to the dtype of `pages`.
        pages: [blocks, block_size, dim], any strides; or fp8: uint8 [blocks, block_size, dim + 4], see `quantize_keys`.
        table: int32 [seats, pages], block of a page, 0 = none.
        seats, positions: int [n]. writes: bool [n]; other rows, and rows of seat -1, are skipped.
        status: int32 [4]; NO_INDEXER_PAGE is set, and the row skipped, where a written position has no page.
    Raises:
        InvariantError: without `status`, a written position has no page; nothing was written.

    Example: block_size 64, table[3, 2] == 5: position 130 of seat 3 goes to `pages[5, 2]`.
    """
    size = pages.shape[1]
    row = (writes & (seats >= 0)).nonzero().squeeze(1)
    seat, position = seats[row].long(), positions[row].long()
    page = position // size
    inside = page < table.shape[1]
    block = torch.where(inside, table[seat, page.clamp(max=table.shape[1] - 1)].long(), 0)
    missing = block <= 0
    if bool(missing.any()):
        at = int(missing.nonzero()[0])
        _report(status, int(seat[at]), int(position[at]), int(row[at]))
        row, block, position = row[~missing], block[~missing], position[~missing]
    chosen = keys.index_select(0, row)
    pages[block, position % size] = quantize_keys(chosen) if pages.dtype == torch.uint8 else chosen.to(pages.dtype)


def quantize_keys(keys: Tensor) -> Tensor:
    """fp8 keys: e4m3 codes of value / scale, to nearest even, then scale = max(absmax, FLT_MIN) / 448 as float32.

    Args:
        keys: float32 or bfloat16 [n, dim].
    Returns:
        uint8 [n, dim + 4]. Example: 128 values of 2.0 give 128 bytes 0x7E (448) and the scale 2 / 448.
    """
    values = keys.float()
    scale = values.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / E4M3_MAX
    codes = (values / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return torch.cat((codes.view(torch.uint8), scale.view(torch.uint8).view(keys.shape[0], 4)), 1)


def dequantize_keys(rows: Tensor) -> Tensor:
    """Values of fp8 keys: uint8 [n, dim + 4] -> float32 [n, dim]."""
    codes, scale = rows[:, :-4].contiguous().view(torch.float8_e4m3fn), rows[:, -4:].contiguous().view(torch.float32)
    return codes.float() * scale


def index_topk(q: Tensor, weights: Tensor, pages: Tensor, table: Tensor, seats: Tensor, lengths: Tensor, top_k: int,
               scale: float, *, max_len: int, out: Tensor | None = None, status: Tensor | None = None) -> Tensor:
    """The `top_k` best positions of every query row, ascending.

    score(position) = sum over heads of weights[head] * relu((q[head] . key(position)) * scale), in float32. Equal scores
    go to the lower position. With a NaN among a row's scores its choice is unspecified. Rows of a context of at most
    `top_k` tokens read no keys.

    Args:
        q: [n, heads, dim]. weights: float32 [n, heads].
        pages: [blocks, block_size, dim] or fp8, as `write_keys`. table: int32 [seats, pages], block of a page, 0 = none.
        seats: int [n], -1 = padding row. lengths: int [n], positions [0, length) compete.
        scale: greater than 0. max_len: at least the largest of `lengths`.
        out: int32 [n, top_k], written completely if given.
        status: int32 [4]; NO_INDEXER_PAGE is set where a page below a length is missing: its positions score -inf.
    Returns:
        int32 [n, top_k], -1 behind the last position; all -1 for a padding row.
    Raises:
        InvariantError: without `status`, a page that is needed is missing.
    """
    num, heads, _ = q.shape
    if out is None:
        out = torch.empty(num, top_k, dtype=torch.int32, device=q.device)
    held = torch.where(seats >= 0, lengths, 0).long()[:, None]
    column = torch.arange(top_k, device=q.device)
    out.copy_(torch.where(column < held, column, -1))
    start = 0
    while start < num:  # runs of rows that share a seat, and with it the keys
        seat, end = int(seats[start]), start + 1
        longest = int(held[start])
        while end < num and int(seats[end]) == seat:
            longest = max(longest, int(held[end]))
            if (end + 1 - start) * heads * longest > _SCORE_ELEMENTS:
                break
            end += 1
        rows = start + (held[start:end, 0] > top_k).nonzero().squeeze(1)
        if rows.numel():
            longest = int(held[rows].max())
            keys, missing = _context(pages, table, seat, longest, status, int(rows[0]))
            scores = _scores(q[rows], weights[rows], keys, scale)
            scores = torch.where(missing, float("-inf"), scores)
            out[rows] = _select(scores, held[rows], top_k)
        start = end
    return out


def _context(pages: Tensor, table: Tensor, seat: int, length: int, status: Tensor | None,
             row: int) -> tuple[Tensor, Tensor]:
    """Keys [length, dim] of a seat, 0 where a page is missing, and bool [length]: where one is."""
    size = pages.shape[1]
    num_pages = -(-length // size)
    blocks = table[seat, :num_pages].long()
    blocks = torch.nn.functional.pad(blocks, (0, num_pages - blocks.numel()))
    lost = blocks <= 0
    if bool(lost.any()):
        _report(status, seat, int(lost.nonzero()[0]) * size, row)
    keys = pages.index_select(0, blocks.clamp(min=0)).flatten(0, 1)[:length]
    if keys.dtype == torch.uint8:
        keys = dequantize_keys(keys)
    missing = lost.repeat_interleave(size)[:length]
    return torch.where(missing[:, None], torch.zeros((), dtype=keys.dtype, device=keys.device), keys), missing


def _scores(q: Tensor, weights: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[m, heads, dim], [m, heads], [t, dim] -> float32 [m, t]."""
    dots = torch.matmul(q.float(), keys.float().T) * scale
    return torch.matmul(weights.float().unsqueeze(1), torch.relu(dots)).squeeze(1)


def _select(scores: Tensor, held: Tensor, top_k: int) -> Tensor:
    """Positions of the `top_k` best of the first `held` [m, 1] (more than top_k) scores of each row, ascending."""
    valid = torch.arange(scores.shape[1], device=scores.device) < held
    ranked = scores.masked_fill(scores.isnan(), float("inf")).masked_fill(~valid, float("-inf"))
    least = ranked.topk(top_k, dim=1).values[:, -1:]
    above, equal = (ranked > least) & valid, (ranked == least) & valid
    room = top_k - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1) <= room))
    return chosen.nonzero()[:, 1].view(-1, top_k).to(torch.int32)


def _report(status: Tensor | None, seat: int, position: int, row: int) -> None:
    if status is None:
        raise InvariantError(f"seat {seat} has no indexer page for position {position} (row {row})")
    if int(status[0]) == 0:
        status[1:] = torch.tensor([seat, position, row], dtype=status.dtype)
    status[0] |= NO_INDEXER_PAGE
