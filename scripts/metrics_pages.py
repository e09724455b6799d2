"""Writes what is derived from the metrics catalogue: docs/metrics.md and deploy/ray/grafana/hisparse.json.

    python scripts/metrics_pages.py            # write both
    python scripts/metrics_pages.py --check    # exit code 1 if a committed file differs
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hisparse.metrics import CATALOGUE
from hisparse.metrics.catalogue import SECTIONS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "metrics.md"
DASHBOARD = ROOT / "deploy" / "ray" / "grafana" / "hisparse.json"

HEAD = """# Metrics

Generated from `hisparse/metrics/catalogue.py` by `scripts/metrics_pages.py`; a test compares.

Each Ray node's agent exports these to Prometheus (`/stats` lists the URLs under `metrics`). Engines report once in
`serve.metrics_interval_s` (1 s; 0 = no metrics), Ray passes values on every 10 s (`RAY_metrics_report_interval_ms`). Counters
exist at 0 before their first event, except `hisparse_http_requests`. A histogram's series add `_bucket`, `_sum` and `_count`.
Ray adds labels of its own (`Component`, `NodeAddress`, `WorkerId`, ...).

"rows" are selected rows summed over layers and query rows; a row is one token's latent KV in one layer. `index_group` counts
from 0 in the order of the model's layers; `/stats` lists the layers of each under `index_groups`. Counts of a step's tiers
reach the statistics a step or two later on CUDA. Nothing here waits for the device, and nothing is done per token.

Without Ray: `MemorySink` takes the same metrics, and its `text()` is what a Prometheus endpoint answers.

```python
from hisparse.metrics import EngineFeed, MemorySink
sink = MemorySink()
feed = EngineFeed(sink, model="my-model", role="colocated", engine="engine-0")
feed.update(core.stats().asdict())   # about once a second
print(sink.text())
```
"""


def page() -> str:
    """docs/metrics.md."""
    lines = [HEAD]
    for title, metrics in SECTIONS.items():
        lines += [f"## {title}", "", "| name in Prometheus | type | unit | labels | what | in `/stats` |",
                  "|---|---|---|---|---|---|"]
        for metric in metrics:
            paths = ", ".join(f"`{reading}`" for reading in metric.readings)
            values = [reading.label for reading in metric.readings if reading.label]
            own = "".join(f", `{name}`" + (f" ({', '.join(values)})" if values and name == metric.own[-1] else "")
                          for name in metric.own)
            common = ", ".join(f"`{name}`" for name in metric.common)
            cells = (f"`{metric.exported}`", metric.kind.value, metric.unit, common + own, metric.help, paths)
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------- the dashboard
FILTER = 'model=~"$model", engine=~"$engine"'
RATE = "[$__rate_interval]"
BY = "role, engine"
MISSED, DECODED, COMPLETED = 'tier="miss"', 'tier!="prefill_host"', 'outcome="completed"'


def name(short: str) -> str:
    """Exported name of `hisparse_<short>`; KeyError if there is none."""
    return {metric.name: metric.exported for metric in CATALOGUE}[f"hisparse_{short}"]


def gauge(short: str, *by: str) -> str:
    return f"sum by ({', '.join([BY, *by])}) ({name(short)}{{{FILTER}}})"


def rate(short: str, *by: str, where: str = FILTER) -> str:
    return f"sum by ({', '.join(by)}) (rate({name(short)}{{{where}}}{RATE}))"


def per_engine(short: str, *by: str, where: str = FILTER) -> str:
    return rate(short, BY, *by, where=where)


def quantiles(short: str, where: str = FILTER) -> list[tuple[str, str]]:
    return [(f"histogram_quantile({q}, sum by (le) (rate({name(short)}_bucket{{{where}}}{RATE})))", f"p{round(q * 100)}")
            for q in (0.5, 0.95, 0.99)]


ENGINE_LEGEND = "{{role}} {{engine}}"
MODEL = 'model=~"$model"'
ROWS: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "Service": [
        ("HTTP requests by status", "reqps", [(rate("http_requests", "status", where=MODEL), "{{status}}")]),
        ("HTTP request duration", "s", quantiles("http_request_seconds", MODEL)),
        ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
        ("Mean time between tokens of a request", "s", quantiles("inter_token_seconds")),
        ("Longest wait for a token of a request", "s", quantiles("inter_token_max_seconds")),
        ("Request duration", "s", quantiles("request_seconds")),
        ("Time in the engine's queue", "s", quantiles("queue_seconds")),
        ("Wait for prefill", "s", quantiles("prefill_wait_seconds")),
        ("Requests by how they ended", "reqps", [(rate("requests_finished", "reason"), "{{reason}}")]),
        ("Prompt tokens, and those found cached", "short", [(per_engine("prompt_tokens"), f"{ENGINE_LEGEND} prompt"),
                                                            (per_engine("cached_tokens"), f"{ENGINE_LEGEND} cached")]),
    ],
    "Engines": [
        ("Up", "short", [(gauge("engine_up"), ENGINE_LEGEND)]),
        ("Age of the loop's last turn", "s", [(gauge("engine_loop_age_seconds"), ENGINE_LEGEND)]),
        ("Open requests", "short", [(gauge("requests", "state"), f"{ENGINE_LEGEND} {{{{state}}}}")]),
        ("Time of a step by phase", "s", [
            (f"{per_engine('step_seconds', 'phase')} / on ({BY}) group_left () {per_engine('steps')}",
             f"{ENGINE_LEGEND} {{{{phase}}}}")]),
        ("Generated tokens", "short", [(per_engine("generated_tokens"), ENGINE_LEGEND)]),
        ("Admissions and preemptions", "short", [(per_engine("admissions"), f"{ENGINE_LEGEND} admitted"),
                                                 (per_engine("preemptions"), f"{ENGINE_LEGEND} preempted")]),
        ("Admissions that loaded indexer pages", "short", [(per_engine("indexer_loads"), ENGINE_LEGEND)]),
    ],
    "Rows and bytes": [
        ("Share of selected rows by tier", "percentunit", [
            (f"{per_engine('cache_hits', 'tier')} / on ({BY}) group_left () "
             f"({per_engine('cache_hits')} + {per_engine('cache_misses')})", f"{ENGINE_LEGEND} {{{{tier}}}}")]),
        ("Missed share of selected rows by index group", "percentunit", [
            (f"{per_engine('index_group_rows', 'index_group', where=f'{FILTER}, {MISSED}')} / on ({BY}, index_group) "
             f"{per_engine('index_group_rows', 'index_group', where=f'{FILTER}, {DECODED}')}",
             f"{ENGINE_LEGEND} {{{{index_group}}}}")]),
        ("Selected rows by tier, all index groups", "short", [(rate("index_group_rows", "tier"), "{{tier}}")]),
        ("Missed rows, and rows that prefill read from host", "short", [
            (per_engine("cache_misses"), f"{ENGINE_LEGEND} decode"),
            (per_engine("prefill_host_rows"), f"{ENGINE_LEGEND} prefill")]),
        ("KV copied between host and device", "Bps", [
            (per_engine("host_to_device_bytes"), f"{ENGINE_LEGEND} to device"),
            (per_engine("device_to_host_bytes"), f"{ENGINE_LEGEND} to host")]),
        ("Mirrored rows", "short", [(per_engine("mirrored_rows"), ENGINE_LEGEND)]),
        ("Bytes to the host by cause", "Bps", [(per_engine("mirrored_bytes"), f"{ENGINE_LEGEND} mirrored rows"),
                                               (per_engine("spilled_bytes"), f"{ENGINE_LEGEND} spilled pages")]),
        ("Mean duration of a spill", "s", [
            (f"{per_engine('spill_seconds')} / {per_engine('spills', where=f'{FILTER}, {COMPLETED}')}", ENGINE_LEGEND)]),
        ("Spills by outcome, those without bytes, and pages copied", "short", [
            (per_engine("spills", "outcome"), f"{ENGINE_LEGEND} {{{{outcome}}}}"),
            (per_engine("spills_without_bytes"), f"{ENGINE_LEGEND} without bytes"),
            (per_engine("spilled_pages"), f"{ENGINE_LEGEND} pages copied")]),
        ("Pending spills", "short", [(gauge("pending_spills"), ENGINE_LEGEND)]),
    ],
    "Pools": [
        ("Host pool, used share", "percentunit", [(gauge("host_blocks_usage"), ENGINE_LEGEND)]),
        ("Host pages", "short", [(gauge("host_blocks_total"), f"{ENGINE_LEGEND} all"),
                                 (gauge("host_blocks_used"), f"{ENGINE_LEGEND} used"),
                                 (gauge("host_blocks_reserved"), f"{ENGINE_LEGEND} reserved"),
                                 (gauge("host_pages_published"), f"{ENGINE_LEGEND} published")]),
        ("Device pool, used share", "percentunit", [(gauge("device_blocks_usage"), ENGINE_LEGEND)]),
        ("Device blocks", "short", [(gauge("device_blocks_total"), f"{ENGINE_LEGEND} all"),
                                    (gauge("device_blocks_used"), f"{ENGINE_LEGEND} used"),
                                    (gauge("device_blocks_loose"), f"{ENGINE_LEGEND} loose"),
                                    (gauge("hot_blocks"), f"{ENGINE_LEGEND} hot regions")]),
        ("Requests with a hot region", "short", [(gauge("hot_seats"), ENGINE_LEGEND)]),
        ("Pages by state", "short", [(gauge("pages", "state"), f"{ENGINE_LEGEND} {{{{state}}}}")]),
        ("Pages evicted, reused, adopted", "short", [(per_engine("host_pages_evicted"), f"{ENGINE_LEGEND} evicted"),
                                                     (per_engine("pages_reused"), f"{ENGINE_LEGEND} reused"),
                                                     (per_engine("pages_adopted"), f"{ENGINE_LEGEND} adopted")]),
        ("Prompt tokens found in the prefix cache", "short", [(per_engine("prefix_hit_tokens"), ENGINE_LEGEND)]),
    ],
    "Prefill/decode": [
        ("Landings", "short", [(per_engine("landings", "landing"), f"{ENGINE_LEGEND} {{{{landing}}}}")]),
        ("Imports, and failures by reason", "short", [
            (per_engine("imports"), f"{ENGINE_LEGEND} ok"),
            (per_engine("import_failures", "reason"), f"{ENGINE_LEGEND} {{{{reason}}}}")]),
        ("Imported bytes", "Bps", [(per_engine("import_bytes"), ENGINE_LEGEND)]),
        ("Mean duration of an import", "s", [(f"{per_engine('import_seconds')} / {per_engine('imports')}", ENGINE_LEGEND)]),
        ("Imports in flight, leases held", "short", [(gauge("imports_in_flight"), f"{ENGINE_LEGEND} imports"),
                                                     (gauge("leases_held"), f"{ENGINE_LEGEND} leases")]),
        ("Leases granted and expired", "short", [(per_engine("leases_granted"), f"{ENGINE_LEGEND} granted"),
                                                 (per_engine("lease_expiries"), f"{ENGINE_LEGEND} expired")]),
        ("Prompt tokens that decode had to compute itself", "short", [(per_engine("local_prefill_tokens"), ENGINE_LEGEND)]),
    ],
}


def dashboard() -> dict[str, Any]:
    """A Grafana dashboard; its variables choose data source, model and engines."""
    panels: list[dict[str, Any]] = []
    y = 0
    source = {"type": "prometheus", "uid": "${datasource}"}
    for title, row in ROWS.items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        y += 1
        for at, (caption, unit, queries) in enumerate(row):
            panels.append({
                "id": len(panels) + 1, "type": "timeseries", "title": caption, "datasource": source,
                "gridPos": {"x": 8 * (at % 3), "y": y + 8 * (at // 3), "w": 8, "h": 8},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"},
                            "tooltip": {"mode": "multi", "sort": "desc"}},
                "targets": [{"refId": chr(ord("A") + i), "datasource": source, "expr": expression, "legendFormat": legend}
                            for i, (expression, legend) in enumerate(queries)],
            })
        y += 8 * -(-len(row) // 3)
    return {
        "uid": "hisparse", "title": "hisparse", "tags": ["hisparse", "ray"], "schemaVersion": 39, "version": 1,
        "editable": True, "refresh": "30s", "time": {"from": "now-1h", "to": "now"}, "templating": {"list": [
            {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
            _variable("model", f"label_values({name('engine_up')}, model)", source),
            _variable("engine", f'label_values({name("engine_up")}{{model=~"$model"}}, engine)', source),
        ]}, "panels": panels,
    }


def _variable(label: str, query: str, source: dict[str, str]) -> dict[str, Any]:
    return {"name": label, "label": label.capitalize(), "type": "query", "datasource": source, "query": query, "refresh": 2,
            "multi": True, "includeAll": True, "allValue": ".*", "sort": 1}


def files() -> dict[Path, str]:
    """What should be committed."""
    return {DOCS: page(), DASHBOARD: json.dumps(dashboard(), indent=1) + "\n"}


def main() -> int:
    stale = [path for path, text in files().items() if not path.is_file() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what the catalogue says; run python scripts/metrics_pages.py")
        return bool(stale)
    for path, text in files().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
