"""The real FlashMLA package behind `sparse_mla`, against float64; every row that no entry names is NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.mla_cases import Case, error, exact, make

pytestmark = pytest.mark.gpu

BF16, FP8 = torch.bfloat16, torch.uint8
REAL = Case(n=4, heads=64, k=2048, latent=512, rope=64, row_dtype=BF16, q_dtype=BF16, num_rows=20000)


@pytest.fixture(autouse=True)
def flash(monkeypatch):
    """FlashMLA wherever it fits; skipped with the reason where it does not load."""
    from hisparse.ops.cuda import attention_flash_mla, attention_switch

    found = attention_flash_mla.support(torch.cuda.get_device_capability()[0])
    if not found.usable:
        pytest.skip(found.reason)
    monkeypatch.setenv(attention_switch.SWITCH, "flash_mla")
    return attention_flash_mla


def called(flash, monkeypatch) -> list[int]:
    calls, attend = [], flash.attend
    monkeypatch.setattr(flash, "attend", lambda *args: calls.append(1) or attend(*args))
    return calls


@pytest.mark.parametrize("row_dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("change", [
    {}, {"n": 1}, {"n": 70, "heads": 128}, {"masked": 0.0}, {"masked": 0.97}, {"k": 128}, {"row_delta": 17}, {"masked": 1.0},
], ids=str)
def test_equals_float64(flash, monkeypatch, change, row_dtype):
    from hisparse.ops.cuda import attention

    calls = called(flash, monkeypatch)
    inputs = make(replace(REAL, row_dtype=row_dtype, **change), "cuda")
    out, gathered = inputs.call(attention)
    assert calls and gathered is None
    # its fp8 kernel works on latents rounded to bfloat16, and has no better scores than that
    assert error(out, exact(inputs)) < (3e-3 if row_dtype == BF16 else 1e-2) and bool((out[(inputs.ids < 0).all(1)] == 0).all())


@pytest.mark.parametrize("row_dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_graphs_of_several_shapes(flash, monkeypatch, row_dtype):
    from hisparse.ops.cuda import attention

    calls = called(flash, monkeypatch)
    cases = [make(replace(REAL, n=n, row_dtype=row_dtype), "cuda") for n in (3, 16)]
    want = [one.call(attention)[0].clone() for one in cases]
    graphs, outs = [], []
    for one in cases:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(one.call(attention)[0])
        graphs.append(graph)
    assert len(calls) == 4
    for _ in range(3):
        for graph, out in zip(graphs, outs):
            out.fill_(float("nan"))
            graph.replay()
        torch.cuda.synchronize()
        assert all(error(out, w.double()) < 2e-3 for out, w in zip(outs, want))


@pytest.mark.parametrize(("row_dtype", "width"), [(BF16, 576), (FP8, 656)], ids=["bf16", "fp8"])
def test_offsets_beyond_two_to_the_31(row_dtype, width):
    from hisparse.ops.cuda import attention

    big = 2**31 // width + 4096
    inputs = make(replace(REAL, n=3, k=128, row_dtype=row_dtype, num_rows=4000), "cuda")
    rows = torch.empty(big, width, dtype=row_dtype, device="cuda")
    rows[-4000:] = inputs.rows
    far = replace(inputs, rows=rows, ids=torch.where(inputs.ids >= 0, inputs.ids + (big - 4000), -1))
    assert error(far.call(attention)[0], exact(inputs)) < (3e-3 if row_dtype == BF16 else 1e-2)
