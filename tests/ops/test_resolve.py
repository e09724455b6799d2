"""`reference.resolve` against a slow model of the rules, over random and hostile inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hisparse.errors import InvariantError
from hisparse.ops import HotState, reference
from tests.ops.hot_model import HotModel, Region

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
NAN = float("nan")


@dataclass
class Setup:
    """One leader layer: `layer` pages at row_offset in blocks of rows_per_block; all unwritten rows are NaN."""

    seats: int
    pages: int
    hot: list[int]
    hot_max: int
    block: int = 4
    rows_per_block: int = 12
    row_offset: int = 8
    width: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        rng = self.rng = np.random.default_rng(self.seed)
        hot_blocks = -(-self.hot_max // self.block)
        num_blocks = 1 + self.seats * (self.pages + hot_blocks)
        num_host = 1 + self.seats * self.pages
        device = iter((rng.permutation(num_blocks - 1) + 1).tolist())
        host = iter((rng.permutation(num_host - 1) + 1).tolist())
        self.rows = torch.full((num_blocks * self.rows_per_block, self.width), NAN)
        self.host_rows = torch.arange(num_host * self.block, dtype=torch.float32)[:, None].repeat(1, self.width)
        self.host_rows[: self.block] = NAN
        self.resident = torch.zeros(self.seats, self.pages, dtype=torch.int32)
        self.source = torch.zeros(self.seats, self.pages, dtype=torch.int32)
        self.hot_table = torch.zeros(self.seats, hot_blocks, dtype=torch.int32)
        self.hot_rows = torch.tensor(self.hot, dtype=torch.int32)
        self.state = HotState.empty(self.seats, hot_blocks * self.block, self.pages * self.block)
        self.model = HotModel(self.block)
        for seat in range(self.seats):
            self.model.regions[seat] = Region(self.hot[seat])
            self.model.resident[seat], self.model.on_host[seat] = {}, {}
            for page in range(self.pages):
                self.source[seat, page] = self.model.on_host[seat][page] = next(host)
                if rng.random() < 0.3:
                    self.make_resident(seat, page, next(device))
            for i in range(hot_blocks):
                self.hot_table[seat, i] = next(device)

    def make_resident(self, seat: int, page: int, block: int) -> None:
        self.resident[seat, page] = self.model.resident[seat][page] = block
        first = block * self.rows_per_block + self.row_offset
        source = int(self.source[seat, page]) * self.block
        self.rows[first : first + self.block] = self.host_rows[source : source + self.block]

    def resolve(self, topk, seats, seq_len, **kw):
        return reference.resolve(
            torch.as_tensor(topk, dtype=torch.int32),
            torch.as_tensor(seats, dtype=torch.int32),
            torch.as_tensor(seq_len),
            resident_table=self.resident,
            source_table=self.source,
            hot_table=self.hot_table,
            hot_rows=self.hot_rows,
            state=self.state,
            block_size=self.block,
            rows_per_block=self.rows_per_block,
            row_offset=self.row_offset,
            rows=self.rows,
            host_rows=self.host_rows,
            **kw,
        )

    def step(self, topk, seats, seq_len) -> None:
        """Resolves and compares everything with the model: row ids, counts, state, bytes."""
        got = self.resolve(topk, seats, seq_len)
        want = self.model.resolve([(int(s), int(n), list(map(int, t))) for s, n, t in zip(seats, seq_len, topk)])
        for row, entries in enumerate(want):
            seat = int(seats[row])
            ids = []
            for entry in entries:
                if entry is None:
                    ids.append(-1)
                elif entry[0] == "resident":
                    ids.append(entry[1] * self.rows_per_block + self.row_offset + entry[2])
                else:
                    block = int(self.hot_table[seat, entry[1] // self.block])
                    ids.append(block * self.rows_per_block + self.row_offset + entry[1] % self.block)
                    assert self.rows[ids[-1]].tolist() == [float(entry[2])] * self.width
            assert got.row_ids[row].tolist() == ids, (row, entries)
            assert bool(got.fits[row]) == (row not in self.model.refused)
        named = (got.row_ids >= 0).sum(1)
        assert got.valid.tolist() == named.tolist() == (got.resident + got.hot + got.miss).tolist()
        assert int(got.miss.sum()) == got.plan.count
        self.same_state()

    def same_state(self) -> None:
        self.state.check(self.hot_rows.long())
        for seat, region in self.model.regions.items():
            size = region.size
            assert self.state.slot_tag[seat, :size].tolist() == [-1 if t is None else t for t in region.tags], seat
            assert self.state.use[seat, :size].tolist() == region.use, seat
            assert int(self.state.hand[seat]) == region.hand, seat
            assert bool((self.state.slot_tag[seat, size:] == -1).all())

    def never_touched_null(self) -> None:
        assert bool(self.rows[: self.rows_per_block].isnan().all())


def hostile(rng, num, k, seq_len, spread):
    """Top-k rows with duplicates, -1, extremes and positions at and beyond the end, mixed with likely ones."""
    topk = rng.integers(0, max(1, spread), (num, k))
    for row in range(num):
        junk = rng.random(k) < 0.25
        topk[row, junk] = rng.choice([-1, INT_MIN, INT_MAX, seq_len[row], seq_len[row] - 1, seq_len[row] + 1, -2], junk.sum())
    return np.clip(topk, INT_MIN, INT_MAX)


@pytest.mark.parametrize("seed", range(12))
def test_random_launches_follow_the_model(seed):
    """Any mix of seats, padding and verification rows, with regions that grow, shrink and rewind between launches."""
    rng = np.random.default_rng(seed)
    setup = Setup(seats=4, pages=12, hot=[8, 12, 16, 24], hot_max=24, seed=seed)
    for step in range(40):
        num = int(rng.integers(1, 8))
        seats = rng.integers(-1, 4, num)
        seq_len = rng.integers(1, 49, num)
        setup.step(hostile(rng, num, 7, seq_len, 48), seats, seq_len)
        seat = int(rng.integers(0, 4))
        if step % 5 == 3:
            size = int(rng.choice([8, 12, 16, 20, 24]))
            setup.model.regions[seat].resize(size)
            setup.hot_rows[seat] = size
            reference.reset_seat(setup.state, seat, from_slot=size, from_position=-1)
            setup.same_state()
        if step % 7 == 4:
            position = int(rng.integers(0, 48))
            setup.model.regions[seat].forget_from(position)
            reference.reset_seat(setup.state, seat, from_slot=-1, from_position=position)
            setup.same_state()
        if step % 11 == 9:
            setup.model.regions[seat] = Region(int(setup.hot_rows[seat]))
            reference.reset_seat(setup.state, seat)
            setup.same_state()
    setup.never_touched_null()


@pytest.mark.parametrize("seed", range(4))
def test_decode_with_a_region_of_exactly_top_k(seed):
    """Each launch may replace the whole region: every row still gets every entry."""
    rng = np.random.default_rng(100 + seed)
    setup = Setup(seats=3, pages=16, hot=[8, 8, 8], hot_max=8, seed=seed)
    for _ in range(30):
        topk = np.stack([rng.permutation(64)[:8] for _ in range(3)])
        setup.step(topk, np.array([2, 0, 1]), np.full(3, 64))


def test_duplicates_share_one_slot_and_one_copy():
    setup = Setup(seats=1, pages=4, hot=[8], hot_max=8)
    setup.resident.zero_()
    got = setup.resolve([[5, 5, 5, 9], [9, 5, 1, 1]], [0, 0], [16, 16])
    assert got.plan.count == 3 and got.miss.tolist() == [2, 1] and got.hot.tolist() == [2, 3]
    assert len(set(got.row_ids.flatten().tolist())) == 3
    again = setup.resolve([[9, 1, 5, -1]], [0], [16])
    assert again.plan.count == 0 and again.hot.tolist() == [3]


def test_a_resident_hit_touches_no_hot_state():
    setup = Setup(seats=1, pages=4, hot=[8], hot_max=8)
    setup.resident.zero_()
    setup.resolve([[0, 1, 2, 3]], [0], [16])
    before = [t.clone() for t in (setup.state.slot_tag, setup.state.pos_slot, setup.state.use, setup.state.hand)]
    setup.resident[0, 0] = 3
    got = setup.resolve([[0, 1, 2, 3]], [0], [16])
    assert got.row_ids.tolist() == [[3 * 12 + 8 + i for i in range(4)]] and got.hot.tolist() == [0]
    for old, new in zip(before, (setup.state.slot_tag, setup.state.pos_slot, setup.state.use, setup.state.hand)):
        assert torch.equal(old, new)


def test_a_victim_is_never_used_by_the_same_request_in_the_launch():
    """All hits of one verification row keep their rows while another row of the request misses everything."""
    setup = Setup(seats=1, pages=8, hot=[8], hot_max=8)
    setup.resident.zero_()
    setup.resolve([[0, 1, 2, 3]], [0], [32])
    got = setup.resolve([[20, 21, 22, 23], [0, 1, 2, 3]], [0, 0], [32, 32])
    assert bool(got.fits.all())
    values = setup.rows[got.row_ids.flatten()][:, 0]
    want = [float(setup.source[0, p // 4]) * 4 + p % 4 for p in (20, 21, 22, 23, 0, 1, 2, 3)]
    assert values.tolist() == want


def test_a_verification_row_that_does_not_fit_is_refused_as_a_whole():
    setup = Setup(seats=2, pages=8, hot=[4, 8], hot_max=8)
    setup.resident.zero_()
    got = setup.resolve([[0, 1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3], [7, 6, 5, 4]], [0, 0, 0, 1], [32] * 4)
    assert got.fits.tolist() == [True, False, False, True]
    assert got.row_ids[1].tolist() == got.row_ids[2].tolist() == [-1] * 4
    assert got.valid.tolist() == [4, 0, 0, 4]


def test_b12_every_output_element_is_written():
    """Padding rows and short sequences keep nothing of an earlier step, and padding touches no state."""
    setup = Setup(seats=2, pages=12, hot=[16, 16], hot_max=16)
    out, valid = torch.full((4, 16), 123456, dtype=torch.int32), torch.full((4,), 123456, dtype=torch.int32)
    topk = np.full((4, 16), 123456)
    topk[0], topk[1] = np.arange(16), np.arange(16) * 2
    topk[2], topk[3] = 7, np.arange(16)
    got = setup.resolve(topk, [0, 1, -1, -1], [5, 40, 40, 0], out_row_ids=out, out_valid=valid)
    assert got.row_ids.data_ptr() == out.data_ptr() and got.valid.data_ptr() == valid.data_ptr()
    assert (out[0] >= 0).tolist() == [True] * 5 + [False] * 11 and (out[1] >= 0).all()
    assert out[0, 5:].tolist() == [-1] * 11 and out[2:].flatten().tolist() == [-1] * 32
    assert valid.tolist() == [5, 16, 0, 0] and 123456 not in out.flatten().tolist()
    before = setup.state.slot_tag.clone()
    setup.resolve(topk[2:], [-1, -1], [40, 40])
    assert torch.equal(before, setup.state.slot_tag)


def test_one_launch_equals_the_same_seats_apart():
    """Slots and victims do not depend on what else is in the batch, nor on its order."""
    topk = np.random.default_rng(5).integers(0, 48, (10, 3, 6))
    together, apart = (Setup(seats=3, pages=12, hot=[8, 12, 8], hot_max=12) for _ in range(2))
    for step in topk:
        joint = together.resolve(step, [0, 1, 2], [48] * 3).row_ids
        for seat in (2, 0, 1):
            alone = apart.resolve(step[seat : seat + 1], [seat], [48]).row_ids
            assert torch.equal(joint[seat], alone[0])
    assert torch.equal(together.state.slot_tag, apart.state.slot_tag) and torch.equal(together.state.use, apart.state.use)


def test_non_contiguous_inputs_and_every_integer_type():
    for dtype in (torch.int32, torch.int64):
        plain, strided = (Setup(seats=2, pages=12, hot=[12, 12], hot_max=12) for _ in range(2))
        topk = torch.arange(20, dtype=dtype).view(2, 10)
        want = plain.resolve(topk, [0, 1], [48, 48]).row_ids
        wide = torch.full((4, 20), 3, dtype=dtype)
        wide[::2, ::2] = topk
        strided.resident = strided.resident.t().contiguous().t()
        strided.source = strided.source.repeat(1, 2)[:, :12]
        got = reference.resolve(
            wide[::2, ::2],
            torch.tensor([0, 9, 1, 9], dtype=dtype)[::2],
            torch.tensor([48, 48]),
            resident_table=strided.resident,
            source_table=strided.source,
            hot_table=strided.hot_table,
            hot_rows=strided.hot_rows,
            state=strided.state,
            block_size=4,
            rows_per_block=12,
            row_offset=8,
            rows=strided.rows,
            host_rows=strided.host_rows,
        )
        assert torch.equal(got.row_ids, want)


def test_a_position_without_any_page_is_an_error_and_changes_nothing():
    setup = Setup(seats=1, pages=4, hot=[8], hot_max=8)
    setup.resident.zero_()
    setup.resolve([[0, 1, 2, 3]], [0], [16])
    tags, use = setup.state.slot_tag.clone(), setup.state.use.clone()
    setup.source[0, 2] = 0
    with pytest.raises(InvariantError, match="position 9 is neither resident nor on the host"):
        setup.resolve([[0, 1, 9, 4]], [0], [16])
    assert torch.equal(tags, setup.state.slot_tag) and torch.equal(use, setup.state.use)


def test_a_slot_without_a_block_is_an_error():
    setup = Setup(seats=1, pages=4, hot=[8], hot_max=8)
    setup.resident.zero_()
    setup.hot_table[0, 1] = 0
    with pytest.raises(InvariantError, match="slot 4 of seat 0's hot region has no block"):
        setup.resolve([[0, 1, 2, 3, 4]], [0], [16])


def test_shapes_are_checked_by_name():
    setup = Setup(seats=1, pages=4, hot=[8], hot_max=8)
    with pytest.raises(InvariantError, match=r"topk must be \[n, k\]"):
        setup.resolve([[0, 1]], [0, 0], [16])


def test_empty_batch():
    setup = Setup(seats=1, pages=4, hot=[8], hot_max=8)
    got = setup.resolve(np.zeros((0, 4)), np.zeros(0), np.zeros(0, dtype=np.int64))
    assert got.row_ids.shape == (0, 4) and got.plan.count == 0


def test_b14_row_ids_and_byte_offsets_are_64_bit():
    """Byte offsets on both sides of 2^31 (row stride 656), and element offsets of block 3277 of 1,280 x 512."""
    table = torch.zeros(1, 1, dtype=torch.int32)
    for block, offset, row_bytes, want in ((51_150, 3, 656, 2_147_483_568), (51_150, 4, 656, 2_147_484_224)):
        table[0, 0] = block
        got = reference.resolve_pages(
            torch.tensor([[offset]], dtype=torch.int32),
            torch.tensor([0]),
            torch.tensor([64]),
            resident_table=table,
            source_table=None,
            block_size=64,
            rows_per_block=64,
            row_offset=0,
        ).row_ids
        assert got.dtype == torch.int64 and int(got[0, 0]) * row_bytes == want
    table[0, 0] = 2**31 - 1
    got = reference.resolve_pages(
        torch.tensor([[63]]),
        torch.tensor([0]),
        torch.tensor([64]),
        resident_table=table,
        source_table=None,
        block_size=64,
        rows_per_block=1280,
        row_offset=1216,
    ).row_ids
    assert int(got[0, 0]) == (2**31 - 1) * 1280 + 1216 + 63


def test_prefill_resolution_names_host_rows():
    setup = Setup(seats=1, pages=4, hot=[8], hot_max=8)
    setup.resident[0] = torch.tensor([0, 7, 0, 8])
    kw = dict(resident_table=setup.resident, block_size=4, rows_per_block=12, row_offset=8)
    topk = torch.tensor([[1, 5, 9, 13], [-1, 5, 9, 13]])
    got = reference.resolve_pages(topk, torch.tensor([0, 0]), torch.tensor([16, 9]), source_table=setup.source, **kw)
    first, third = int(setup.source[0, 0]) * 4, int(setup.source[0, 2]) * 4
    assert got.row_ids.tolist() == [[-1, 7 * 12 + 9, -1, 8 * 12 + 9], [-1, 7 * 12 + 9, -1, -1]]
    assert got.host_ids is not None and got.host_ids.tolist() == [[first + 1, -1, third + 1, -1], [-1] * 4]
    assert got.valid.tolist() == [4, 1]
    with pytest.raises(InvariantError, match="position 1 is not resident"):
        reference.resolve_pages(topk, torch.tensor([0, 0]), torch.tensor([16, 9]), source_table=None, **kw)
