"""The indexer's kernels against the reference: equal to the bit where sums are exact, never a better position left out else."""

from __future__ import annotations

import pytest
import torch

from hisparse.bench import indexer as bench_indexer
from hisparse.errors import ConfigError, InvariantError
from hisparse.ops import cuda, reference
from hisparse.ops.cuda.indexer import MAX_ROWS
from hisparse.ops.cuda.topk import select_topk
from hisparse.ops.status import NO_INDEXER_PAGE
from tests.ops.indexer_cases import Case, Shape

pytestmark = pytest.mark.gpu
SHAPES = [
    Shape(), Shape(heads=64), Shape(heads=4, dim=32, block_size=16), Shape(heads=13, dim=64), Shape(heads=8, dim=96),
    Shape(dtype=torch.float32), Shape(heads=16, dim=32, block_size=16, dtype=torch.float32),
    Shape(heads=5, dim=64, block_size=128, dtype=torch.float32), Shape(dtype=torch.uint8),
    Shape(heads=64, block_size=32, dtype=torch.uint8),
]


def shape_like(shape: Shape, **changes: object) -> Shape:
    return Shape(**{**shape.__dict__, **changes})  # type: ignore[arg-type]


def status() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int32, device="cuda")


def run(case: Case, top_k: int, **more) -> torch.Tensor:
    flags = status()
    out = torch.full((case.q.shape[0], top_k), -7, dtype=torch.int32, device="cuda")
    got = cuda.index_topk(*case.arguments, top_k, case.scale, out=out, status=flags,
                          **{"max_len": case.max_len, **more})
    assert got is out and flags.tolist() == [0, 0, 0, 0]
    return out


def expected(case: Case, top_k: int) -> torch.Tensor:
    return reference.index_topk(*case.arguments, top_k, case.scale, max_len=case.max_len)


def borders(top_k: int, size: int) -> list[int]:
    """Lengths at which something changes."""
    return [0, 1, top_k - 1, top_k, top_k + 1, top_k + size - 1, top_k + size, top_k + size + 1, 1023, 1024, 1025,
            2 * top_k + 31, 4096 + 255, 4096 + 256, 4096 + 257, 9999]


@pytest.mark.parametrize("top_k", [32, 512, 2048])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_sums_give_the_same_positions(shape: Shape, top_k: int) -> None:
    """Small integers: every order of summation is exact and scores tie by the hundred."""
    lengths = borders(top_k, shape.block_size)
    seats = list(range(len(lengths)))
    seats[5] = -1
    case = Case(shape_like(shape, spread=2), lengths, seats, lengths, device="cuda")
    assert torch.equal(run(case, top_k), expected(case, top_k))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_better_position_is_left_out(shape: Shape, seed: int) -> None:
    lengths = [0, 31, 2049, 5000, 12345, 700, 16384]
    case = Case(shape_like(shape, seed=seed), lengths, [0, 1, 2, 3, 4, -1, 6], lengths, device="cuda")
    for top_k in (64, 2048):
        case.check(run(case, top_k), top_k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_scores_go_to_the_lower_positions(dtype: torch.dtype) -> None:
    lengths = [3000, 70_001, 2049]
    case = Case(Shape(dtype=dtype, spread=1), lengths, [0, 1, 2], lengths, device="cuda")
    case.q[0] = 0  # all scores 0
    case.weights[1] = -1.0  # many -0 among the zeros, nothing above
    case.q[2] = case.q[2, :1]
    assert torch.equal(run(case, 2048), expected(case, 2048))
    assert torch.equal(run(case, 2048)[0], torch.arange(2048, device="cuda", dtype=torch.int32))


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [2049, 2080, 16_384, 16_385, 32_768, 65_537, 131_072, 300_001])
def test_selection_of_hostile_scores(length: int, cluster: int) -> None:
    """Infinities, denormals, one-bit differences, runs of equals across shares; garbage beyond the length."""
    g = torch.Generator("cuda").manual_seed(length)
    scores = torch.full((6, (length + 63) // 32 * 32), float("nan"), device="cuda")
    scores[0, :length] = torch.randn(length, generator=g, device="cuda")
    scores[1, :length] = torch.randint(-3, 4, (length,), generator=g, device="cuda").float()
    low_bits = torch.randint(0, 1 << 12, (length,), generator=g, device="cuda", dtype=torch.int32)
    scores[2, :length] = (low_bits + 0x3F800000).view(torch.float32)
    scores[3, :length] = torch.randn(length, generator=g, device="cuda") * 1e-42  # must not be flushed to 0
    scores[4, :length] = 1.5
    scores[5, :length] = torch.tensor([float("-inf"), float("inf"), -0.0, 0.0], device="cuda")[
        torch.randint(0, 4, (length,), generator=g, device="cuda")]
    order = scores[:, :length].cpu().sort(dim=1, descending=True, stable=True).indices
    seats = torch.zeros(6, dtype=torch.int32, device="cuda")
    lengths = torch.full((6,), length, dtype=torch.int32, device="cuda")
    for top_k in (32, 1000, 2048):
        out = torch.full((6, top_k), -7, dtype=torch.int32, device="cuda")
        select_topk(scores, seats, lengths, top_k, max_len=length, out=out, cluster=cluster)
        ranked = order[:, :top_k].sort(dim=1).values
        assert torch.equal(out.long().cpu(), ranked), (top_k, (out.long().cpu() != ranked).any(1).tolist())


def test_prefill_rows_share_their_keys() -> None:
    """A chunk of one seat with growing lengths; runs of one seat that cross the borders of a run; a seat that comes back."""
    lengths = [*range(3000, 3300), *range(2040, 2060), 5000, 5001, 5002, 100, 4999, 5000, 3299, 3298]
    seats = [0] * 300 + [1] * 20 + [2, 2, 2, 2, 0, -1, 0, 0]
    lengths[-4], lengths[-3] = 3300, 9
    case = Case(Shape(spread=2), [3300, 2060, 5003], seats, lengths, device="cuda")
    assert torch.equal(run(case, 2048), expected(case, 2048))
    case = Case(Shape(dtype=torch.float32, spread=2, heads=16, dim=32), [3300, 2060, 5003], seats, lengths, device="cuda")
    assert torch.equal(run(case, 512), expected(case, 512))


@pytest.mark.parametrize("num", [1, 2, 17, 64, 133, 512, MAX_ROWS + 5])
def test_batches(num: int) -> None:
    g = torch.Generator().manual_seed(num)
    lengths = torch.randint(0, 3000, (num,), generator=g).tolist()
    lengths[0] = 20_000
    case = Case(Shape(spread=2), lengths, list(range(num)), lengths, device="cuda")
    once = run(case, 512)
    assert torch.equal(once, expected(case, 512))
    assert torch.equal(once, run(case, 512)), "the same twice"
    assert torch.equal(once, run(case, 512, workspace_bytes=5 * 4 * case.max_len)), "in groups of five rows"


@pytest.mark.parametrize("block_size", [4, 64])
def test_rows_that_lie_apart_in_a_page(block_size: int) -> None:
    """NaN between the keys of a page, which must not be read as one."""
    lengths = [700, 5000, 4097]
    case = Case(Shape(block_size=block_size, spread=2), lengths, [0, 1, 2], lengths, device="cuda")
    blocks, size, dim = case.pages.shape
    packed = torch.full((blocks, size * (dim + 24)), float("nan"), dtype=torch.bfloat16, device="cuda")
    pages = packed.as_strided((blocks, size, dim), (packed.stride(0), dim + 24, 1), 8)
    pages.copy_(case.pages)
    dense = run(case, 512)
    case.pages = pages
    assert torch.equal(run(case, 512), dense) and torch.equal(dense, expected(case, 512))


@pytest.mark.parametrize("length", [131_072, 1_000_003])
def test_long_contexts(length: int) -> None:
    case = Case(Shape(spread=3), [length, 4000], [0, 1], [length, 4000], device="cuda")
    assert torch.equal(run(case, 2048), expected(case, 2048))
    case = Case(Shape(seed=1), [length], [0], [length], device="cuda")
    case.check(run(case, 2048), 2048)


def test_every_integer_type_of_the_arguments() -> None:
    case = Case(Shape(spread=2), [3000, 5000], [1, 0], [5000, 2999], device="cuda")
    want = expected(case, 512)
    for seats in (case.seats, case.seats.long()):
        for lengths in (case.lengths, case.lengths.int()):
            got = cuda.index_topk(case.q, case.weights, case.pages, case.table, seats, lengths, 512, case.scale, max_len=5000)
            assert torch.equal(got, want)


def test_a_graph_follows_lengths_seats_and_pages() -> None:
    """Captured with the longest context; replayed with others, all written in place."""
    tokens = [9000, 40_000, 3000, 130]
    case = Case(Shape(spread=2), tokens, [0, 1, 2, 3], tokens, device="cuda")
    flags, out = status(), torch.empty(4, 512, dtype=torch.int32, device="cuda")

    def call() -> None:
        cuda.index_topk(*case.arguments, 512, case.scale, max_len=case.max_len, out=out, status=flags)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replays = [([0, 1, 2, 3], tokens), ([1, 1, 0, -1], [39_000, 39_001, 511, 5]), ([3, 2, -1, 0], [130, 513, 0, 8999])]
    for seats, lengths in replays:
        case.seats.copy_(torch.tensor(seats))
        case.lengths.copy_(torch.tensor(lengths))
        case.q.copy_(case.q.roll(1, 0))
        out.fill_(-7)
        graph.replay()
        assert torch.equal(out, expected(case, 512)), seats
    assert flags.tolist() == [0, 0, 0, 0]


def test_b14_keys_beyond_two_gibi_elements() -> None:
    case = Case(Shape(spread=2), [4000], [0], [4000], device="cuda")
    stride, blocks = 1 << 19, 4300  # 2.25e9 elements
    try:
        packed = torch.empty(blocks * stride, dtype=torch.bfloat16, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pytest.skip("needs 4.5 GB")
    pages = packed.as_strided((blocks, 64, 128), (stride, 128, 1), 64)
    count = -(-4000 // 64)
    want = expected(case, 512)
    table = torch.zeros_like(case.table)
    table[0, :count] = torch.arange(blocks - count, blocks, dtype=torch.int32, device="cuda").flip(0)
    writes = torch.ones(4000, dtype=torch.bool, device="cuda")
    seats, positions = torch.zeros(4000, dtype=torch.int32, device="cuda"), torch.arange(4000, device="cuda")
    cuda.write_keys(case.keys[0], pages, table, seats, positions, writes)
    got = cuda.index_topk(case.q, case.weights, pages, table, case.seats, case.lengths, 512, case.scale, max_len=4000)
    assert torch.equal(got, want)


def test_a_missing_page_is_reported_and_never_read() -> None:
    case = Case(Shape(spread=2), [5000, 5000], [0, 1, 1, -1], [5000, 5000, 300, 5000], device="cuda")
    case.table[1, 40] = 0
    flags, wanted = status(), torch.zeros(4, dtype=torch.int32, device="cuda")
    got = cuda.index_topk(*case.arguments, 512, case.scale, max_len=case.max_len, status=flags)
    want = reference.index_topk(*case.arguments, 512, case.scale, max_len=case.max_len, status=wanted)
    assert torch.equal(got, want)
    found = flags.tolist()
    assert found[0] == NO_INDEXER_PAGE and found[1] == 1 and 40 * 64 <= found[2] < 41 * 64 and found[3] == 1
    assert wanted.tolist() == [NO_INDEXER_PAGE, 1, 40 * 64, 1]
    fewest = cuda.index_topk(*case.arguments, 4960, case.scale, max_len=case.max_len)  # 4,936 positions have a page
    assert fewest[1].tolist()[:2600] == [*range(40 * 64 + 24), *range(41 * 64, 41 * 64 + 16)]


@pytest.mark.parametrize("max_len", [4096, 512, 100])
def test_a_length_beyond_max_len_is_cut_and_reported(max_len: int) -> None:
    case = Case(Shape(spread=2), [5000, 90], [0, 1], [5000, 90], device="cuda")
    flags = status()
    got = cuda.index_topk(*case.arguments, 512, case.scale, max_len=max_len, status=flags)
    assert flags.tolist() == [NO_INDEXER_PAGE, 0, 4999, 0]
    case.lengths[0] = max_len
    assert torch.equal(got, expected(case, 512))


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
def test_written_keys_equal_the_reference(given: torch.dtype, to: torch.dtype) -> None:
    """The last row has no page; keys of a wide range, among them zeros, denormals and ties of the rounding."""
    case = Case(Shape(dtype=to, block_size=32), [200, 60], [0], [1], device="cuda")
    g = torch.Generator("cuda").manual_seed(5)
    keys = torch.randn(9, 128, generator=g, device="cuda") * torch.logspace(-42, 30, 9, device="cuda")[:, None]
    keys[3], keys[4, 1:] = 0, torch.arange(127, device="cuda") / 16
    keys[4, 0] = 448  # scale 1
    keys = keys.to(given)
    seats = torch.tensor([0, 1, -1, 0, 1, 0, 0, 0, 1], device="cuda")
    positions = torch.tensor([0, 31, 3, 199, 32, 7, 64, 127, 64], device="cuda")
    writes = torch.tensor([1, 1, 1, 1, 1, 0, 1, 1, 1], dtype=torch.bool, device="cuda")
    wanted_pages, flags, wanted = case.pages.cpu(), status(), status().cpu()  # torch divides by a scalar inexactly on CUDA
    reference.write_keys(keys.cpu(), wanted_pages, case.table.cpu(), seats.cpu(), positions.cpu(), writes.cpu(), wanted)
    before = case.pages.clone()
    cuda.write_keys(keys, case.pages, case.table, seats, positions, writes, flags)
    as_bytes = [pages.contiguous().view(torch.uint8).cpu() for pages in (case.pages, wanted_pages, before)]
    assert torch.equal(as_bytes[0], as_bytes[1]) and not torch.equal(as_bytes[0], as_bytes[2])
    assert flags.tolist() == wanted.tolist() == [NO_INDEXER_PAGE, 1, 64, 8]
    case.pages.copy_(before)
    cuda.write_keys(keys, case.pages, case.table, seats.int(), positions.int(), writes, None)
    assert torch.equal(case.pages.contiguous().view(torch.uint8).cpu(), as_bytes[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_that_do_not_fit_a_processor_are_refused(dtype: torch.dtype) -> None:
    case = Case(Shape(heads=128, dim=256, dtype=dtype), [100], [0], [100], device="cuda")
    with pytest.raises(ConfigError, match="cannot score indexer keys of 256 values .* with 128 heads: a CTA needs"):
        run(case, 32)
    case = Case(Shape(heads=128, dim=128, dtype=dtype, spread=2), [100], [0], [100], device="cuda")
    assert torch.equal(run(case, 32), expected(case, 32))


def test_wrong_arguments_are_refused_by_name() -> None:
    case = Case(Shape(spread=2), [3000], [0], [3000], device="cuda")
    q, weights, pages, table, seats, lengths = case.arguments
    for bad, what in (
        ((q.float(), weights, pages, table, seats, lengths), "q must be"),
        ((q, weights.double(), pages, table, seats, lengths), "weights"),
        ((q, weights, pages, table.long(), seats, lengths), "block table"),
        ((q, weights, pages, table, seats.short(), lengths), "seats"),
        ((q, weights, pages[:, :, :64], table, seats, lengths), "pages"),
    ):
        with pytest.raises(InvariantError, match=what):
            cuda.index_topk(*bad, 512, case.scale, max_len=3000)
    with pytest.raises(InvariantError, match="fit"):
        cuda.index_topk(*case.arguments, 512, case.scale, max_len=1 << 20)
    with pytest.raises(ConfigError, match="indexer keys on CUDA are one of"):
        cuda.index_topk(q.half(), weights, pages.half(), table, seats, lengths, 512, case.scale, max_len=3000)


def test_the_benchmark_measures_at_a_tiny_size() -> None:
    _, rows = bench_indexer.run(quick=True)
    assert len(rows) == 5 and all(row.value > 0 for row in rows)
