"""Reported failures of other systems at the boundary to the transfer code. Labels as in the list of scenarios."""

from __future__ import annotations

import numpy as np
import pytest

from hisparse.errors import ProtocolError
from hisparse.layout import IndexGroup, KVCacheLayout, ModelShape
from hisparse.pd.endpoint import RankEndpoint, Region, agent_name, check_regions, local_regions
from hisparse.pd.loopback import LoopbackNetwork
from tests.pd.rig import Side

PAGE, ROW = 73_728, 294_912
"""Bytes of a sparse page, and of the packed storage of one block: four layers."""
BLOCKS = 8


def packed_layout() -> KVCacheLayout:
    """Five layers of 64 tokens x 1,152 bytes: four of them in one resident group, one in another."""
    shape = ModelShape(
        model_type="glm_moe_dsa", num_layers=5, num_heads=2, kv_lora_rank=512, rope_dim=64, index_head_dim=128, top_k=64,
        max_positions=4096, vocab_size=64,
        index_groups=(IndexGroup(leader=0, layers=(0, 1, 2, 3)), IndexGroup(leader=4, layers=(4,))))
    return KVCacheLayout.build(shape, block_size=64, dtype="bfloat16", num_groups=2)


def test_b05_a_sparse_page_smaller_than_its_packed_block_is_a_region_of_its_own() -> None:
    """8 blocks of 294,912 bytes with sparse pages of 73,728 at 0, 73,728, 147,456 and 221,184: one region per cache, as
    long as its page, with the block's stride, 8 descriptors; what else a block holds lies outside of it."""
    layout = packed_layout()
    assert (layout.layer_page_bytes, layout.block_bytes) == (PAGE, ROW)
    assert [layout.layer_byte_offset(layer) for layer in range(4)] == [0, PAGE, 2 * PAGE, 3 * PAGE]
    base = 1 << 30
    regions = {region.name: region for region in local_regions(
        layout, device_address=base, num_device_blocks=BLOCKS, host_address=1 << 40, num_host_blocks=BLOCKS)}
    small = regions["resident.1"]
    assert (small.page_bytes, small.page_stride, small.num_pages) == (PAGE, ROW, BLOCKS)
    assert regions["resident.0"].page_bytes == ROW == regions["resident.0"].page_stride
    addresses = small.page_addresses(np.arange(BLOCKS))
    assert addresses.tolist() == [base + i * ROW for i in range(BLOCKS)]
    storage = np.zeros(BLOCKS * ROW, dtype=np.uint8)
    for address in addresses.tolist():
        storage[address - base : address - base + small.page_bytes] = 1
    blocks = storage.reshape(BLOCKS, ROW)
    assert blocks[:, :PAGE].all() and not blocks[:, PAGE:].any(), "sentinels of the other caches stay"
    host = regions["host"]
    assert (host.page_bytes, host.page_stride, host.num_planes) == (PAGE, PAGE, 5)


def test_b05_a_region_longer_than_its_destination_page_is_refused_with_both_numbers() -> None:
    layout = packed_layout()
    regions = local_regions(layout, device_address=1 << 30, num_device_blocks=BLOCKS, host_address=1 << 40,
                            num_host_blocks=BLOCKS)
    whole_rows = tuple(
        Region(name=r.name, address=r.address, page_bytes=ROW, page_stride=ROW, num_pages=r.num_pages)
        if r.name == "resident.1" else r for r in regions)
    endpoint = RankEndpoint(rank=0, agent=agent_name("p", 1, 0), metadata=b"m", regions=whole_rows,
                            generations=Side("p", LoopbackNetwork()).endpoints[0].generations)
    with pytest.raises(ProtocolError, match=f"{ROW} bytes, its destination page {PAGE} bytes"):
        check_regions(endpoint, layout)
