"""Sampling: greedy, reproducible from (seed, position) alone, and following the distribution it claims."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from hisparse.engine.sampler import Sampler, SampleRow
from hisparse.errors import InvariantError
from hisparse.types import SamplingParams

LOGITS = torch.tensor([[0.0, 3.0, 2.0, 2.0, -1.0, 1.0]])
PROBABILITIES = LOGITS[0].softmax(0)


def row(position: int = 7, request_id: str = "r", **params) -> SampleRow:
    return SampleRow(request_id=request_id, position=position, params=SamplingParams(**params))


def draw(count: int, **params) -> Counter:
    sampler = Sampler(salt=1)
    params.setdefault("seed", 5)
    rows = [row(position, **params) for position in range(count)]
    return Counter(token.token_id for token in sampler.sample(LOGITS.expand(count, -1), rows))


def test_temperature_zero_and_no_parameters_take_the_largest_logit() -> None:
    rows = [row(), SampleRow(request_id="r", position=1, params=None)]
    assert [token.token_id for token in Sampler().sample(LOGITS.expand(2, -1), rows)] == [1, 1]


def test_a_draw_depends_on_seed_and_position_only() -> None:
    """What a preempted request needs: another batch, another engine, the same tokens."""
    alone = [Sampler(salt=1).sample(LOGITS, [row(p, temperature=1.0, seed=3)])[0].token_id for p in range(40)]
    rows = [row(p, request_id=f"other{p}", temperature=1.0, seed=3) for p in range(40)]
    together = [token.token_id for token in Sampler(salt=2).sample(LOGITS.expand(40, -1), rows)]
    assert alone == together
    other_seed = [Sampler(salt=1).sample(LOGITS, [row(p, temperature=1.0, seed=4)])[0].token_id for p in range(40)]
    assert alone != other_seed and len(set(alone)) > 1


def test_without_a_seed_a_request_repeats_itself_but_not_another_request() -> None:
    sampler = Sampler(salt=9)
    tokens = [
        [sampler.sample(LOGITS, [row(p, request_id=name, temperature=1.0)])[0].token_id for p in range(40)]
        for name in ("a", "a", "b")
    ]
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_distribution(temperature: float) -> None:
    count = 6000
    expected = (LOGITS[0] / temperature).softmax(0)
    seen = draw(count, temperature=temperature)
    for token in range(6):
        p = float(expected[token])
        assert abs(seen[token] / count - p) < 4.5 * math.sqrt(p * (1 - p) / count) + 1e-9, token


def test_top_k_keeps_exactly_k_and_ties_go_to_the_smaller_id() -> None:
    assert set(draw(400, temperature=5.0, top_k=2)) == {1, 2}  # 2 and 3 tie
    assert set(draw(400, temperature=5.0, top_k=3)) == {1, 2, 3}
    assert set(draw(2000, temperature=5.0, top_k=99)) == set(range(6))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    first = float(PROBABILITIES[1])
    assert set(draw(300, temperature=1.0, top_p=first - 0.01)) == {1}
    assert set(draw(300, temperature=1.0, top_p=first + 0.01)) == {1, 2}
    assert set(draw(3000, temperature=1.0, top_p=1.0)) == set(range(6))


def test_logprobs_are_of_the_model_not_of_the_tempered_choice() -> None:
    token = Sampler().sample(LOGITS, [row(temperature=3.0, seed=1, top_k=1, logprobs=3)])[0]
    expected = LOGITS[0].log_softmax(0)
    assert token.token_id == 1 and token.logprob == pytest.approx(float(expected[1]))
    assert [i for i, _ in token.top_logprobs] == [1, 2, 3]
    assert [value for _, value in token.top_logprobs] == pytest.approx([float(expected[i]) for i in (1, 2, 3)])
    only_own = Sampler().sample(LOGITS, [row(logprobs=0)])[0]
    assert only_own.logprob is not None and only_own.top_logprobs == ()
    assert Sampler().sample(LOGITS, [row()])[0].logprob is None


def test_logits_that_are_not_finite_never_become_a_token() -> None:
    logits = LOGITS.repeat(2, 1)
    logits[1, 4] = float("nan")
    with pytest.raises(InvariantError, match="bad@12"):
        Sampler().sample(logits, [row(), row(12, request_id="bad")])


def test_a_row_too_few_is_an_error() -> None:
    with pytest.raises(InvariantError, match="1 rows of logits for 2"):
        Sampler().sample(LOGITS, [row(), row()])


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    token = Sampler().sample(LOGITS.bfloat16(), [row(logprobs=1)])[0]
    assert token.logprob == pytest.approx(float(LOGITS[0].log_softmax(0)[1]), abs=1e-6)
