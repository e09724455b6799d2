"""Where every byte of the KV cache lives, on the device and on the host."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

from hisparse.errors import ConfigError, InvariantError
from hisparse.layout.groups import CacheGroup, HotGroup, IndexerGroup, ResidentGroup, SourceGroup
from hisparse.layout.packing import best_packing
from hisparse.layout.row_format import (
    FP8_DS_MLA,
    INDEXER_SCALE_BYTES,
    ITEM_BYTES,
    ROW_ALIGN_BYTES,
    STORAGE_BYTES,
    RowFormat,
)
from hisparse.layout.shape import ModelShape
from hisparse.layout.waste import WARN_FRACTION, GroupWaste, WasteReport

NULL_BLOCK = 0
"""Block 0 of the device pool and of the host pool is never handed out; tables hold it where there is no page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheLayout:
    """Where every byte of the KV cache lives, on the device and on the host.

    Device: one packed allocation `[num_blocks, block_bytes]`. A block belongs to one group at a time. Inside a resident
    or hot block, layer `l` owns `block_size` consecutive rows from `layer_row_offset[l]`; a *flat row id* of layer `l` is
    `block * rows_per_block + layer_row_offset[l] + row`. Inside an indexer block, the i-th indexer layer owns
    `block_size * indexer_row_bytes` bytes from `i * block_size * indexer_row_bytes`.
    Host: `[layer][host block][block_size][row_bytes]`, layer outermost.
    """

    shape: ModelShape
    block_size: int
    row: RowFormat
    indexer_dtype: str
    block_bytes: int
    indexer: IndexerGroup
    source: SourceGroup
    residents: tuple[ResidentGroup, ...]
    hots: tuple[HotGroup, ...]
    layer_row_offset: tuple[int, ...]
    """Row offset of each layer inside a block of its resident (or hot) group."""
    layer_group: tuple[int, ...]
    """Index into `residents` (and `hots`) of each layer."""

    def __post_init__(self) -> None:
        if self.block_bytes % self.row.row_bytes or self.block_bytes % ROW_ALIGN_BYTES:
            raise InvariantError(f"a block of {self.block_bytes} bytes is no multiple of {self.row.row_bytes}-byte rows and of "
                                 f"{ROW_ALIGN_BYTES} bytes: flat row ids would not be exact")

    @classmethod
    def build(cls, shape: ModelShape, *, block_size: int = 64, dtype: str = "float32", row_format: str = "auto",
              indexer_dtype: str | None = None, num_groups: int | None = None) -> KVCacheLayout:
        """Packs the index groups so that one block of every GPU group has the same size with the least waste.

        Args:
            block_size: tokens per page, a power of two in 4..64 (a page's row mask is a uint64).
            dtype: of the latent rows. row_format: "auto" = rows hold `dtype` as it is; "fp8_ds_mla" = see RowFormat.
            indexer_dtype: of the indexer keys, default `dtype`; "uint8" = fp8: e4m3 codes, then their float32 scale.
            num_groups: resident groups; None chooses the number with the fewest bytes per page.
        Raises:
            ConfigError: block size, row size or number of groups is impossible.
        """
        if block_size not in (4, 8, 16, 32, 64):
            raise ConfigError(f"block_size must be a power of two in 4..64 tokens, got {block_size}")
        if row_format not in ("auto", FP8_DS_MLA):
            raise ConfigError(f"row_format must be 'auto' or '{FP8_DS_MLA}', got {row_format!r}")
        row = RowFormat(dtype="uint8" if row_format == FP8_DS_MLA else dtype, latent_dim=shape.kv_lora_rank,
                        rope_dim=shape.rope_dim)
        indexer_dtype = indexer_dtype or dtype
        if indexer_dtype not in STORAGE_BYTES:
            raise ConfigError(f"indexer dtype must be one of {sorted(ITEM_BYTES)} or 'uint8' (fp8), got {indexer_dtype!r}")
        if indexer_dtype == "uint8" and shape.index_head_dim % INDEXER_SCALE_BYTES:
            raise ConfigError(f"fp8 indexer keys need an index_head_dim that is a multiple of {INDEXER_SCALE_BYTES}, got "
                              f"{shape.index_head_dim}; set cache.indexer_dtype to auto")
        indexer_layers = tuple(group.leader for group in shape.index_groups)
        packing = best_packing(
            [len(group.layers) for group in shape.index_groups], layer_bytes=block_size * row.row_bytes,
            indexer_bytes=len(indexer_layers) * block_size * _indexer_row_bytes(shape, indexer_dtype),
            unit_bytes=math.lcm(row.row_bytes, ROW_ALIGN_BYTES), num_groups=num_groups,
        )
        bins = packing.bins
        offsets, owner = [0] * shape.num_layers, [0] * shape.num_layers
        residents, hots = [], []
        for g, members in enumerate(bins):
            layers = tuple(layer for i in members for layer in shape.index_groups[i].layers)
            for place, layer in enumerate(layers):
                offsets[layer], owner[layer] = place * block_size, g
            residents.append(ResidentGroup(group_id=2 + g, layers=layers, index_groups=members))
            hots.append(HotGroup(group_id=2 + len(bins) + g, layers=layers, index_groups=members))
        return cls(
            shape=shape, block_size=block_size, row=row, indexer_dtype=indexer_dtype, block_bytes=packing.block_bytes,
            indexer=IndexerGroup(group_id=0, layers=indexer_layers),
            source=SourceGroup(group_id=1, layers=tuple(range(shape.num_layers))),
            residents=tuple(residents), hots=tuple(hots),
            layer_row_offset=tuple(offsets), layer_group=tuple(owner),
        )

    def repaged(self, *, block_size: int, num_groups: int) -> KVCacheLayout:
        """The same rows in other pages. Raises ConfigError as `build` does."""
        fp8 = self.row.dtype == "uint8"
        return KVCacheLayout.build(self.shape, block_size=block_size, dtype=self.row.dtype,
                                   row_format=FP8_DS_MLA if fp8 else "auto", indexer_dtype=self.indexer_dtype,
                                   num_groups=num_groups)

    # ---- groups
    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Every group; `groups[i].group_id == i`. Order: indexer, source, resident..., hot..."""
        return (self.indexer, self.source, *self.residents, *self.hots)

    @property
    def num_resident_groups(self) -> int:
        return len(self.residents)

    # ---- device bytes
    @property
    def rows_per_block(self) -> int:
        return self.block_bytes // self.row.row_bytes

    @property
    def indexer_row_bytes(self) -> int:
        return _indexer_row_bytes(self.shape, self.indexer_dtype)

    @property
    def indexer_row_elems(self) -> int:
        """Elements of a key in its storage dtype: index_head_dim, and for fp8 the bytes of its scale behind them."""
        return self.indexer_row_bytes // STORAGE_BYTES[self.indexer_dtype]

    @property
    def indexer_page_bytes(self) -> int:
        """Bytes of an indexer block that hold keys (all indexer layers)."""
        return len(self.indexer.layers) * self.block_size * self.indexer_row_bytes

    def resident_page_bytes(self, group: int) -> int:
        """Bytes of a block of resident group `group` that hold rows (all its layers)."""
        return len(self.residents[group].layers) * self.layer_page_bytes

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of one page of one layer, on the device and on the host."""
        return self.block_size * self.row.row_bytes

    def device_bytes(self, num_blocks: int) -> int:
        return num_blocks * self.block_bytes

    def layer_byte_offset(self, layer: int) -> int:
        """Byte offset of a layer's page inside a block of its group."""
        return self.layer_row_offset[layer] * self.row.row_bytes

    # ---- host bytes
    @property
    def host_block_bytes(self) -> int:
        """Bytes of one host page over all layers."""
        return self.shape.num_layers * self.layer_page_bytes

    def host_layer_stride_bytes(self, num_host_blocks: int) -> int:
        return num_host_blocks * self.layer_page_bytes

    def host_page_byte_offset(self, layer: int, host_block: int, num_host_blocks: int) -> int:
        return layer * self.host_layer_stride_bytes(num_host_blocks) + host_block * self.layer_page_bytes

    def host_blocks_in(self, num_bytes: int) -> int:
        """Whole host pages that fit in `num_bytes` (rounded down)."""
        return num_bytes // self.host_block_bytes

    # ---- capacity in pages and blocks
    def pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def hot_blocks(self, hot_rows: int) -> int:
        """Blocks of one hot group that hold `hot_rows` rows."""
        return -(-hot_rows // self.block_size)

    def device_blocks_resident(self, num_tokens: int) -> int:
        """Device blocks of a request whose every page is resident (indexer + all resident groups)."""
        return self.pages(num_tokens) * (1 + self.num_resident_groups)

    # ---- reports
    @property
    def waste_fraction(self) -> float:
        """Share of the packed bytes of one page (indexer + all resident groups) that holds nothing."""
        return self.waste_report().fraction

    def waste_report(self) -> WasteReport:
        """Used and wasted bytes of one block of every group."""
        used = [("indexer", self.indexer.layers, self.indexer_page_bytes)]
        used += [(str(g), group.layers, self.resident_page_bytes(g)) for g, group in enumerate(self.residents)]
        return WasteReport(
            groups=tuple(GroupWaste(name=name, layers=layers, used_bytes=size, wasted_bytes=self.block_bytes - size)
                         for name, layers, size in used),
            num_groups=self.num_resident_groups, block_bytes=self.block_bytes,
        )

    def waste_advice(self) -> str | None:
        """None up to WARN_FRACTION; else the waste and what wastes less, in the words of the configuration."""
        if self.waste_fraction <= WARN_FRACTION:
            return None
        what = (f"{self.waste_fraction:.1%} of the packed device bytes of a page hold nothing (cache.num_groups = "
                f"{self.num_resident_groups}, blocks of {self.block_bytes:,} bytes)")
        fixes, least = [], self.waste_fraction
        for block_size in sorted({self.block_size, 64}):
            other = KVCacheLayout.build(self.shape, block_size=block_size, dtype=self.row.dtype,
                                        indexer_dtype=self.indexer_dtype)
            if other.waste_fraction < least:
                least = other.waste_fraction
                size = f" with cache.block_size = {block_size}" if block_size != self.block_size else ""
                fixes.append(f"cache.num_groups = {other.num_resident_groups}{size} wastes {other.waste_fraction:.1%}")
        if fixes:
            return f"{what}; {', '.join(fixes)}"
        return (f"{what}; no other cache.num_groups or cache.block_size wastes less, only another indexer dtype "
                f"({self.indexer_dtype} now) or row format ({self.row.name}) changes the sizes that are packed")

    def fingerprint(self) -> str:
        """Hash of everything two sides must agree on before they exchange pages. Same in every process."""
        return _hash(self._row_facts() | {
            "block_size": self.block_size, "groups": [list(group.layers) for group in self.residents],
            "block_bytes": self.block_bytes,
        })

    def row_fingerprint(self) -> str:
        """Hash of what a token's rows are, however they are cut into pages. Same in every process."""
        return _hash(self._row_facts())

    def _row_facts(self) -> dict[str, object]:
        shape = self.shape
        return {
            "v": 1, "model_type": shape.model_type, "layers": shape.num_layers,
            "row": [self.row.dtype, self.row.latent_dim, self.row.rope_dim],
            "indexer": [self.indexer_dtype, shape.index_head_dim, list(self.indexer.layers)],
        }


def _hash(facts: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _indexer_row_bytes(shape: ModelShape, dtype: str) -> int:
    return shape.index_head_dim * STORAGE_BYTES[dtype] + (INDEXER_SCALE_BYTES if dtype == "uint8" else 0)
