"""Models and GPUs by name. A model is the part of its `config.json` that decides sizes."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from hisparse.errors import ConfigError

_GLM: dict[str, Any] = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": 78, "first_k_dense_replace": 3, "hidden_size": 6144,
    "intermediate_size": 12_288, "moe_intermediate_size": 2048, "num_attention_heads": 64, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "q_lora_rank": 2048, "kv_lora_rank": 512, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 202_752, "vocab_size": 154_880,
}
_DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v32", "num_hidden_layers": 61, "first_k_dense_replace": 3, "hidden_size": 7168,
    "intermediate_size": 18_432, "moe_intermediate_size": 2048, "num_attention_heads": 128, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163_840, "vocab_size": 129_280,
}

MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v3.2": _DEEPSEEK,
    "glm-5": _GLM,
    "glm-5.1": _GLM,
    "glm-5.2": _GLM | {"index_topk_freq": 4, "index_skip_topk_offset": 3, "max_position_embeddings": 1_048_576},
}
"""Sources: DeepSeek's published inference configuration of V3.2-Exp; the Hugging Face class defaults of `glm_moe_dsa` and a
published `config.json` of GLM-5.1; for GLM-5.2 (21 layers own an indexer) loaders of several serving engines, which agree."""

GPUS: dict[str, int] = {"h100": 81_559, "h200": 143_771, "b200": 183_359, "b300": 275_040}
"""Memory of one GPU in MiB, as nvidia-smi shows it for the SXM modules."""


def model_config(name: str) -> tuple[str, dict[str, Any]]:
    """(name for people, config) of a preset, a checkpoint directory, a `config.json`, or 'recall'.

    A preset may be written as on the hub: "zai-org/GLM-5.2" is glm-5.2, unless there is such a directory.

    Raises:
        ConfigError: none of these; lists the presets.
    """
    short = name.lower() if Path(name).exists() else name.lower().rpartition("/")[2]
    if short in MODELS:
        return short, dict(MODELS[short])
    if name == "recall":
        from hisparse.checkpoints import recall_checkpoint

        path = recall_checkpoint()
    else:
        path = Path(name)
    file = path if path.is_file() else path / "config.json"
    try:
        data = json.loads(file.read_text())
    except OSError as error:
        near = difflib.get_close_matches(short, MODELS, n=1)
        raise ConfigError(f"--model {name}: neither a preset ({', '.join(MODELS)}) nor a checkpoint: {file}: "
                          f"{error.strerror}{f'; did you mean {near[0]}?' if near else ''}") from error
    except ValueError as error:
        raise ConfigError(f"--model {name}: {file} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"--model {name}: {file} holds no JSON object")
    return name, data


def gpu_memory_bytes(name: str) -> int:
    """Raises ConfigError for a GPU that is not known; lists those that are."""
    if name.lower() not in GPUS:
        raise ConfigError(f"--gpu {name}: known are {', '.join(GPUS)}; for another one give its memory with --gpu-gib")
    return GPUS[name.lower()] << 20
