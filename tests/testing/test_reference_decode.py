"""The oracle equals transformers' own generate(), and its gaps are the ones they are called."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from hisparse.testing.reference_decode import ReferenceModel, ReferenceRun, ReferenceStep, _gap, chunk_lengths

PROMPT = [(7 * i * i + 3 * i + 11) % 500 + 4 for i in range(90)]


@pytest.fixture(scope="module", params=["glm5", "glm52", "ds32"])
def model(request: pytest.FixtureRequest, tiny_checkpoints) -> ReferenceModel:
    return ReferenceModel(tiny_checkpoints[request.param])


@pytest.mark.parametrize("chunks", [90, 32, [1, 88, 1]])
def test_tokens_are_those_of_generate(model: ReferenceModel, chunks) -> None:
    expected = model.model.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False, eos_token_id=None,
                                    pad_token_id=1)[0, len(PROMPT) :].tolist()
    run = model.decode(PROMPT, 16, prefill_chunks=chunks)
    assert list(run.token_ids) == expected and len(set(expected)) > 8
    assert run.first_excusable() == 16, "a near tie in the first place"


def test_gaps_exist_exactly_where_there_is_a_choice(model: ReferenceModel) -> None:
    """top_k is 32: below that every position is selected and no rounding can change the selection."""
    run = model.decode(PROMPT[:30], 6, prefill_chunks=30, keep_logits=True)
    gaps = [step.index_gaps for step in run.steps]  # contexts of 30, 31, 32, 33, 34, 35 tokens
    assert run.prefill_index_gap == math.inf
    assert all(math.isinf(gap) for step in gaps[:3] for gap in step)
    assert all(0 < gap < math.inf for step in gaps[3:] for gap in step)
    num_indexers = sum(layer.self_attn.indexer is not None for layer in model.model.model.layers)
    assert {len(step) for step in gaps} == {num_indexers}
    assert model.decode(PROMPT, 1).prefill_index_gap < math.inf
    best = run.logits.topk(2).values
    assert [step.logit_gap for step in run.steps] == pytest.approx((best[:, 0] - best[:, 1]).tolist())


def test_forced_tokens_are_fed_instead(model: ReferenceModel) -> None:
    free = model.decode(PROMPT, 5)
    forced = model.decode(PROMPT, 5, forced=[5, 6, 7, 8])
    assert forced.token_ids[0] == free.token_ids[0] and forced.token_ids[1:] != free.token_ids[1:]
    assert forced.token_ids[4] == model.decode([*PROMPT, 5, 6, 7, 8], 1, prefill_chunks=[90, 1, 1, 1, 1]).token_ids[0]


def test_it_stops_after_an_end_of_sequence_token(model: ReferenceModel) -> None:
    tokens = model.decode(PROMPT, 6).token_ids
    assert model.decode(PROMPT, 6, eos_token_ids=[tokens[2]]).token_ids == tokens[: tokens.index(tokens[2]) + 1]


def test_chunks_must_cover_the_prompt(model: ReferenceModel) -> None:
    for chunks in ([89], [90, 1], [90, 0]):
        with pytest.raises(ValueError, match="do not cover"):
            model.decode(PROMPT, 1, prefill_chunks=chunks)
    assert chunk_lengths(10, 4) == [4, 4, 2] and chunk_lengths(8, 4) == [4, 4]


def test_the_gap_of_scores() -> None:
    scores = torch.tensor([[5.0, 1.0, 4.0, 3.5], [2.0, 2.0, -math.inf, -math.inf], [1.0, 1.0, 1.0, 0.0]])
    assert _gap(scores, 2).tolist() == [0.5, math.inf, 0.0]
    assert _gap(scores, 4).tolist() == [math.inf] * 3


def test_a_near_tie_excuses_what_follows_and_nothing_before() -> None:
    def step(logit_gap: float, index_gap: float) -> ReferenceStep:
        return ReferenceStep(token_id=1, logit_gap=logit_gap, index_gaps=(1.0, index_gap))

    run = ReferenceRun(steps=(step(1, 1), step(1, 1e-7), step(1, 1)), prefill_index_gap=0.0)
    assert run.first_excusable() == 1
    assert ReferenceRun(steps=(step(1, 1), step(1e-7, 1)), prefill_index_gap=1).first_excusable() == 1
    assert ReferenceRun(steps=(step(1, 1),) * 3, prefill_index_gap=0.0).first_excusable() == 3


def test_the_oracle_shares_no_code_with_the_engine() -> None:
    source = Path(sys.modules[ReferenceModel.__module__].__file__).read_text()
    assert "hisparse." not in source.replace("hisparse.testing", "")
