"""The kernel that rotates heads, against the reference to the bit."""

from __future__ import annotations

import pytest
import torch

from hisparse.errors import InvariantError
from hisparse.ops import reference
from tests.ops.test_rope import inputs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("heads", "dim", "rope"), [(1, 128, 64), (32, 128, 64), (16, 32, 16), (3, 40, 24), (5, 16, 16)])
def test_bits_are_the_references(dtype: torch.dtype, interleaved: bool, heads: int, dim: int, rope: int) -> None:
    from hisparse.ops.cuda.rope import rotate_heads

    for n in (1, 33):
        x, cos, sin = inputs(dtype, n=n, heads=heads, dim=dim, rope=rope)
        got = rotate_heads(x.cuda(), cos.cuda(), sin.cuda(), interleaved=interleaved)
        assert torch.equal(got.cpu(), reference.rotate_heads(x, cos, sin, interleaved=interleaved)) and got.is_contiguous()


def test_shapes_are_checked_and_nothing_is_fine() -> None:
    from hisparse.ops.cuda.rope import rotate_heads

    x, cos, sin = (part.cuda() for part in inputs(torch.float32))
    assert rotate_heads(x[:0], cos[:0], sin[:0], interleaved=True).shape == (0, 3, 48)
    with pytest.raises(InvariantError, match="cos and sin must be"):
        rotate_heads(x, cos[:2], sin[:2], interleaved=True)
    with pytest.raises(InvariantError, match="adjacent"):
        rotate_heads(x.transpose(1, 2).contiguous().transpose(1, 2), cos, sin, interleaved=True)
