"""Sparse MLA on the GPU against float64 over the named rows only; every other row is NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hisparse.ops.cuda import attention_cluster
from tests.ops.mla_cases import Case, encode, error, exact, make

pytestmark = pytest.mark.gpu

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.uint8
REAL = Case(n=4, heads=64, k=2048, latent=512, rope=64, row_dtype=BF16, q_dtype=BF16, num_rows=20000)
TINY = Case(n=3, heads=4, k=32, latent=64, rope=16)


def bound(case: Case) -> float:
    """Relative error of the norm: float32 sums; else bfloat16 inputs of the products, or a bfloat16 result (2^-9 each)."""
    if case.row_dtype == F32:
        return 2e-6 if case.q_dtype == F32 else 3e-3
    return 4e-3


def check(case: Case) -> None:
    from hisparse.ops.cuda import attention

    inputs = make(case, "cuda")
    out = torch.full((case.n, case.heads, case.latent), float("nan"), dtype=case.q_dtype, device="cuda")
    got, gathered = inputs.call(attention, out=out)
    assert got is out and got.shape == (case.n, case.heads, case.latent)
    want = exact(inputs)
    assert error(got, want) < bound(case), case
    empty = (inputs.ids < 0).all(1)
    if inputs.host_ids is not None:
        empty &= (inputs.host_ids < 0).all(1)
        assert torch.equal(gathered, (inputs.host_ids >= 0).sum(1))
    else:
        assert gathered is None
    assert bool((got[empty] == 0).all())
    per_row = (got.double() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).clamp(min=1e-30)
    assert float(per_row.where(~empty, 0).max()) < 3 * bound(case), case


@pytest.mark.parametrize("row_dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("n", [1, 2, 3, 16, 33, 64, 128, 200, 512])
def test_real_shapes_at_every_batch(n, heads, row_dtype):
    check(replace(REAL, n=n, heads=heads, row_dtype=row_dtype, seed=n))


@pytest.mark.parametrize("row_dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [1, 8, 16, 17, 32, 40, 48, 96, 127])
@pytest.mark.parametrize("k", [1, 63, 64, 65, 300, 2047])
def test_heads_and_k_that_fill_no_tile(heads, k, row_dtype):
    check(replace(REAL, n=3, heads=heads, k=k, row_dtype=row_dtype, seed=k))


@pytest.mark.parametrize("row_dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("latent", "rope"), [(64, 16), (64, 64), (128, 32), (256, 64), (512, 16), (512, 64)])
@pytest.mark.parametrize("heads", [4, 64])
def test_widths(latent, rope, heads, row_dtype):
    check(replace(TINY, n=5, heads=heads, latent=latent, rope=rope, k=70, row_dtype=row_dtype, q_dtype=row_dtype))


@pytest.mark.parametrize("row_dtype", [F32, BF16, FP8], ids=["f32", "bf16", "fp8"])
@pytest.mark.parametrize("q_dtype", [F32, BF16], ids=["qf32", "qbf16"])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("host", [False, True])
def test_dtypes_host_rows_and_a_row_delta(row_dtype, q_dtype, id_dtype, host):
    for heads in (8, 64):
        check(replace(REAL, n=5, heads=heads, k=333, row_dtype=row_dtype, q_dtype=q_dtype, id_dtype=id_dtype, host=host,
                      row_delta=17, num_rows=4000))


@pytest.mark.parametrize("row_dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [4, 16, 64])
def test_the_general_kernel_where_the_other_is_chosen(heads, row_dtype):
    from hisparse.ops.cuda import attention

    for host in (False, True):
        inputs = make(replace(REAL, n=5, heads=heads, k=700, row_dtype=row_dtype, host=host), "cuda")
        for splits in (1, 4):
            per_split = 704 if splits == 1 else 192
            launch = attention.Launch(splits=splits, per_split=per_split, block_h=16, block_n=32, warps=4)
            out, _ = inputs.call(attention, launch=launch)
            assert error(out, exact(inputs)) < bound(inputs.case)


@pytest.mark.parametrize("row_dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("cluster", "block_heads"), attention_cluster.SHAPES)
def test_every_cluster(cluster, block_heads, row_dtype):
    """Shares of the entries that are even, uneven, of one tile, and empty; heads that fill no block; host rows."""
    from hisparse.ops.cuda import attention

    launch = attention.Launch(splits=cluster, per_split=64, cluster=cluster, block_h=block_heads)
    for change in ({"k": 2048}, {"k": 1111, "host": True, "row_delta": 17}, {"k": 65}, {"heads": 128, "n": 70},
                   {"heads": 40, "k": 500, "masked": 0.97}, {"masked": 1.0},
                   {"q_dtype": F32, "k": 300, "id_dtype": torch.int64}):
        inputs = make(replace(REAL, row_dtype=row_dtype, **change), "cuda")
        out = torch.full((inputs.case.n, inputs.case.heads, 512), float("nan"), dtype=inputs.case.q_dtype, device="cuda")
        inputs.call(attention, launch=launch, out=out)
        assert error(out, exact(inputs)) < bound(inputs.case) and not bool(out.isnan().any()), (launch, inputs.case)


@pytest.mark.parametrize("row_dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_short_of_room_for_large_clusters(row_dtype, small_clusters):
    """A device that cannot run clusters of 16 CTAs gets clusters of 8."""
    attention_cluster._loaded.cache_clear()
    try:
        check(replace(REAL, n=1, row_dtype=row_dtype))
    finally:
        attention_cluster._loaded.cache_clear()
    assert small_clusters == [(16, attention_cluster.RESIDENT[16]), (8, attention_cluster.RESIDENT[8])]


@pytest.mark.parametrize("row_dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("n", [1, 16, 130])
def test_the_cluster_kernel_is_the_one_that_runs(n, row_dtype, monkeypatch):
    """Right, the same bits in a graph, and NaN in a named row shows."""
    from hisparse.ops.cuda import attention, attention_cluster, attention_switch

    calls, attend = [], attention_cluster.attend
    monkeypatch.setattr(attention_cluster, "attend", lambda *args: calls.append(1) or attend(*args))
    monkeypatch.setenv(attention_switch.SWITCH, "own")
    inputs = make(replace(REAL, n=n, row_dtype=row_dtype), "cuda")
    want, _ = inputs.call(attention)
    assert calls and error(want, exact(inputs)) < bound(inputs.case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = inputs.call(attention)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)
    row = int(inputs.ids[-1][inputs.ids[-1] >= 0][0]) if n > 1 else int(inputs.ids[inputs.ids >= 0][0])
    names = (inputs.ids == row).any(1)
    inputs.rows.view(torch.uint8)[row] = 0xFF
    out, _ = inputs.call(attention)
    assert bool(out[names].isnan().any(2).all()) and not bool(out[~names].isnan().any())


@pytest.mark.parametrize("row_dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("masked", [0.0, 0.97, 1.0])
def test_masks(masked, row_dtype):
    check(replace(REAL, n=7, masked=masked, row_dtype=row_dtype))
    check(replace(REAL, n=300, masked=masked, row_dtype=row_dtype, k=640))


@pytest.mark.parametrize("row_dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_a_prefill_chunk(heads, row_dtype):
    check(replace(REAL, n=3000, heads=heads, k=256, row_dtype=row_dtype))


def test_a_prefill_chunk_of_a_tiny_model():
    check(replace(TINY, n=2500))


@pytest.mark.parametrize("row_dtype", [F32, BF16, FP8], ids=["f32", "bf16", "fp8"])
def test_duplicates_count_as_often_as_they_stand(row_dtype):
    from hisparse.ops.cuda import attention

    inputs = make(replace(REAL, n=2, k=128, row_dtype=row_dtype, masked=0.0), "cuda")
    ids = inputs.ids.clone()
    ids[:, 64:] = ids[:, :1]
    twice = replace(inputs, ids=ids)
    assert error(twice.call(attention)[0], exact(twice)) < 4e-3


@pytest.mark.parametrize("row_dtype", [F32, BF16, FP8], ids=["f32", "bf16", "fp8"])
def test_nan_queries_stay_in_their_row(row_dtype):
    from hisparse.ops.cuda import attention

    for heads in (8, 64):
        inputs = make(replace(REAL, n=3, heads=heads, k=128, row_dtype=row_dtype), "cuda")
        inputs.q[0] = float("nan")
        out, _ = inputs.call(attention)
        assert not bool(out.isnan().any()) and bool((out[0] == 0).all())


@pytest.mark.parametrize("row_dtype", [F32, BF16, FP8], ids=["f32", "bf16", "fp8"])
@pytest.mark.parametrize("heads", [8, 64])
def test_nan_in_a_named_row_shows_in_its_query_rows_and_no_other(row_dtype, heads):
    from hisparse.ops.cuda import attention

    inputs = make(replace(REAL, n=4, heads=heads, k=300, row_dtype=row_dtype, masked=0.2), "cuda")
    row = int(inputs.ids[2][inputs.ids[2] >= 0][0])
    names = (inputs.ids == row).any(1)
    inputs.rows.view(torch.uint8)[row] = 0xFF
    out, _ = inputs.call(attention)
    assert bool(out[names].isnan().any(2).all()) and not bool(out[~names].isnan().any())
    assert bool(names.any()) and not bool(names.all())


@pytest.mark.parametrize("row_dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_query_and_output_strides(row_dtype):
    from hisparse.ops.cuda import attention

    inputs = make(replace(REAL, n=6, k=200, row_dtype=row_dtype), "cuda")
    want, _ = inputs.call(attention)
    q = inputs.q
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)
    by_latent = q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    wide_q = torch.cat([q, q], 2)[:, :, : q.shape[2]]
    wide_ids = torch.cat([inputs.ids, inputs.ids], 1)[:, : inputs.ids.shape[1]]
    odd_q = torch.cat([q, q[:, :, :4]], 2)[:, :, : q.shape[2]]  # heads that start on 8 bytes: the Triton kernel takes them
    for other in (by_head, by_latent, wide_q):
        assert not other.is_contiguous()
        assert torch.equal(replace(inputs, q=other, ids=wide_ids).call(attention)[0], want)
    assert error(replace(inputs, q=odd_q).call(attention)[0], exact(inputs)) < bound(inputs.case)
    out = torch.full((64, 6, 512), float("nan"), dtype=BF16, device="cuda").transpose(0, 1)
    assert torch.equal(inputs.call(attention, out=out)[0], want)


@pytest.mark.parametrize(("row_dtype", "width"), [(BF16, 576), (FP8, 656), (F32, 576)], ids=["bf16", "fp8", "f32"])
@pytest.mark.parametrize("heads", [8, 64])
def test_offsets_beyond_two_to_the_31(row_dtype, width, heads):
    """Rows at element offsets beyond 2^31 (and byte offsets beyond 2^32) of a sparse allocation."""
    from hisparse.ops.cuda import attention

    big = 2**31 // width + 4096
    inputs = make(replace(REAL, n=3, heads=heads, k=128, row_dtype=row_dtype, num_rows=4000), "cuda")
    want, _ = inputs.call(attention)
    rows = torch.empty(big, width, dtype=row_dtype, device="cuda")
    rows[-4000:] = inputs.rows
    far = replace(inputs, rows=rows, ids=torch.where(inputs.ids >= 0, inputs.ids + (big - 4000), -1))
    assert torch.equal(far.call(attention)[0], want)
    near = replace(inputs, rows=rows, case=replace(inputs.case, row_delta=big - 4000))
    assert torch.equal(near.call(attention)[0], want)


@pytest.mark.parametrize("row_dtype", [F32, BF16, FP8], ids=["f32", "bf16", "fp8"])
@pytest.mark.parametrize("n", [1, 16, 130])
def test_same_bits_twice_and_in_graphs(n, row_dtype):
    """Two graphs of different shapes, replayed in turns, each equal to its eager call bit for bit."""
    from hisparse.ops.cuda import attention

    cases = [make(replace(REAL, n=n + extra, k=1000, row_dtype=row_dtype, seed=extra), "cuda") for extra in (0, 3)]
    want = [one.call(attention)[0] for one in cases]
    assert all(torch.equal(one.call(attention)[0], w) for one, w in zip(cases, want))
    graphs, outs = [], []
    for one in cases:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(one.call(attention)[0])
        graphs.append(graph)
    for _ in range(5):
        for graph, out in zip(graphs, outs):
            out.fill_(float("nan"))
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, w) for out, w in zip(outs, want))


def test_scales_of_every_size():
    """fp8_ds_mla rows from 1e-30 to 10, tiles of very different scales, and rows of zeros."""
    from hisparse.ops.cuda import attention

    for heads in (8, 64):
        inputs = make(replace(REAL, n=4, heads=heads, k=256, row_dtype=FP8, num_rows=2000, masked=0.0), "cuda")
        g = torch.Generator("cuda").manual_seed(5)
        plain = torch.randn(2000, 576, generator=g, device="cuda")
        power = 10 ** (torch.rand(2000, 4, 1, generator=g, device="cuda") * 31 - 30)
        plain[:, :512] *= power.expand(-1, 4, 128).reshape(2000, 512)
        plain[::7, :512] = 0
        for rows in (plain, plain * 1e-25, plain * torch.tensor([0.0] * 512 + [1.0] * 64, device="cuda")):
            mixed = replace(inputs, rows=encode(rows, FP8), ids=inputs.ids.clamp(min=0))
            want = exact(mixed)
            assert error(mixed.call(attention)[0], want) < 4e-3 or float(want.norm()) == 0


def test_the_two_kernels_agree():
    from hisparse.ops.cuda import attention

    for row_dtype in (BF16, FP8):
        inputs = make(replace(REAL, n=9, row_dtype=row_dtype), "cuda")
        general = attention.Launch(splits=4, per_split=512, block_h=64, block_n=32)
        assert error(inputs.call(attention)[0], inputs.call(attention, launch=general)[0].double()) < 4e-3
