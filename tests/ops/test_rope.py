"""Rotation of heads against the functions of the models themselves, to the bit."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave

from hisparse.ops.reference import rotate_heads


def inputs(dtype: torch.dtype, *, n: int = 7, heads: int = 3, dim: int = 48, rope: int = 16) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(n + heads)
    x = torch.randn(n, heads + 2, dim + 8, generator=draw).to(dtype)[:, 1:-1, :dim]
    angle = torch.rand(n, rope // 2, generator=draw) * 6
    angle = torch.cat([angle, angle], 1)
    return x, angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_bits_are_those_of_the_models(dtype: torch.dtype, interleaved: bool) -> None:
    x, cos, sin = inputs(dtype)
    rotate = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
    front, _ = rotate(x[..., :16], x[..., :16], cos, sin, unsqueeze_dim=1)
    got = rotate_heads(x, cos, sin, interleaved=interleaved)
    assert torch.equal(got, torch.cat([front, x[..., 16:]], -1)) and got.is_contiguous()


def test_a_whole_head_may_be_rotated() -> None:
    x, cos, sin = inputs(torch.float32, dim=16)
    assert rotate_heads(x, cos, sin, interleaved=True).shape == x.shape
