"""Rows of the real width (512 latents, 64 rope values), in bfloat16 and fp8_ds_mla: how far from the float32 truth.

Near ties flip in both, so that tokens prove nothing; the error of the logits on the same tokens does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hisparse.testing.reference_decode import ReferenceModel
from tests.engine.hand_driver import HandDriver, engine_config

PROMPT, STEPS = 150, 6


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of GLM-MoE-DSA with random weights, an index group of two."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    config = GlmMoeDsaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=16, num_key_value_heads=16, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
        n_group=1, topk_group=1, kv_lora_rank=512, q_lora_rank=128, qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64,
        index_topk=64, index_head_dim=128, index_n_heads=32, mlp_layer_types=["dense", "sparse", "sparse"],
        indexer_types=["full", "shared", "full"], max_position_embeddings=4096, bos_token_id=0, eos_token_id=1,
        initializer_range=0.08,
    )
    path = tmp_path_factory.mktemp("wide")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        GlmMoeDsaForCausalLM(config).float().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def oracle(wide_checkpoint: Path) -> Callable[[torch.dtype], ReferenceModel]:
    models = {dtype: ReferenceModel(wide_checkpoint, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    return models.__getitem__


@pytest.mark.parametrize(("row_format", "indexer_dtype", "factor"),
                         [("auto", "auto", 1.5), ("fp8_ds_mla", "auto", 2.0), ("auto", "fp8", 2.5)])
def test_the_error_of_a_row_format(wide_checkpoint: Path, oracle: Callable[[torch.dtype], ReferenceModel], row_format: str,
                                   indexer_dtype: str, factor: float) -> None:
    """Against what the oracle loses by computing in bfloat16 at all; half of the pages are served by hot regions."""
    ours, theirs = [], []
    config = engine_config(wide_checkpoint, model={"dtype": "bfloat16"},
                           cache={"row_format": row_format, "indexer_dtype": indexer_dtype, "hot_rows": 64,
                                  "device_blocks": 900, "block_size": 32})
    with HandDriver(config) as driver:
        assert driver.layout.row.row_bytes == (656 if row_format == "fp8_ds_mla" else 1152)
        assert driver.layout.indexer_row_bytes == (132 if indexer_dtype == "fp8" else 256)
        for number in range(4):
            draw = torch.Generator().manual_seed(number)
            ids = torch.randint(2, 512, (PROMPT,), generator=draw).tolist()
            seat = driver.open(number, ids)
            driver.prefill(seat, (PROMPT,))
            driver.spill(seat, range(3))
            driver.give_hot_region(seat)
            driver.drop(seat, range(3))
            driver.decode([seat], STEPS)
            runs = [oracle(dtype).decode(ids, STEPS + 1, prefill_chunks=PROMPT, forced=seat.generated, keep_logits=True)
                    for dtype in (torch.float32, torch.bfloat16)]
            truth, coarse = (run.logits.log_softmax(-1) for run in runs)
            ours.append(torch.stack(seat.logprobs) - truth)
            theirs.append(coarse - truth)
        assert driver.stats.miss_rows > 0
    error, allowed = (torch.cat(part).abs().mean() for part in (ours, theirs))
    spread = (truth - truth.mean(-1, keepdim=True)).abs().mean()
    print(f"{row_format}, keys {indexer_dtype}: {error:.4f}, the oracle in bfloat16 {allowed:.4f}, spread {spread:.3f}")
    assert error < factor * allowed and error < 0.5 * spread, f"{error:.4f}, oracle {allowed:.4f}, spread {spread:.3f}"
