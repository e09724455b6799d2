"""Configuration: one frozen pydantic object, from YAML, environment and keywords."""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, model_validator

from hisparse.errors import ConfigError
from hisparse.layout import KVCacheLayout, ModelShape, limit_rows, start_rows

GIB = 1 << 30
FP8_KEYS_BLOCK = 32
"""The scores kernel reads fp8 keys and their scales in tiles of this many positions of a page."""


def _rows_option(value: Any) -> Any:
    """One message instead of one per member of the union."""
    items = value if isinstance(value, (list, tuple)) else [value]
    if value is not None and (not items or any(type(item) is not int or item < 1 for item in items)):
        raise ValueError("must be a number of rows >= 1, or a list of them, one per hot group, e.g. [128, 256]")
    return value


def _keys_option(value: Any) -> Any:
    """A list, or one string with commas (as an environment variable has it)."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise ValueError("must be a list of strings, or one string with commas; quote keys that look like numbers")
    keys = [item.get_secret_value() if isinstance(item, SecretStr) else item for item in items]
    if any(not isinstance(key, str) or not key.strip() or len(key.split()) > 1 for key in keys):
        raise ValueError("every key must be a string without spaces; quote keys that look like numbers")
    return tuple(SecretStr(key.strip()) for key in keys)


KeysOption = Annotated[tuple[SecretStr, ...], BeforeValidator(_keys_option)]
RowsOption = Annotated[int | tuple[int, ...] | None, BeforeValidator(_rows_option)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ModelConfig(_Section):
    """Which checkpoint to serve and how to run it."""

    path: str = Field(description="Directory of a Hugging Face DSA checkpoint, or 'recall' for the bundled one.")
    name: str | None = Field(None, description="Name in the API; default: the directory's name.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Weights, activations and KV rows.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Compute device; cuda: one GPU for each rank.")
    gpu_share: float = Field(1.0, gt=0, le=1, description="Of one GPU, reserved in Ray for each rank when device is cuda; "
                             "below 1, engines share a GPU.")
    max_model_len: int = Field(8192, ge=2, description="Longest prompt + output of one request, in tokens.")


class CacheConfig(_Section):
    """The two pools and how the device pool is used as a write-back cache of the host pool. Sizes are per replica."""

    enabled: bool = Field(True, description="False: an ordinary device-only cache; no host pool, no command, no hot region.")
    block_size: int = Field(64, description="Tokens per page: a power of two in 4..64.")
    row_format: Literal["auto", "fp8_ds_mla"] = Field(
        "auto", description="KV rows: auto = model.dtype as it is; fp8_ds_mla = e4m3 latents with a scale for each 128, "
        "bfloat16 rope (656 instead of 1,152 bytes a token and layer at 512 + 64). Equal on prefill and decode.")
    indexer_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="Indexer keys: auto = model.dtype; fp8 = e4m3 with one scale a key (132 instead of 256 bytes at "
        "128), which selects slightly other tokens. Equal on prefill and decode.")
    device_blocks: int = Field(2048, ge=2, description="Blocks of the packed device allocation, incl. the null block.")
    host_pool_gib: float = Field(0.25, ge=0, description="Logical host capacity per replica; rounded down to whole pages.")
    host_pool: Literal["auto", "shared", "private"] = Field(
        "auto", description="auto: shared under Ray (private where that does not fit one rank's node), private without.")
    num_groups: int | None = Field(None, ge=1, description="Resident (and hot) groups the layers are packed into, equal on "
                                   "prefill and decode; default: the number with the fewest bytes per page.")
    hot_rows: RowsOption = Field(None, description="Rows a hot region of a request starts with, for every hot group or a "
                                 "list with one number each; default 3 * top_k + a page.")
    hot_rows_total: int | None = Field(None, ge=1, description="Instead of hot_rows: rows of one request over all hot "
                                       "groups, split by hot_rows_weights; every group gets at least top_k.")
    hot_rows_weights: tuple[Weight, ...] | None = Field(None, description="One per hot group, e.g. its share of the misses; "
                                                        "default equal.")
    hot_rows_max: RowsOption = Field(None, description="Limit of elastic growth, for every hot group or a list; default "
                                     "4 * hot_rows, <= 32,768.")
    position_table: Literal["direct", "hashed"] = Field(
        "direct", description="How the resolver finds a position's slot. direct: 2 bytes for each seat, index group and "
        "position of max_model_len; hashed (CUDA): none, each resolve builds a table in shared memory, which takes longer.")
    watermark: float = Field(0.1, gt=0, lt=1, description="Share of the device pool below which requests go hot.")
    prefix_cache: bool = Field(True, description="Reuse published host pages and cached indexer pages.")
    host_reserve_tokens: int = Field(1024, ge=0, description="Output tokens whose host pages admission reserves.")
    host_reservation: Literal["window", "full"] = Field("window", description="full: reserve all of max_tokens.")
    offload_indexer: bool = Field(True, description="Keep indexer pages in a host store so that preemption is cheap.")
    transfer_deadline_s: float = Field(30.0, gt=0, description="A copy without completion fails its worker after this.")

    @model_validator(mode="after")
    def _check_block_size(self) -> CacheConfig:
        if self.block_size not in (4, 8, 16, 32, 64):
            raise ValueError(f"block_size must be a power of two in 4..64 tokens, got {self.block_size}")
        return self

    @model_validator(mode="after")
    def _check_hot_rows(self) -> CacheConfig:
        if self.hot_rows is not None and self.hot_rows_total is not None:
            raise ValueError(f"hot_rows ({self.hot_rows}) and hot_rows_total ({self.hot_rows_total}) exclude each other; "
                             "set one of them to null")
        if self.hot_rows_weights is not None:
            if self.hot_rows_total is None:
                raise ValueError("hot_rows_weights split hot_rows_total, which is not set; set it or remove the weights")
            if not any(self.hot_rows_weights):
                raise ValueError(f"hot_rows_weights must not all be 0, got {list(self.hot_rows_weights)}")
        return self


class SchedulerConfig(_Section):
    """Continuous batching."""

    max_num_seqs: int = Field(16, ge=1, description="Requests running at once (seats).")
    prefill_chunk_tokens: int = Field(512, ge=1, description="Most prompt tokens of one request in one step.")
    max_step_tokens: int = Field(1024, ge=1, description="Most tokens of all requests in one step.")
    max_waiting: int = Field(1024, ge=1, description="Requests that may queue; more are refused with 429.")

    @model_validator(mode="after")
    def _check_chunk(self) -> SchedulerConfig:
        if self.prefill_chunk_tokens > self.max_step_tokens:
            raise ValueError(
                f"prefill_chunk_tokens ({self.prefill_chunk_tokens}) must not exceed max_step_tokens ({self.max_step_tokens})"
            )
        return self


class EngineConfig(_Section):
    """How each rank runs its steps."""

    cuda_graphs: bool = Field(True, description="Replay decode steps as CUDA graphs; false: eager, to look for errors.")


class TraceConfig(_Section):
    """Recording of what decode steps select, to replay through policies (docs/traces.md). Off by default."""

    directory: str | None = Field(None, description="Where rank 0 of each decoding engine writes one file when it stops.")
    requests: int = Field(1, ge=1, description="The first requests of an engine that are recorded.")
    steps: int = Field(512, ge=1, description="Of each of them; 4 bytes a step, index group and selected position are kept.")


class TelemetryConfig(_Section):
    """OpenTelemetry spans of requests. Off by default; the standard OTEL_* variables fill in what is not set here."""

    exporter: Literal["none", "otlp", "file"] = Field(
        "none", description="Where spans go: otlp = a collector; file = JSON lines in `directory`; none = there are none.")
    endpoint: str | None = Field(None, description="Of the collector, e.g. http://collector:4318 (http/protobuf) or "
                                 "http://collector:4317 (grpc); default the exporter's.")
    protocol: Literal["http/protobuf", "grpc"] = "http/protobuf"
    directory: str | None = Field(None, description="Of exporter file; must be there on every node. One file a process.")
    sample_ratio: float = Field(1.0, ge=0, le=1, description="Share of the requests that have spans, where the caller's "
                                "traceparent does not decide it.")
    service_name: str = "hisparse"

    @model_validator(mode="after")
    def _check_target(self) -> TelemetryConfig:
        if (self.exporter == "file") != (self.directory is not None):
            raise ValueError(f"directory belongs to exporter = file: exporter is {self.exporter}, directory {self.directory}; "
                             "set both or neither")
        if self.endpoint is not None and self.exporter != "otlp":
            raise ValueError(f"endpoint has no effect with exporter = {self.exporter}; set exporter to otlp, or remove it")
        return self


class PDConfig(_Section):
    """Prefill/decode disaggregation. Durations in seconds."""

    role: Literal["colocated", "prefill", "decode"] = "colocated"
    lease_s: float = Field(30.0, gt=0, description="How long prefill holds pages without a heartbeat.")
    transfer_deadline_s: float = Field(20.0, gt=0, description="An import without completion fails after this.")
    staging_slots: int = Field(4, ge=1, description="Slots of the staging pool for HOST landings.")
    staging_slot_pages: int = Field(8, ge=1, description="Whole pages per staging slot.")
    landing_path: Literal["staged", "direct"] = "staged"
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    max_retries: int = Field(3, ge=0, description="Prefill retries before the first token.")
    local_prefill_tokens: int = Field(16384, ge=0, description="Prompt tokens a decode engine may recompute at once "
                                      "(policy recompute) when prefill failed; more are refused with 503.")
    transport: Literal["nixl", "loopback"] = "nixl"


class AutoscalingConfig(_Section):
    """How many replicas a role has, by the requests that are open on them."""

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    target_requests: float | None = Field(None, gt=0, description="Open requests per replica to aim at; default 0.7 of the "
                                          "role's scheduler.max_num_seqs.")
    upscale_delay_s: float = Field(10.0, ge=0, description="How long more must be needed before replicas are added.")
    downscale_delay_s: float = Field(300.0, ge=0, description="How long fewer must be enough; a start loads weights and pins "
                                     "the pool, and the prefix cache of a replica goes with it.")

    @model_validator(mode="after")
    def _check_limits(self) -> AutoscalingConfig:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) must be at least min_replicas ({self.min_replicas})")
        return self


class ServeConfig(_Section):
    """The Ray Serve app."""

    host: str = Field("127.0.0.1", description="Address to listen on. Beyond this machine only with API keys.")
    port: int = Field(8000, ge=0, le=65535)
    prefill_replicas: int = Field(1, ge=0, description="0: one colocated engine does both.")
    decode_replicas: int = Field(1, ge=1)
    prefill_autoscaling: AutoscalingConfig | None = Field(None, description="Instead of a fixed number; prefill_replicas is "
                                                          "then what it starts with, within the limits.")
    decode_autoscaling: AutoscalingConfig | None = Field(None, description="The same for decode_replicas.")
    request_timeout_s: float = Field(300.0, gt=0, description="Deadline of every request.")
    start_timeout_s: float = Field(180.0, gt=0, description="A replica that is not ready by then fails its start.")
    drain_timeout_s: float = Field(30.0, ge=0, description="Open streams get so long to end when a replica stops.")
    step_timeout_s: float = Field(60.0, gt=0, description="An engine step without every rank's answer ends the engine.")
    metrics_interval_s: float = Field(1.0, ge=0, le=60, description="How often engines report metrics to Ray; 0: no metrics.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Of what replicas, engines, ranks log.")
    log_format: Literal["json", "text"] = Field("json", description="Of replicas, engines and ranks, in Ray's session logs.")
    max_body_bytes: int = Field(8 << 20, ge=1024, description="Longer request bodies are refused with 413.")
    api_keys: KeysOption = Field((), description="Clients must send one of them; never printed. Ray's dashboard shows the "
                                 "arguments of an application, so prefer api_keys_file or HISPARSE_SERVE__API_KEYS.")
    api_keys_file: str | None = Field(None, description="One 'KEY' or 'TENANT KEY' a line; read again when it changes. Must be "
                                      "there on every node that runs an ingress replica.")
    allow_no_keys: bool = Field(False, description="Serve other machines without keys, e.g. behind a gateway that checks them.")
    share_prefixes: bool = Field(False, description="Let tenants share cached prefixes. False: each API key (or tenant) sees "
                                 "only its own, whatever cache_salt it sends.")

    @model_validator(mode="after")
    def _check_autoscaling(self) -> ServeConfig:
        if self.prefill_autoscaling is not None and not self.prefill_replicas:
            raise ValueError("prefill_autoscaling has no effect without prefill replicas; set prefill_replicas to at least 1, "
                             "or remove it")
        return self

    @property
    def least_engines(self) -> int:
        """Engines that a complete service has at least."""
        counts = ((self.prefill_replicas, self.prefill_autoscaling), (self.decode_replicas, self.decode_autoscaling))
        return sum(count if scaling is None else scaling.min_replicas for count, scaling in counts)

    @model_validator(mode="after")
    def _check_exposure(self) -> ServeConfig:
        if self.api_keys or self.api_keys_file or self.allow_no_keys or _is_loopback(self.host):
            return self
        raise ValueError(f"host = {self.host} is reachable from other machines and no API keys are set; set api_keys_file (or "
                         "HISPARSE_SERVE__API_KEYS), or keep host = 127.0.0.1, or set allow_no_keys: true behind a gateway")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HiSparseConfig(_Section):
    """Everything. `prefill` overrides sections for prefill engines (e.g. a larger device pool)."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: EngineConfig = EngineConfig()
    trace: TraceConfig = TraceConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    tensor_parallel_size: int = Field(1, ge=1, le=8)
    pd: PDConfig = PDConfig()
    serve: ServeConfig = ServeConfig()
    prefill: dict[str, Any] = Field(default_factory=dict, description="Sections that differ on prefill engines.")

    def for_role(self, role: Literal["colocated", "prefill", "decode"]) -> HiSparseConfig:
        """This configuration as one engine of the given role uses it."""
        data = self.model_dump()
        if role == "prefill":
            data = _merge(data, self.prefill)
        data["pd"]["role"] = role
        data["prefill"] = {}
        return load_config(data, environ={})  # the environment is in `self` already, below the prefill overrides


def load_config(source: str | Path | dict[str, Any], overrides: dict[str, Any] | None = None,
                environ: dict[str, str] | None = None) -> HiSparseConfig:
    """Resolves YAML file or dictionary, then `HISPARSE_SECTION__FIELD` variables, then keyword overrides.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or impossible value; names path, value and limit.
    """
    if isinstance(source, dict):
        data: Any = source
    else:
        try:
            data = yaml.safe_load(Path(source).read_text())
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {source}: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{source} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"the configuration must be a mapping of sections, got {type(data).__name__}")
    environ = dict(os.environ) if environ is None else environ
    data = _with_otel(_merge(data, _from_environ(environ)), environ)
    data = _merge(data, overrides or {})
    try:
        return HiSparseConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error)) from error


def explain(error: ValidationError) -> str:
    """One line per problem: path, message, value given; never the value of a key."""
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"]) or "configuration"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown key; remove it or fix its spelling"
        shown = item["type"] != "missing" and not _holds_secrets(path, item["input"])
        lines.append(f"{path}: {message} (got {item['input']!r})" if shown else f"{path}: {message}")
    return "invalid configuration:\n  " + "\n  ".join(lines)


def _holds_secrets(path: str, value: Any) -> bool:
    return "key" in path.rpartition(".")[2] or ".api_keys." in path or (
        isinstance(value, dict) and any(_holds_secrets(str(name), item) for name, item in value.items()))


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
    got = layout.host_blocks_in(int(config.host_pool_gib * GIB))
    need = layout.pages(max_model_len) + 2
    if got < need:
        raise ConfigError(
            f"cache.host_pool_gib = {config.host_pool_gib} holds {got} host pages of {layout.host_block_bytes} bytes, but "
            f"model.max_model_len = {max_model_len} needs at least {need}; raise host_pool_gib to "
            f"{need * layout.host_block_bytes / GIB:.3f} or lower max_model_len"
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
        raise ConfigError(f"model.path: no checkpoint at {path} (config.json not found); give a local directory or 'recall'")
    return path


def model_shape(config: ModelConfig) -> ModelShape:
    """Reads the checkpoint's config.json. Raises ConfigError when it is not a DSA checkpoint or max_model_len too long."""
    import json

    path = model_path(config)
    try:
        data = json.loads((path / "config.json").read_text())
    except ValueError as error:
        raise ConfigError(f"{path / 'config.json'} is not valid JSON: {error}") from error
    shape = ModelShape.from_hf_config(data)
    if config.max_model_len > shape.max_positions:
        raise ConfigError(
            f"model.max_model_len = {config.max_model_len} exceeds the checkpoint's max_position_embeddings = "
            f"{shape.max_positions}; lower it"
        )
    return shape


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
        _warn_once(advice)
    return layout


@functools.cache
def _warn_once(message: str) -> None:
    logging.getLogger("hisparse").warning("%s", message)


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in top.items():
        out[key] = _merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def _from_environ(environ: dict[str, str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in environ.items():
        if not name.startswith("HISPARSE_") or "__" not in name:
            continue
        node = out
        *sections, leaf = name.removeprefix("HISPARSE_").lower().split("__")
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = yaml.safe_load(value)
    return out


def _with_otel(data: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
    """`data`, with OpenTelemetry's own variables where its section `telemetry` says nothing about the exporter."""
    given = data.get("telemetry") or {}
    if not isinstance(given, dict) or "exporter" in given:
        return data

    def read(*names: str) -> str:
        return next((environ[name].strip() for name in names if environ.get(name, "").strip()), "")

    endpoint = read("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    exporter = read("OTEL_TRACES_EXPORTER") or ("otlp" if endpoint else "none")
    if read("OTEL_SDK_DISABLED").lower() == "true" or exporter == "none":
        return data
    found: dict[str, Any] = {"exporter": exporter}
    if endpoint:
        found["endpoint"] = endpoint
    if protocol := read("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        found["protocol"] = protocol
    if name := read("OTEL_SERVICE_NAME"):
        found["service_name"] = name
    sampler, ratio = read("OTEL_TRACES_SAMPLER"), read("OTEL_TRACES_SAMPLER_ARG")
    if sampler.endswith("always_off"):
        found["sample_ratio"] = 0.0
    elif sampler.endswith("traceidratio") and ratio:
        found["sample_ratio"] = ratio
    return data | {"telemetry": found | given}
