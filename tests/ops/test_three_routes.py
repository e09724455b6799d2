"""B01: every layer of one packed allocation reads back its own row by each route, on either backend."""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch

from hisparse.ops import HotState
from hisparse.ops.page_list import page_list
from tests.gpu.host_memory import HostMemory
from tests.ops.page_world import Pools, as_rows, make_layout

SLOT, VALUES, PAGES = 5, 144, 6


@pytest.mark.parametrize("backend", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_b01_resident_hot_and_host_rows_are_each_layers_own(num_groups, backend):
    """1000 * layer + 5 goes to slot 5 of layers 0, 1, 2 in this order, then is read by all routes: never 2005 for layer 0."""
    ops = importlib.import_module(f"hisparse.ops.{backend}")
    device = "cuda" if backend == "cuda" else "cpu"
    layout = make_layout(dtype="float32", groups=((0,), (1,), (2,)), num_groups=num_groups)
    groups, pools = layout.num_resident_groups, Pools.random(layout, 80, 9, 1)
    with contextlib.ExitStack() as stack:
        host = pools.host
        if device == "cuda":
            memory = stack.enter_context(HostMemory(host.numel()))
            memory.cpu.copy_(host.flatten())
            host = memory.cuda.view(host.shape)
        rows, host_rows = as_rows(layout, pools.device.to(device)), [as_rows(layout, layer) for layer in host]
        copier, one = ops.PageCopier(layout, rows, host_rows), torch.ones(1, dtype=torch.int32, device=device)
        near = [7 + group for group in range(groups)]
        tables = []
        for block in near:
            tables.append(torch.zeros(2, PAGES, dtype=torch.int32, device=device))
            tables[-1][1, 0], tables[-1][1, 1] = 3, block
        for layer, group in enumerate(layout.layer_group):
            ops.append_rows(torch.full((1, VALUES), 1000.0 * layer + SLOT, device=device), one, SLOT * one.long(), one.bool(),
                            resident_table=tables[group], block_size=4,
                            rows_per_block=layout.rows_per_block, row_offset=layout.layer_row_offset[layer], rows=rows)
        copier.spill(page_list([6], [near], 4))
        source = torch.zeros(2, PAGES, dtype=torch.int32, device=device)
        source[1, 1] = 6
        for layer, group in enumerate(layout.layer_group):
            want, offset = 1000.0 * layer + SLOT, layout.layer_row_offset[layer]
            resident = rows[near[group] * layout.rows_per_block + offset + SLOT % 4]
            assert resident.tolist() == [want] * VALUES, "resident"
            assert host_rows[layer][6 * 4 + SLOT % 4].tolist() == [want] * VALUES, "host"
            hot = torch.zeros(2, 16, dtype=torch.int32, device=device)
            hot[1] = torch.arange(20 + 16 * group, 36 + 16 * group)
            found = ops.resolve(
                torch.tensor([[SLOT]], dtype=torch.int32, device=device), one, 8 * one, resident_table=torch.zeros_like(source),
                source_table=source, hot_table=hot, hot_rows=torch.tensor([0, 64], dtype=torch.int32, device=device),
                state=HotState.empty(2, 64, PAGES * 4, device=device), block_size=4, rows_per_block=layout.rows_per_block,
                row_offset=offset, rows=rows, host_rows=host_rows[layer],
            )
            at = int(found.row_ids[0, 0])
            assert at // layout.rows_per_block >= 20 and rows[at].tolist() == [want] * VALUES, "hot"
            assert resident.tolist() == [want] * VALUES
        del host, rows, host_rows, copier
