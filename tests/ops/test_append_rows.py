"""append_rows and mark_rows of the reference: where rows go, what stays untouched, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hisparse.errors import InvariantError
from hisparse.ops import reference

BLOCK, PER_BLOCK, OFFSET, PAGES = 4, 12, 8, 5
INT_MAX = 2**31 - 1


class Case:
    """3 seats; seat 0 has pages in blocks 5 and 3, mirrored by 2 and nothing; seat 2 a page in block 1, mirrored by 6."""

    def __init__(self, elems: int = 4, dtype: torch.dtype = torch.float32, row_elems: int | None = None) -> None:
        self.resident = torch.zeros(3, PAGES, dtype=torch.int32)
        self.mirror = torch.zeros(3, PAGES, dtype=torch.int32)
        self.resident[0, :2], self.mirror[0, 0] = torch.tensor([5, 3]), 2
        self.resident[2, 4], self.mirror[2, 4] = 1, 6
        shape = row_elems or elems
        self.rows = torch.zeros(6 * PER_BLOCK, shape, dtype=dtype)
        self.rows.view(torch.uint8).fill_(0xEE)
        self.new = torch.randn(5, elems)
        self.seats = torch.tensor([0, 0, -1, 2, 1], dtype=torch.int32)
        self.positions = torch.tensor([3, 4, INT_MAX, 17, 2])
        self.writes = torch.tensor([True, True, True, True, False])

    def append(self, new: tuple[Tensor, Tensor] | None = None) -> None:
        reference.append_rows(self.new if new is None else new, self.seats, self.positions, self.writes,
                              resident_table=self.resident, block_size=BLOCK, rows_per_block=PER_BLOCK, row_offset=OFFSET,
                              rows=self.rows)

    def untouched(self, but: list[int]) -> bool:
        kept = torch.ones(self.rows.shape[0], dtype=torch.bool)
        kept[but] = False
        return bool((self.rows[kept].view(torch.uint8) == 0xEE).all())


ROWS = [5 * PER_BLOCK + OFFSET + 3, 3 * PER_BLOCK + OFFSET, PER_BLOCK + OFFSET + 1]


def test_rows_go_to_their_page_only():
    case = Case()
    case.append()
    assert torch.equal(case.rows[ROWS], case.new[[0, 1, 3]]) and case.untouched(ROWS)


def test_latent_and_rope_may_come_apart():
    whole, parts = Case(), Case()
    parts.new = whole.new
    whole.append()
    parts.append(new=(whole.new[:, :3], whole.new[:, 3:]))
    assert torch.equal(whole.rows.view(torch.uint8), parts.rows.view(torch.uint8))


def test_uint8_rows_are_quantised_and_bfloat16_rows_rounded():
    case = Case(128 + 16, torch.uint8, 176)
    case.append()
    want = reference.quantize_rows(case.new, 128)
    assert torch.equal(case.rows[ROWS], want[[0, 1, 3]]) and case.untouched(ROWS)
    case = Case(8, torch.bfloat16)
    case.append()
    assert torch.equal(case.rows[ROWS], case.new[[0, 1, 3]].bfloat16())


@pytest.mark.parametrize(("seat", "position"), [(0, 8), (0, 4 * PAGES), (0, INT_MAX), (0, -1), (3, 0), (1, 0)])
def test_a_row_without_a_page_is_refused_and_nothing_written(seat, position):
    case = Case()
    case.seats[4], case.positions[4], case.writes[4] = seat, position, True
    with pytest.raises(InvariantError, match=rf"position {position} of seat {seat} is written, but has no page"):
        case.append()
    assert case.untouched([])


def test_a_block_beyond_the_pool_is_refused():
    case = Case()
    case.resident[0, 0] = 6
    with pytest.raises(InvariantError, match="resident block 6"):
        case.append()
    assert case.untouched([])


def test_shapes_are_checked():
    case = Case()
    case.writes = case.writes[:4]
    with pytest.raises(InvariantError, match=r"must be \[n\]"):
        case.append()


def test_marks_are_the_mirrored_rows():
    case = Case()
    masks = torch.zeros(7, dtype=torch.int64)
    masks[2] = 1
    reference.mark_rows(case.seats, case.positions, case.writes, case.mirror, masks, block_size=BLOCK)
    assert masks.tolist() == [0, 0, 0b1001, 0, 0, 0, 0b10]
    case.positions[3], case.mirror[0, 0] = 16, 9
    with pytest.raises(InvariantError, match="host block 9, but there are 7"):
        reference.mark_rows(case.seats, case.positions, case.writes, case.mirror, masks, block_size=BLOCK)


def test_marks_of_a_whole_page_of_64():
    masks, mirror = torch.zeros(3, dtype=torch.int64), torch.tensor([[2]], dtype=torch.int32)
    for part in (torch.arange(0, 64, 2), torch.arange(1, 64, 2)):
        reference.mark_rows(
            torch.zeros(32, dtype=torch.int32), part, torch.ones(32, dtype=torch.bool), mirror, masks, block_size=64
        )
        assert masks.tolist() == [0, 0, -1 if int(part[0]) else 0x5555555555555555]
