"""The indexer's reference against a loop over positions and against transformers; its kernels compile without a GPU."""

from __future__ import annotations

import pytest
import torch

from hisparse.errors import ConfigError, InvariantError
from hisparse.ops import reference
from hisparse.ops.reference.indexer import dequantize_keys, quantize_keys
from hisparse.ops.status import NO_INDEXER_PAGE
from tests.ops.indexer_cases import Case, Shape

SIZE = 8


def by_loop(case: Case, top_k: int) -> list[list[int]]:
    """Python's sort on (score, position), one position and one head at a time, in exact integers."""
    rows = []
    for row, (seat, length) in enumerate(zip(case.seats.tolist(), case.lengths.tolist())):
        ranked = []
        for position in range(length if seat >= 0 else 0):
            block = int(case.table[seat, position // SIZE])
            key = case.pages[block, position % SIZE].tolist()
            score = 0.0
            for head, weight in zip(case.q[row].tolist(), case.weights[row].tolist()):
                score += weight * max(0.0, sum(a * b for a, b in zip(head, key)) * case.scale)
            ranked.append((-score, position))
        chosen = sorted(position for _, position in sorted(ranked)[:top_k])
        rows.append(chosen + [-1] * (top_k - len(chosen)))
    return rows


@pytest.mark.parametrize("top_k", [1, 5, 16])
@pytest.mark.parametrize("seed", range(4))
def test_reference_equals_a_loop_and_ties_go_to_the_lower_position(seed: int, top_k: int) -> None:
    shape = Shape(heads=3, dim=4, block_size=SIZE, dtype=torch.float32, spread=1, seed=seed)
    case = Case(shape, [40, 17, 16, 3], [0, 1, 2, -1, 3, 0, 0, 1], [40, 17, 16, 9, 3, 0, 39, 5])
    out = reference.index_topk(*case.arguments, top_k, case.scale, max_len=40)
    assert out.dtype == torch.int32 and out.tolist() == by_loop(case, top_k)
    given = torch.full_like(out, -7)
    assert reference.index_topk(*case.arguments, top_k, case.scale, max_len=40, out=given) is given
    assert torch.equal(given, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_leaves_no_better_position_out(dtype: torch.dtype) -> None:
    case = Case(Shape(heads=8, dim=32, block_size=SIZE, dtype=dtype), [300, 65], [0, 1, 0], [300, 65, 299])
    case.check(reference.index_topk(*case.arguments, 33, case.scale, max_len=300), 33)


def test_rows_are_split_where_scores_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [*range(60, 90), 20, 90]
    case = Case(Shape(heads=3, dim=4, block_size=SIZE, dtype=torch.float32, spread=1), [90], [0] * 32, lengths)
    whole = reference.index_topk(*case.arguments, 16, case.scale, max_len=90)
    monkeypatch.setattr("hisparse.ops.reference.indexer._SCORE_ELEMENTS", 3 * 90 * 4)
    assert torch.equal(reference.index_topk(*case.arguments, 16, case.scale, max_len=90), whole)
    assert whole.tolist() == by_loop(case, 16)


def test_nothing_beyond_a_length_is_read() -> None:
    """Unwritten rows and the null block hold NaN, as does a written row that only a longer context includes."""
    case = Case(Shape(heads=3, dim=4, block_size=SIZE, dtype=torch.float32, spread=1), [21], [0, 0], [20, 18])
    case.pages[int(case.table[0, 2]), 4] = float("nan")
    assert reference.index_topk(*case.arguments, 4, case.scale, max_len=21).tolist() == by_loop(case, 4)


def test_a_missing_page_is_told() -> None:
    case = Case(Shape(heads=3, dim=4, block_size=SIZE, dtype=torch.float32, spread=1), [40, 40], [0, 1, 1], [40, 5, 40])
    case.table[1, 2] = 0
    with pytest.raises(InvariantError, match="seat 1 has no indexer page for position 16"):
        reference.index_topk(*case.arguments, 8, case.scale, max_len=40)
    status = torch.zeros(4, dtype=torch.int32)
    out = reference.index_topk(*case.arguments, 8, case.scale, max_len=40, status=status)
    assert status.tolist() == [NO_INDEXER_PAGE, 1, 16, 2]
    assert not set(out[2].tolist()) & set(range(16, 24)) and out[1].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


def test_written_keys_are_found_again() -> None:
    case = Case(Shape(heads=1, dim=4, block_size=SIZE, dtype=torch.bfloat16, spread=1), [20, 20], [0], [1])
    before = case.pages.clone()
    keys = torch.arange(20.0).view(5, 4) + 0.0001  # rounded to bfloat16
    seats, positions = torch.tensor([0, 1, -1, 1, 0]), torch.tensor([7, 8, 3, 19, 0])
    writes = torch.tensor([True, True, True, True, False])
    reference.write_keys(keys, case.pages, case.table, seats, positions, writes)
    changed = (case.pages.nan_to_num(99) != before.nan_to_num(99)).any(2).nonzero().tolist()
    want = {(int(case.table[s, p // SIZE]), p % SIZE): keys[i].bfloat16() for i, s, p in ((0, 0, 7), (1, 1, 8), (3, 1, 19))}
    assert {tuple(place) for place in changed} <= set(want)
    assert all(torch.equal(case.pages[place], key) for place, key in want.items())


def test_fp8_keys_come_back_within_half_a_step() -> None:
    keys = torch.randn(50, 128, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, 50)[:, None]
    keys[3] = 0
    rows = quantize_keys(keys)
    assert rows.shape == (50, 132) and rows.dtype == torch.uint8
    back = dequantize_keys(rows)
    largest = keys.abs().amax(1, keepdim=True)
    assert bool(((back - keys).abs() <= torch.maximum(keys.abs() / 16, largest / 448 / 512) * 1.0001).all())
    assert torch.equal(quantize_keys(back), rows)
    assert quantize_keys(torch.full((1, 128), 2.0))[0].tolist() == [0x7E] * 128 + [*(torch.tensor([2 / 448]).view(torch.uint8))]


def test_fp8_keys_are_scored_by_their_values() -> None:
    case = Case(Shape(heads=8, block_size=SIZE, dtype=torch.uint8), [300, 65], [0, 1, 0], [300, 65, 299])
    case.check(reference.index_topk(*case.arguments, 33, case.scale, max_len=300), 33)
    zeros, everything = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.bool)
    reference.write_keys(case.keys[1][:1], case.pages, case.table, zeros, zeros + 299, everything)
    assert torch.equal(dequantize_keys(case.pages[int(case.table[0, 37]), 3:4]), case.keys[1][:1])


def test_a_write_without_a_page_is_told() -> None:
    case = Case(Shape(heads=1, dim=4, block_size=SIZE, dtype=torch.float32, spread=1), [20, 9], [0], [1])
    keys, seats = torch.ones(3, 4), torch.tensor([0, 1, 1])
    everything = torch.ones(3, dtype=torch.bool)
    for positions, page in (([1, 2, 16], 16), ([1, 2, 1000], 1000)):
        before, status = case.pages.clone(), torch.zeros(4, dtype=torch.int32)
        with pytest.raises(InvariantError, match=f"position {page}"):
            reference.write_keys(keys, case.pages, case.table, seats, torch.tensor(positions), everything)
        assert torch.equal(before.nan_to_num(9), case.pages.nan_to_num(9))
        reference.write_keys(keys, case.pages, case.table, seats, torch.tensor(positions), everything, status)
        assert status.tolist() == [NO_INDEXER_PAGE, 1, page, 2] and bool((case.pages[case.table[1, 0], 2] == 1).all())


@pytest.mark.parametrize("name", ["glm5", "glm52", "ds32"])
def test_the_indexer_of_transformers_picks_the_same_sets(tiny_checkpoints, name: str) -> None:
    """Its own module computes queries, keys and weights of a text; its choice is compared with ours from pages."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints[name], dtype=torch.float32, local_files_only=True).eval()
    indexers = [layer.self_attn.indexer for layer in model.model.layers if layer.self_attn.indexer is not None]
    seen = [_Seen(indexer) for indexer in indexers]
    tokens = torch.randint(3, 512, (1, 150), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        model.model(input_ids=tokens)
    for one in seen:
        top_k, length = one.indexer.index_topk, tokens.shape[1]
        case = Case(Shape(heads=one.q.shape[1], dim=one.q.shape[2], block_size=16, dtype=torch.float32), [length], [0], [1])
        position = torch.arange(length)
        zeros, everything = torch.zeros(length, dtype=torch.int32), torch.ones(length, dtype=torch.bool)
        reference.write_keys(one.keys, case.pages, case.table, zeros, position, everything)
        out = reference.index_topk(one.q, one.weights, case.pages, case.table, zeros, position + 1, top_k,
                                   one.indexer.softmax_scale, max_len=length)
        for row in range(length):
            theirs = sorted(int(i) for i in one.chosen[row] if i <= row)
            assert [i for i in out[row].tolist() if i >= 0] == theirs, f"{name}: row {row}"


class _Seen:
    """What one indexer of transformers computed in its last forward: recorded at the functions it calls."""

    def __init__(self, indexer: torch.nn.Module) -> None:
        self.indexer = indexer
        forward = indexer.forward

        def record(*args, **kwargs):
            cache = _Cache()
            kwargs.pop("past_key_values", None)
            kwargs["cache"] = cache
            matmul, operands = torch.matmul, []

            def spy(a, b):
                operands.append((a, b))
                return matmul(a, b)

            torch.matmul = spy
            try:
                chosen = forward(*args, **kwargs)
            finally:
                torch.matmul = matmul
            self.q, self.keys, self.weights, self.chosen = operands[0][0][0], cache.keys[0], operands[1][0][0, :, 0], chosen[0]
            return chosen

        indexer.forward = record


class _Cache:
    keys: torch.Tensor

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        self.keys = keys
        return keys


def test_arguments_are_checked_before_anything_is_launched() -> None:
    from hisparse.ops import cuda

    case = Case(Shape(heads=4, dim=32, block_size=SIZE, dtype=torch.float32), [40], [0], [40])
    with pytest.raises(InvariantError, match="q must be"):
        cuda.index_topk(case.q.bfloat16(), *case.arguments[1:], 16, case.scale, max_len=40)
    with pytest.raises(ConfigError, match="indexer_dtype"):
        cuda.index_topk(case.q.half(), case.weights, case.pages.half(), *case.arguments[3:], 16, case.scale, max_len=40)
    with pytest.raises(InvariantError, match="pages fit"):
        cuda.index_topk(*case.arguments, 16, case.scale, max_len=SIZE * case.table.shape[1] + 1)
