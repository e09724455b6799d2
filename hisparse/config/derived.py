"""What follows from a configuration and its checkpoint: paths, the layout, rows of hot regions, pages of the host pool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hisparse.config.loading import warn_once
from hisparse.config.sections import CacheConfig, HiSparseConfig, ModelConfig
from hisparse.errors import ConfigError
from hisparse.layout import KVCacheLayout, ModelShape, limit_rows, start_rows

GIB = 1 << 30
FP8_KEYS_BLOCK = 32
"""The scores kernel reads fp8 keys and their scales in tiles of this many positions of a page."""


def hot_rows(config: CacheConfig, layout: KVCacheLayout) -> tuple[int, ...]:
    """Rows a hot region starts with, per group of `layout.hots`: whole pages, at least top_k; see `CacheConfig`.

    Raises:
        ConfigError: a list of another length, a group below top_k or above 32,768 rows, or a budget below all top_k.
    """
    return start_rows(config.hot_rows, total_rows=config.hot_rows_total, weights=config.hot_rows_weights,
                      num_groups=len(layout.hots), top_k=layout.shape.top_k, block_size=layout.block_size)


def hot_rows_max(config: CacheConfig, layout: KVCacheLayout) -> tuple[int, ...]:
    """Rows a hot region may grow to, per group of `layout.hots`, in whole pages. Raises ConfigError like `hot_rows`."""
    return limit_rows(config.hot_rows_max, start=hot_rows(config, layout), block_size=layout.block_size)


def host_blocks(config: CacheConfig, layout: KVCacheLayout, max_model_len: int) -> int:
    """Host pages of the pool incl. its null block; at least one longest request and two more.

    Raises:
        ConfigError: the pool is too small, with the numbers.
    """
    if not config.enabled:
        return 0
    got, option = layout.host_blocks_in(int(config.host_pool_gib * GIB)), f"host_pool_gib = {config.host_pool_gib}"
    if config.host_to_device_ratio is not None:
        resident = (config.device_blocks - 1) // layout.device_blocks_resident(layout.block_size)
        got, option = 1 + int(config.host_to_device_ratio * resident), f"host_to_device_ratio = {config.host_to_device_ratio:g}"
    need = layout.pages(max_model_len) + 2
    fix = f"host_pool_gib to {need * layout.host_block_bytes / GIB:.3f}" if config.host_to_device_ratio is None else "it"
    if got < need:
        raise ConfigError(
            f"cache.{option} holds {got} host pages of {layout.host_block_bytes} bytes, but "
            f"model.max_model_len = {max_model_len} needs at least {need}; raise {fix} or lower max_model_len"
        )
    return got


def served_name(config: ModelConfig) -> str:
    """The model's name in the API and in metrics."""
    return config.name or model_path(config).name


def model_path(config: ModelConfig) -> Path:
    """Directory of the checkpoint; 'recall' is the bundled one."""
    if config.path == "recall":
        from hisparse.checkpoints import recall_checkpoint

        return recall_checkpoint()
    path = Path(config.path)
    if not (path / "config.json").is_file():
        fix = "give a local directory or 'recall'"
        if config.path.count("/") == 1 and not path.is_absolute() and not path.exists():  # as names on the hub are
            fix = f"nothing is downloaded: 'hf download {config.path} --local-dir DIRECTORY', then give DIRECTORY"
        raise ConfigError(f"model.path: no checkpoint at {path} (config.json not found); {fix}")
    return path


def model_shape(config: ModelConfig) -> ModelShape:
    """Reads the checkpoint's config.json. Raises ConfigError when it is not a DSA checkpoint or max_model_len too long."""
    shape = ModelShape.from_hf_config(_hf_config(config))
    if config.max_model_len > shape.max_positions:
        raise ConfigError(
            f"model.max_model_len = {config.max_model_len} exceeds the checkpoint's max_position_embeddings = "
            f"{shape.max_positions}; lower it"
        )
    return shape


def check_ranks(config: HiSparseConfig) -> None:
    """Raises ConfigError unless the checkpoint's attention heads can be split over the ranks of an engine."""
    heads, ranks = _hf_config(config.model).get("num_attention_heads"), config.tensor_parallel_size
    if isinstance(heads, int) and heads % ranks:
        raise ConfigError(f"tensor_parallel_size = {ranks} does not divide the model's {heads} attention heads; use one of "
                          f"{[n for n in range(1, 9) if heads % n == 0]}")


def _hf_config(config: ModelConfig) -> dict[str, Any]:
    path = model_path(config) / "config.json"
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return data


def kv_layout(config: HiSparseConfig) -> KVCacheLayout:
    """The cache layout that every part of an engine with this configuration uses. Warns (once a process) of its waste."""
    shape, fp8_keys = model_shape(config.model), config.cache.indexer_dtype == "fp8"
    if fp8_keys and config.model.device == "cuda" and (config.model.dtype, shape.index_head_dim) != ("bfloat16", 128):
        raise ConfigError(f"cache.indexer_dtype = fp8 on CUDA takes bfloat16 models with an index_head_dim of 128, not "
                          f"{config.model.dtype} with {shape.index_head_dim}; set it to auto")
    if fp8_keys and config.model.device == "cuda" and config.cache.block_size % FP8_KEYS_BLOCK:
        raise ConfigError(f"cache.indexer_dtype = fp8 on CUDA takes a cache.block_size that is a multiple of {FP8_KEYS_BLOCK}, "
                          f"not {config.cache.block_size}; set one of them to its default")
    layout = KVCacheLayout.build(shape, block_size=config.cache.block_size, dtype=config.model.dtype,
                                 row_format=config.cache.row_format, indexer_dtype="uint8" if fp8_keys else None,
                                 num_groups=config.cache.num_groups)
    advice = layout.waste_advice()
    if advice is not None:
        warn_once(advice)
    return layout
