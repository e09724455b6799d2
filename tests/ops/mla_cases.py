"""Inputs of sparse MLA and its exact answer; shared by the CPU and the GPU tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 128
"""Latents of an fp8_ds_mla row that share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call; prints as a repro."""

    n: int = 3
    heads: int = 4
    k: int = 40
    latent: int = 64
    rope: int = 16
    row_dtype: torch.dtype = torch.float32
    q_dtype: torch.dtype = torch.float32
    id_dtype: torch.dtype = torch.int32
    masked: float = 0.3
    num_rows: int = 200
    host: bool = False
    row_delta: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Arguments of one call. Rows that no entry names are poisoned."""

    q: Tensor
    rows: Tensor
    ids: Tensor
    scaling: float
    host_rows: Tensor | None
    host_ids: Tensor | None
    case: Case

    def call(self, backend, **more):
        c = self.case
        return backend.sparse_mla(self.q, self.rows, self.ids, self.scaling, c.latent, row_delta=c.row_delta,
                                  host_rows=self.host_rows, host_ids=self.host_ids, **more)


def make(case: Case, device: str = "cpu") -> Inputs:
    """Random rows, each poisoned (NaN) unless an entry names it; row 0 is never named."""
    c, g = case, torch.Generator(device).manual_seed(case.seed)
    width = c.latent + c.rope

    def table() -> tuple[Tensor, Tensor]:
        scale = torch.exp(0.5 * torch.randn(c.num_rows, 1, generator=g, device=device))
        rows = encode(scale * torch.randn(c.num_rows, width, generator=g, device=device), c.row_dtype, c.latent)
        ids = torch.randint(1, c.num_rows - c.row_delta, (c.n, c.k), generator=g, device=device)
        return rows, ids

    rows, ids = table()
    masked = torch.rand(c.n, c.k, generator=g, device=device) < c.masked
    if c.n > 1:
        masked[0] = True
    ids = torch.where(masked, -1, ids)
    host_rows = host_ids = None
    if c.host:
        host_rows, host_ids = table()
        on_host = (torch.rand(c.n, c.k, generator=g, device=device) < 0.5) & (ids >= 0)
        host_ids = torch.where(on_host, host_ids, -1)
        ids = torch.where(on_host, -1, ids)
        poison(host_rows, host_ids)
    q = torch.randn(c.n, c.heads, width, generator=g, device=device).to(c.q_dtype)
    poison(rows, torch.where(ids >= 0, ids + c.row_delta, -1))
    return Inputs(q=q, rows=rows, ids=ids.to(c.id_dtype), scaling=width**-0.5, host_rows=host_rows,
                  host_ids=None if host_ids is None else host_ids.to(c.id_dtype), case=c)


def poison(rows: Tensor, ids: Tensor) -> None:
    """NaN into every row that no id names (0xff is NaN in e4m3, float32 and bfloat16 alike)."""
    unnamed = torch.ones(rows.shape[0], dtype=torch.bool, device=rows.device)
    unnamed[ids[ids >= 0].long()] = False
    rows.view(torch.uint8)[unnamed] = 0xFF


def encode(rows: Tensor, dtype: torch.dtype, latent: int = 512) -> Tensor:
    """Values to rows. fp8_ds_mla here and below is written down again, apart from the package."""
    if dtype != torch.uint8:
        return rows.to(dtype)
    tiles = rows[:, :latent].float().reshape(rows.shape[0], latent // TILE, TILE)
    scale = tiles.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny) / 448
    codes = (tiles / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    scales = torch.zeros(rows.shape[0], -(-latent // TILE // 4) * 4, device=rows.device)
    scales[:, : latent // TILE] = scale
    return torch.cat([codes, scales.view(torch.uint8), rows[:, latent:].to(torch.bfloat16).view(torch.uint8)], 1)


def decode(rows: Tensor, latent: int = 512, rope: int = 64) -> Tensor:
    """Rows to float64 values."""
    if rows.dtype != torch.uint8:
        return rows.double()
    codes = rows[:, :latent].contiguous().view(torch.float8_e4m3fn).double().reshape(rows.shape[0], latent // TILE, TILE)
    scale = rows[:, latent : latent + latent // TILE * 4].contiguous().view(torch.float32).double()
    tail = rows[:, rows.shape[1] - 2 * rope :].contiguous().view(torch.bfloat16).double()
    return torch.cat([(codes * scale[..., None]).flatten(1), tail], 1)


def exact(inputs: Inputs) -> Tensor:
    """[n, heads, latent] float64: one query row at a time, over its named rows only."""
    c = inputs.case
    out = torch.zeros(c.n, c.heads, c.latent, dtype=torch.float64, device=inputs.q.device)
    for i in range(c.n):
        ids = inputs.ids[i].long()
        kv = decode(inputs.rows[ids[ids >= 0] + c.row_delta], c.latent, c.rope)
        if inputs.host_rows is not None and inputs.host_ids is not None:
            host = inputs.host_ids[i].long()
            kv = torch.cat([kv, decode(inputs.host_rows[host[host >= 0]], c.latent, c.rope)])
        if kv.shape[0]:
            out[i] = (inputs.q[i].double() @ kv.T * inputs.scaling).softmax(-1) @ kv[:, : c.latent]
    return out


def error(out: Tensor, want: Tensor) -> float:
    """|out - want| / |want| over everything; NaN never passes a comparison with it."""
    return float((out.double() - want).norm() / want.norm().clamp(min=1e-30))
