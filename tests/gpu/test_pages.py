"""Page copies against copies of single byte ranges, over whole pools."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hisparse.errors import InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.ops import reference
from hisparse.ops.page_list import page_list, pair_list
from hisparse.ops.status import NO_PAGE
from tests.gpu.full_gpu import full_gpu
from tests.gpu.gate import Gate, no_waiting
from tests.gpu.host_memory import HostMemory
from tests.ops.page_world import POISON, Pools, as_rows, distinct, make_layout

pytestmark = pytest.mark.gpu
DEVICE, HOST = 260, 120
LAYOUTS = {
    "bfloat16": make_layout(),
    "float32, pages of 8": make_layout(dtype="float32", block_size=8),
    "fp8_ds_mla": make_layout(row_format="fp8_ds_mla"),
    "fp8_ds_mla, 41,984 bytes": make_layout(row_format="fp8_ds_mla", block_size=64, latent=512, rope=64),
    "one group": make_layout(num_groups=1),
}


class OnDevice:
    """A copy of `pools` on the device and in registered memory, and the copier under test over it."""

    def __init__(self, pools: Pools, memory: HostMemory, ctas: int = 32) -> None:
        from hisparse.ops.cuda.pages import PageCopier

        self.layout = pools.layout
        self.device = pools.device.cuda()
        self.host_bytes = memory.cpu[: pools.host.nbytes].view(pools.host.shape)
        self.host_bytes.copy_(pools.host)
        alias = memory.cuda[: pools.host.nbytes].view(pools.host.shape)
        self.host_rows = [as_rows(pools.layout, layer) for layer in alias]
        self.rows = as_rows(pools.layout, self.device)
        assert self.rows.data_ptr() == self.device.data_ptr()
        self.copier = PageCopier(pools.layout, self.rows, self.host_rows, ctas=ctas, send_ctas=ctas)

    def check(self, want: Pools) -> None:
        torch.cuda.synchronize()
        assert torch.equal(self.device.cpu(), want.device), "device bytes differ"
        assert torch.equal(self.host_bytes, want.host), "host bytes differ"


@pytest.fixture(scope="module")
def memory() -> Iterator[HostMemory]:
    with HostMemory(128 << 20) as memory:
        yield memory


@pytest.fixture(params=LAYOUTS)
def layout(request) -> KVCacheLayout:
    return LAYOUTS[request.param]


def random_pages(layout, count, seed, *, in_runs=False, whole=False):
    rng, groups, size = np.random.default_rng(seed), layout.num_resident_groups, layout.block_size
    if in_runs:
        hosts = list(range(3, 3 + count))
        blocks = np.arange(2, 2 + count)[:, None] + np.arange(groups) * (count + 1)
        hosts[count // 2 :] = [host + 2 for host in hosts[count // 2 :]]
    else:
        hosts = distinct(count, HOST, rng)
        blocks = np.array(distinct(count * groups, DEVICE, rng)).reshape(count, groups)
    return page_list(hosts, blocks, size if whole else rng.integers(0, size + 1, count))


@pytest.mark.parametrize("operation", ["spill", "restore"])
def test_between_device_and_host(layout, operation, memory):
    for count, seed, in_runs, whole in ((1, 0, False, False), (100, 1, False, False), (90, 2, True, True), (0, 3, False, True)):
        pools = Pools.random(layout, DEVICE, HOST, seed)
        ours, pages = OnDevice(pools, memory), random_pages(layout, count, seed, in_runs=in_runs, whole=whole)
        for _ in range(2):
            getattr(ours.copier, operation)(pages)
        getattr(pools, operation)(pages)
        ours.check(pools)


@pytest.mark.parametrize("ctas", [1, 7, 64])
def test_any_number_of_ctas_copies_the_same(ctas, memory):
    layout = LAYOUTS["fp8_ds_mla"]
    pools = Pools.random(layout, DEVICE, HOST, 7)
    ours, pages = OnDevice(pools, memory, ctas), random_pages(layout, 60, 7)
    ours.copier.spill(pages)
    pools.spill(pages)
    ours.check(pools)


@pytest.mark.parametrize("on", ["device", "host"])
@pytest.mark.parametrize("layered", [True, False])
def test_scatter_of_staged_pages(layout, layered, on, memory):
    pools = Pools.random(layout, DEVICE, HOST, 3)
    pages = random_pages(layout, 24, 3)
    pages[::3, 2:] = 0
    pages[7, -1] = 0
    pages[1::4, 1] = 0
    raw = torch.randint(0, 256, (30 * layout.staged_page_bytes,), dtype=torch.uint8)
    with HostMemory(raw.numel()) as staging:
        staging.cpu.copy_(raw)
        ours = OnDevice(pools, memory)
        ours.copier.scatter(staging.cuda if on == "host" else raw.cuda(), pages, layered=layered, slot_pages=30)
        pools.scatter(raw, pages, layered, 30)
        ours.check(pools)


@pytest.mark.parametrize("layered", [True, False])
def test_a_prepared_scatter_takes_no_memory(layered, memory):
    layout = LAYOUTS["bfloat16"]
    pools, pages = Pools.random(layout, DEVICE, HOST, 3), random_pages(layout, 24, 3)
    raw = torch.randint(0, 256, (30 * layout.staged_page_bytes,), dtype=torch.uint8)
    ours, staging = OnDevice(pools, memory), raw.cuda()
    ours.copier.prepare_scatter(30)
    with full_gpu():
        ours.copier.scatter(staging, pages, layered=layered, slot_pages=30)
    pools.scatter(raw, pages, layered, 30)
    ours.check(pools)


def test_copies_for_forks(layout, memory):
    rng, pools = np.random.default_rng(4), Pools.random(layout, DEVICE, HOST, 4)
    ours = OnDevice(pools, memory)
    blocks = pair_list(np.array(distinct(80, DEVICE, rng)).reshape(-1, 2), 1)
    hosts = pair_list(np.array(distinct(80, HOST, rng)).reshape(-1, 2), rng.integers(0, layout.block_size + 1, 40))
    ours.copier.copy_blocks(blocks)
    ours.copier.copy_host_pages(hosts)
    pools.copy_blocks(blocks)
    pools.copy_host_pages(hosts)
    ours.check(pools)


@pytest.mark.parametrize("copy_resident", [False, True])
def test_gather_is_the_references(layout, copy_resident, memory):
    rng, pools = np.random.default_rng(5), Pools.random(layout, DEVICE, HOST, 5)
    ours, theirs = OnDevice(pools, memory), reference.PageCopier(layout, pools.rows, pools.host_rows)
    source, resident = (torch.zeros(3, 100, dtype=torch.int32) for _ in range(2))
    source[1, 2:90] = torch.tensor(distinct(88, HOST, rng))
    resident[1, 5:90:7] = torch.tensor(distinct(13, DEVICE, rng), dtype=torch.int32)
    source[1, 12] = 0
    wide = torch.zeros(3, 105, dtype=torch.int32, device="cuda")[:, 5:]
    wide.copy_(resident)
    status = torch.zeros(4, dtype=torch.int32, device="cuda")
    for layer in range(layout.shape.num_layers):
        raw = torch.full((90, layout.layer_page_bytes), POISON, dtype=torch.uint8)
        got = as_rows(layout, raw.cuda())
        arguments = {"first_page": 2, "num_pages": 88, "copy_resident": copy_resident}
        theirs.gather_pages(layer, 1, source, resident, as_rows(layout, raw), **arguments)
        ours.copier.gather_pages(layer, 1, source.cuda(), wide, got, status=status, **arguments)
        assert torch.equal(got.view(torch.uint8).view(raw.shape).cpu(), raw)
    assert status.tolist() == [0] * 4
    ours.check(pools)


@pytest.mark.parametrize(("host", "block"), [(0, 0), (HOST, 0), (2**31 - 1, 0), (3, DEVICE), (-1, 0)])
def test_gather_reports_a_page_in_neither_tier(host, block, memory):
    layout = LAYOUTS["bfloat16"]
    ours = OnDevice(Pools.random(layout, DEVICE, HOST, 6), memory)
    source, resident = (torch.full((2, 9), value, dtype=torch.int32, device="cuda") for value in (4, 0))
    source[1, 6], resident[1, 6] = host, block
    raw = torch.full((5, layout.layer_page_bytes), POISON, dtype=torch.uint8, device="cuda")
    status = torch.zeros(4, dtype=torch.int32, device="cuda")
    ours.copier.gather_pages(1, 1, source, resident, as_rows(layout, raw), first_page=4, num_pages=5, copy_resident=True,
                             status=status)
    assert status.tolist() == [NO_PAGE, 1, 6 * layout.block_size, block or host]
    assert bool((raw[2] == POISON).all()) and torch.equal(raw[[0, 1, 3, 4]].cpu(), ours.host_bytes[1, [4] * 4])


def test_gather_in_a_graph_follows_its_tables(memory):
    layout = LAYOUTS["fp8_ds_mla"]
    pools = Pools.random(layout, DEVICE, HOST, 8)
    ours = OnDevice(pools, memory)
    source, resident = (torch.full((1, 40), value, dtype=torch.int32, device="cuda") for value in (4, 0))
    raw = torch.full((40, layout.layer_page_bytes), POISON, dtype=torch.uint8, device="cuda")

    def gather() -> None:
        ours.copier.gather_pages(2, 0, source, resident, as_rows(layout, raw), first_page=0, num_pages=40, copy_resident=True)

    gather()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather()
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        source[0] = torch.tensor(distinct(40, HOST, rng), dtype=torch.int32)
        resident[0, ::seed + 1] = torch.tensor(distinct(len(resident[0, ::seed + 1]), DEVICE, rng), dtype=torch.int32)
        graph.replay()
        want = torch.stack([pools.page(2, int(block)) if block else pools.host[2, int(host)]
                            for block, host in zip(resident[0].tolist(), source[0].tolist(), strict=True)])
        assert torch.equal(raw.cpu(), want)


def test_many_batches_follow_each_other_without_waiting(memory):
    """A batch's list is the launch's own: forty batches are queued while the device is held."""
    layout = LAYOUTS["fp8_ds_mla, 41,984 bytes"]
    pools, gate = Pools.random(layout, DEVICE, HOST, 9), Gate()
    ours, side = OnDevice(pools, memory, ctas=1), torch.cuda.Stream()
    ours.copier.copy_blocks(pair_list([(3, 4)], 1))
    pools.copy_blocks(pair_list([(3, 4)], 1))
    torch.cuda.synchronize()
    batches = [("spill" if seed % 2 else "restore", random_pages(layout, 5, seed)) for seed in range(40)]
    for operation, pages in batches:
        getattr(pools, operation)(pages)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), no_waiting():
        gate.hold(side)
        for operation, pages in batches:
            getattr(ours.copier, operation)(pages)
        assert not side.query()
        gate.open()
    torch.cuda.current_stream().wait_stream(side)
    ours.check(pools)


def test_lists_longer_than_a_launch_takes(memory, monkeypatch):
    """Several launches, also where the place in the list says which staged page is meant."""
    from hisparse.ops.cuda import pages as module

    layout = LAYOUTS["bfloat16"]
    pools = Pools.random(layout, DEVICE, HOST, 10)
    ours, listed = OnDevice(pools, memory), random_pages(layout, 100, 10)
    raw = torch.randint(0, 256, (100 * layout.staged_page_bytes,), dtype=torch.uint8)
    monkeypatch.setattr(module, "LIST_WORDS", (40, 124))
    ours.copier.spill(listed)
    pools.spill(listed)
    ours.check(pools)
    for layered in (True, False):
        ours.copier.scatter(raw.cuda(), listed, layered=layered, slot_pages=100)
        pools.scatter(raw, listed, layered, 100)
        ours.check(pools)
    monkeypatch.undo()
    many = np.repeat(pair_list([(7, 8)], 1), 3000, axis=0)
    ours.copier.copy_blocks(many)
    pools.copy_blocks(many[:1])
    ours.check(pools)


def test_a_captured_spill_repeats_its_list(memory):
    layout = LAYOUTS["fp8_ds_mla"]
    pools = Pools.random(layout, DEVICE, HOST, 12)
    ours, pages = OnDevice(pools, memory), random_pages(layout, 20, 12)
    ours.copier.spill(pages[:1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.copier.spill(pages)
    for seed in range(2):
        pools.device[1:] = torch.randint(0, 256, pools.device[1:].shape, generator=torch.Generator().manual_seed(seed)).byte()
        ours.device.copy_(pools.device)
        graph.replay()
        pools.spill(pages)
        ours.check(pools)


def test_b14_pages_beyond_two_gib():
    """Host rows and device blocks on both sides of byte 2^31, in the last layer's part of the pool."""
    layout = make_layout(row_format="fp8_ds_mla", block_size=64, latent=512, rope=64, groups=((0,), (1,)), num_groups=1)
    page = layout.layer_page_bytes
    assert page == 41_984
    host_blocks, device_blocks = 2**31 // page // 2 + 20, 2**31 // layout.block_bytes + 12
    from hisparse.ops.cuda.pages import PageCopier

    with HostMemory(2 * host_blocks * page) as memory:
        host = memory.cuda.view(2, host_blocks, page)
        device = torch.full((device_blocks, layout.block_bytes), POISON, dtype=torch.uint8, device="cuda")
        memory.cpu.view(2, host_blocks, page)[:, -30:] = torch.randint(0, 256, (2, 30, page), dtype=torch.uint8)
        memory.cpu.view(2, host_blocks, page)[:, 1] = 5
        assert (host_blocks + host_blocks - 25) * page > 2**31 and (device_blocks - 3) * layout.block_bytes > 2**31
        copier = PageCopier(layout, as_rows(layout, device), [as_rows(layout, layer) for layer in host])
        far, near = list(range(host_blocks - 30, host_blocks)), list(range(device_blocks - 20, device_blocks))
        copier.restore(page_list(far[:20], np.array(near)[:, None], 64))
        torch.cuda.synchronize()
        want = memory.cpu.view(2, host_blocks, page)
        for place, block in enumerate(near):
            for layer in range(2):
                start = layout.layer_byte_offset(layer)
                assert torch.equal(device[block, start : start + page].cpu(), want[layer, far[place]])
        assert bool((device[: device_blocks - 20] == POISON).all())
        copier.spill(page_list(far[20:], np.array(near[:10])[:, None], 64))
        copier.copy_blocks(pair_list([(near[19], 1)], 64))
        copier.copy_host_pages(pair_list([(far[0], 2)], 64))
        workspace = torch.zeros(2 * 64, 656, dtype=torch.uint8, device="cuda")
        tables = [torch.tensor([pages], dtype=torch.int32, device="cuda") for pages in ([far[3], 0], [0, near[4]])]
        copier.gather_pages(1, 0, *tables, workspace, first_page=0, num_pages=2, copy_resident=True)
        torch.cuda.synchronize()
        assert torch.equal(want[:, far[20:]], want[:, far[:10]])
        assert torch.equal(device[1].cpu(), device[near[19]].cpu()) and torch.equal(want[:, 2], want[:, far[0]])
        assert bool((want[:, 1] == 5).all()) and bool((want[:, 3 : host_blocks - 30] == 0).all())
        assert torch.equal(workspace.view(2, page).cpu(), want[1, [far[3], far[4]]])
        del host, copier


def test_what_cannot_be_copied_is_refused(memory):
    layout = LAYOUTS["bfloat16"]
    pools = Pools.random(layout, DEVICE, HOST, 2)
    ours = OnDevice(pools, memory)
    pages = random_pages(layout, 4, 2)
    for column, value, words in ((1, 0, "host block 0"), (1, HOST, f"host block {HOST}"), (2, DEVICE, "device block"),
                                 (0, layout.block_size + 1, "rows")):
        bad = pages.copy()
        bad[2, column] = value
        with pytest.raises(InvariantError, match=words):
            ours.copier.spill(bad)
    with pytest.raises(InvariantError, match="staging must be"):
        ours.copier.scatter(torch.zeros(4 * layout.staged_page_bytes, dtype=torch.uint8), pages, layered=True, slot_pages=4)
    with pytest.raises(InvariantError, match="16-byte aligned"):
        raw = torch.zeros(4 * layout.staged_page_bytes + 1, dtype=torch.uint8, device="cuda")[1:]
        ours.copier.scatter(raw, pages, layered=True, slot_pages=4)
    from hisparse.ops.cuda.pages import PageCopier

    with pytest.raises(InvariantError, match="on cpu"):
        PageCopier(layout, pools.rows)
    with pytest.raises(InvariantError, match="7 equal tensors"):
        PageCopier(layout, ours.rows, ours.host_rows[:3])
    ours.check(pools)
