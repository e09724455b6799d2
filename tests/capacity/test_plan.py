"""Capacity against sums written out by hand, and against what the cache manager really admits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.capacity.plan import CONTEXTS, CapacityPlan, Deployment
from hisparse.capacity.presets import GPUS, MODELS, gpu_memory_bytes, model_config
from hisparse.capacity.weights import Weights
from hisparse.config import CacheConfig
from hisparse.errors import ConfigError
from hisparse.layout import hot_state_bytes
from hisparse.ops import HotState
from hisparse.types import Landing

GIB = 1 << 30
K = 1024


def deployment(model: str = "glm-5.2", **changes: Any) -> Deployment:
    """100 GiB, of which 90 are planned with, less 4 of workspace and 50 of weights: 36 GiB for KV."""
    given = {"model": model, "config": MODELS[model], "gpu": "h200", "gpu_bytes": 100 * GIB, "weights_bytes": 50 * GIB}
    return Deployment(**given | changes)


def test_glm_5_2_at_128k_by_hand() -> None:
    plan = CapacityPlan.of(deployment(), [128 * K])
    assert plan.kv_bytes == 36 * GIB
    # 78 layers; 21 index groups of 1, 1 and 19 times 4 layers: ten blocks of at most 8 layers. A layer's page is 64 rows.
    assert plan.layout.host_block_bytes == 78 * 64 * 1152 and plan.layout.block_bytes == 8 * 64 * 1152 == 589_824
    (row,) = plan.rows
    # 2,048 pages: an indexer block and ten others for each
    assert row.requests_device_only == 2 == (36 * GIB - 589_824) // (2048 * 11 * 589_824)
    # default region: 3 * 2,048 + 64 = 6,208 rows = 97 blocks in each of ten groups; three pages in flight
    blocks = 2048 + 97 * 10 + 3 * 10
    # of each of 21 index groups: 4 * 6,208 slots of 5 bytes, the hand, 2 bytes for each position
    state = 21 * (24_832 * 5 + 4 + 2 * 131_072)
    assert (blocks, state) == (3048, 8_112_468)
    assert row.device_bytes == 3048 * 589_824 + 8_112_468
    assert row.fixed_bytes == 1000 * 589_824 + 8_112_468
    assert row.requests_hisparse == 21 == (36 * GIB - 589_824) // row.device_bytes
    assert row.host_bytes == (1 + 21 * 2048) * 78 * 64 * 1152
    assert (row.landing, row.limit) == ("host", "GPU memory")
    # p pages: (p + 1000) * 589,824 + 21 * (124,164 + 128 p) < 11 p * 589,824, so p > 592,431,444 / 5,895,552 = 100.5
    assert plan.crossover_tokens == 101 * 64


def test_deepseek_v3_2_in_fp8_at_32k_by_hand() -> None:
    plan = CapacityPlan.of(deployment("deepseek-v3.2", row_dtype="fp8", indexer_dtype="fp8", hot_rows=4096, hashed=True),
                           [32 * K])
    # 61 layers in five blocks of 13: rows of 512 + 16 + 128 bytes, keys of 128 + 4 bytes on every layer
    assert plan.layout.block_bytes == 13 * 64 * 656 == 545_792 >= 61 * 64 * 132
    (row,) = plan.rows
    assert row.requests_device_only == 23 == (36 * GIB - 545_792) // (512 * 6 * 545_792)
    device_bytes = (512 + 64 * 5 + 3 * 5) * 545_792 + 61 * (16_384 * 5 + 4)
    assert row.device_bytes == device_bytes and row.requests_hisparse == 82 == (36 * GIB - 545_792) // device_bytes
    assert row.host_bytes == (1 + 82 * 512) * 61 * 64 * 656


def test_drafts_take_the_mtp_layer_and_a_larger_region() -> None:
    plan = CapacityPlan.of(deployment("glm-5.1", spec_tokens=3), [64 * K])
    # 79 layers with an indexer each: 20 to a block; 79 keys of 256 bytes take 17.6 layers
    assert plan.layout.block_bytes == 20 * 64 * 1152 and plan.layout.host_block_bytes == 79 * 64 * 1152
    assert plan.hot_rows == (4 * 2048,) * 4  # four query rows of 2,048
    assert plan.rows[0].device_bytes == (1024 + 128 * 4 + 3 * 4) * 20 * 64 * 1152 + 79 * (32_768 * 5 + 4 + 2 * 65_536)
    assert any("MTP" in line for line in plan.assumptions())
    with pytest.raises(ConfigError, match="no multi-token prediction layer"):
        CapacityPlan.of(deployment(config=MODELS["glm-5.2"] | {"num_nextn_predict_layers": 0}, spec_tokens=1))
    with pytest.raises(ConfigError, match=r"spec|lookahead"):
        CapacityPlan.of(deployment(spec_tokens=3, hot_rows=6144))


def test_short_contexts_stay_on_the_device() -> None:
    (row,) = CapacityPlan.of(deployment(), [4 * K]).rows
    # the seats' tables take 21 * (124,164 + 8,192) bytes from each resident request of 64 * 11 blocks
    assert row.landing == "device"
    assert row.requests_device_only == 93 == (36 * GIB - 589_824) // (64 * 11 * 589_824)
    assert row.requests_hisparse == 92 == (36 * GIB - 589_824) // (64 * 11 * 589_824 + 21 * (124_164 + 8_192))


def test_replicas_multiply_and_a_small_host_limits() -> None:
    one, two = (CapacityPlan.of(deployment(tp=4, dp=dp), [128 * K]).rows[0] for dp in (1, 2))
    assert two.requests_hisparse == 2 * one.requests_hisparse and two.host_bytes == 2 * one.host_bytes
    assert two.requests_device_only == 2 * one.requests_device_only and two.device_bytes == one.device_bytes
    page = 78 * 64 * 1152
    (row,) = CapacityPlan.of(deployment(host_bytes=(1 + 5 * 2048) * page + 1, dp=2), [128 * K]).rows
    assert (row.requests_hisparse, row.limit) == (2 * 5, "host memory")
    (row,) = CapacityPlan.of(deployment(host_bytes=(1 + 5 * 2048) * page - 1), [128 * K]).rows
    assert row.requests_hisparse == 4
    assert CapacityPlan.of(deployment(host_bytes=0), [128 * K]).rows[0].requests_hisparse == 0


def admitted(plan: CapacityPlan, tokens: int, *, enabled: bool, requests: int) -> int:
    """How many requests of `tokens` tokens a real cache manager takes when memory is set aside for `requests` seats' state."""
    layout, d = plan.layout, plan.deployment
    positions = layout.pages(tokens) * layout.block_size
    state = 0
    if enabled:
        state = len(layout.shape.index_groups) * hot_state_bytes(min(4 * plan.hot_rows[0], 32_768), positions)
    config = CacheConfig(enabled=enabled, device_blocks=(plan.kv_bytes - requests * state) // layout.block_bytes,
                         hot_rows=plan.hot_rows if enabled else None, prefix_cache=False)
    hosts = 0 if not enabled else (requests + 1) * layout.pages(tokens) + 2
    if d.host_bytes is not None and enabled:
        hosts = layout.host_blocks_in(d.host_bytes)
    manager = KVCacheManager(layout, config, num_host_blocks=hosts, max_model_len=tokens, max_seats=1000,
                             max_query_tokens=1 + d.spec_tokens, num_ranks=1, lookahead_tokens=d.spec_tokens)
    for i in range(1000):
        manager.open(str(i), [0] * tokens, max_tokens=1)
        landing = {"landing": Landing.HOST, "import_tokens": tokens} if enabled else {}
        chunk = 1 + d.spec_tokens
        if manager.admit(str(i), manager.prefix(str(i)), chunk_tokens=chunk, **landing) is None:  # type: ignore[arg-type]
            return i
    raise AssertionError("no end")


@pytest.mark.parametrize(("model", "tokens", "changes"), [
    ("glm-5.2", 128 * K, {}),
    ("glm-5.2", 1024 * K, {"row_dtype": "fp8"}),
    ("glm-5.1", 32 * K, {"spec_tokens": 2, "gpu_bytes": 80 * GIB}),
    ("deepseek-v3.2", 32 * K, {"row_dtype": "fp8", "indexer_dtype": "fp8", "hot_rows": 4096}),
    ("deepseek-v3.2", 32 * K, {"host_bytes": 40 * GIB}),
], ids=lambda value: str(value))
def test_the_cache_manager_admits_as_many(model: str, tokens: int, changes: dict[str, Any]) -> None:
    plan = CapacityPlan.of(deployment(model, **changes), [tokens])
    (row,) = plan.rows
    assert row.landing == "host" and row.requests_hisparse > row.requests_device_only
    assert admitted(plan, tokens, enabled=True, requests=row.requests_hisparse) == row.requests_hisparse
    if row.limit == "GPU memory":  # and not with the memory for one more
        assert admitted(plan, tokens, enabled=True, requests=row.requests_hisparse + 1) == row.requests_hisparse
    if row.requests_device_only:
        assert admitted(plan, tokens, enabled=False, requests=0) == row.requests_device_only


def test_state_is_counted_as_it_is_allocated() -> None:
    for hashed in (False, True):
        state = HotState.empty(3, 4096, 8192, hashed=hashed)
        real = sum(t.numel() * t.element_size() for t in (state.slot_tag, state.pos_slot, state.use, state.hand))
        assert real == 3 * hot_state_bytes(4096, 8192, hashed=hashed)


# ------------------------------------------------------------------------------------------- weights and presets


def test_parameters_are_those_that_the_makers_publish() -> None:
    glm = Weights.of(MODELS["glm-5.1"], mtp_layers=1)
    assert glm.params == pytest.approx(753.86e9, abs=0.01e9)  # sum over GLM-5.1's published list of tensors
    deepseek = Weights.of(MODELS["deepseek-v3.2"])
    indexers = 61 * (1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64)
    assert deepseek.params - indexers == pytest.approx(671.03e9, abs=0.01e9)  # V3, to which V3.2 adds the indexers
    assert Weights.of(MODELS["glm-5.1"]).params - Weights.of(MODELS["glm-5.2"]).params == 57 * (
        2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 6144 * 32)


def test_bytes_on_a_gpu_by_hand() -> None:
    config = {"model_type": "deepseek_v32", "num_hidden_layers": 2, "first_k_dense_replace": 1, "hidden_size": 256,
              "intermediate_size": 512, "moe_intermediate_size": 128, "num_attention_heads": 4, "qk_nope_head_dim": 64,
              "qk_rope_head_dim": 32, "v_head_dim": 64, "q_lora_rank": 128, "kv_lora_rank": 128, "index_n_heads": 2,
              "index_head_dim": 64, "n_routed_experts": 8, "n_shared_experts": 1, "vocab_size": 1000}
    by_head = 2 * 4 * (128 * 96 + 128 * 128 + 64 * 256)
    everywhere = 2 * 256 * (128 + 128 + 32) + 2 * 64 * (128 * 2 + 256)
    experts, mlps = 8 * 3 * 256 * 128, 3 * 256 * 512 + 3 * 256 * 128
    small = 2 * (256 * 2 + 2 * 64) + 8 * (256 + 1) + 2 * (2 * 256 + 128 + 128) + 256
    tables = 2 * 1000 * 256
    weights = Weights.of(config)
    assert weights.params == by_head + everywhere + experts + mlps + small + tables
    want = 2 * (by_head // 2 + everywhere + experts // 4 + mlps // 2 + small + tables // 2)
    assert weights.bytes_per_gpu(tp=2, ep=4, dtype="bf16") == want
    linear = by_head // 2 + everywhere + experts // 4 + mlps // 2
    fp8 = weights.bytes_per_gpu(tp=2, ep=4, dtype="fp8")
    assert want - linear <= fp8 <= want - linear + 4 * (linear // 16_384 + 8)
    with pytest.raises(ConfigError, match="q_lora_rank = None; give --weights-gib"):
        Weights.of(config | {"q_lora_rank": None})


def test_presets_have_the_published_shapes() -> None:
    per_token = {name: CapacityPlan.of(deployment(name), [8 * K]).layout for name in MODELS}
    rows = {name: layout.host_block_bytes // 64 for name, layout in per_token.items()}
    keys = {name: layout.indexer_page_bytes // 64 for name, layout in per_token.items()}
    assert rows == {"deepseek-v3.2": 70_272, "glm-5": 89_856, "glm-5.1": 89_856, "glm-5.2": 89_856}
    assert keys == {"deepseek-v3.2": 15_616, "glm-5": 19_968, "glm-5.1": 19_968, "glm-5.2": 5_376}
    leaders = [group.leader for group in per_token["glm-5.2"].shape.index_groups]
    assert leaders == [0, 1, *range(2, 78, 4)]
    assert gpu_memory_bytes("H200") == 143_771 << 20 and set(GPUS) == {"h100", "h200", "b200", "b300"}
    assert model_config("zai-org/GLM-5.2") == model_config("glm-5.2") == ("glm-5.2", MODELS["glm-5.2"])
    name, config = model_config("recall")
    assert name == "recall" and config["num_hidden_layers"] == 6


def test_contexts_beyond_the_model_are_left_out() -> None:
    plan = CapacityPlan.of(deployment("deepseek-v3.2"))
    assert [row.context_tokens for row in plan.rows] == [8 * K, 16 * K, 32 * K, 64 * K, 128 * K]
    assert plan.left_out_tokens == (256 * K, 512 * K, 1024 * K)
    assert any("longest, 163,840 tokens, are left out" in line for line in plan.assumptions())
    whole = CapacityPlan.of(deployment())
    assert [row.context_tokens for row in whole.rows] == list(CONTEXTS) and not whole.left_out_tokens
    assert not any("left out" in line for line in whole.assumptions())
    with pytest.raises(ConfigError, match=r"1\.\.163840 tokens"):
        CapacityPlan.of(deployment("deepseek-v3.2"), [200 * K])


@pytest.mark.parametrize(("changes", "text"), [
    ({"weights_bytes": None, "weights_dtype": "bf16", "tp": 8}, "no room for KV"),
    ({"weights_bytes": None, "tp": 3}, "does not divide the model's 64 attention heads"),
    ({"weights_bytes": None, "tp": 8, "ep": 3}, "--ep 3 does not divide the 8 GPUs"),
    ({"gpu_share": 1.1}, "above 0 and at most 1"),
    ({"hot_rows": 100}, "at least top_k = 2048"),
    ({"config": {"model_type": "llama"}}, "not a supported DSA checkpoint"),
])
def test_the_impossible_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        CapacityPlan.of(deployment(**changes))


def test_a_plan_is_plain_data() -> None:
    plan = CapacityPlan.of(deployment(), [8 * K])
    data = plan.asdict()
    assert data["rows"] == [dataclasses.asdict(plan.rows[0])] and "config" not in data["deployment"]
    assert data["deployment"]["tp"] == 1 and data["assumptions"] == plan.assumptions()
