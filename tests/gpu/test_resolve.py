"""The fused resolver, bit-equal to the reference: ids, plan, state, bytes."""

from __future__ import annotations

import pytest
import torch

from hisparse.errors import InvariantError
from hisparse.ops import status as words
from hisparse.ops.cuda.resolve import _loaded
from hisparse.testing.pinned_alias import alias_on_cuda
from tests.gpu.resolve_world import POISON, World

pytestmark = pytest.mark.gpu


def random_steps(world: World, k: int, steps: int, *, rows: int = 1, batch: int | None = None, hostile: bool = False,
                 ordered: bool = False, pool: int | None = None) -> None:
    for step in range(steps):
        seats = world.rng.permutation(world.seats)[: batch or world.seats].tolist()
        if hostile and len(seats) > 1:
            seats[int(world.rng.integers(len(seats)))] = -1
        topk, seat, seq = world.select(seats, k, rows=rows, hostile=hostile, ordered=ordered, pool=pool)
        if hostile and rows > 1:
            seat[world.rng.integers(len(seat))] = -1
        world.step(topk, seat, seq if step % 2 else seq.to(torch.int32), rows_per_request=rows)
    assert int(world.status[0]) & ~words.NO_FIT == 0


@pytest.mark.parametrize("row_bytes", [656, 1152, 16, 320])
@pytest.mark.parametrize("block", [64, 16, 4])
@pytest.mark.parametrize("hostile", [False, True])
def test_random_steps(row_bytes: int, block: int, hostile: bool) -> None:
    random_steps(World(block=block, pages=2048 // block, hot=384, hot_max=512, row_bytes=row_bytes), 300, 12, hostile=hostile)


@pytest.mark.parametrize("batch", [1, 3, 16, 64, 65, 300, 512])
def test_batches(batch: int) -> None:
    """Each cluster size, and what is left of the last one."""
    world = World(seats=batch, pages=16, hot=192, hot_max=192, row_bytes=16)
    random_steps(world, 150, 4, hostile=True)


@pytest.mark.parametrize("top_k", [1, 31, 32, 255, 256, 257, 1024, 2047, 2048])
def test_top_k(top_k: int) -> None:
    random_steps(World(seats=3, pages=128, hot=2048, hot_max=2048, row_bytes=32), top_k, 5, hostile=True)


@pytest.mark.parametrize("hot", [2048, 3072, 4096, 6144, 8192, 16384, 32768])
def test_hot_sizes(hot: int) -> None:
    world = World(seats=2, pages=hot // 64 + 64, hot=hot, hot_max=hot, row_bytes=16, resident=0.05)
    random_steps(world, 2048, 14, ordered=True, pool=hot + hot // 2)


@pytest.mark.parametrize("hashed", [False, True])
def test_short_of_room_for_large_clusters(hashed: bool, small_clusters: list[tuple[int, int]]) -> None:
    """A device that cannot run clusters of 16 CTAs gets clusters of 8, with the same results."""
    _loaded.cache_clear()
    try:
        world = World(seats=2, pages=128, hot=2048, hot_max=2048, row_bytes=32, hashed=hashed)
        random_steps(world, 2048, 5, hostile=True)
    finally:
        _loaded.cache_clear()
    assert [cluster for cluster, _ in small_clusters] == [16, 8], small_clusters
    assert all(fits > 0 for _, fits in small_clusters), f"an H200 has room for both: {small_clusters}"


@pytest.mark.parametrize("rows", [2, 3, 4, 8])
@pytest.mark.parametrize("hot", [2048, 700])
def test_verification_rows(rows: int, hot: int) -> None:
    """The union of a request's rows; with 700 slots later rows do not fit."""
    world = World(seats=5, pages=64, hot=hot, hot_max=2048, row_bytes=32)
    random_steps(world, 512, 8, rows=rows, hostile=True, pool=1500)


@pytest.mark.parametrize("batch", [1, 16, 65, 256])
@pytest.mark.parametrize(("rows", "hot"), [(1, 2048), (1, 700), (4, 2048), (2, 600)])
def test_hash_instead_of_the_position_table(batch: int, rows: int, hot: int) -> None:
    world = World(seats=batch, pages=40, hot=hot, hot_max=2048, row_bytes=16, hashed=True)
    random_steps(world, 512, 5, rows=rows, hostile=True, pool=1500)
    world.reset(0, 100, -1)
    random_steps(world, 512, 2, rows=rows, ordered=True)


@pytest.mark.parametrize("hot", [4096, 32768])
def test_hash_at_large_regions(hot: int) -> None:
    world = World(seats=2, pages=hot // 64 + 64, hot=hot, hot_max=hot, row_bytes=16, resident=0.05, hashed=True)
    random_steps(world, 2048, 14, ordered=True, pool=hot + hot // 2)


@pytest.mark.parametrize("batch", [1, 16, 64, 256])
def test_all_misses_then_all_hits(batch: int) -> None:
    world = World(seats=batch, pages=8, hot=512, hot_max=512, row_bytes=16, resident=0.0)
    topk, seats, seq = world.select(list(range(batch)), 256)
    assert int(world.step(topk, seats, seq).miss.min()) == 256
    found = world.step(topk, seats, seq)
    assert int(found.miss.sum()) == 0 and int(found.hot.min()) == 256


def test_one_position_in_every_column() -> None:
    world = World(hot=64, hot_max=64, resident=0.0)
    topk = torch.full((4, 1024), 777, dtype=torch.int32)
    found = world.step(topk, torch.arange(4, dtype=torch.int32), torch.full((4,), 2000))
    assert found.miss.tolist() == [1] * 4 and found.hot.tolist() == [1023] * 4


def test_region_smaller_than_the_selection_is_refused() -> None:
    world = World(hot=100, hot_max=256, resident=0.0)
    topk, seats, seq = world.select([0, 1, 2, 3], 256)
    found = world.step(topk, seats, seq)
    assert not bool(found.fits.any()) and bool((found.row_ids == -1).all())
    assert int(world.status[0]) == words.NO_FIT


def test_no_region_at_all() -> None:
    world = World(hot=0, hot_max=64, resident=1.0)
    topk, seats, seq = world.select([0, 1, 2, 3], 256)
    assert world.step(topk, seats, seq).resident.tolist() == [256] * 4
    world.evict(2, 3)
    found = world.step(topk, seats, seq)
    assert found.fits.tolist() == [True, True, False, True] and int(world.status[0]) == words.NO_FIT
    assert int(world.status[1]) == 2


def test_1000_chained_steps_with_shrinking_and_growing_regions() -> None:
    world = World(seats=6, pages=48, hot=512, hot_max=1024, row_bytes=32, resident=0.2)
    rng = world.rng
    for step in range(1000):
        seat = int(rng.integers(world.seats))
        move = step % 7
        if move == 0:
            world.resize(seat, int(rng.integers(400, 1025)))
        elif move == 1:
            world.reset(seat, -1, int(rng.integers(0, 3000)))
        elif move == 2:
            world.evict(seat, int(rng.integers(world.pages)))
        elif move == 3:
            page = int(rng.integers(world.pages))
            if not int(world.resident_table[seat, page]) and world.free:
                world.seal(seat, page)
        elif move == 4 and step % 5 == 0:
            world.reset(seat, 0, 0)
        topk, seats, seq = world.select(rng.permutation(6)[:4].tolist(), 384, hostile=step % 3 == 0, pool=900)
        found = world.launch(topk.cuda(), seats.cuda(), seq.cuda())
        expected = world.expected(topk, seats, seq)
        assert torch.equal(found.row_ids.cpu().long(), expected.row_ids), f"step {step}"
        if step % 50 == 49:
            world.compare(found, expected)
            world.state.check(world.hot_rows.long())
    world.compare_state()
    assert torch.equal(world.on_gpu["rows"].cpu(), world.rows)


def test_the_same_inputs_give_the_same_outputs() -> None:
    outputs = []
    for _ in range(2):
        world = World(seats=32, pages=32, hot=512, hot_max=512, row_bytes=16, resident=0.1, seed=5)
        for _ in range(5):
            found = world.launch(*(x.cuda() for x in world.select(list(range(32)), 400, hostile=True)))
        outputs.append((found.row_ids, found.plan.flat().host_rows, found.plan.flat().device_rows, world.gpu_state.use,
                        world.gpu_state.slot_tag, world.gpu_state.hand, world.on_gpu["rows"]))
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_geometry_does_not_change_the_result() -> None:
    """More CTAs per request, other threads: same ids, same state."""
    from dataclasses import replace

    from hisparse.ops.cuda.resolve import Geometry

    base = Geometry.choose(4, 1, 2048, 2048)
    for cluster, threads, eager in ((1, 256, 0), (1, 512, 1), (2, 256, 1), (2, 512, 0), (4, 128, 1), (8, 512, 0), (16, 128, 1),
                                    (16, 256, 1)):
        world = World(seats=4, pages=64, hot=2048, hot_max=2048, row_bytes=48, seed=7)
        geometry = replace(base, cluster=cluster, threads=threads, eager=eager, ctas_per_sm=1,
                           groups=max(1, 2048 // 16 // threads))
        for _ in range(4):
            topk, seats, seq = world.select([0, 3, 1, 2], 1500, hostile=True)
            world.step(topk, seats, seq, geometry=geometry)


def test_non_contiguous_inputs() -> None:
    world = World(row_bytes=48)
    topk, seats, seq = world.select([0, 1, 2, 3], 200, hostile=True)
    wide = torch.full((4, 400), 5, dtype=torch.int32, device="cuda")
    wide[:, ::2] = topk.cuda()
    world.compare(world.launch(wide[:, ::2], seats.cuda(), seq.cuda()), world.expected(topk, seats, seq))
    tall = torch.zeros((200, 4), dtype=torch.int32, device="cuda")
    topk, seats, seq = world.select([3, 2, 1, 0], 200)
    tall.copy_(topk.t().cuda())
    world.compare(world.launch(tall.t(), seats.cuda(), seq.cuda()), world.expected(topk, seats, seq))


def test_b12_every_output_element_is_written_and_padding_touches_nothing() -> None:
    world = World(seats=2, hot=64, hot_max=64, row_bytes=16)
    topk = torch.arange(16, dtype=torch.int32).repeat(4, 1)
    ids = torch.full((4, 16), 123456, dtype=torch.int32, device="cuda")
    valid = torch.full((4,), 123456, dtype=torch.int32, device="cuda")
    seats, seq = torch.tensor([0, 1, -1, -1], dtype=torch.int32), torch.tensor([5, 40, 0, 77])
    found = world.step(topk, seats, seq, out_row_ids=ids, out_valid=valid)
    assert found.row_ids is ids and valid.tolist() == [5, 16, 0, 0]
    assert not bool((ids == 123456).any()) and bool((ids[2:] == -1).all()) and bool((ids[0, 5:] == -1).all())


def test_missing_pages_are_reported_and_never_named() -> None:
    world = World(hot=256, hot_max=256, resident=0.0)
    world.on_gpu["source_table"][1, 3] = 0
    topk = torch.arange(150, 350, dtype=torch.int32).repeat(2, 1).cuda()
    found = world.launch(topk, torch.tensor([0, 1], dtype=torch.int32).cuda(), torch.full((2,), 2000).cuda())
    flags, seat, position, _ = world.status.tolist()
    assert flags == words.NO_PAGE and seat == 1 and 192 <= position < 256
    assert bool((found.row_ids[0] >= 0).all())
    assert (found.row_ids[1] < 0).nonzero().squeeze(1).tolist() == list(range(42, 106))
    assert "neither resident nor on the host" in (words.describe(world.status.tolist()) or "")
    world.gpu_state.check(world.on_gpu["hot_rows"].long())


def test_rows_of_one_request_must_share_a_seat() -> None:
    world = World()
    topk, _, seq = world.select([0, 1], 64)
    world.launch(topk.cuda(), torch.tensor([0, 1], dtype=torch.int32).cuda(), seq.cuda(), rows_per_request=2)
    assert int(world.status[0]) & words.BAD_ROWS


def test_bad_arguments() -> None:
    world = World()
    topk, seats, seq = (x.cuda() for x in world.select([0, 1, 2], 64))
    with pytest.raises(InvariantError, match="topk must be int32"):
        world.launch(topk.long(), seats, seq)
    with pytest.raises(InvariantError, match="no multiple of rows_per_request"):
        world.launch(topk, seats, seq, rows_per_request=2)
    with pytest.raises(InvariantError, match="not on CUDA"):
        world.launch(topk, seats.cpu(), seq)


@pytest.mark.parametrize("rows", [1, 2])
def test_graph_replay_equals_the_reference_over_1000_steps(rows: int) -> None:
    """Pages are sealed, spilled and handed to other requests between replays of one captured launch."""
    world = World(seats=4, pages=40, hot=640, hot_max=640, row_bytes=32, resident=0.2)
    n, k = 4 * rows, 300
    topk = torch.full((n, k), -1, dtype=torch.int32, device="cuda")
    seats = torch.full((n,), -1, dtype=torch.int32, device="cuda")
    seq = torch.zeros(n, dtype=torch.int64, device="cuda")
    follower = torch.full_like(world.on_gpu["rows"], POISON)
    from hisparse.ops import cuda

    idle = world.launch(topk, seats, seq, rows_per_request=rows)  # padding only: compiles, changes nothing
    cuda.replay(idle.plan, -world.row_offset, follower, world.gpu_host)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = world.launch(topk, seats, seq, rows_per_request=rows)
        cuda.replay(found.plan, -world.row_offset, follower, world.gpu_host)
    want_follower = follower.cpu()
    for step in range(1000):
        seat = int(world.rng.integers(4))
        if step % 4 == 1 and world.free:
            page = int(world.rng.integers(world.pages))
            world.seal(seat, page) if not int(world.resident_table[seat, page]) else world.evict(seat, page)
        if step % 50 == 7:
            world.reset(seat, 0, 0)  # another request takes the seat
        chosen, seat_of, lengths = world.select(world.rng.permutation([0, 1, 2, -1]).tolist(), k, rows=rows,
                                                hostile=step % 2 == 0, pool=800)
        topk.copy_(chosen), seats.copy_(seat_of), seq.copy_(lengths)
        graph.replay()
        expected = world.expected(chosen, seat_of, lengths)
        want_follower[expected.plan.device_rows - world.row_offset] = world.host[expected.plan.host_rows]
        assert torch.equal(found.row_ids.cpu().long(), expected.row_ids), f"step {step}"
        if step % 100 == 99:
            world.compare(found, expected)
            assert torch.equal(follower.cpu(), want_follower), f"follower, step {step}"


def test_b14_rows_beyond_2_gib_and_2_31_elements() -> None:
    """Host rows beyond 2^31 bytes, device rows beyond 2^31 elements (not only bytes)."""
    host_blocks, block, row = 52_000, 64, 656  # 2.18 GB
    host = torch.empty((host_blocks * block, row), dtype=torch.uint8, pin_memory=True)
    host[3_273_603:3_273_605] = torch.arange(2 * row).reshape(2, row).to(torch.uint8)
    assert 3_273_603 * row < 2**31 <= 3_273_604 * row
    device = torch.empty((3_400_000, row), dtype=torch.uint8, device="cuda")  # 2.23e9 elements
    from hisparse.ops import HotState, cuda

    state = HotState.empty(1, 64, 64 * 4, "cuda")
    table = torch.zeros((1, 4), dtype=torch.int32, device="cuda")
    source = torch.tensor([[3_273_603 // 64, 0, 0, 0]], dtype=torch.int32, device="cuda")
    hot = torch.tensor([[3_399_000 // 64]], dtype=torch.int32, device="cuda")
    offset = 3_273_603 % 64
    topk = torch.tensor([[offset, offset + 1]], dtype=torch.int32, device="cuda")
    found = cuda.resolve(topk, torch.zeros(1, dtype=torch.int32, device="cuda"), torch.full((1,), 200, device="cuda"),
                         resident_table=table, source_table=source, hot_table=hot,
                         hot_rows=torch.full((1,), 64, dtype=torch.int32, device="cuda"), state=state, block_size=64,
                         rows_per_block=64, row_offset=0, rows=device, host_rows=alias_on_cuda(host))
    ids = found.row_ids[0].tolist()
    assert ids == [3_399_000 // 64 * 64, 3_399_000 // 64 * 64 + 1] and ids[0] * row > 2**31
    assert torch.equal(device[ids].cpu(), host[3_273_603:3_273_605])


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_short_walk_for_the_sanitizer(rows: int, hashed: bool) -> None:
    """Misses, hits, duplicates, refused rows and resets in few launches."""
    world = World(seats=3, pages=12, hot=256, hot_max=256, row_bytes=32, hashed=hashed)
    random_steps(world, 130, 3, rows=rows, hostile=True)
    world.resize(0, 128)
    random_steps(world, 130, 2, rows=rows, pool=200)


def test_reset_seats_of_one_launch() -> None:
    from hisparse.ops import cuda, reference

    world = World(seats=5, hot=192, hot_max=256, resident=0.0)
    random_steps(world, 150, 6)
    resets = [(0, 0, 0), (1, 100, -1), (2, -1, 700), (3, 64, 900), (3, 128, -1), (1, 180, 5)]
    for seat, slot, position in resets:
        reference.reset_seat(world.state, seat, from_slot=slot, from_position=position)
    cuda.reset_seats(world.gpu_state, torch.tensor(resets, dtype=torch.int32, device="cuda"))
    world.compare_state()


def test_lookup_equals_the_reference() -> None:
    from hisparse.ops import cuda, reference

    world = World(pages=64, resident=0.5)
    for hostile in (False, True):
        topk, seats, seq = world.select([0, -1, 2, 3], 700, hostile=hostile)
        want = reference.resolve_pages(topk, seats, seq, resident_table=world.resident_table, source_table=world.source_table,
                                       **world.geometry())
        got = cuda.resolve_pages(topk.cuda(), seats.cuda(), seq.cuda(), resident_table=world.on_gpu["resident_table"],
                                 source_table=world.on_gpu["source_table"], status=world.status, **world.geometry())
        for name in ("row_ids", "host_ids", "valid", "resident"):
            assert torch.equal(getattr(got, name).cpu().long(), getattr(want, name).long()), name
        assert int(world.status[0]) == 0
        cuda.resolve_pages(topk.cuda(), seats.cuda(), seq.cuda(), resident_table=world.on_gpu["resident_table"],
                           source_table=None, status=world.status, **world.geometry())
        assert int(world.status[0]) == words.NO_PAGE
        world.status.zero_()
