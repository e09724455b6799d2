"""Prefix hits of every length and kind give the tokens of unmodified transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.failures import evict_indexer_pages
from tests.parity.rig import BLOCK, Rig, engine_config, prompt_of

TOKENS = 8
LENGTHS = [n for pages in (1, 2, 5, 8) for n in (pages * BLOCK - 1, pages * BLOCK, pages * BLOCK + 1)]
MakeRig = Callable[..., Rig]


def build(make_rig: MakeRig, path: Path, mode: str, pool: str) -> Rig:
    slack = None if pool == "roomy" else 6
    if mode == "colocated":
        return make_rig(engine_config(path, slack=slack))
    return make_rig(engine_config(path, "decode", slack=slack), engine_config(path, "prefill", slack=None))


@pytest.mark.parametrize("pool", ["roomy", "tight"])
@pytest.mark.parametrize(("mode", "model"), [("colocated", "ds32"), ("pd", "glm52")])
def test_shared_prefixes(make_rig: MakeRig, tiny_checkpoints: dict[str, Path], mode: str, model: str, pool: str) -> None:
    rig = build(make_rig, tiny_checkpoints[model], mode, pool)
    base = prompt_of(170, 1)
    rig.put("base", base, TOKENS)
    rig.run()
    for n in LENGTHS:  # one by one: the whole prefix is there; then what follows differs
        before = rig.decode.core.stats().cache["prefix_hit_tokens"]
        rig.put(f"cut{n}", base[:n], TOKENS)
        rig.run()
        hit = rig.decode.core.stats().cache["prefix_hit_tokens"] - before
        assert hit >= n // BLOCK * BLOCK or pool == "tight", f"{hit} of {n} tokens hit"
    for n in LENGTHS:  # all at once, sharing pages while they run
        rig.put(f"tail{n}", base[:n] + prompt_of(9, n), TOKENS)
    rig.run()
    rig.check()


@pytest.mark.parametrize("pool", ["roomy", "tight"])
@pytest.mark.parametrize("mode", ["colocated", "pd"])
def test_salts(make_rig: MakeRig, tiny_checkpoints: dict[str, Path], mode: str, pool: str) -> None:
    rig = build(make_rig, tiny_checkpoints["glm5"], mode, pool)
    prompt = prompt_of(96, 2)
    for salt in (None, "a", "b"):
        before = rig.decode.core.stats().cache["prefix_hit_tokens"]
        rig.put(f"first-{salt}", prompt, TOKENS, salt=salt)
        rig.run()
        assert rig.decode.core.stats().cache["prefix_hit_tokens"] == before, "a hit across salts"
        rig.put(f"second-{salt}", prompt, TOKENS, salt=salt)
        rig.run()
        assert rig.decode.core.stats().cache["prefix_hit_tokens"] > before
    rig.check()


def test_what_a_finished_answer_leaves_is_a_prefix(make_rig: MakeRig, tiny_checkpoints: dict[str, Path]) -> None:
    """The next turn of a conversation hits the pages of the answer too."""
    for mode in ("colocated", "pd"):
        rig = build(make_rig, tiny_checkpoints["glm52"], mode, "roomy")
        history, hit = prompt_of(41, 3), 0
        for turn in range(4):
            rig.put(f"turn{turn}", history, 23)
            rig.run()
            rows = len(history) + 22
            history = (*history, *rig.answer(f"turn{turn}").token_ids)
            if turn:
                assert rig.answer(f"turn{turn}").stats.cached_tokens == hit
            hit = rows // BLOCK * BLOCK
        rig.check()


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("mode", ["colocated", "pd"])
def test_a_hit_whose_indexer_pages_come_from_the_store(make_rig: MakeRig, tiny_checkpoints: dict[str, Path], mode: str,
                                                       aligned: bool) -> None:
    rig = build(make_rig, tiny_checkpoints["glm52"], mode, "tight")
    evict_indexer_pages(rig)
    prompt = rig.served["first"].prompt
    rig.put("again", prompt[:128] if aligned else prompt, TOKENS)
    rig.run()
    stats = rig.decode.core.stats()
    store = stats.indexer_store or {}
    assert stats.indexer_loads == 1 and 0 < store["loaded_pages"] <= 128 // BLOCK and not store["loads_failed"]
    assert store["loaded_pages"] <= store["used_pages"] <= store["capacity_pages"] and store["stored_pages"]
    assert rig.answer("again").stats.cached_tokens == 128
    rig.check()


def test_a_preempted_request_resumes_from_the_host(make_rig: MakeRig, tiny_checkpoints: dict[str, Path]) -> None:
    """Its indexer pages come back from the store, its rows from the host, and no token changes."""
    rig = make_rig(engine_config(tiny_checkpoints["ds32"], slack=0))
    core = rig.decode.core

    def take_readable_blocks() -> None:
        """What a busy pool does sooner or later: the cached indexer pages of a preempted request are gone."""
        if any(request.preemptions for request in core.scheduler.waiting):
            core.cache.core.pool.drop_readable(1000)

    rig.watch = take_readable_blocks
    for i in range(3):
        rig.put(f"r{i}", prompt_of(100 + 16 * i, i), 60)
    rig.run()
    rig.check()
    stats = core.stats()
    assert stats.preemptions > 0 and stats.indexer_loads > 0 and stats.resolve.miss_rows > 0, stats


@pytest.mark.parametrize("model", ["glm52"])
def test_hisparse_off(make_rig: MakeRig, tiny_checkpoints: dict[str, Path], model: str) -> None:
    rig = make_rig(engine_config(tiny_checkpoints[model], slack=0, cache={"enabled": False, "device_blocks": 100}))
    for i in range(5):
        rig.put(f"r{i}", prompt_of(20 + 55 * i, i), 16)
    rig.run()
    rig.check()


def test_bfloat16_runs(make_rig: MakeRig, tiny_checkpoints: dict[str, Path]) -> None:
    """No oracle to the token; but every token has a finite probability, hot region and host rows included."""
    import math

    from hisparse.types import SamplingParams

    config = engine_config(tiny_checkpoints["glm52"], slack=0, model={"dtype": "bfloat16"})
    rig = make_rig(config)
    answers = rig.decode.generate([prompt_of(150, i) for i in range(3)],
                                  SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1))
    for answer in answers:
        assert len(answer.token_ids) == len(answer.logprobs) == 40
        assert all(token.logprob is not None and math.isfinite(token.logprob) and token.logprob <= 0
                   for token in answer.logprobs)
    assert rig.decode.core.stats().resolve.miss_rows > 0
    rig.drain()
