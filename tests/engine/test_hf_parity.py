"""The hooked model through real pages against unmodified transformers, from plain resident to host-only history."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from hisparse.config import hot_rows, kv_layout
from hisparse.engine.tokenizer import Tokenizer
from hisparse.testing.reference_decode import ReferenceModel, ReferenceRun, chunk_lengths
from tests.engine.hand_driver import BLOCK, HandDriver, Seat, engine_config

MODELS = ("glm5", "glm52", "ds32")
TOLERANCE = 2e-5
"""fp32 noise of absorbed attention is below 5e-6 in the logits; one swapped position of 32 gives 1e-3 and more."""


@cache
def reference(path: Path, dtype: torch.dtype = torch.float32) -> ReferenceModel:
    return ReferenceModel(path, dtype=dtype)


@cache
def tokens(path: Path) -> tuple[int, ...]:
    return tuple(Tokenizer(path).encode(Path(argparse.__file__).read_text()[2000:8000]))


def prompt(path: Path, length: int, start: int = 0) -> tuple[int, ...]:
    return tokens(path)[start : start + length]


@cache
def expected(path: Path, ids: tuple[int, ...], count: int, chunks: tuple[int, ...]) -> ReferenceRun:
    return reference(path).decode(ids, count, prefill_chunks=chunks, keep_logits=True)


def check(path: Path, seat: Seat, chunks: tuple[int, ...]) -> None:
    """Every sampled token and every logprob of the seat equals the oracle's."""
    count = len(seat.generated)
    run = expected(path, tuple(seat.token_ids[: seat.num_prompt]), count, chunks)
    assert run.first_excusable() == count, "choose another prompt: the oracle itself nearly ties"
    assert tuple(seat.generated) == run.token_ids
    difference = (torch.stack(seat.logprobs) - run.logits.log_softmax(-1)).abs().max()
    assert difference < TOLERANCE, f"{difference:.1e}"


@pytest.fixture(params=MODELS)
def path(request: pytest.FixtureRequest, tiny_checkpoints) -> Path:
    return tiny_checkpoints[request.param]


@pytest.fixture
def driver(path: Path) -> Iterator[HandDriver]:
    with HandDriver(engine_config(path)) as driver:
        yield driver


def test_resident_pages(path: Path, driver: HandDriver) -> None:
    ids, chunks = prompt(path, 150), (64, 64, 22)
    seat = driver.open(3, ids)
    driver.prefill(seat, chunks)
    driver.decode([seat], 20)
    check(path, seat, chunks)
    assert driver.stats.hot_rows == driver.stats.miss_rows == driver.stats.prefill_host_rows == 0


def test_short_contexts_select_everything_and_never_padding(path: Path, driver: HandDriver) -> None:
    """Contexts around top_k = 32: the indexer returns masked positions, which must not be attended to."""
    ids, chunks = prompt(path, 5, start=40), (2, 3)
    seat = driver.open(0, ids)
    driver.prefill(seat, chunks)
    driver.decode([seat], 40)
    check(path, seat, chunks)


def test_hot_region_and_host_history(path: Path, driver: HandDriver) -> None:
    """After a spill only the last two pages stay resident: decode copies rows into a small hot region."""
    ids, chunks = prompt(path, 150), (64, 64, 22)
    seat = driver.open(2, ids)
    driver.prefill(seat, chunks)
    gone = range(len(seat.host) - 2)
    driver.spill(seat, gone)
    driver.give_hot_region(seat)
    driver.drop(seat, gone)
    driver.decode([seat], 20)
    check(path, seat, chunks)
    assert driver.stats.miss_rows > 0 and driver.stats.hot_rows > 0


def test_hot_regions_of_different_sizes(path: Path) -> None:
    """Rows per hot group from a budget and weights, each group's region as large as its own share."""
    groups = len(kv_layout(engine_config(path)).hots)
    assert groups > 1
    weights = [1.0, *[3.0] * (groups - 1)]
    budget = {"hot_rows": None, "hot_rows_total": groups * 32 + 8 * BLOCK, "hot_rows_weights": weights}
    with HandDriver(engine_config(path, cache=budget)) as driver:
        sizes = hot_rows(driver.config.cache, driver.layout)
        assert len(sizes) == groups and sizes[0] < sizes[1]
        ids, chunks = prompt(path, 150, start=21), (64, 64, 22)
        seat = driver.open(2, ids)
        driver.prefill(seat, chunks)
        gone = range(len(seat.host) - 2)
        driver.spill(seat, gone)
        driver.give_hot_region(seat)
        driver.drop(seat, gone)
        driver.decode([seat], 20)
        check(path, seat, chunks)
        assert driver.stats.miss_rows > 0 and driver.stats.hot_rows > 0


def test_prefill_over_host_history(path: Path, driver: HandDriver) -> None:
    """A later chunk reads pages that are on the host only; no hot region is used."""
    ids, chunks = prompt(path, 150, start=9), (96, 54)
    seat = driver.open(1, ids)
    driver.prefill(seat, chunks[:1])
    driver.spill(seat, range(4))
    driver.give_hot_region(seat)
    driver.drop(seat, range(4))
    driver.prefill(seat, chunks[1:])
    driver.decode([seat], 12)
    check(path, seat, chunks)
    assert driver.stats.prefill_host_rows > 0  # counts of a step on a device come with a later one


def test_mirrored_decode_rows_replace_their_page(path: Path) -> None:
    """Pages written row by row in decode are durable without a copy, and read back from the host."""
    ids, chunks = prompt(path, 2 * BLOCK, start=3), (2 * BLOCK,)
    with HandDriver(engine_config(path), mirror=True) as driver:
        seat = driver.open(1, ids)
        driver.prefill(seat, chunks)
        driver.decode([seat], 4 * BLOCK)
        driver.spill(seat, [0, 1, 2, 3], copy_bytes=False)
        driver.give_hot_region(seat)
        driver.drop(seat, [0, 1, 2, 3])
        driver.decode([seat], 8)
        assert driver.stats.miss_rows > 0 and driver.stats.mirrored_rows > 0
        check(path, seat, chunks)


def test_a_batch_of_unequal_lengths_equals_single_runs(path: Path, driver: HandDriver) -> None:
    """Tiers differ within the batch too: one seat reads from the host, the others are resident."""
    plan = [(5, 7, (7,)), (0, 120, (64, 56)), (7, 40, (40,)), (2, 33, (33,))]
    seats = []
    for i, (number, length, chunks) in enumerate(plan):
        seat = driver.open(number, prompt(path, length, start=17 * i))
        driver.prefill(seat, chunks)
        seats.append(seat)
    driver.spill(seats[1], range(5))
    driver.give_hot_region(seats[1])
    driver.drop(seats[1], range(5))
    driver.decode(seats, 16)
    for seat, (_, _, chunks) in zip(seats, plan):
        check(path, seat, chunks)
    assert driver.stats.miss_rows > 0


def test_prefill_and_decode_in_one_step(path: Path, driver: HandDriver) -> None:
    first = driver.open(0, prompt(path, 70))
    driver.prefill(first, (70,))
    second = driver.open(1, prompt(path, 90, start=11))
    driver.prefill(second, (30, 30, 30), with_decode=[first])
    driver.decode([second, first], 6)
    check(path, first, (70,))
    check(path, second, (30, 30, 30))


def test_a_replayed_last_token_writes_nothing_and_gives_the_same_logits(path: Path, driver: HandDriver) -> None:
    ids = prompt(path, 4 * BLOCK)
    seat = driver.open(4, ids)
    driver.prefill(seat, (64,))
    before = driver.executor.rank_engine.parts.cache.bytes.clone()
    seat.logprobs.append(driver.replay(seat))
    assert torch.equal(before, driver.executor.rank_engine.parts.cache.bytes)
    assert (seat.logprobs[0] - seat.logprobs.pop()).abs().max() < TOLERANCE
    driver.decode([seat], 4)
    check(path, seat, (64,))


def test_without_hisparse_plain_tables_are_enough(path: Path) -> None:
    with HandDriver(engine_config(path, cache={"enabled": False})) as driver:
        seat = driver.open(6, prompt(path, 100))
        driver.prefill(seat, (60, 40))
        driver.decode([seat], 10)
        check(path, seat, (60, 40))


def test_bfloat16_is_no_further_from_the_truth_than_the_oracle_in_bfloat16(path: Path) -> None:
    """In bf16 near ties flip on both sides, so tokens may differ; fp32 logits on the same tokens are the truth."""
    ours, theirs = [], []
    with HandDriver(engine_config(path, model={"dtype": "bfloat16"})) as driver:
        assert driver.layout.row.row_bytes == 2 * 80
        for number, start in enumerate((0, 50, 100)):
            ids = prompt(path, 90, start)
            seat = driver.open(number, ids)
            driver.prefill(seat, (90,))
            driver.decode([seat], 6)
            truth = teacher_forced(reference(path), ids, seat.generated)
            ours.append(torch.stack(seat.logprobs) - truth)
            theirs.append(teacher_forced(reference(path, torch.bfloat16), ids, seat.generated) - truth)
    error, allowed = (torch.cat(part).abs().mean() for part in (ours, theirs))
    spread = (truth - truth.mean(-1, keepdim=True)).abs().mean()
    assert error < 1.5 * allowed < 0.75 * spread, f"{error:.3f}, oracle {allowed:.3f}, spread {spread:.3f}"


def teacher_forced(model: ReferenceModel, ids: tuple[int, ...], forced: list[int]) -> torch.Tensor:
    run = model.decode(ids, len(forced), prefill_chunks=len(ids), forced=forced, keep_logits=True)
    assert run.logits is not None
    return run.logits.log_softmax(-1)


def test_chunks_of_one_step_may_come_in_any_order(path: Path) -> None:
    """What a step computes does not depend on the order of its chunks."""
    outcomes = []
    for order in (slice(None), slice(None, None, -1)):
        with HandDriver(engine_config(path)) as driver:
            seats = [driver.open(i, prompt(path, 40 + i, start=5 * i)) for i in range(3)]
            chunks = [driver._chunk(seat, seat.num_prompt, sample=True) for seat in seats]
            driver.step(chunks[order], seats[order])
            outcomes.append([seat.generated for seat in seats])
            assert chunk_lengths(41, 40) == [40, 1]
    assert outcomes[0] == outcomes[1]
