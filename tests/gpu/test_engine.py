"""Whole engines on the GPU: scheduling, spills, preemption and resumption, graphs, and what a step may wait for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.engine import step_output
from hisparse.errors import EngineDeadError
from hisparse.types import SamplingParams
from tests.engine import hand_driver
from tests.engine.hand_driver import BLOCK, HandDriver
from tests.gpu.engine_world import modes, move_to_cuda
from tests.parity import cells, rig, test_matrix, test_reuse, test_stress
from tests.parity.cells import Cell, Engines, cell_config
from tests.parity.conftest import make_rig  # noqa: F401
from tests.parity.rig import Rig, engine_config, prompt_of
from tests.parity.test_stress import play, workload

pytestmark = pytest.mark.gpu
MakeRig = Callable[..., Rig]


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs, unless a test says otherwise."""
    move_to_cuda(monkeypatch, graphs=True, modules=(hand_driver, cells, rig, test_matrix))


@pytest.mark.parametrize("tier", ["resident", "tight"])
@pytest.mark.parametrize("model", cells.MODELS)
def test_prompts_around_the_borders_of_pages_and_top_k(tiny_checkpoints: dict[str, Path], model: str, tier: str) -> None:
    """Every prompt length of the matrix; tight: pages spill, the hot region serves, and the counters prove it."""
    engines, excused = Engines(), []
    for prompt in cells.PROMPTS:
        cell = Cell(model, prompt, tier, 1, "colocated")
        excused.append(test_matrix.check(engines, cell, tiny_checkpoints[model]))
    engines.close()
    assert len([line for line in excused if line]) <= 1, excused


@pytest.mark.parametrize("seed", range(3))
def test_many_requests_through_tight_pools(make_rig: MakeRig, tiny_checkpoints: dict[str, Path], seed: int) -> None:  # noqa: F811
    """Arrivals, aborts, shared prefixes, spills and preemptions; every finished answer is the oracle's."""
    running = make_rig(engine_config(tiny_checkpoints[test_stress.MODELS[seed]], slack=5, host_pages=40))
    play(running, workload(seed))
    stats = running.decode.core.stats()
    assert stats.resolve.miss_rows > 0 and stats.cache["spills_completed"] > 0, stats
    for tier in ("resident", "hot", "miss", "prefill_host"):
        total = getattr(stats.resolve, {"prefill_host": "prefill_host_rows"}.get(tier, f"{tier}_rows"))
        assert sum(group[tier] for group in stats.index_groups) == total, tier


def test_a_preempted_request_resumes_from_the_host(make_rig: MakeRig, tiny_checkpoints: dict[str, Path]) -> None:  # noqa: F811
    test_reuse.test_a_preempted_request_resumes_from_the_host(make_rig, tiny_checkpoints)


@pytest.mark.parametrize("pool", ["roomy", "tight"])
def test_shared_prefixes(make_rig: MakeRig, tiny_checkpoints: dict[str, Path], pool: str) -> None:  # noqa: F811
    test_reuse.test_shared_prefixes(make_rig, tiny_checkpoints, "colocated", "ds32", pool)


@pytest.mark.parametrize("model", cells.MODELS)
def test_replay_equals_eager_bit_for_bit(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch,
                                         model: str) -> None:
    """120 steps of five seats, unequal lengths, one of them hot: every logprob of both ways is the same number."""
    lengths, runs = {0: 5, 3: 40, 1: 130, 6: 64, 7: 31}, []
    for graphs in (False, True):
        move_to_cuda(monkeypatch, graphs=graphs, modules=(hand_driver,))
        with HandDriver(hand_driver.engine_config(tiny_checkpoints[model])) as driver:
            seats = [driver.open(number, prompt_of(length, number)) for number, length in lengths.items()]
            for seat in seats:
                driver.prefill(seat, (seat.num_prompt,))
            hot = seats[2]
            driver.spill(hot, range(6))
            driver.give_hot_region(hot)
            driver.drop(hot, range(6))
            driver.decode(seats, 120)
            assert driver.stats.miss_rows > 0
            runs.append([(seat.generated, torch.stack(seat.logprobs)) for seat in seats])
    for (eager_tokens, eager), (tokens, replayed) in zip(*runs):
        assert tokens == eager_tokens and torch.equal(eager, replayed)


def keep_one_logprob(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the whole vocabulary's."""
    monkeypatch.setattr(hand_driver, "_FULL", SamplingParams(temperature=0.0, logprobs=1))
    monkeypatch.setattr(hand_driver, "_logprobs", lambda token: torch.tensor(token.logprob))


@contextmanager
def only_the_steps_event(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Whatever waits for the device raises, but for the engine's one function; yields a list that counts its calls."""
    waits: list[int] = []
    inside = []

    def refuse(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            assert inside, f"{name} during a step"
            return original(*args, **kwargs)

        return called

    def allowed(event: Any, original: Callable[[Any], None] = step_output.wait_for) -> None:
        waits.append(1)
        inside.append(1)
        original(event)
        inside.pop()

    with monkeypatch.context() as patch:
        patch.setattr(step_output, "wait_for", allowed)
        patch.setattr(torch.cuda, "synchronize", refuse("torch.cuda.synchronize", torch.cuda.synchronize))
        for kind in (torch.cuda.Stream, torch.cuda.Event):
            patch.setattr(kind, "synchronize", refuse(f"{kind.__name__}.synchronize", kind.synchronize))
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("graphs", modes())
def test_a_step_waits_for_one_event(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    """Decode steps with misses, mirrors and table updates, and a prefill chunk over host-only history beside them: one wait
    each, in the engine's own function."""
    move_to_cuda(monkeypatch, graphs=graphs, modules=(hand_driver,))
    with HandDriver(hand_driver.engine_config(tiny_checkpoints["glm52"], model={"dtype": "bfloat16"}), mirror=True) as driver:
        seats = [driver.open(number, prompt_of(100 + number, number)) for number in range(3)]
        for seat in seats:
            driver.prefill(seat, (seat.num_prompt,))
        driver.spill(seats[0], range(4))
        driver.give_hot_region(seats[0])
        driver.drop(seats[0], range(4))
        late = driver.open(5, prompt_of(140, 5))
        driver.prefill(late, (80,))
        driver.spill(late, range(3))
        driver.give_hot_region(late)
        driver.drop(late, range(3))
        driver.decode(seats, 2)
        keep_one_logprob(monkeypatch)
        with only_the_steps_event(monkeypatch) as waits:
            driver.decode(seats, BLOCK)
            driver.prefill(late, (40, 20), with_decode=seats)
            driver.decode([*seats, late], BLOCK)
        assert len(waits) == 2 * BLOCK + 2 and driver.stats.miss_rows > 0 and driver.stats.prefill_host_rows > 0


@pytest.mark.parametrize("graphs", modes())
def test_an_error_on_the_device_ends_the_engine_without_a_token(tiny_checkpoints: dict[str, Path],
                                                                monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    """A page that is in no tier: the step is refused as a whole, whatever the other seats' tokens are."""
    move_to_cuda(monkeypatch, graphs=graphs, modules=(hand_driver,))
    with HandDriver(hand_driver.engine_config(tiny_checkpoints["glm5"])) as driver:
        seats = [driver.open(number, prompt_of(90, number)) for number in range(2)]
        for seat in seats:
            driver.prefill(seat, (90,))
        driver.decode(seats, 1)
        driver.give_hot_region(seats[0])
        driver.drop(seats[0], range(5))
        tables = driver.executor.rank_engine.parts.tables
        tables.source[0] = 0
        with pytest.raises(EngineDeadError, match="neither resident nor on the host .first: seat 0"):
            driver.decode(seats, 3)
        with pytest.raises(EngineDeadError):
            driver.decode(seats, 1)


@pytest.mark.parametrize("graphs", modes())
def test_padding_rows_change_nothing(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    """Three seats run as four rows; bytes of the cache, hot states and counts are as if the fourth was not there."""
    move_to_cuda(monkeypatch, graphs=graphs, modules=(hand_driver,))
    with HandDriver(hand_driver.engine_config(tiny_checkpoints["ds32"])) as driver:
        engine = driver.executor.rank_engine
        seats = [driver.open(number, prompt_of(50, number)) for number in (1, 2, 4)]
        for seat in seats:
            driver.prefill(seat, (50,))
        driver.decode(seats, 3)
        engine.parts.worker.check()
        untouched = engine.parts.cache.bytes[driver.config.cache.device_blocks - 1]
        assert bool((untouched == 0xFF).all()) and bool((engine.parts.cache.bytes[0] == 0xFF).all())
        before = engine.parts.cache.bytes.clone()
        engine._runner.warm_up(64)
        assert torch.equal(engine.parts.cache.bytes, before)


def test_sampling_repeats_with_its_seed_and_reports_logprobs(make_rig: MakeRig, tiny_checkpoints: dict[str, Path]) -> None:  # noqa: F811
    """Rows that need logits, beside rows that do not, in one batch."""
    running = make_rig(engine_config(tiny_checkpoints["glm52"]))
    warm = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)
    answers = [running.decode.generate([prompt_of(60, 1)], warm)[0].token_ids for _ in range(2)]
    assert answers[0] == answers[1] and len(set(answers[0])) > 3
    running.decode.add("greedy", prompt_of(60, 1), SamplingParams(max_tokens=12, ignore_eos=True))
    running.decode.add("listed", prompt_of(60, 1), SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3))
    running.decode.add("warm", prompt_of(60, 1), warm)
    done = running.decode.answers
    running.decode.run_until(lambda: all(done[name].finish_reason for name in ("greedy", "listed", "warm")))
    assert done["warm"].token_ids == answers[0] and done["greedy"].token_ids == done["listed"].token_ids
    assert all(token.top_logprobs[0] == (token.token_id, token.logprob) for token in done["listed"].logprobs)


@functools.cache
def recall_prompts(count: int) -> list[list[int]]:
    from hisparse.checkpoints import recall_checkpoint
    from hisparse.engine.tokenizer import Tokenizer
    from hisparse.testing.recall_documents import build_recall_document

    tokenizer = Tokenizer(recall_checkpoint())
    return [tokenizer.encode(build_recall_document(seed, budget=1200, measure=lambda text: len(tokenizer.encode(text))).prompt)
            for seed in range(count)]


def test_bfloat16_agrees_with_the_float32_oracle_on_recall(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained checkpoint, long contexts served hot: of the oracle's tokens, fed one after the other, at least 95 in 100 are
    what the engine in bfloat16 would have said."""
    from hisparse.checkpoints import recall_checkpoint
    from tests.gpu.engine_world import cuda_reference

    keep_one_logprob(monkeypatch)
    path = recall_checkpoint()
    right = total = 0
    config = hand_driver.engine_config(
        path, model={"dtype": "bfloat16", "max_model_len": 1400},
        cache={"device_blocks": 4000, "host_pool_gib": 0.2, "hot_rows": 320},
        scheduler={"prefill_chunk_tokens": 1400, "max_step_tokens": 1400})
    with HandDriver(config) as driver:
        for number, ids in enumerate(recall_prompts(4)):
            run = cuda_reference(path).decode(ids, 24, prefill_chunks=len(ids))
            seat = driver.open(number, ids)
            driver.prefill(seat, (len(ids),))
            driver.spill(seat, range(len(seat.host) - 2))
            driver.give_hot_region(seat)
            driver.drop(seat, range(len(seat.host) - 2))
            for i, token in enumerate(run.token_ids):
                right += seat.token_ids[-1] == token
                seat.token_ids[-1] = token
                if i + 1 < len(run.token_ids):
                    driver.decode([seat], 1)
            total += len(run.token_ids)
        assert driver.stats.miss_rows > 0
    print(f"bfloat16 agrees with float32 on {right} of {total} tokens")
    assert right >= 0.95 * total


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("tier", ["resident", "tight"])
def test_two_ranks_on_two_devices(tiny_checkpoints: dict[str, Path], tier: str) -> None:
    """Heads split over NCCL inside the graphs, one shared host pool that rank 0 writes."""
    engines, path, processes = Engines(), tiny_checkpoints["glm52"], []
    try:
        for prompt in (31, 65, 300) if tier == "resident" else (65, 300):  # tight: an engine for each length
            cell = Cell("glm52", prompt, tier, 2, "colocated")
            assert test_matrix.check(engines, cell, path) is None
            ranks = engines.get(cell_config(cell, path, "colocated")).executor._ranks
            assert ranks is not None
            processes += [process for process in ranks._processes if process not in processes]
    finally:
        engines.close()
    assert [process.exitcode for process in processes] == [0] * len(processes), "a rank had to be killed"
