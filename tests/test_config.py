"""Configuration: one object from file, environment and keywords; errors that say path, value, limit and fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hisparse.config import (
    CacheConfig,
    HiSparseConfig,
    ModelConfig,
    host_blocks,
    kv_layout,
    load_config,
    model_path,
    model_shape,
)
from hisparse.errors import ConfigError
from hisparse.layout import KVCacheLayout
from tests.test_layout import GLM52, shape

LAYOUT = KVCacheLayout.build(shape(), block_size=64)
BASE = {"model": {"path": "recall"}}


def test_precedence_is_file_environment_keywords(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: recall}\ncache: {device_blocks: 10, hot_rows: 64, watermark: 0.2}\n")
    environ = {"HISPARSE_CACHE__DEVICE_BLOCKS": "20", "HISPARSE_CACHE__HOT_ROWS": "65", "HISPARSE_OTHER": "x"}
    config = load_config(file, {"cache": {"hot_rows": 66}}, environ)
    assert (config.cache.device_blocks, config.cache.hot_rows, config.cache.watermark) == (20, 66, 0.2)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"model": {"path": "recall", "dtyp": "float32"}}, "model.dtyp: unknown key.*float32"),
        ({**BASE, "cache": {"block_size": 48}}, "power of two in 4..64.*48"),
        ({**BASE, "cache": {"device_blocks": "many"}}, "cache.device_blocks.*many"),
        ({**BASE, "cache": {"watermark": 1.5}}, "cache.watermark.*1.5"),
        ({**BASE, "scheduler": {"prefill_chunk_tokens": 4096}}, r"prefill_chunk_tokens \(4096\) must not exceed"),
        ({**BASE, "pd": {"lease_s": 0}}, "pd.lease_s"),
        ({**BASE, "tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"cache": {}}, "model: is required; give model: {path: DIRECTORY}"),
        ({**BASE, "extra": 1}, "extra: unknown key"),
    ],
)
def test_errors_name_path_value_and_limit(data: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(data, environ={})


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "missing.yaml")
    for text, words in (("a: [", "not valid YAML"), ("- 1\n", "mapping of sections, got list")):
        file = tmp_path / "c.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_config(file)


def test_roles_and_overrides_of_prefill() -> None:
    config = load_config({**BASE, "cache": {"device_blocks": 100, "hot_rows": 900},
                          "prefill": {"cache": {"device_blocks": 500}}}, environ={})
    prefill, decode = config.for_role("prefill"), config.for_role("decode")
    assert (prefill.cache.device_blocks, prefill.cache.hot_rows, prefill.pd.role) == (500, 900, "prefill")
    assert (decode.cache.device_blocks, decode.pd.role) == (100, "decode")
    environ = {"HISPARSE_CACHE__DEVICE_BLOCKS": "7"}
    config = load_config({**BASE, "prefill": {"cache": {"device_blocks": 500}}}, environ=environ)
    assert (config.for_role("prefill").cache.device_blocks, config.for_role("decode").cache.device_blocks) == (500, 7)
    with pytest.raises(ConfigError, match="cache.device_blok"):
        load_config({**BASE, "prefill": {"cache": {"device_blok": 1}}}, environ={}).for_role("prefill")


def test_a_host_pool_that_cannot_hold_one_request_is_refused_with_the_numbers() -> None:
    page_gib = LAYOUT.host_block_bytes / (1 << 30)
    assert host_blocks(CacheConfig(host_pool_gib=20.5 * page_gib), LAYOUT, 64 * 18) == 20
    with pytest.raises(ConfigError, match=r"holds 19 host pages.*needs at least 20; raise host_pool_gib to"):
        host_blocks(CacheConfig(host_pool_gib=19.5 * page_gib), LAYOUT, 64 * 18)
    assert host_blocks(CacheConfig(enabled=False, host_pool_gib=0), LAYOUT, 64 * 18) == 0


def test_checkpoints_that_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint at"):
        model_path(ModelConfig(path=str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        model_shape(ModelConfig(path=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="not a supported DSA checkpoint"):
        model_shape(ModelConfig(path=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps({**GLM52, "max_position_embeddings": 4096}))
    with pytest.raises(ConfigError, match="max_position_embeddings = 4096"):
        model_shape(ModelConfig(path=str(tmp_path), max_model_len=4097))


def test_fp8_indexer_keys_on_cuda_need_what_the_kernel_takes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM52))

    def layout(dtype: str, device: str, block_size: int = 64) -> object:
        model = {"path": str(tmp_path), "dtype": dtype, "device": device}
        cache = {"indexer_dtype": "fp8", "block_size": block_size}
        return kv_layout(HiSparseConfig.model_validate({"model": model, "cache": cache})).indexer_dtype

    assert layout("float32", "cpu") == layout("bfloat16", "cuda") == "uint8"
    with pytest.raises(ConfigError, match="takes bfloat16 models with an index_head_dim of 128, not float32 with 128"):
        layout("float32", "cuda")
    assert layout("bfloat16", "cuda", 32) == layout("bfloat16", "cpu", 16) == "uint8"
    with pytest.raises(ConfigError, match="a multiple of 32, not 16"):
        layout("bfloat16", "cuda", 16)


def test_operators_come_as_a_list_or_with_commas() -> None:
    assert load_config(BASE, environ={"HISPARSE_SERVE__OPERATORS": "ops, night,"}).serve.operators == ("ops", "night")
    assert load_config({**BASE, "serve": {"operators": ["ops"]}}, environ={}).serve.operators == ("ops",)
    with pytest.raises(ConfigError, match=r"serve\.operators"):
        load_config({**BASE, "serve": {"operators": [7]}}, environ={})
