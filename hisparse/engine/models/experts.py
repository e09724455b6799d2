"""Mixture-of-experts forwards that a CUDA graph can hold.

Hugging Face's default on CUDA, `grouped_mm`, captures in bfloat16; in float32 torch falls back to a loop that asks the device
for the group sizes. `batched_mm` captures in every dtype, but copies the weights of every selected expert once per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

BOUNDED = "hisparse_bounded_mm"
MOST_BYTES = 256 << 20
"""Most bytes of copied expert weights at once."""


def _bounded_mm(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`batched_mm` over as many tokens at a time as `MOST_BYTES` allows; hidden_states [n, hidden]."""
    expert = self.gate_up_proj[0].numel() + self.down_proj[0].numel()
    step = max(1, MOST_BYTES // (top_k_index.shape[1] * expert * self.down_proj.element_size()))
    parts = [batched_mm_experts_forward(self, hidden_states[i : i + step], top_k_index[i : i + step],
                                        top_k_weights[i : i + step]) for i in range(0, hidden_states.shape[0], step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


ALL_EXPERTS_FUNCTIONS.register(BOUNDED, _bounded_mm)


def use_capturable_experts(network: Any, dtype: torch.dtype) -> None:
    """Chooses the experts' forward for a network on CUDA. Networks without experts are left alone."""
    network.set_experts_implementation("grouped_mm" if dtype == torch.bfloat16 else BOUNDED)
