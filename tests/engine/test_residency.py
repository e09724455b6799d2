"""What a residency sample says of an engine, against the cache's own pages and a plain model of strips."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from hisparse.cache.report import RequestTiers
from hisparse.cache.residency import DURABLE, READABLE_ON_GPU, PageState
from hisparse.engine.residency import MAX_REQUESTS, RequestSample, ResidencySample, draw_strips
from hisparse.types import ResolveStats
from tests.engine.test_core import make, prompt  # noqa: F401 (the fixture)


def plain_strip(states: bytes, cells: int) -> str:
    drawn = ""
    count = min(len(states), cells)
    for cell in range(count):
        part = states[cell * len(states) // count : (cell + 1) * len(states) // count]
        on_device = sum(state in READABLE_ON_GPU for state in part)
        if 2 * part.count(PageState.IMPORTING) >= len(part):
            drawn += "i"
        elif on_device in (0, len(part)):
            drawn += "9" if on_device else "0"
        else:
            drawn += str(1 + on_device * 8 // (len(part) + 1))
    return drawn


@pytest.mark.parametrize("cells", [1, 7, 48])
def test_strips_equal_a_plain_model(cells: int) -> None:
    random = np.random.default_rng(cells)
    lengths = [0, 1, 2, 47, 48, 49, 0, 100, 2048, 333, 0]
    states = [random.integers(1, len(PageState), length, dtype=np.uint8).tobytes() for length in lengths]
    states.append(bytes([PageState.HOST_ONLY]) * 5000 + bytes([PageState.GPU_ONLY]) * 2)
    drawn = draw_strips(states, cells)
    assert drawn == [plain_strip(item, cells) for item in states]
    assert draw_strips([]) == [] and draw_strips([b"", b""]) == ["", ""]


def test_a_page_among_many_shows() -> None:
    """One resident page of 2,048 is never drawn as none, one host page never as all."""
    for pages in (2048, 100, 49):
        host, device = (bytearray([state]) * pages for state in (PageState.HOST_ONLY, PageState.CLEAN_PINNED))
        host[0], device[-1] = PageState.GPU_ONLY, PageState.HOST_ONLY
        few, most = draw_strips([bytes(host), bytes(device)])
        assert few[0] in "123456789" and set(few[1:]) == {"0"}
        assert most[-1] in "012345678" and set(most[:-1]) == {"9"}


def test_a_sample_says_what_the_cache_says(make: Any) -> None:  # noqa: F811
    """In each step of a tight run every count equals the cache's page by page, and nothing of a prompt is in the report."""
    engine = make(device_blocks=90, max_model_len=320, copy_steps=3)
    prompts = {f"r{i}": prompt(150, i) for i in range(6)}
    for name, ids in prompts.items():
        engine.add(name, ids, 100, cache_salt="a secret")
    seen, spilling = set(), False
    for _ in range(6000):
        if not engine.core.has_work():
            break
        engine.step()
        manager, report = engine.core.cache, engine.core.residency().report()
        rows = {row["id"]: row for row in report["requests"]}
        assert set(rows) == set(engine.core.requests)
        for name, row in rows.items():
            admitted = name in manager.core.live
            views = manager.page_views(name) if admitted else ()
            states = [view.state for view in views]
            assert row["pages"] == len(views) and row["state"] == engine.core.requests[name].state.value
            assert row["device"] == sum(bool(view.resident) for view in views)
            assert row["both"] == sum(bool(view.resident) and view.state in DURABLE for view in views)
            assert row["host"] == states.count(PageState.HOST_ONLY) and row["spilling"] == states.count(PageState.SPILLING)
            assert row["strip"] == plain_strip(bytes(states), 48)
            hot = manager.core.live[name].hot if admitted else []
            assert row["hot_rows"] == 16 * sum(len(blocks) for blocks in hot)
            seen.add(row["state"])
        assert sum(group["hot_blocks"] for group in report["groups"]) == report["pools"]["device"]["hot"]
        device, cache = report["pools"]["device"], engine.core.stats().cache
        assert device["pages"] + device["hot"] + device["loose"] + device["free"] == device["total"]
        assert report["transfers"] == cache["transfers_in_flight"]
        pending = report["pending"]
        spilling = spilling or bool(pending)
        assert len(pending) == min(cache["transfers_in_flight"], 16)
        assert all(age >= 0 and phase in ("planned", "sent", "enqueued") for _, _, phase, age in pending)
        text = json.dumps(report)
        assert "secret" not in text and "token_ids" not in text
    assert spilling and {"running", "waiting"} <= seen
    ended = {item["request_id"]: item for item in engine.core.residency().report()["ended"]}
    assert set(ended) == set(prompts)
    for item in ended.values():
        assert (item["prompt_tokens"], item["output_tokens"], item["reason"]) == (150, 100, "length")
        assert abs(item["at_s"] - time.time()) < 300


def test_a_report_lists_the_largest_and_counts_the_rest() -> None:
    requests = [RequestSample(f"r{i}", "running", 9, 10, "", 0, ResolveStats(),
                              RequestTiers(0, bytes([PageState.GPU_ONLY]) * i, ()) if i else None) for i in range(1000)]
    sample = ResidencySample(stats=_stats(), block_size=64, requests=requests, groups=(), pending=(), landings=(), ended=())
    report = sample.report()
    assert [row["pages"] for row in report["requests"]] == list(range(999, 999 - MAX_REQUESTS, -1))
    assert report["requests_hidden"] == 1000 - MAX_REQUESTS


def test_it_works_without_the_host_tier(make: Any) -> None:  # noqa: F811
    engine = make(cache={"enabled": False})
    engine.add("a", prompt(40), 8)
    engine.step()
    (row,) = engine.core.residency().report()["requests"]
    assert row["device"] == row["pages"] > 0 and row["host"] == row["hot_rows"] == 0 and set(row["strip"]) == {"9"}
    engine.run()


def _stats() -> dict[str, Any]:
    from tests.serve.residency_world import ScriptedEngine

    return dict(ScriptedEngine(requests=1).sample().stats)
