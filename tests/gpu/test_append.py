"""The kernels that append and mark rows against the reference, byte by byte over everything they could touch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hisparse.errors import ConfigError, InvariantError
from hisparse.layout import scale_bytes
from hisparse.ops import reference
from hisparse.ops.status import NO_TARGET

pytestmark = pytest.mark.gpu
POISON = 0xEE
INT_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A row format, and how its new rows come."""

    latent: int = 512
    rope: int = 64
    stored: torch.dtype = torch.uint8
    new: torch.dtype = torch.bfloat16
    apart: bool = False
    strided: int = 0
    """Elements between a new row's end and the next one's start; odd ones forbid 16-byte reads."""

    @property
    def row_elems(self) -> int:
        if self.stored == torch.uint8:
            return self.latent + scale_bytes(self.latent) + 2 * self.rope
        return self.latent + self.rope


SHAPES = [
    *(Shape(stored=stored, new=new, apart=apart, strided=strided)
      for stored in (torch.uint8, torch.bfloat16, torch.float32) for new in (torch.bfloat16, torch.float32)
      for apart, strided in ((False, 0), (True, 0), (False, 8), (True, 3))),
    Shape(latent=128, rope=16), Shape(latent=640, rope=24, new=torch.float32), Shape(latent=1024, rope=128),
    Shape(latent=8, rope=4, stored=torch.float32, new=torch.float32, apart=True),
    Shape(latent=12, rope=4, stored=torch.bfloat16, new=torch.float32, apart=True),
    Shape(latent=12, rope=4, stored=torch.bfloat16, new=torch.bfloat16, apart=True),
    Shape(latent=60, rope=4, stored=torch.float32, new=torch.bfloat16, apart=True, strided=4),
]


class Batch:
    """Random tables over small pools, and `num` rows of which some are padding, do not write, or have no mirror."""

    def __init__(self, shape: Shape, num: int, *, seed: int, block_size: int = 64, hostile: bool = True) -> None:
        self.shape, self.num, self.block_size = shape, num, block_size
        make = torch.Generator().manual_seed(seed)
        self.seats_max, pages = 5, max(3, 2 * num // block_size)
        self.rows_per_block, self.row_offset = block_size * 3 + 7, block_size + 5
        self.num_blocks, self.num_host = 2 + self.seats_max * pages, 2 + self.seats_max * pages
        self.resident, self.mirror = (
            (1 + torch.randperm(blocks - 1, generator=make)[: self.seats_max * pages].int()).view(-1, pages)
            for blocks in (self.num_blocks, self.num_host)
        )
        self.mirror[torch.rand(self.mirror.shape, generator=make) < 0.3] = 0
        places = torch.randperm(self.seats_max * pages * block_size, generator=make)[:num]
        self.seats = (places // (pages * block_size)).int()
        self.positions = places % (pages * block_size)
        self.writes = torch.rand(num, generator=make) < 0.8
        if num > 4:  # the borders of a page
            border = torch.tensor([0, block_size - 1, block_size, 2 * block_size - 1, 2 * block_size])
            used = set(zip(self.seats[5:].tolist(), self.positions[5:].tolist(), strict=True))
            for i, position in enumerate(border.tolist()):
                if (1, position) not in used:
                    self.seats[i], self.positions[i], self.writes[i] = 1, position, True
        if hostile:
            padding = torch.rand(num, generator=make) < 0.2
            self.seats[padding] = -1
            self.positions[padding] = INT_MAX
            idle = ~self.writes
            self.positions[idle] = INT_MAX
        wide = torch.randn(num, shape.latent + shape.rope + shape.strided, generator=make)
        wide *= torch.logspace(-6, 3, num)[:, None]
        self.wide = wide.to(shape.new)

    def new(self, device: str) -> Tensor | tuple[Tensor, Tensor]:
        wide, (latent, rope) = self.wide.to(device), (self.shape.latent, self.shape.rope)
        if not self.shape.apart:
            return wide[:, : latent + rope]
        second = wide.clone()
        return wide[:, :latent], second[:, self.shape.strided + latent :][:, :rope]

    def pool(self) -> Tensor:
        """Poisoned device rows, on the CPU."""
        shape, item = self.shape, self.shape.stored.itemsize
        size = self.num_blocks * self.rows_per_block
        return torch.full((size, shape.row_elems * item), POISON, dtype=torch.uint8).view(shape.stored)

    def geometry(self) -> dict[str, int]:
        return {"block_size": self.block_size, "rows_per_block": self.rows_per_block, "row_offset": self.row_offset}


def run_reference(batch: Batch, writes: Tensor | None = None) -> Tensor:
    rows = batch.pool()
    reference.append_rows(
        batch.new("cpu"), batch.seats, batch.positions, batch.writes if writes is None else writes,
        resident_table=batch.resident, rows=rows, **batch.geometry(),
    )
    return rows


class OnDevice:
    """The batch's tensors on the device; `launch` may be called again after changing them."""

    def __init__(self, batch: Batch, index: torch.dtype = torch.int64) -> None:
        self.batch, self.rows = batch, batch.pool().cuda()
        self.new = batch.new("cuda")
        self.seats, self.positions = batch.seats.cuda().to(index), batch.positions.cuda().to(index)
        self.writes = batch.writes.cuda()
        self.resident, self.mirror = (torch.zeros(batch.seats_max, batch.resident.shape[1] + pad, dtype=torch.int32).cuda()
                                      [:, pad:] for pad in (3, 5))
        self.resident.copy_(batch.resident), self.mirror.copy_(batch.mirror)
        self.status = torch.zeros(4, dtype=torch.int32, device="cuda")

    def launch(self) -> None:
        from hisparse.ops.cuda.append import append_rows

        append_rows(self.new, self.seats, self.positions, self.writes, resident_table=self.resident, rows=self.rows,
                    status=self.status, **self.batch.geometry())

    def check(self, want: Tensor) -> None:
        torch.cuda.synchronize()
        same_bytes(self.rows.cpu(), want, "device")


def same_bytes(got: Tensor, want: Tensor, what: str) -> None:
    got, want = got.contiguous().view(torch.uint8).flatten(), want.contiguous().view(torch.uint8).flatten()
    wrong = (got != want).nonzero().flatten()
    assert not wrong.numel(), f"{what}: {wrong.numel()} bytes differ, first {wrong[:8].tolist()}: " \
        f"{got[wrong[:8]].tolist()} instead of {want[wrong[:8]].tolist()}"


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_the_references(shape, index):
    for seed, num in enumerate((1, 7, 64, 257)):
        batch = Batch(shape, num, seed=seed)
        ours = OnDevice(batch, index)
        ours.launch()
        ours.check(run_reference(batch))
        assert ours.status.tolist() == [0] * 4


@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_small_pages_and_many_rows(block_size):
    for num in (1023, 1024, 3001):
        batch = Batch(Shape(), num, seed=num, block_size=block_size)
        ours = OnDevice(batch)
        ours.launch()
        ours.check(run_reference(batch))


def test_padding_and_idle_rows_touch_nothing():
    batch = Batch(Shape(), 64, seed=6)
    batch.seats[::2], batch.writes[1::2] = -1, False
    ours = OnDevice(batch)
    ours.launch()
    assert bool((ours.rows == POISON).all()) and ours.status.tolist() == [0] * 4
    empty = OnDevice(Batch(Shape(), 0, seed=1))
    empty.launch()
    empty.check(run_reference(empty.batch))


@pytest.mark.parametrize("new", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.uint8, torch.bfloat16, torch.float32])
def test_hostile_values(stored, new):
    """Zeros, denormals, the largest numbers, infinities, and NaN with payloads, in the latent and in the rope part."""
    batch = Batch(Shape(stored=stored, new=new), 24, seed=7, hostile=False)
    batch.writes[:] = True
    f32 = torch.finfo(torch.float32)
    inf, nan = float("inf"), float("nan")
    values = [0.0, -0.0, f32.tiny, f32.tiny / 448, 1e-45, -1e-40, f32.max, -f32.max, inf, -inf, nan, 448.0]
    for i, value in enumerate(values):
        batch.wide[2 * i] = value
        batch.wide[2 * i + 1, [0, 127, 128, 300, 511, 512, 575]] = value
    payload = {torch.float32: (torch.int32, [0x7F800001, -1, 0x7FC01234]), torch.bfloat16: (torch.int16, [0x7F81, -1, 0x7FA5])}
    as_int, bits = payload[new]
    batch.wide.view(as_int)[20, :3] = torch.tensor(bits, dtype=as_int)
    batch.wide.view(as_int)[20, 570:573] = torch.tensor(bits, dtype=as_int)
    ours = OnDevice(batch)
    ours.launch()
    want = run_reference(batch)
    ours.check(want)
    if stored == torch.uint8:
        row = int(batch.resident[batch.seats[20].long(), batch.positions[20] // 64]) * batch.rows_per_block \
            + batch.row_offset + int(batch.positions[20]) % 64
        assert bool(reference.dequantize_rows(ours.rows[row : row + 1].cpu())[0, :128].isnan().all()), "NaN must stay visible"


def test_random_bits_are_quantised_alike():
    """Any float32 bit pattern: every exponent, NaN payload and rounding case."""
    batch = Batch(Shape(new=torch.float32), 2000, seed=8, hostile=False)
    bits = torch.randint(-(2**31), 2**31, batch.wide.shape, generator=torch.Generator().manual_seed(9)).int()
    batch.wide = bits.view(torch.float32)
    exponent = 0x0F800000 * (torch.arange(2000) % 8)[:, None].int()  # rows of like magnitude, or few values are not 0
    half = (bits[::2] & -0x78000001 & -0x07800001) | exponent[::2]
    batch.wide[::2] = half.view(torch.float32)
    ours = OnDevice(batch)
    ours.launch()
    ours.check(run_reference(batch))


@pytest.mark.parametrize(("seat", "position"), [(0, -1), (0, 64), (0, INT_MAX), (4, 10**9), (5, 0), (10**6, 3)])
def test_a_row_without_a_page_is_reported_and_written_nowhere(seat, position):
    batch = Batch(Shape(), 40, seed=11)
    batch.resident[0, 1] = 0
    at0 = (batch.seats == 0) & (batch.positions // 64 == 1)
    batch.writes[at0] = False
    batch.seats[17], batch.positions[17], batch.writes[17] = seat, position, True
    ours = OnDevice(batch)
    ours.launch()
    others = batch.writes.clone()
    others[17] = False
    ours.check(run_reference(batch, others))
    assert ours.status.tolist() == [NO_TARGET, seat, position, 0]


def test_a_block_beyond_the_pool_is_reported():
    batch = Batch(Shape(), 40, seed=12, hostile=False)
    batch.writes[:] = True
    seat, page = int(batch.seats[20]), int(batch.positions[20]) // 64
    hit = (batch.seats == seat) & (batch.positions // 64 == page)
    ours = OnDevice(batch)
    ours.resident[seat, page] = 2**31 - 1
    ours.launch()
    ours.check(run_reference(batch, ~hit))
    flags, bad_seat, position, _ = ours.status.tolist()
    assert flags == NO_TARGET and bad_seat == seat and position // 64 == page


def test_the_first_error_keeps_its_details():
    batch = Batch(Shape(), 8, seed=13)
    batch.seats[3], batch.positions[3], batch.writes[3] = 9, 5, True
    ours = OnDevice(batch)
    ours.status.copy_(torch.tensor([NO_TARGET, 1, 2, 3], dtype=torch.int32))
    ours.launch()
    assert ours.status.tolist() == [NO_TARGET, 1, 2, 3]


@pytest.mark.parametrize("stored", [torch.uint8, torch.bfloat16])
def test_a_graph_replays_with_new_tables_and_rows(stored):
    first, second = (Batch(Shape(stored=stored), 64, seed=seed) for seed in (21, 22))
    ours = OnDevice(first)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ours.launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.launch()
    for batch in (second, first, second):
        ours.rows.view(torch.uint8).fill_(POISON)
        ours.new.copy_(batch.new("cuda"))
        for name in ("resident", "mirror", "seats", "positions", "writes"):
            getattr(ours, name).copy_(getattr(batch, name))
        graph.replay()
        ours.check(run_reference(batch))


def test_b14_rows_beyond_two_gib_of_bytes_and_of_elements():
    """Row 3,273,604 of 656 bytes starts at byte 2,147,484,224."""
    from hisparse.ops.cuda.append import append_rows

    blocks = 3_273_664 // 64 + 1
    rows = torch.full((blocks * 64, 656), POISON, dtype=torch.uint8, device="cuda")
    new = torch.randn(3, 576, device="cuda")
    position = torch.tensor([3_273_603, 3_273_604, 3_273_663], device="cuda")
    table = torch.arange(blocks, dtype=torch.int32, device="cuda")[None]
    seats, writes = torch.zeros(3, dtype=torch.int32, device="cuda"), torch.ones(3, dtype=torch.bool, device="cuda")
    append_rows(new, seats, position, writes, resident_table=table, block_size=64, rows_per_block=64, row_offset=0, rows=rows)
    assert torch.equal(rows[position].cpu(), reference.quantize_rows(new.cpu()))
    assert int((rows != POISON).any(1).sum()) == 3, "other rows were written"
    assert 3_273_604 * 656 == 2_147_484_224
    elements = 2**31 // 576 + 70
    rows = torch.full((elements, 576), 7.0, dtype=torch.bfloat16, device="cuda")
    table = torch.tensor([[elements - 64]], dtype=torch.int32, device="cuda")
    append_rows(new[:1], seats[:1], seats[:1], writes[:1], resident_table=table, block_size=64,
                rows_per_block=1, row_offset=3, rows=rows)
    assert torch.equal(rows[elements - 61], new[0].bfloat16()) and int((rows != 7.0).any(1).sum()) == 1


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_marks_are_the_references(index):
    from hisparse.ops.cuda.append import mark_rows

    for seed, block_size in ((31, 64), (32, 4), (33, 16)):
        batch = Batch(Shape(), 500, seed=seed, block_size=block_size)
        ours = OnDevice(batch, index)
        want = torch.randint(0, 2**40, (batch.num_host,), generator=torch.Generator().manual_seed(seed))
        masks = want.cuda()
        reference.mark_rows(batch.seats, batch.positions, batch.writes, batch.mirror, want, block_size=block_size)
        for _ in range(2):
            mark_rows(ours.seats, ours.positions, ours.writes, ours.mirror, masks, block_size=block_size, status=ours.status)
        assert torch.equal(masks.cpu(), want) and ours.status.tolist() == [0] * 4


def test_a_mark_outside_the_masks_is_reported():
    from hisparse.ops.cuda.append import mark_rows

    batch = Batch(Shape(), 8, seed=34, hostile=False)
    batch.writes[:], batch.mirror[:] = True, 5
    ours = OnDevice(batch)
    masks = torch.zeros(5, dtype=torch.int64, device="cuda")
    mark_rows(ours.seats, ours.positions, ours.writes, ours.mirror, masks, block_size=64, status=ours.status)
    assert ours.status.tolist()[0] == NO_TARGET and ours.status.tolist()[3] == 5 and not masks.any()


def test_what_the_kernel_cannot_take_is_refused():
    batch = Batch(Shape(), 8, seed=41)

    def refused(error: type[Exception], words: str, **changes: Tensor) -> None:
        ours = OnDevice(batch)
        for name, value in changes.items():
            setattr(ours, name, value)
        with pytest.raises(error, match=words):
            ours.launch()

    good = OnDevice(batch)
    refused(InvariantError, "bool", writes=good.writes.int())
    refused(InvariantError, "int32 or int64", seats=good.seats.float())
    refused(InvariantError, r"must be \[n\]", seats=good.seats[:3])
    refused(InvariantError, "dense rows", resident=good.resident.t())
    refused(InvariantError, "rows must be contiguous", rows=good.rows.repeat(1, 2)[:, :656])
    refused(ConfigError, "no append kernel from torch.float16", new=good.new.half())
    refused(ConfigError, "570 values has 656 bytes", new=good.new[:, :570])
    refused(InvariantError, r"status must be contiguous int32 \[4\]", status=good.status.long())
    refused(InvariantError, "not on CUDA", writes=batch.writes)
