"""Byte arithmetic, checked against hand-computed numbers and by writing through every layer."""

from __future__ import annotations

import dataclasses

import pytest

from hisparse.errors import ConfigError, InvariantError
from hisparse.layout import KVCacheLayout, ModelShape, RowFormat

GLM52 = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": 78, "num_attention_heads": 64, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 2048, "max_position_embeddings": 1048576,
    "vocab_size": 154880, "index_topk_freq": 4, "index_skip_topk_offset": 3,
}
V32 = {**GLM52, "model_type": "deepseek_v32", "num_hidden_layers": 61, "num_attention_heads": 128,
       "max_position_embeddings": 163840, "vocab_size": 129280}


def shape(num_layers: int = 6, kinds: str = "fsfsfs", latent: int = 64, rope: int = 16, index: int = 32) -> ModelShape:
    return ModelShape.from_hf_config({
        **GLM52, "num_hidden_layers": num_layers, "kv_lora_rank": latent, "qk_rope_head_dim": rope, "index_head_dim": index,
        "index_topk": 32, "indexer_types": [{"f": "full", "s": "shared"}[kind] for kind in kinds],
    })


def test_row_formats() -> None:
    assert RowFormat(dtype="bfloat16", latent_dim=512, rope_dim=64).row_bytes == 1152
    assert RowFormat(dtype="float32", latent_dim=64, rope_dim=32).row_bytes == 384
    with pytest.raises(ConfigError, match="multiple of 16"):
        RowFormat(dtype="bfloat16", latent_dim=60, rope_dim=7)
    with pytest.raises(ConfigError, match="float64"):
        RowFormat(dtype="float64", latent_dim=64, rope_dim=32)


def test_fp8_ds_mla_rows() -> None:
    row = RowFormat(dtype="uint8", latent_dim=512, rope_dim=64)
    assert (row.row_bytes, row.row_elems, row.values, row.rope_byte_offset, row.name) == (656, 656, 576, 528, "fp8_ds_mla")
    small = RowFormat(dtype="uint8", latent_dim=128, rope_dim=16)
    assert (small.row_bytes, small.rope_byte_offset) == (128 + 16 + 32, 144)  # one scale, filled up to 16 bytes
    plain = RowFormat(dtype="bfloat16", latent_dim=512, rope_dim=64)
    assert (plain.row_elems, plain.values, plain.rope_byte_offset, plain.name) == (576, 576, 1024, "bfloat16")
    with pytest.raises(ConfigError, match=r"kv_lora_rank is 64; set cache.row_format to auto"):
        RowFormat(dtype="uint8", latent_dim=64, rope_dim=16)
    with pytest.raises(ConfigError, match="multiple of 16"):
        RowFormat(dtype="uint8", latent_dim=128, rope_dim=12)


def test_fp8_indexer_keys_have_their_scale_behind_them() -> None:
    layout = KVCacheLayout.build(shape(index=128), dtype="bfloat16", indexer_dtype="uint8")
    assert (layout.indexer_row_bytes, layout.indexer_row_elems) == (132, 132)
    assert layout.indexer_page_bytes == len(layout.indexer.layers) * layout.block_size * 132 <= layout.block_bytes
    plain = KVCacheLayout.build(shape(index=128), dtype="bfloat16")
    assert (plain.indexer_row_bytes, plain.indexer_row_elems) == (256, 128)
    assert layout.fingerprint() != plain.fingerprint()
    with pytest.raises(ConfigError, match="multiple of 4, got 6; set cache.indexer_dtype to auto"):
        KVCacheLayout.build(shape(index=6), indexer_dtype="uint8")


@pytest.mark.parametrize("config", [GLM52, V32])
def test_fp8_ds_mla_blocks_hold_whole_rows(config: dict[str, object]) -> None:
    layout = KVCacheLayout.build(ModelShape.from_hf_config(config), dtype="bfloat16", row_format="fp8_ds_mla")
    assert layout.row.row_bytes == 656 and layout.layer_page_bytes == 41_984 and layout.indexer_dtype == "bfloat16"
    assert layout.block_bytes == layout.rows_per_block * 656 and layout.block_bytes % 16 == 0
    assert all(offset % 656 == 0 for offset in map(layout.layer_byte_offset, range(layout.shape.num_layers)))
    assert layout.indexer_page_bytes <= layout.block_bytes
    with pytest.raises(InvariantError, match="no multiple of 656-byte rows"):
        dataclasses.replace(layout, block_bytes=layout.block_bytes + 16)
    with pytest.raises(ConfigError, match="'auto' or 'fp8_ds_mla', got 'fp8'"):
        KVCacheLayout.build(ModelShape.from_hf_config(config), row_format="fp8")


def test_glm52_has_21_index_groups_and_v32_one_per_layer() -> None:
    glm = ModelShape.from_hf_config(GLM52)
    assert [group.leader for group in glm.index_groups] == [0, 1, 2, *range(6, 78, 4)]
    assert sum(len(group.layers) for group in glm.index_groups) == 78
    assert [group.layers for group in ModelShape.from_hf_config(V32).index_groups] == [(i,) for i in range(61)]


def test_b14_offsets_do_not_wrap_at_two_gib() -> None:
    layout = KVCacheLayout.build(ModelShape.from_hf_config(GLM52), dtype="bfloat16")
    assert layout.host_page_byte_offset(77, 200_000, 262_144) == (77 * 262_144 + 200_000) * 64 * 1152 > 2**40
    assert layout.device_bytes(100_000) == 100_000 * layout.block_bytes > 2**35


def test_capacity() -> None:
    layout = KVCacheLayout.build(shape(), block_size=64)
    assert [layout.pages(n) for n in (0, 1, 63, 64, 65)] == [0, 1, 1, 1, 2]
    assert layout.pages(32_019) == 501 and KVCacheLayout.build(shape(), block_size=32).pages(32_019) == 1001
    assert layout.device_blocks_resident(65) == 2 * (1 + layout.num_resident_groups)
    assert layout.host_blocks_in(10 * layout.host_block_bytes + 5) == 10
    assert layout.hot_blocks(832) == 13


def test_the_fingerprint_is_stable_and_sees_every_difference() -> None:
    base = KVCacheLayout.build(shape(), block_size=64)
    assert base.fingerprint() == KVCacheLayout.build(shape(), block_size=64).fingerprint()
    others = [
        KVCacheLayout.build(shape(), block_size=32), KVCacheLayout.build(shape(), dtype="bfloat16"),
        KVCacheLayout.build(shape(kinds="ffsfss")), KVCacheLayout.build(shape(), num_groups=1),
        KVCacheLayout.build(shape(index=64)), KVCacheLayout.build(shape(latent=80)),
        KVCacheLayout.build(shape(), indexer_dtype="bfloat16"),
        KVCacheLayout.build(shape(latent=128)), KVCacheLayout.build(shape(latent=128), row_format="fp8_ds_mla"),
    ]
    assert len({base.fingerprint(), *(other.fingerprint() for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "llama.*glm_moe_dsa"),
        ({"index_topk": None}, "index_topk"),
        ({"indexer_types": ["full"]}, "1 entries for 78 layers"),
        ({"num_hidden_layers": 2, "indexer_types": ["shared", "full"]}, "first layer"),
        ({"num_hidden_layers": 2, "indexer_types": ["full", "half"]}, "half"),
    ],
)
def test_a_config_that_is_not_dsa_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelShape.from_hf_config({**GLM52, **change})


@pytest.mark.parametrize("block_size", [0, 3, 48, 128])
def test_block_size_must_fit_a_row_mask(block_size: int) -> None:
    with pytest.raises(ConfigError, match="power of two in 4..64"):
        KVCacheLayout.build(shape(), block_size=block_size)


def test_num_groups_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1\.\.3"):
        KVCacheLayout.build(shape(), num_groups=4)
