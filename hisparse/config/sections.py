"""The sections of a configuration and their options, each with its default, limits and meaning. Frozen."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator


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


def _names_option(value: Any) -> Any:
    """A list, or one string with commas (as an environment variable has it)."""
    return tuple(item.strip() for item in value.split(",") if item.strip()) if isinstance(value, str) else value


KeysOption = Annotated[tuple[SecretStr, ...], BeforeValidator(_keys_option)]
NamesOption = Annotated[tuple[str, ...], BeforeValidator(_names_option)]
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
    host_to_device_ratio: float | None = Field(None, gt=0, description="Instead of host_pool_gib: host pages per page that the "
                                               "device pool could hold resident.")
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
    protocol: Literal["http/protobuf", "grpc"] = Field("http/protobuf", description="That the collector speaks there.")
    directory: str | None = Field(None, description="Of exporter file; must be there on every node. One file a process.")
    sample_ratio: float = Field(1.0, ge=0, le=1, description="Share of the requests that have spans, where the caller's "
                                "traceparent does not decide it.")
    service_name: str = Field("hisparse", description="Of the resource that spans belong to.")

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

    role: Literal["colocated", "prefill", "decode"] = Field("colocated", description="Of this engine; the service sets it.")
    lease_s: float = Field(30.0, gt=0, description="How long prefill holds pages without a heartbeat.")
    transfer_deadline_s: float = Field(20.0, gt=0, description="An import without completion fails after this.")
    staging_slots: int = Field(8, ge=1, description="Slots of the staging pool for HOST landings; one prefill engine gets half "
                               "of them at most.")
    staging_slot_pages: int | None = Field(None, ge=1, description="Whole pages per staging slot; default 16 MiB, "
                                           "on CUDA 32 MiB of them.")
    transfer_threads: int | None = Field(None, ge=0, le=16, description="Threads of UCX that share an import's READs on a "
                                         "decode rank; default 2 between CPUs, 4 from 8 cores on; 0 (one thread reads all) "
                                         "for GPU memory.")
    gpu_reads: Literal["mapped", "ucx"] = Field("mapped", description="GPU memory of a prefill engine on the same host: mapped "
                                                "= read by a kernel through CUDA IPC where that is possible; ucx = by UCX.")
    landing_path: Literal["staged", "direct"] = Field("staged", description="How pages reach the host pool: staged = through "
                                                      "staging slots; direct = READs end in the pool (faster between CPUs).")
    kv_load_failure_policy: Literal["recompute", "fail"] = Field(
        "recompute", description="When an import fails: compute the prompt on decode, or end the request with 503.")
    max_retries: int = Field(3, ge=0, description="Times that prefill is asked again before the first token, because it did "
                             "not answer or an import failed.")
    local_prefill_tokens: int = Field(16384, ge=0, description="Prompt tokens a decode engine may recompute at once "
                                      "(policy recompute) when prefill or an import failed; more are refused with 503.")
    transport: Literal["nixl", "loopback"] = Field("nixl", description="loopback: between engines of one process, for tests.")


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
    port: int = Field(8000, ge=0, le=65535, description="Of HTTP; 0: any that is free (with hisparse serve).")
    prefill_replicas: int = Field(1, ge=0, description="0: one colocated engine does both.")
    decode_replicas: int = Field(1, ge=1, description="Engines that answer; each with its own pools.")
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
    operators: NamesOption = Field((), description="Tenants whose keys show every tenant's requests on /residency; others see "
                                   "the ids of their own, and sizes of the rest.")
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
    tensor_parallel_size: int = Field(1, ge=1, le=8, description="Ranks of each engine; attention heads are split over them.")
    pd: PDConfig = PDConfig()
    serve: ServeConfig = ServeConfig()
    prefill: dict[str, Any] = Field(default_factory=dict, description="Sections that differ on prefill engines.")

    def for_role(self, role: Literal["colocated", "prefill", "decode"]) -> HiSparseConfig:
        """This configuration as one engine of the given role uses it. Raises ConfigError for impossible `prefill` overrides."""
        from hisparse.config.loading import merge, resolved

        data = self.model_dump()
        if role == "prefill":
            data = merge(data, self.prefill)
        data["pd"]["role"] = role
        data["prefill"] = {}
        return resolved(data)  # the environment is in `self` already, below the prefill overrides
