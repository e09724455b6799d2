"""The rope of attention in two launches instead of fourteen, with the same bits.

Hugging Face's attention forward runs as it is, from its own code object; only the name of its rope function means another
function there. The module itself is not touched, so that an unmodified model in the same process stays one.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

from torch import Tensor

from hisparse.engine.models.seams import seam_error
from hisparse.ops import backend

_NAME = "apply_rotary_pos_emb_interleave"


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[B, H, S, rope] of q and k, as `apply_rotary_pos_emb_interleave` rotates them; cos, sin [B, S, rope]."""
    ops = backend(q.device)
    cos, sin = cos.flatten(0, 1), sin.flatten(0, 1)
    size, length = q.shape[0], q.shape[2]
    out = []
    for part in (q, k):
        heads = ops.rotate_heads(part.transpose(1, 2).flatten(0, 1), cos, sin, interleaved=True)
        out.append(heads.view(size, length, *heads.shape[1:]).transpose(1, 2))
    return out[0], out[1]


def use_fused_rope(attention: Any) -> None:
    """Replaces the forward of one attention module. Raises ConfigError when its class ropes by another function."""
    forward = inspect.unwrap(type(attention).forward)
    if _NAME not in forward.__code__.co_names or _NAME not in forward.__globals__:
        raise seam_error(f"{type(attention).__name__}.forward does not call {_NAME}")
    same = types.FunctionType(forward.__code__, {**forward.__globals__, _NAME: _rotate}, forward.__name__,
                              forward.__defaults__, forward.__closure__)
    same.__kwdefaults__ = forward.__kwdefaults__
    attention.forward = types.MethodType(same, attention)
