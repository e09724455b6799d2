"""The fp8_ds_mla row: e4m3 latents with a float32 scale for each 128, bfloat16 rope. See `hisparse.layout.RowFormat`.

Kernels are bit-equal to this, so NaN has one spelling: 0x7F as e4m3, 0x7FC00000 as a scale, 0x7FFF as bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.layout import scale_bytes

E4M3_MAX = 448.0
SCALED_VALUES = 128
_FLT_MIN = torch.finfo(torch.float32).tiny
_E4M3_NAN, _SCALE_NAN, _BF16_NAN = 0x7F, 0x7FC00000, 0x7FFF


def quantize_rows(rows: Tensor, latent_dim: int = 512) -> Tensor:
    """Makes fp8_ds_mla rows.

    scale = max(absmax of 128 latents, FLT_MIN) / 448 in float32; value = e4m3(latent / scale), an IEEE division, then to
    nearest even, saturating. Rope to bfloat16, to nearest even. A NaN or infinity among 128 latents makes their scale
    NaN or infinite, so all 128 come back as NaN: it stays visible.

    Args:
        rows: float32 or bfloat16 [n, latent_dim + rope_dim]; any strides. latent_dim: a multiple of 128.
    Returns:
        uint8 [n, latent_dim + scale_bytes(latent_dim) + 2 * rope_dim].
    Raises:
        InvariantError: a shape that has no such row.

    Example: 512 latents of 2.0 give 512 bytes 0x7E (448), four scales 2/448.
    """
    n, values = rows.shape
    _check(latent_dim, values - latent_dim)
    latent = rows[:, :latent_dim].to(torch.float32).reshape(n, latent_dim // SCALED_VALUES, SCALED_VALUES)
    scale = latent.abs().amax(-1).clamp_min(_FLT_MIN) / E4M3_MAX
    scaled = (latent / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(scaled.isnan(), _E4M3_NAN, codes)
    scale_bits = torch.where(scale.isnan(), _SCALE_NAN, scale.view(torch.int32))
    out = torch.zeros(n, rope_byte_offset(latent_dim) + 2 * (values - latent_dim), dtype=torch.uint8, device=rows.device)
    out[:, :latent_dim] = codes.reshape(n, latent_dim)
    out[:, latent_dim : latent_dim + 4 * scale.shape[1]] = scale_bits.contiguous().view(torch.uint8)
    out[:, rope_byte_offset(latent_dim) :] = to_bfloat16(rows[:, latent_dim:]).contiguous().view(torch.uint8)
    return out


def dequantize_rows(rows: Tensor, latent_dim: int = 512) -> Tensor:
    """Values of fp8_ds_mla rows: float32 [n, latent_dim + rope_dim].

    Args:
        rows: uint8 [n, row_bytes], as `quantize_rows` makes; any leading strides.
    Raises:
        InvariantError: `rows` is not uint8, or too short for `latent_dim`.
    """
    if rows.dtype != torch.uint8 or rows.ndim != 2:
        raise InvariantError(f"fp8_ds_mla rows are uint8 [n, row_bytes], got {rows.dtype} {list(rows.shape)}")
    n, start = rows.shape[0], rope_byte_offset(latent_dim)
    _check(latent_dim, (rows.shape[1] - start) // 2)
    num_scales = latent_dim // SCALED_VALUES
    codes = rows[:, :latent_dim].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    scales = rows[:, latent_dim : latent_dim + 4 * num_scales].contiguous().view(torch.float32)
    rope = rows[:, start:].contiguous().view(torch.bfloat16).to(torch.float32)
    latent = codes.view(n, num_scales, SCALED_VALUES) * scales[..., None]
    return torch.cat((latent.reshape(n, latent_dim), rope), 1)


def to_bfloat16(values: Tensor) -> Tensor:
    """To nearest even, every NaN as 0x7FFF (a cast spells it differently from machine to machine); bfloat16 as it is."""
    if values.dtype == torch.bfloat16:
        return values
    bits = values.to(torch.bfloat16).view(torch.int16)
    return torch.where(values.isnan(), torch.full_like(bits, _BF16_NAN), bits).view(torch.bfloat16)


def rope_byte_offset(latent_dim: int) -> int:
    """Where the rope part begins. Example: 528 for 512 latents."""
    return latent_dim + scale_bytes(latent_dim)


def _check(latent_dim: int, rope_dim: int) -> None:
    if latent_dim <= 0 or latent_dim % SCALED_VALUES or rope_dim < 0:
        raise InvariantError(f"no fp8_ds_mla row has {latent_dim} latents and {rope_dim} rope values")
