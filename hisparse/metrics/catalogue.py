"""Every metric there is. docs/metrics.md, the dashboard and the alert rules are checked against this list.

Names mirror those of other KV offloading servers (cache hits and misses, host blocks, pending spills). Rows are selected
rows summed over layers and query rows; a row is one token's latent KV in one layer.
"""

from __future__ import annotations

from hisparse.metrics.metric import Kind, Metric, Reading

ENGINE = ("model", "role", "engine")
"""Labels of everything an engine or its replica reports."""
SERVICE = ("model",)
"""Labels of what the API reports."""

LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
GAP_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
FINISH = ("stop", "length", "refused", "error", "abandoned")
"""refused: the client's mistake, or no room (4xx). abandoned: the client left, or the API gave up at the deadline."""
FAILURES = ("refused", "timeout", "transfer", "generation", "cancelled", "restarted")
"""Values of `hisparse.pd.commands.ImportFailure`."""


def _counter(name: str, unit: str, help: str, *readings: Reading, own: str = "") -> Metric:
    return Metric(name=f"hisparse_{name}", kind=Kind.COUNTER, unit=unit, help=help, common=ENGINE, readings=readings,
                  own=tuple(own.split()))


def _gauge(name: str, unit: str, help: str, *readings: Reading, own: str = "") -> Metric:
    return Metric(name=f"hisparse_{name}", kind=Kind.GAUGE, unit=unit, help=help, common=ENGINE, readings=readings,
                  own=(own,) if own else ())


def _histogram(name: str, help: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name=f"hisparse_{name}", kind=Kind.HISTOGRAM, unit="s", help=help, common=ENGINE, buckets=buckets)


R = Reading

# ------------------------------------------------------------------------------------------- rows and bytes
CACHE = (
    _counter("cache_hits", "rows", "Selected rows that were in device memory: on a resident page, or in the hot region.",
             R("resolve.resident_rows", "resident"), R("resolve.hot_rows", "hot"), own="tier"),
    _counter("cache_misses", "rows", "Selected rows that decode had to copy from host memory to the hot region.",
             R("resolve.miss_rows")),
    _counter("index_group_rows", "rows", "Selected rows by index group (its place in the model) and by what served them; "
             "prefill_host: read from host memory by prefill chunks.",
             *(R(f"index_groups.*.{tier}", tier) for tier in ("resident", "hot", "miss", "prefill_host")),
             own="index_group tier"),
    _counter("prefill_host_rows", "rows", "Rows of history that prefill chunks read from host memory.",
             R("resolve.prefill_host_rows")),
    _counter("host_to_device_bytes", "bytes", "KV copied from host to device: misses, prefill history, restored pages.",
             R("resolve.host_to_device_bytes")),
    _counter("device_to_host_bytes", "bytes", "KV copied from device to host: mirrored rows and spilled pages.",
             R("resolve.device_to_host_bytes")),
    _counter("mirrored_rows", "rows", "New rows that were written to device and host at once.", R("resolve.mirrored_rows")),
    _counter("mirrored_bytes", "bytes", "Bytes of mirrored rows.",
             R("resolve.device_to_host_bytes", minus="resolve.spilled_bytes")),
    _counter("spilled_bytes", "bytes", "Bytes of pages that were copied from device to host.", R("resolve.spilled_bytes")),
    _counter("spilled_pages", "pages", "Pages whose bytes were copied from device to host.", R("resolve.spilled_pages")),
    _counter("spills", "pages", "Write-backs of pages by outcome.", R("cache.spills_completed", "completed"),
             R("cache.spills_failed", "failed"), own="outcome"),
    _counter("spills_without_bytes", "pages", "Write-backs that copied nothing, because every row had been mirrored.",
             R("cache.spills_without_bytes")),
    _counter("spill_seconds", "s", "From the enqueuing of a write-back to the scheduler's word of its end, summed over "
             "completed ones; includes the wait behind a forward.", R("cache.spill_seconds")),
    _gauge("pending_spills", "pages", "Pages whose write-back has not completed.", R("cache.pages_spilling")),
)

# ------------------------------------------------------------------------------------------- pools
POOLS = (
    _gauge("host_blocks_total", "pages", "Host pages of the pool.", R("cache.host_blocks_total")),
    _gauge("host_blocks_used", "pages", "Host pages that requests hold. Published pages that nobody holds count as free.",
           R("cache.host_blocks_total", minus="cache.host_blocks_free")),
    _gauge("host_blocks_usage", "ratio", "Used share of the host pool, 0 to 1.",
           R("cache.host_blocks_total", minus="cache.host_blocks_free", over="cache.host_blocks_total")),
    _gauge("host_blocks_reserved", "pages", "Host pages promised to admitted requests and not yet taken.",
           R("cache.host_blocks_reserved")),
    _gauge("host_pages_published", "pages", "Host pages that a prompt's prefix can find, held or not.",
           R("cache.host_pages_published")),
    _gauge("device_blocks_total", "blocks", "Blocks of the packed device pool.", R("cache.device_blocks_total")),
    _gauge("device_blocks_used", "blocks", "Device blocks that are neither free nor loose.",
           R("cache.device_blocks_total", minus="cache.device_blocks_free")),
    _gauge("device_blocks_usage", "ratio", "Used share of the device pool, 0 to 1.",
           R("cache.device_blocks_total", minus="cache.device_blocks_free", over="cache.device_blocks_total")),
    _gauge("device_blocks_loose", "blocks", "Free device blocks whose content can still be read.",
           R("cache.device_blocks_loose")),
    _gauge("hot_blocks", "blocks", "Device blocks of all hot regions.", R("cache.hot_blocks")),
    _gauge("hot_seats", "requests", "Requests that have a hot region.", R("cache.hot_seats")),
    _gauge("pages", "pages", "Pages of admitted requests by state.",
           *(R(f"cache.pages_{state}", state) for state in ("gpu_only", "spilling", "clean_pinned", "clean_loose", "host_only",
                                                            "importing")), own="state"),
    _counter("host_pages_evicted", "pages", "Published host pages that were given up for room.",
             R("cache.host_pages_evicted")),
    _counter("pages_reused", "pages", "Loose pages whose device blocks were handed out again.", R("cache.pages_reused")),
    _counter("pages_adopted", "pages", "Host pages that became resident again without a copy.", R("cache.pages_adopted")),
    _counter("prefix_hit_tokens", "tokens", "Prompt tokens found in the prefix cache.", R("cache.prefix_hit_tokens")),
)

# ------------------------------------------------------------------------------------------- scheduling
SCHEDULING = (
    _gauge("engine_up", "1", "1 while the engine loop turns, 0 when it has failed or a step is stuck."),
    _gauge("engine_loop_age_seconds", "s", "Since the last turn of the engine loop began or ended."),
    _gauge("requests", "requests", "Open requests by state; held: finished on prefill and leased to decode.",
           *(R(state, state) for state in ("running", "waiting", "loading", "held")), own="state"),
    _counter("steps", "steps", "Engine steps.", R("steps")),
    _counter("step_seconds", "s", "Time of the engine loop by phase: schedule, rank (the slowest rank's work), wire (the rest "
             "of the wait for the ranks), retire.",
             *(R(f"step_seconds.{phase}", phase) for phase in ("schedule", "rank", "wire", "retire")), own="phase"),
    _counter("admissions", "requests", "Requests that got a seat and blocks; preempted ones count again.", R("admissions")),
    _counter("preemptions", "requests", "Requests that lost their blocks to earlier ones.", R("preemptions")),
    _counter("generated_tokens", "tokens", "Tokens sampled.", R("generated_tokens")),
    _counter("indexer_loads", "requests", "Admissions that loaded indexer pages from the host store.", R("indexer_loads")),
)

# ------------------------------------------------------------------------------------------- prefill/decode
TRANSFER = (
    _counter("landings", "requests", "Imported prefixes by where they landed.", R("resident_landings", "resident"),
             R("host_landings", "host"), own="landing"),
    _counter("imports", "imports", "Imports that completed.", R("pd.imports_ok")),
    _counter("import_failures", "imports", "Imports that failed, by reason; their prompts are recomputed or refused.",
             R("pd.imports_failed.*", known=FAILURES), own="reason"),
    _counter("import_bytes", "bytes", "KV read from prefill engines.", R("pd.import_bytes")),
    _counter("import_seconds", "s", "Duration of imports, summed.", R("pd.import_seconds")),
    _gauge("imports_in_flight", "imports", "Imports under way.", R("pd.imports_in_flight")),
    _gauge("leases_held", "leases", "Finished prompts that decode may still read.", R("pd.leases_held")),
    _counter("leases_granted", "leases", "Leases that began.", R("pd.leases_granted")),
    _counter("lease_expiries", "leases", "Leases that ended by their time: nobody read or released the pages.",
             R("pd.leases_expired")),
    _counter("local_prefill_tokens", "tokens", "Prompt tokens computed on decode because prefill or an import failed.",
             R("local_prefill_tokens")),
)

# ------------------------------------------------------------------------------------------- requests
TTFT = _histogram("time_to_first_token_seconds", "From the call to the replica to the first token, prefill included.",
                  LATENCY_S)
MEAN_GAP = _histogram("inter_token_seconds", "Mean time between the tokens of a request; one value per request.", GAP_S)
LONGEST_GAP = _histogram("inter_token_max_seconds", "Longest wait for the next token within a request; one value per request.",
                         GAP_S)
QUEUE = _histogram("queue_seconds", "From a request's arrival at the engine to its first admission.", LATENCY_S)
PREFILL_WAIT = _histogram("prefill_wait_seconds", "How long decode waited for a prefill replica, retries included.", LATENCY_S)
DURATION = _histogram("request_seconds", "From the call to the replica to the end of the answer.", LATENCY_S)
FINISHED = _counter("requests_finished", "requests", "Requests by how they ended.", own="reason")
PROMPT_TOKENS = _counter("prompt_tokens", "tokens", "Prompt tokens of requests that ended.")
CACHED_TOKENS = _counter("cached_tokens", "tokens", "Of the prompt tokens, those whose KV was there already.")
REQUESTS = (TTFT, MEAN_GAP, LONGEST_GAP, QUEUE, PREFILL_WAIT, DURATION, FINISHED, PROMPT_TOKENS, CACHED_TOKENS)

HTTP_REQUESTS = Metric(name="hisparse_http_requests", kind=Kind.COUNTER, unit="requests", common=SERVICE,
                       own=("endpoint", "status"), help="HTTP requests by endpoint and status; 499: the client left first.")
HTTP_SECONDS = Metric(name="hisparse_http_request_seconds", kind=Kind.HISTOGRAM, unit="s", common=SERVICE, own=("endpoint",),
                      buckets=LATENCY_S, help="From an HTTP request's head to the last byte of its answer.")
HTTP = (HTTP_REQUESTS, HTTP_SECONDS)

ENGINE_UP, LOOP_AGE = SCHEDULING[:2]
SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Rows and bytes": CACHE, "Pools": POOLS, "Scheduling": SCHEDULING, "Prefill/decode": TRANSFER, "Requests": REQUESTS,
    "HTTP": HTTP,
}
CATALOGUE: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)
