"""When FlashMLA is called, by a stand-in for the package that answers with float64 and notes how it was called."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from hisparse.errors import ConfigError
from hisparse.ops.cuda import attention_flash_mla as flash
from hisparse.ops.cuda import attention_switch as switch
from tests.ops.mla_cases import Case, Inputs, error, exact, make

BF16, FP8 = torch.bfloat16, torch.uint8
REAL = Case(n=2, heads=64, k=128, latent=512, rope=64, row_dtype=BF16, q_dtype=BF16)


class Standin(ModuleType):
    """`flash_mla` by its public interface, on the CPU."""

    def __init__(self, legacy: bool = True, forked: bool = True) -> None:
        super().__init__("flash_mla")
        self.__version__, self.legacy, self.calls = "9.9", legacy, []
        if forked:
            self.has_legacy = lambda: self.legacy
            self.flash_mla_sparse_fwd = lambda q, kv, ids, scale, d_v, use_legacy=False: self._prefill(
                q, kv, ids, scale, use_legacy)
        else:
            self.flash_mla_sparse_fwd = lambda q, kv, ids, scale, d_v: self._prefill(q, kv, ids, scale, None)
        self.get_mla_metadata = lambda: ({"filled": False}, None)

    def _prefill(self, q, kv, ids, scale, use_legacy):
        self.calls.append(("prefill", use_legacy))
        assert kv.shape[1] == 1 and ids.shape[1] == 1 and ids.dtype == torch.int32
        return self._answer(q, kv[:, 0], ids[:, 0], scale), None, None

    def flash_mla_with_kvcache(self, q, cache, table, lens, d_v, plan, splits, scale, causal, is_fp8, ids, use_legacy=False):
        self.calls.append(("decode", use_legacy))
        assert is_fp8 and not causal and table is None and lens is None and splits is None and d_v == 512
        pages, page, one, width = cache.shape
        assert (page, one, width) == (1, 1, 656) and q.dim() == 4 and ids.dim() == 3
        plan["filled"] = True
        return self._answer(q[:, 0], cache.reshape(pages, width), ids[:, 0], scale)[:, None], None

    def _answer(self, q, rows, ids, scale):
        case = replace(REAL, n=q.shape[0], heads=q.shape[1], row_dtype=rows.dtype)
        inputs = Inputs(q=q, rows=rows, ids=ids, scaling=scale, host_rows=None, host_ids=None, case=case)
        return exact(inputs).to(BF16)


@pytest.fixture
def package(monkeypatch):
    """The stand-in, imported as `flash_mla`; nothing of another test is remembered."""
    def install(standin: Standin) -> Standin:
        monkeypatch.setitem(sys.modules, "flash_mla", standin)
        flash.support.cache_clear()
        flash._is_forked.cache_clear()
        flash._plans.clear()
        return standin

    monkeypatch.delenv(switch.SWITCH, raising=False)
    yield install
    flash.support.cache_clear()
    flash._is_forked.cache_clear()
    flash._plans.clear()


def chosen(inputs, **change) -> bool:
    given = {"q": inputs.q, "rows": inputs.rows, "row_ids": inputs.ids, "latent_dim": inputs.case.latent,
             "row_delta": inputs.case.row_delta, "host_ids": inputs.host_ids, "device_major": 9} | change
    return flash.chosen(**given)


def test_without_the_package_the_reason_is_told(package, monkeypatch):
    package(Standin())
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    flash.support.cache_clear()
    assert not flash.support(9).usable and "does not import" in flash.support(9).reason
    monkeypatch.setenv(switch.SWITCH, "flash_mla")
    assert not chosen(make(REAL))


@pytest.mark.parametrize(("standin", "usable", "words"), [
    (Standin(), True, "usable"), (Standin(forked=False), True, "usable"), (Standin(legacy=False), False, "Hopper"),
])
def test_what_the_package_supports(package, standin, usable, words):
    package(standin)
    found = flash.support(9)
    assert found.usable is usable and words in found.reason and found.version == "9.9"
    assert not flash.support(10).usable


def test_a_package_without_the_kernels_is_no_package(package):
    standin = package(Standin())
    del standin.flash_mla_sparse_fwd
    assert not flash.support(9).usable and "flash_mla_sparse_fwd" in flash.support(9).reason


@pytest.mark.parametrize(("wish", "faster", "want"), [
    ("auto", True, True), ("auto", False, False), ("own", True, False), ("flash_mla", False, True), ("", True, True),
])
def test_the_switch(package, monkeypatch, wish, faster, want):
    package(Standin())
    monkeypatch.setenv(switch.SWITCH, wish)
    monkeypatch.setattr(flash, "faster", lambda *_: faster)
    assert chosen(make(REAL)) is want


def test_auto_goes_by_the_table_and_by_exactness(package, monkeypatch):
    package(Standin())
    monkeypatch.setattr(flash, "FASTER_BF16_FROM", {64: 2})
    assert chosen(make(REAL)) and not chosen(make(replace(REAL, n=1))) and not chosen(make(replace(REAL, heads=128)))
    assert not chosen(make(replace(REAL, row_dtype=FP8)))


def test_an_unknown_switch_is_refused(monkeypatch):
    monkeypatch.setenv(switch.SWITCH, "fastest")
    with pytest.raises(ConfigError, match="HISPARSE_ATTENTION must be one of auto, own, flash_mla, got 'fastest'"):
        switch.mode()


@pytest.mark.parametrize("change", [
    {"heads": 32}, {"k": 100}, {"latent": 256}, {"row_dtype": torch.float32}, {"q_dtype": torch.float32}, {"host": True},
    {"id_dtype": torch.int64},
])
def test_what_does_not_fit_is_ours(package, monkeypatch, change):
    package(Standin())
    monkeypatch.setenv(switch.SWITCH, "flash_mla")
    assert chosen(make(REAL))
    assert not chosen(make(replace(REAL, **change)))


def test_strides_and_deltas_that_do_not_fit_are_ours(package, monkeypatch):
    package(Standin())
    monkeypatch.setenv(switch.SWITCH, "flash_mla")
    inputs = make(REAL)
    assert not chosen(inputs, q=inputs.q.transpose(0, 1).contiguous().transpose(0, 1))
    assert not chosen(inputs, row_ids=torch.cat([inputs.ids, inputs.ids], 1)[:, :128])
    assert not chosen(inputs, row_delta=-1)
    assert not chosen(inputs, row_delta=inputs.rows.shape[0])


def test_a_capture_without_a_plan_is_ours(package, monkeypatch):
    """FlashMLA makes its plan of splits in the first call of a shape, which a graph would repeat and outlive."""
    package(Standin())
    monkeypatch.setenv(switch.SWITCH, "flash_mla")
    inputs = make(replace(REAL, row_dtype=FP8))
    monkeypatch.setattr(flash, "_is_capturing", lambda q: True)
    assert not chosen(inputs) and chosen(make(REAL))
    flash.attend(inputs.q, inputs.rows, inputs.ids, 0.1, 0, None)
    assert chosen(inputs)


@pytest.mark.parametrize("forked", [True, False])
@pytest.mark.parametrize("row_dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("row_delta", [0, 17])
def test_the_call_means_the_same(package, forked, row_dtype, row_delta):
    standin = package(Standin(forked=forked))
    inputs = make(replace(REAL, row_dtype=row_dtype, row_delta=row_delta))
    got = flash.attend(inputs.q, inputs.rows, inputs.ids, inputs.scaling, row_delta, None)
    assert error(got, exact(inputs)) < 3e-3
    out = torch.full_like(got, float("nan"))
    assert flash.attend(inputs.q, inputs.rows, inputs.ids, inputs.scaling, row_delta, out) is out and torch.equal(out, got)
    kinds = [kind for kind, _ in standin.calls]
    assert kinds == (["prefill"] * 2 if row_dtype == BF16 else ["decode"] * 3)  # the plan of the shape is made once
    assert {legacy for _, legacy in standin.calls} <= ({True} if forked else {None, False})
