"""What the cache needs to know of a model: dimensions, and which layers share an indexer's top-k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hisparse.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexGroup:
    """A layer that owns an indexer and the later layers that reuse its top-k."""

    leader: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the cache needs to know of a DeepSeek-Sparse-Attention model."""

    model_type: str
    num_layers: int
    num_heads: int
    kv_lora_rank: int
    rope_dim: int
    index_head_dim: int
    top_k: int
    max_positions: int
    vocab_size: int
    index_groups: tuple[IndexGroup, ...]

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Reads a Hugging Face `config.json` dictionary.

        Raises:
            ConfigError: the checkpoint is not a DSA model, or a field is missing.
        """
        model_type = str(config.get("model_type", "unknown"))
        if model_type not in ("glm_moe_dsa", "deepseek_v32"):
            raise ConfigError(
                f"not a supported DSA checkpoint: model_type is {model_type!r}, supported are 'glm_moe_dsa' and "
                "'deepseek_v32' (models with kv_lora_rank and index_topk); point `model.path` at such a checkpoint"
            )
        need = ("num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim",
                "index_topk", "max_position_embeddings", "vocab_size")
        missing = [name for name in need if config.get(name) is None]
        if missing:
            raise ConfigError(f"config.json of a {model_type} checkpoint lacks {', '.join(missing)}")
        num_layers = int(config["num_hidden_layers"])
        return cls(
            model_type=model_type,
            num_layers=num_layers,
            num_heads=int(config["num_attention_heads"]),
            kv_lora_rank=int(config["kv_lora_rank"]),
            rope_dim=int(config["qk_rope_head_dim"]),
            index_head_dim=int(config["index_head_dim"]),
            top_k=int(config["index_topk"]),
            max_positions=int(config["max_position_embeddings"]),
            vocab_size=int(config["vocab_size"]),
            index_groups=_index_groups(indexer_types(config, num_layers)),
        )


def indexer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """'full' or 'shared' per layer, from `indexer_types` or derived by the GLM rule; V3.2 has an indexer everywhere."""
    if config.get("model_type") != "glm_moe_dsa":
        return ["full"] * num_layers
    given = config.get("indexer_types")
    if given is not None:
        if len(given) != num_layers:
            raise ConfigError(f"indexer_types has {len(given)} entries for {num_layers} layers")
        return [str(kind) for kind in given]
    freq = int(config.get("index_topk_freq") or 1)
    offset = int(config.get("index_skip_topk_offset") or 0)
    return ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(num_layers)]


def _index_groups(kinds: Sequence[str]) -> tuple[IndexGroup, ...]:
    if not kinds or kinds[0] != "full":
        raise ConfigError("the first layer must own an indexer ('full'); got " + (repr(kinds[0]) if kinds else "no layer"))
    groups: list[list[int]] = []
    for layer, kind in enumerate(kinds):
        if kind == "full":
            groups.append([layer])
        elif kind == "shared":
            groups[-1].append(layer)
        else:
            raise ConfigError(f"indexer_types[{layer}] must be 'full' or 'shared', got {kind!r}")
    return tuple(IndexGroup(leader=layers[0], layers=tuple(layers)) for layers in groups)
