"""Three tiny DSA checkpoints with random weights and real tensor names: made in seconds, the same every time.

Random logits are flat but distinct, so fp32 greedy decoding is a sharp test of the KV path and of nothing else.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

_STDLIB_FILES = 24
_COMMON: dict[str, Any] = dict(
    vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
    n_group=1, topk_group=1, kv_lora_rank=64, q_lora_rank=96, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
    index_topk=32, index_head_dim=32,
    index_n_heads=16,  # fewer heads tie: every relu can be zero at once
    first_k_dense_replace=1, max_position_embeddings=16384, bos_token_id=0, eos_token_id=1, initializer_range=0.08,
)
_ROPE_GLM = {"rope_type": "default", "rope_theta": 1_000_000.0}
_ROPE_V32 = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm5": ("GlmMoeDsa", {"rope_parameters": _ROPE_GLM}),
    "glm52": ("GlmMoeDsa", {"rope_parameters": _ROPE_GLM, "num_hidden_layers": 6, "index_topk_freq": 2,
                            "index_skip_topk_offset": 2}),
    "ds32": ("DeepseekV32", {"rope_parameters": _ROPE_V32}),
}
"""Name -> (transformers class prefix, differences). glm52 shares top-k: full, full, shared, full, shared, full."""


def tiny_checkpoints(cache_dir: str | Path | None = None) -> dict[str, Path]:
    """Directories of the three checkpoints, made on the first call and kept for later ones.

    Args:
        cache_dir: where to keep them; default: a directory of this user below the system's temporary directory,
            named after everything the bytes depend on (this file, Python, torch and transformers).
    Returns:
        "glm5", "glm52", "ds32" -> directory with config.json, model.safetensors and a tokenizer.
    """
    default = Path(tempfile.gettempdir()) / f"hisparse-tiny-{_user()}-{_key()}"
    root = Path(cache_dir) if cache_dir is not None else default
    paths = {name: root / name for name in VARIANTS}
    if not _complete(paths):
        root.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=root.name + ".", dir=root.parent))
        try:
            _make(scratch)
            if root.is_dir() and not _complete(paths):  # a cleaner of temporary files took some
                shutil.rmtree(root, ignore_errors=True)
            try:
                scratch.rename(root)
            except OSError:  # another process was faster; its files are the same
                if not _complete(paths):
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return paths


def _complete(paths: dict[str, Path]) -> bool:
    files = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    return all((path / file).is_file() for path in paths.values() for file in files)


def _make(root: Path) -> None:
    import torch
    import transformers

    tokenizer = _train_tokenizer()
    for name, (prefix, differences) in VARIANTS.items():
        config = getattr(transformers, f"{prefix}Config")(**{**_COMMON, **differences})
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("k_norm.bias"):
                    parameter.normal_(0, 0.1)
                elif "norm" in parameter_name and parameter.dim() == 1:
                    parameter.uniform_(0.7, 1.3)
            for buffer_name, buffer in model.named_buffers():
                if "e_score_correction_bias" in buffer_name:
                    buffer.uniform_(-0.1, 0.1)
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)


def _train_tokenizer() -> Any:
    """A byte-level BPE of 512 entries, trained on the standard library's own source."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    files = sorted(Path(os.__file__).parent.glob("*.py"))[:_STDLIB_FILES]
    text = "\n".join(path.read_text(encoding="utf8", errors="ignore") for path in files)
    bpe: Any = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<bos>", "<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ))
    wrap: Any = PreTrainedTokenizerFast
    return wrap(tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>")


def _key() -> str:
    import torch
    import transformers

    facts = (inspect.getsource(sys.modules[__name__]), sys.version, torch.__version__, transformers.__version__)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else "user"
