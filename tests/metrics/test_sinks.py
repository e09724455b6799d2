from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import prometheus_client as oracle
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hisparse.metrics import CATALOGUE, MemorySink
from hisparse.metrics import catalogue as c

WHO = {"model": 'a "quoted"\\ name\n', "role": "decode", "engine": "e"}
BY_NAME = {metric.name: metric for metric in CATALOGUE}


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples
            if not sample.name.endswith("_created")}


def test_the_text_is_what_prometheus_own_client_writes() -> None:
    """Same events into both; read back by Prometheus' own parser."""
    sink, registry = MemorySink(), oracle.CollectorRegistry()
    hits, usage, ttft = BY_NAME["hisparse_cache_hits"], BY_NAME["hisparse_host_blocks_usage"], c.TTFT
    counter = oracle.Counter(hits.exported.removesuffix("_total"), hits.help, hits.labels, registry=registry)
    gauge = oracle.Gauge(usage.exported, usage.help, usage.labels, registry=registry)
    histogram = oracle.Histogram(ttft.exported, ttft.help, ttft.labels, registry=registry, buckets=ttft.buckets)
    chance = random.Random(1)
    for _ in range(200):
        value = chance.choice((0.0, 0.005, 0.25, chance.expovariate(0.5), 500.0))
        tier = chance.choice(("resident", "hot"))
        sink.add(hits, value, WHO | {"tier": tier})
        counter.labels(**WHO, tier=tier).inc(value)
        sink.set(usage, value, WHO)
        gauge.labels(**WHO).set(value)
        sink.observe(ttft, value, WHO)
        histogram.labels(**WHO).observe(value)
    expected = parsed(oracle.generate_latest(registry).decode())
    assert parsed(sink.text()) == pytest.approx(expected) and len(expected) == 2 + 1 + len(ttft.buckets) + 3


def test_mistakes_are_refused() -> None:
    sink, hits = MemorySink(), BY_NAME["hisparse_cache_hits"]
    with pytest.raises(ValueError, match="cannot go down by 1"):
        sink.add(hits, -1, WHO | {"tier": "hot"})
    with pytest.raises(ValueError, match="has the labels"):
        sink.add(hits, 1, WHO)
    with pytest.raises(ValueError, match="is a counter, not a gauge"):
        sink.set(hits, 1, WHO | {"tier": "hot"})
    assert sink.text() == ""


def test_threads_lose_nothing() -> None:
    sink, steps = MemorySink(), BY_NAME["hisparse_steps"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: [sink.add(steps, 1, WHO) for _ in range(500)], range(8)))
    assert sink.value(steps, **WHO) == 4000
