"""Poisoned pools with distinct bytes in every row, and page copies done the slow way: one byte range at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from hisparse.layout import IndexGroup, KVCacheLayout, ModelShape
from hisparse.ops.page_list import PageList

POISON = 0xEE


def make_layout(*, dtype: str = "bfloat16", row_format: str = "auto", block_size: int = 4, latent: int = 128, rope: int = 16,
                groups: tuple[tuple[int, ...], ...] = ((0, 1), (2,), (3, 4, 5), (6,)),
                num_groups: int | None = 2) -> KVCacheLayout:
    shape = ModelShape(
        model_type="glm_moe_dsa", num_layers=sum(map(len, groups)), num_heads=2, kv_lora_rank=latent, rope_dim=rope,
        index_head_dim=32, top_k=4, max_positions=1024, vocab_size=32,
        index_groups=tuple(IndexGroup(leader=layers[0], layers=layers) for layers in groups),
    )
    return KVCacheLayout.build(shape, block_size=block_size, dtype=dtype, row_format=row_format, num_groups=num_groups)


@dataclasses.dataclass
class Pools:
    """`device`: uint8 [blocks, block_bytes]. `host`: uint8 [layers, host blocks, page bytes]. Random bytes, block 0 poison."""

    layout: KVCacheLayout
    device: Tensor
    host: Tensor

    @classmethod
    def random(cls, layout: KVCacheLayout, device_blocks: int, host_blocks: int, seed: int = 0) -> Pools:
        make = torch.Generator().manual_seed(seed)
        host_shape = (layout.shape.num_layers, host_blocks, layout.layer_page_bytes)
        device, host = (torch.randint(0, 256, shape, generator=make, dtype=torch.uint8)
                        for shape in ((device_blocks, layout.block_bytes), host_shape))
        device[0], host[:, 0] = POISON, POISON
        return cls(layout, device, host)

    def clone(self) -> Pools:
        return Pools(self.layout, self.device.clone(), self.host.clone())

    @property
    def rows(self) -> Tensor:
        return as_rows(self.layout, self.device)

    @property
    def host_rows(self) -> list[Tensor]:
        return [as_rows(self.layout, layer) for layer in self.host]

    def page(self, layer: int, block: int) -> Tensor:
        """Bytes of one layer's page in a device block."""
        start = self.layout.layer_byte_offset(layer)
        return self.device[block, start : start + self.layout.layer_page_bytes]

    # ---- what each copy means
    def spill(self, pages: PageList) -> None:
        for rows, host, *blocks in pages.tolist():
            for layer, group in enumerate(self.layout.layer_group):
                self._copy(self.host[layer, host], self.page(layer, blocks[group]), rows)

    def restore(self, pages: PageList) -> None:
        for rows, host, *blocks in pages.tolist():
            for layer, group in enumerate(self.layout.layer_group):
                self._copy(self.page(layer, blocks[group]), self.host[layer, host], rows)

    def scatter(self, staging: Tensor, pages: PageList, layered: bool, slot_pages: int) -> None:
        layout = self.layout
        page, groups = layout.layer_page_bytes, layout.num_resident_groups
        for place, (rows, host, *blocks) in enumerate(pages.tolist()):
            if layered:
                slot = staging[: slot_pages * layout.host_block_bytes].view(-1, slot_pages, page)
                by_layer = dict(enumerate(slot[:, place]))
            else:
                slot = staging[: groups * slot_pages * layout.block_bytes].view(groups, slot_pages, -1)
                by_layer = {layer: slot[g, place, i * page : (i + 1) * page]
                            for g, group in enumerate(layout.residents) for i, layer in enumerate(group.layers)}
            for layer, group in enumerate(layout.layer_group):
                if host:
                    self._copy(self.host[layer, host], by_layer[layer], rows)
                if blocks[group]:
                    self._copy(self.page(layer, blocks[group]), by_layer[layer], rows)

    def copy_blocks(self, pairs: PageList) -> None:
        for _, source, target in pairs.tolist():
            self.device[target] = self.device[source]

    def copy_host_pages(self, pairs: PageList) -> None:
        for rows, source, target in pairs.tolist():
            for layer in range(self.layout.shape.num_layers):
                self._copy(self.host[layer, target], self.host[layer, source], rows)

    def _copy(self, target: Tensor, source: Tensor, rows: int) -> None:
        size = rows * self.layout.row.row_bytes
        target[:size] = source[:size]


def as_rows(layout: KVCacheLayout, raw: Tensor) -> Tensor:
    return raw.reshape(-1).view(getattr(torch, layout.row.dtype)).view(-1, layout.row.row_elems)


def distinct(count: int, limit: int, rng: np.random.Generator) -> list[int]:
    """Block ids 1..limit-1, without repetition."""
    return (1 + rng.permutation(limit - 1)[:count]).tolist()
