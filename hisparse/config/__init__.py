"""Configuration: one frozen object, from YAML, environment and keywords. docs/configuration.md lists every option."""

from hisparse.config.derived import (
    FP8_KEYS_BLOCK,
    GIB,
    check_ranks,
    host_blocks,
    hot_rows,
    hot_rows_max,
    kv_layout,
    model_path,
    model_shape,
    served_name,
)
from hisparse.config.document import Document
from hisparse.config.loading import load_config
from hisparse.config.sections import (
    AutoscalingConfig,
    CacheConfig,
    EngineConfig,
    HiSparseConfig,
    ModelConfig,
    PDConfig,
    SchedulerConfig,
    ServeConfig,
    TelemetryConfig,
    TraceConfig,
)

__all__ = [
    "FP8_KEYS_BLOCK", "GIB", "AutoscalingConfig", "CacheConfig", "Document", "EngineConfig", "HiSparseConfig", "ModelConfig",
    "PDConfig", "SchedulerConfig", "ServeConfig", "TelemetryConfig", "TraceConfig", "check_ranks", "host_blocks", "hot_rows",
    "hot_rows_max", "kv_layout", "load_config", "model_path", "model_shape", "served_name",
]
