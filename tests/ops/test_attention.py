"""Sparse MLA against a dense softmax in float64 over the same positions; masked rows are NaN and must never matter."""

from __future__ import annotations

import pytest
import torch

from hisparse.ops import reference
from tests.ops.mla_cases import Case, error, exact, make

LATENT, ROPE = 12, 4


def dense(q, rows, ids, scaling):
    """One query row at a time, float64, over the valid ids only."""
    out = torch.zeros(q.shape[0], q.shape[1], LATENT, dtype=torch.float64)
    for i in range(q.shape[0]):
        kv = rows[ids[i][ids[i] >= 0]].double()
        if kv.numel():
            out[i] = (q[i].double() @ kv.T * scaling).softmax(-1) @ kv[:, :LATENT]
    return out


def case(n=9, heads=3, k=11, rows=60, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    pool = torch.full((rows, LATENT + ROPE), float("nan"), dtype=dtype)
    written = torch.randperm(rows - 1, generator=g)[: rows // 2] + 1
    pool[written] = torch.randn(len(written), LATENT + ROPE, generator=g).to(dtype)
    ids = written[torch.randint(0, len(written), (n, k), generator=g)]
    ids[torch.rand(n, k, generator=g) < 0.4] = -1
    ids[0], ids[1] = -1, written[:k]
    return torch.randn(n, heads, LATENT + ROPE, generator=g).to(dtype), pool, ids


@pytest.mark.parametrize("gather_rows", [1, 11, 25, 1 << 15])
@pytest.mark.parametrize("seed", range(3))
def test_equals_dense_softmax_for_every_split(seed, gather_rows):
    q, pool, ids = case(seed=seed)
    out, gathered = reference.sparse_mla(q, pool, ids, 0.3, LATENT, gather_rows=gather_rows)
    torch.testing.assert_close(out.double(), dense(q, pool, ids, 0.3), atol=2e-6, rtol=1e-5)
    assert bool((out[0] == 0).all()) and int(gathered.sum()) == 0


def test_bfloat16_rows_and_queries():
    q, pool, ids = case(dtype=torch.bfloat16, seed=4)
    out, _ = reference.sparse_mla(q, pool, ids, 0.3, LATENT)
    assert out.dtype == torch.bfloat16 and not bool(out.isnan().any())
    want = dense(q, pool, ids, 0.3)
    assert float(torch.nn.functional.cosine_similarity(out[1:].double().flatten(), want[1:].flatten(), dim=0)) > 0.999


@pytest.mark.parametrize("gather_rows", [11, 40, 1 << 15])
def test_rows_split_over_device_and_host(gather_rows):
    """Each entry is on one side; the other side holds NaN there. Host rows are gathered once per split."""
    q, pool, ids = case(n=8, k=11, seed=7)
    on_host = (torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.5) & (ids >= 0)
    order = torch.randperm(pool.shape[0], generator=torch.Generator().manual_seed(2))
    host = torch.full_like(pool, float("nan"))
    host_ids = torch.where(on_host, order[ids.clamp(min=0)], -1)
    used = ids[on_host]
    host[order[used]] = pool[used]
    device_ids = torch.where(on_host, -1, ids)
    device = pool.clone()
    device[list(set(used.tolist()) - set(device_ids.flatten().tolist()))] = float("nan")
    out, gathered = reference.sparse_mla(
        q, device, device_ids, 0.3, LATENT, host_rows=host, host_ids=host_ids, gather_rows=gather_rows
    )
    torch.testing.assert_close(out.double(), dense(q, pool, ids, 0.3), atol=2e-6, rtol=1e-5)
    step = max(1, gather_rows // 11)
    want = [len(set(host_ids[i : i + step][host_ids[i : i + step] >= 0].tolist())) for i in range(0, 8, step)]
    assert gathered[::step].tolist() == want and int(gathered.sum()) == sum(want)


def test_nan_queries_of_padding_rows_stay_in_their_row():
    q, pool, ids = case(seed=3)
    q[0] = float("nan")
    out, _ = reference.sparse_mla(q, pool, ids, 0.3, LATENT)
    assert not bool(out.isnan().any())


def test_no_rows_and_no_columns():
    q, pool, ids = case()
    assert reference.sparse_mla(q[:0], pool, ids[:0], 1.0, LATENT)[0].shape == (0, 3, LATENT)
    assert bool((reference.sparse_mla(q, pool, ids[:, :0], 1.0, LATENT)[0] == 0).all())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("gather_rows", [11, 1 << 15])
def test_a_row_delta_moves_named_entries_only(dtype, gather_rows):
    q, pool, ids = case(seed=5)
    moved = torch.cat([torch.full((7, LATENT + ROPE), float("nan")), pool])
    out, _ = reference.sparse_mla(q, moved, ids.to(dtype), 0.3, LATENT, row_delta=7, gather_rows=gather_rows)
    assert torch.equal(out, reference.sparse_mla(q, pool, ids, 0.3, LATENT, gather_rows=gather_rows)[0])


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (128, 16)])
def test_fp8_ds_mla_rows_are_dequantised_after_the_gather(latent, rope):
    """Against float64 over the values that the bytes stand for; unnamed rows are NaN bytes. Host rows too."""
    inputs = make(Case(n=4, heads=3, k=30, latent=latent, rope=rope, row_dtype=torch.uint8, host=True, row_delta=9))
    given = torch.full((4, 3, latent), float("nan"))
    out, gathered = inputs.call(reference, out=given)
    assert out is given
    assert error(out, exact(inputs)) < 2e-6 and int(gathered.sum()) > 0
