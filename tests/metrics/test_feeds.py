"""Statistics to counters and gauges, and a request's life to one value per histogram. No Ray."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hisparse.config import load_config
from hisparse.metrics import CATALOGUE, EngineFeed, HttpFeed, Kind, MemorySink, RequestFeed
from hisparse.metrics import catalogue as c
from hisparse.pd.commands import ImportFailure
from hisparse.pd.scheduler import PDStats
from hisparse.testing.local_engine import LocalEngine
from hisparse.types import RequestStats, SamplingParams

WHO = {"model": "m", "role": "decode", "engine": "e1"}
BY_NAME = {metric.name: metric for metric in CATALOGUE}


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    engine = LocalEngine(load_config({
        "model": {"path": "recall", "max_model_len": 1024},
        "cache": {"device_blocks": 160, "host_pool_gib": 0.03}, "serve": {"prefill_replicas": 0},
    }, environ={}))
    engine.generate([list(range(5, 200)), list(range(7, 90))], SamplingParams(max_tokens=4, ignore_eos=True))
    return engine


def with_pd(stats: dict[str, Any]) -> dict[str, Any]:
    from dataclasses import asdict

    return stats | {"pd": asdict(PDStats(leases_expired=2, imports_failed={"timeout": 3}))}


def test_every_reading_finds_its_number_in_a_real_engines_statistics(engine: LocalEngine) -> None:
    stats = with_pd(engine.core.stats().asdict())
    for metric in CATALOGUE:
        for reading in metric.readings:
            assert list(reading.values(stats)), f"{metric.name}: /stats has no {reading}"


def test_values_are_those_of_the_statistics(engine: LocalEngine) -> None:
    sink, stats = MemorySink(), engine.core.stats().asdict()
    EngineFeed(sink, **WHO).update(stats)
    assert stats["generated_tokens"] == 8 == sink.value(BY_NAME["hisparse_generated_tokens"], **WHO)
    hits = BY_NAME["hisparse_cache_hits"]
    assert stats["resolve"]["resident_rows"] == sink.value(hits, **WHO, tier="resident") > 0
    assert sink.value(hits, **WHO, tier="hot") == 0, "a counter is there before its first event"
    cache = stats["cache"]
    used = cache["host_blocks_total"] - cache["host_blocks_free"]
    assert sink.value(BY_NAME["hisparse_host_blocks_used"], **WHO) == used
    assert sink.value(BY_NAME["hisparse_host_blocks_usage"], **WHO) == used / cache["host_blocks_total"]
    assert sum(stats["step_seconds"].values()) > 0
    for phase, seconds in stats["step_seconds"].items():
        assert sink.value(BY_NAME["hisparse_step_seconds"], **WHO, phase=phase) == seconds
    assert sink.value(BY_NAME["hisparse_lease_expiries"], **WHO) is None, "a colocated engine has no leases"
    groups, rows = stats["index_groups"], BY_NAME["hisparse_index_group_rows"]
    assert [layer for group in groups for layer in group["layers"]] == list(range(engine.core.layout.shape.num_layers))
    for tier, field in (("resident", "resident_rows"), ("hot", "hot_rows"), ("miss", "miss_rows"),
                        ("prefill_host", "prefill_host_rows")):
        values = [sink.value(rows, **WHO, index_group=str(i), tier=tier) for i in range(len(groups))]
        assert values == [group[tier] for group in groups] and sum(values) == stats["resolve"][field]  # type: ignore[arg-type]
    assert all(group["resident"] > 0 for group in groups)
    written = [sink.value(BY_NAME[f"hisparse_{name}_bytes"], **WHO) for name in ("mirrored", "spilled", "device_to_host")]
    assert written[0] == stats["resolve"]["mirrored_rows"] * engine.core.layout.row.row_bytes > 0
    assert written[0] + written[1] == written[2]  # type: ignore[operator]


def test_counters_grow_by_what_was_added_and_survive_a_new_engine() -> None:
    sink = MemorySink()
    feed = EngineFeed(sink, **WHO)
    tokens, waiting = BY_NAME["hisparse_generated_tokens"], BY_NAME["hisparse_requests"]
    for generated, queue, expected in ((10, 3, 10), (10, 1, 10), (25, 0, 25), (4, 9, 29), (5, 2, 30)):
        feed.update({"generated_tokens": generated, "waiting": queue})
        assert sink.value(tokens, **WHO) == expected
        assert sink.value(waiting, **WHO, state="waiting") == queue


def test_failures_by_reason_are_there_before_the_first_one() -> None:
    sink, failures = MemorySink(), BY_NAME["hisparse_import_failures"]
    feed = EngineFeed(sink, **WHO)
    feed.update(with_pd({}) | {"pd": {"imports_failed": {}}})
    assert set(c.FAILURES) == {failure.value for failure in ImportFailure}
    assert [sink.value(failures, **WHO, reason=reason) for reason in c.FAILURES] == [0.0] * len(c.FAILURES)
    feed.update({"pd": {"imports_failed": {"timeout": 2, "new kind": 1}}})
    assert sink.value(failures, **WHO, reason="timeout") == 2 and sink.value(failures, **WHO, reason="new kind") == 1


def test_the_feed_reads_and_changes_nothing(engine: LocalEngine) -> None:
    stats = engine.core.stats().asdict()
    before = copy.deepcopy(stats)
    EngineFeed(MemorySink(), **WHO).update(stats)
    assert stats == before


def test_a_request_gives_one_value_to_each_histogram() -> None:
    sink, now = MemorySink(), [100.0]
    timer = RequestFeed(sink, lambda: now[0], **WHO).begin()
    assert sink.value(c.FINISHED, **WHO, reason="error") == 0
    for at, count in ((100.3, None), (100.5, 1), (100.5, 0), (100.6, 1), (101.1, 2), (101.2, 1)):
        now[0] = at
        if count is None:
            timer.prefilled()
        else:
            timer.tokens(count)
    timer.stats(RequestStats(prompt_tokens=70, cached_tokens=64, queue_s=0.02))
    now[0] = 101.5
    timer.end("length")
    text = sink.text()
    for metric, total in ((c.PREFILL_WAIT, 0.3), (c.TTFT, 0.5), (c.QUEUE, 0.02), (c.DURATION, 1.5),
                          (c.MEAN_GAP, 0.7 / 4), (c.LONGEST_GAP, 0.5)):
        assert sink.value(metric, **WHO) == 1
        (line,) = (line for line in text.splitlines() if line.startswith(f"{metric.exported}_sum"))
        assert float(line.split()[-1]) == pytest.approx(total), metric.name
    assert sink.value(c.FINISHED, **WHO, reason="length") == 1
    assert (sink.value(c.PROMPT_TOKENS, **WHO), sink.value(c.CACHED_TOKENS, **WHO)) == (70, 64)


def test_a_request_of_one_token_has_no_time_between_tokens() -> None:
    sink = MemorySink()
    timer = RequestFeed(sink, lambda: 1.0, **WHO).begin()
    timer.tokens(1)
    timer.end("stop")
    assert sink.value(c.TTFT, **WHO) == 1 and sink.value(c.MEAN_GAP, **WHO) is None


def test_clients_cannot_make_series() -> None:
    sink = MemorySink()
    feed = HttpFeed(sink, model="m")
    for path in ("/v1/models/recall", "/v1/models", "/etc/passwd", "/v1/modelsx", "/favicon.ico"):
        feed.answered(path, 404, 0.1)
    assert sink.value(c.HTTP_REQUESTS, model="m", endpoint="/v1/models", status="404") == 2
    assert sink.value(c.HTTP_REQUESTS, model="m", endpoint="other", status="404") == 3


def test_kinds_and_units_agree() -> None:
    for metric in CATALOGUE:
        assert metric.name.startswith("hisparse_") and metric.help.endswith(".") and metric.unit
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM) and list(metric.buckets) == sorted(metric.buckets)
        if metric.unit in ("s", "bytes"):
            assert metric.name.endswith({"s": "_seconds", "bytes": "_bytes"}[metric.unit]), metric.name
    assert len(BY_NAME) == len(CATALOGUE)
