"""fp8_ds_mla rows against a table of all e4m3 numbers, and what must stay visible in them."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from hisparse.errors import ConfigError, InvariantError
from hisparse.layout import RowFormat, quantized_latent_dim, scale_bytes
from hisparse.ops.reference import dequantize_rows, quantize_rows
from hisparse.ops.reference.fp8 import to_bfloat16


def e4m3_value(code: int) -> float:
    """By definition: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


CODES = [code for code in range(256) if code & 0x7F != 0x7F]
POSITIVE = torch.tensor([e4m3_value(code) for code in range(0x7F)], dtype=torch.float64)


def nearest_even(values: Tensor) -> Tensor:
    """Magnitude codes of float64 values in 0..448, by search: nearest, ties to the even code."""
    above = torch.searchsorted(POSITIVE, values).clamp(max=0x7E)
    below = (above - 1).clamp(min=0)
    down, up = values - POSITIVE[below], POSITIVE[above] - values
    return torch.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)


def test_a_row_is_656_bytes_in_the_documented_order():
    row = torch.zeros(1, 576)
    row[0, :512] = torch.arange(512) % 128 / 127 * 7  # every scale is 7 / 448
    row[0, 128:256] *= 64  # the second: 1
    row[0, 512:] = torch.arange(64) - 30.5
    packed = quantize_rows(row)
    assert packed.shape == (1, 656) and packed.dtype == torch.uint8
    raw = bytes(packed[0].tolist())
    assert struct.unpack("<4f", raw[512:528]) == (7 / 448, 1.0, 7 / 448, 7 / 448)
    assert raw[127] == 0x7E and raw[255] == 0x7E and raw[0] == 0
    assert [struct.unpack("<f", b"\0\0" + raw[i : i + 2])[0] for i in range(528, 656, 2)] == row[0, 512:].tolist()


def test_every_code_comes_back_as_itself():
    latent = torch.tensor([e4m3_value(code) for code in CODES] + [448.0, -448.0])
    row = torch.cat((latent, torch.zeros(8)))[None]
    packed = quantize_rows(row, 256)
    assert packed[0, : len(CODES)].tolist() == CODES
    assert torch.equal(dequantize_rows(packed, 256), row)


@pytest.mark.parametrize("spread", [1e-30, 1e-3, 1.0, 1e4, 3e37])
def test_values_are_the_nearest_of_all_codes(spread):
    torch.manual_seed(3)
    rows = torch.randn(40, 512 + 64) * spread * torch.logspace(-3, 0, 40)[:, None]
    packed = quantize_rows(rows)
    scales = packed[:, 512:528].contiguous().view(torch.float32)
    latent = rows[:, :512].view(40, 4, 128)
    assert torch.equal(scales, latent.abs().amax(-1) / 448)
    scaled = (latent / scales[..., None]).double().clamp(-448, 448)
    want = nearest_even(scaled.abs().flatten()) + 0x80 * scaled.signbit().flatten()
    assert torch.equal(packed[:, :512].flatten().long(), want)
    back = dequantize_rows(packed)
    error = (back[:, :512].view(40, 4, 128) - latent).abs() / latent.abs().amax(-1, keepdim=True)
    assert float(error.max()) <= 16.001 / 448  # half a step of the coarsest binade: 256..448 in steps of 32
    assert torch.equal(back[:, 512:], rows[:, 512:].bfloat16().float())


def test_ties_go_to_even():
    halfway = (POSITIVE[:-1] + POSITIVE[1:]) / 2
    latent = torch.cat((halfway, torch.tensor([448.0, 0.0]))).float()
    packed = quantize_rows(latent[None], 128)
    assert packed[0, :126].tolist() == [code + code % 2 for code in range(126)]


def test_zeros_denormals_and_huge_values():
    rows = torch.zeros(4, 128)
    rows[0, 0] = -0.0
    rows[1] = torch.linspace(-1e-40, 1e-40, 128)
    rows[2, :2] = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max])
    rows[3, 5] = torch.finfo(torch.float32).tiny
    back = dequantize_rows(quantize_rows(rows, 128), 128)
    assert torch.equal(back[0], rows[0]) and bool(back.isfinite().all())
    assert float((back[1] - rows[1]).abs().max()) < 2e-40
    assert torch.allclose(back[2:], rows[2:], rtol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_visible(bad):
    rows = torch.ones(2, 256 + 8)
    rows[0, 130] = bad
    rows[1, 256 + 3] = bad
    back = dequantize_rows(quantize_rows(rows, 256), 256)
    assert torch.equal(back[0, :128], rows[0, :128]) and bool(back[0, 128:256].isnan().all())
    assert torch.equal(back[1, :256], rows[1, :256])
    assert str(float(back[1, 259])) == str(bad) and int(back[1].isfinite().sum()) == 263
    again = quantize_rows(torch.full((1, 264), float("nan")), 256)[0]
    assert again[:256].unique().tolist() == [0x7F] and bytes(again[256:264].tolist()) == struct.pack("<2I", *[0x7FC00000] * 2)
    assert bytes(again[272:].tolist()) == b"\xff\x7f" * 8


def test_poison_is_nan_value_by_value():
    assert bool(dequantize_rows(torch.full((3, 656), 0xFF, dtype=torch.uint8)).isnan().all())
    one = quantize_rows(torch.ones(1, 576))
    one[0, 7], one[0, 654], one[0, 655] = 0xFF, 0xFF, 0xFF
    assert dequantize_rows(one)[0].isnan().nonzero().flatten().tolist() == [7, 575]


def test_scales_are_filled_up_to_sixteen_bytes():
    packed = quantize_rows(torch.randn(3, 128 + 16), 128)
    assert packed.shape == (3, 128 + 16 + 32) and packed[:, 132:144].tolist() == [[0] * 12] * 3
    assert [scale_bytes(n) for n in (128, 512, 640)] == [16, 16, 32]


def test_strided_and_empty_rows():
    wide = torch.randn(6, 1200)
    view = wide[::2, 10 : 10 + 576]
    assert torch.equal(quantize_rows(view), quantize_rows(view.contiguous()))
    assert torch.equal(dequantize_rows(quantize_rows(view.bfloat16())), dequantize_rows(quantize_rows(view.bfloat16().float())))
    assert quantize_rows(view[:0]).shape == (0, 656) and dequantize_rows(quantize_rows(view[:0])).shape == (0, 576)


def test_bfloat16_rounds_to_even_with_one_nan():
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001, -1, 0x00008000], dtype=torch.int32)
    got = to_bfloat16(bits.view(torch.float32)).view(torch.int16).tolist()
    assert got == [0x3F80, 0x3F82, 0x3F81, 0x7FFF, 0x7FFF, 0]
    raw = torch.tensor([0x7F81, -1], dtype=torch.int16).view(torch.bfloat16)
    assert to_bfloat16(raw).view(torch.int16).tolist() == [0x7F81, -1]


def test_shapes_that_are_no_row_are_refused():
    with pytest.raises(InvariantError, match="64 latents"):
        quantize_rows(torch.zeros(1, 80), 64)
    with pytest.raises(InvariantError, match="float32"):
        dequantize_rows(torch.zeros(1, 656))
    with pytest.raises(ConfigError, match="576 values has 640 bytes"):
        quantized_latent_dim(576, 640)
    assert quantized_latent_dim(576, 656) == 512 and quantized_latent_dim(144, 176) == 128
    for latent in range(128, 1281, 128):
        for rope in range(8, 129, 8):
            row = RowFormat(dtype="uint8", latent_dim=latent, rope_dim=rope)
            assert quantized_latent_dim(row.values, row.row_bytes) == latent
