"""Weights of a DSA checkpoint on one GPU, counted from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hisparse.errors import ConfigError
from hisparse.layout.shape import indexer_types

Split = Literal["tp", "ep", "none"]
FP8_TILE_VALUES = 128 * 128
"""Weights that share one float32 scale in a block-quantised checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Parameters that are placed alike.

    Attributes:
        split: over which GPUs; "none" = every GPU has all of it. is_linear: may be stored as fp8; the rest stays bfloat16.
    """

    name: str
    params: int
    split: Split
    is_linear: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All parts of a model."""

    parts: tuple[Part, ...]

    @property
    def params(self) -> int:
        return sum(part.params for part in self.parts)

    def bytes_per_gpu(self, *, tp: int, ep: int, dtype: Literal["bf16", "fp8"]) -> int:
        """Bytes on the fullest GPU, where `tp` GPUs share the parts split "tp", and `ep` the routed experts."""
        total = 0
        for part in self.parts:
            params = -(-part.params // {"tp": tp, "ep": ep, "none": 1}[part.split])
            if dtype == "fp8" and part.is_linear:
                total += params + 4 * -(-params // FP8_TILE_VALUES)
            else:
                total += 2 * params
        return total

    @classmethod
    def of(cls, config: Mapping[str, Any], *, mtp_layers: int = 0) -> Weights:
        """Counts a Hugging Face configuration.

        Args:
            mtp_layers: multi-token prediction layers that are loaded, each a decoder layer with experts and an indexer.
        Raises:
            ConfigError: a size is missing; names it.
        """
        size = _Sizes(config)
        hidden, heads, layers = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
        nope, rope, value = size("qk_nope_head_dim"), size("qk_rope_head_dim"), size("v_head_dim")
        q_rank, kv_rank = size("q_lora_rank"), size("kv_lora_rank")
        experts, expert = size("n_routed_experts"), 3 * hidden * size("moe_intermediate_size")
        dense = _dense_layers(config, layers)
        indexers = indexer_types(config, layers).count("full") + mtp_layers
        decoders, moe = layers + mtp_layers, layers - dense + mtp_layers
        index_heads, index_dim, vocab = size("index_n_heads"), size("index_head_dim"), size("vocab_size")
        by_head = q_rank * (nope + rope) + kv_rank * (nope + value) + value * hidden
        tables = 1 if config.get("tie_word_embeddings") else 2
        return cls(parts=(
            Part(name="attention, by head", params=decoders * heads * by_head, split="tp"),
            Part(name="attention, latent projections", params=decoders * hidden * (q_rank + kv_rank + rope), split="none"),
            Part(name="indexers", params=indexers * index_dim * (q_rank * index_heads + hidden), split="none"),
            Part(name="indexer head weights and norms", params=indexers * (hidden * index_heads + 2 * index_dim), split="none",
                 is_linear=False),
            Part(name="dense MLP", params=dense * 3 * hidden * size("intermediate_size"), split="tp"),
            Part(name="routed experts", params=moe * experts * expert, split="ep"),
            Part(name="shared experts", params=moe * size("n_shared_experts") * expert, split="tp"),
            Part(name="router", params=moe * experts * (hidden + 1), split="none", is_linear=False),
            Part(name="norms", params=decoders * (2 * hidden + q_rank + kv_rank) + hidden, split="none", is_linear=False),
            Part(name="MTP projections", params=mtp_layers * (2 * hidden * hidden + 3 * hidden), split="none"),
            Part(name="embedding and head", params=tables * vocab * hidden, split="tp", is_linear=False),
        ))


class _Sizes:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __call__(self, name: str) -> int:
        value = self._config.get(name)
        if type(value) is not int or value < 0:
            raise ConfigError(f"the weights cannot be counted: config.json has {name} = {value!r}; give --weights-gib")
        return value


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return sum(kind == "dense" for kind in kinds)
    return min(int(config.get("first_k_dense_replace") or 0), layers)
