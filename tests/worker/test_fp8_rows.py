"""A worker over fp8_ds_mla rows: what append makes, and that pages of them travel like any others."""

from __future__ import annotations

import pytest
import torch

from hisparse.config import kv_layout, load_config
from hisparse.errors import ConfigError, InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.ops import reference
from hisparse.types import PageCopy, PageRestore, SparseKVPageTransfer
from hisparse.worker import RowBatch
from tests.ops.page_world import make_layout
from tests.worker.rig import Rig

LATENT, VALUES = 128, 144


@pytest.fixture
def rig():
    rig = Rig(make_layout(row_format="fp8_ds_mla"))
    yield rig
    rig.shutdown()


def rows_of(layer, positions):
    """Distinct in every value, so that a wrong layer, position or order shows."""
    step = torch.arange(VALUES) % 16 / 16
    return (1 + step + layer)[None] * 2.0 ** (positions[:, None] % 8)


def test_rows_are_quantised_on_the_device_and_in_the_mirror(rig):
    layout, positions = rig.layout, torch.arange(3, 7)
    assert rig.cache.rows.dtype == rig.host.rows(0).dtype == torch.uint8 and layout.row.row_elems == 176
    batch = RowBatch.build([1] * 4, positions.tolist(), is_prefill=True)

    def forward():
        for handle in rig.handles:
            handle.append(rows_of(handle.layer, positions).to(torch.bfloat16), batch)

    rig.step(forward, resident={(1, 0): (9, 4), (1, 1): (5, 6)}, mirrors={1: (0, 3)}, new_host=(3,), new_device=(4, 5, 6, 9))
    for layer, group in enumerate(layout.layer_group):
        view = rig.cache.view(layer)
        blocks = torch.tensor(((9, 4), (5, 6))[group])
        ids = view.row_ids(blocks[positions // 4], positions % 4)
        assert torch.equal(rig.cache.rows[ids], reference.quantize_rows(rows_of(layer, positions), LATENT))
        back = reference.dequantize_rows(rig.cache.rows[ids], LATENT)
        assert torch.allclose(back, rows_of(layer, positions), rtol=1 / 16)  # 3 mantissa bits
        mirrored = rig.host.rows(layer)[3 * 4 : 4 * 4]
        assert torch.equal(mirrored[:3], rig.cache.rows[ids[1:]])
        assert bool(reference.dequantize_rows(mirrored[3:], LATENT).isnan().all()), "poison shows"
    assert int(rig.host.row_masks[3]) == 0b0111
    with pytest.raises(InvariantError, match=r"rows must be \[4, 144\], got \[4, 176\]"):
        rig.handles[0].append(torch.zeros(4, 176), RowBatch.build([1] * 4, positions.tolist(), is_prefill=True))


def test_spill_restore_and_fork_keep_the_bytes(rig):
    layout, positions = rig.layout, torch.arange(4)
    batch = RowBatch.build([0] * 4, range(4), is_prefill=True)

    def forward():
        for handle in rig.handles:
            handle.append(rows_of(handle.layer, positions), batch)

    spill = SparseKVPageTransfer(id=1, host_block=7, device_blocks=(2, 3), copy_bytes=True, after_forward=True)
    rig.step(forward, resident={(0, 0): (2,), (0, 1): (3,)}, new_device=(2, 3), new_host=(7,), spills=(spill,))
    rig.finish_copies()
    restore = PageRestore(id=2, host_block=7, device_blocks=(10, 11), num_rows=3)
    fork = PageCopy(id=3, device_pairs=((2, 12),), host_pair=(7, 8), num_rows=2)
    rig.step(new_device=(10, 11, 12), new_host=(8,), restores=(restore,), page_copies=(fork,))
    for layer, group in enumerate(layout.layer_group):
        want, view = reference.quantize_rows(rows_of(layer, positions), LATENT), rig.cache.view(layer)
        assert torch.equal(rig.host.rows(layer)[28:32], want) and torch.equal(rig.host.rows(layer)[32:34], want[:2])
        assert torch.equal(view.page((10, 11)[group])[:3], want[:3])
        if group == 0:
            assert torch.equal(view.page(12), want)


def test_a_checkpoint_whose_latent_is_no_multiple_of_128_is_refused(tiny_checkpoints):
    data = {"model": {"path": str(tiny_checkpoints["glm5"])}, "cache": {"row_format": "fp8_ds_mla"}}
    with pytest.raises(ConfigError, match="row_format = fp8_ds_mla scales latents in groups of 128.*kv_lora_rank is 64"):
        kv_layout(load_config(data, environ={}))
    with pytest.raises(ConfigError, match="cache.row_format.*fp8"):
        load_config({**data, "cache": {"row_format": "fp8"}}, environ={})
    data["cache"]["row_format"] = "auto"
    assert isinstance(kv_layout(load_config(data, environ={})), KVCacheLayout)
