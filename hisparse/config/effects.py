"""Options that were set and do nothing, because of other options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hisparse.config.options import options
from hisparse.config.sections import HiSparseConfig

HIERARCHY = ("cache.host_pool_gib", "cache.host_to_device_ratio", "cache.host_pool", "cache.hot_rows", "cache.hot_rows_total",
             "cache.hot_rows_weights", "cache.hot_rows_max", "cache.position_table", "cache.watermark",
             "cache.host_reserve_tokens", "cache.host_reservation")
"""What only the two tiers together use."""
PD = ("pd.lease_s", "pd.transfer_deadline_s", "pd.staging_slots", "pd.staging_slot_pages", "pd.gpu_reads", "pd.landing_path",
      "pd.kv_load_failure_policy", "pd.max_retries", "pd.local_prefill_tokens", "pd.transport", "prefill")

RULES: tuple[tuple[tuple[str, ...], Callable[[HiSparseConfig], bool], str], ...] = (
    (HIERARCHY, lambda c: not c.cache.enabled, "cache.enabled is false"),
    (("cache.host_pool_gib",), lambda c: c.cache.host_to_device_ratio is not None, "cache.host_to_device_ratio is set"),
    (PD, lambda c: not c.serve.prefill_replicas, "serve.prefill_replicas is 0, so one engine does both"),
    (("pd.role",), lambda c: True, "each replica gets its role; serve.prefill_replicas decides which there are"),
    (("engine.cuda_graphs", "model.gpu_share"), lambda c: c.model.device == "cpu", "model.device is cpu"),
    (("cache.position_table",), lambda c: c.model.device == "cpu", "only CUDA kernels build one; model.device is cpu"),
    (("pd.gpu_reads",), lambda c: c.model.device == "cpu", "model.device is cpu"),
    (("trace.requests", "trace.steps"), lambda c: c.trace.directory is None, "trace.directory is not set"),
    (("pd.local_prefill_tokens",), lambda c: c.pd.kv_load_failure_policy == "fail", "pd.kv_load_failure_policy is fail"),
    (("serve.allow_no_keys",), lambda c: bool(c.serve.api_keys or c.serve.api_keys_file), "there are API keys"),
    (("serve.share_prefixes",), lambda c: not (c.serve.api_keys or c.serve.api_keys_file), "without API keys there are no "
     "tenants"),
)
"""Options, when they do nothing, and why."""


def without_effect(data: dict[str, Any], config: HiSparseConfig) -> Iterator[str]:
    """A sentence for each option that `data` sets to something else than its default and that does nothing in `config`."""
    told: set[str] = set()
    for paths, idle, why in RULES:
        for path in paths if idle(config) else ():
            if path not in told and _is_set(data, config, path):
                told.add(path)
                yield f"{path} has no effect: {why}; remove it"


def _is_set(data: dict[str, Any], config: HiSparseConfig, path: str) -> bool:
    given: Any = data
    value: Any = config
    for part in path.split("."):
        if not isinstance(given, dict) or part not in given:
            return False
        given, value = given[part], getattr(value, part)
    default = options()[path].default
    shown = {True: "true", False: "false", None: "null"}.get(value) if value is None or isinstance(value, bool) else (
        f"{value:g}" if isinstance(value, float) else "{}" if value == {} else str(value))
    return shown != default
