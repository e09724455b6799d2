"""RMS norms in one launch instead of six, for bfloat16 on CUDA, where a decode step is bound by its number of launches."""

from __future__ import annotations

import functools
from typing import Any

from torch.nn.functional import rms_norm


def use_fused_norms(network: Any) -> None:
    """Replaces the forward of every RMS norm of a network.

    Hugging Face rounds the normalised value to bfloat16 and again after the weight; the fused norm rounds once, so results
    differ by at most one unit in the last place, towards the truth.
    """
    for module in network.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(
                rms_norm, normalized_shape=tuple(module.weight.shape), weight=module.weight, eps=module.variance_epsilon
            )
