"""All byte arithmetic: row formats, packing of cache groups, host layout, capacity.

Nothing else in hisparse multiplies block counts with byte sizes. All results are Python ints (never 32-bit).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hisparse.errors import ConfigError

ROW_ALIGN_BYTES = 16
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NULL_BLOCK = 0
"""Block 0 of the device pool and of the host pool is never handed out; tables hold it where there is no page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """One token's latent KV in one layer: `latent_dim` values, then `rope_dim` values, of one dtype.

    Example: `RowFormat(dtype="bfloat16", latent_dim=512, rope_dim=64).row_bytes == 1152`.
    """

    dtype: str
    latent_dim: int
    rope_dim: int

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"row dtype must be one of {sorted(ITEM_BYTES)}, got {self.dtype!r}")
        if self.row_bytes % ROW_ALIGN_BYTES:
            raise ConfigError(
                f"a row of {self.row_elems} x {self.dtype} is {self.row_bytes} bytes, which is not a multiple of "
                f"{ROW_ALIGN_BYTES}; use a model whose kv_lora_rank + qk_rope_head_dim fills whole 16-byte units"
            )

    @property
    def row_elems(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.row_elems * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexGroup:
    """A layer that owns an indexer and the later layers that reuse its top-k."""

    leader: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the cache needs to know of a DeepSeek-Sparse-Attention model."""

    model_type: str
    num_layers: int
    num_heads: int
    kv_lora_rank: int
    rope_dim: int
    index_head_dim: int
    top_k: int
    max_positions: int
    vocab_size: int
    index_groups: tuple[IndexGroup, ...]

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Reads a Hugging Face `config.json` dictionary.

        Raises:
            ConfigError: the checkpoint is not a DSA model, or a field is missing.
        """
        model_type = str(config.get("model_type", "unknown"))
        if model_type not in ("glm_moe_dsa", "deepseek_v32"):
            raise ConfigError(
                f"not a supported DSA checkpoint: model_type is {model_type!r}, supported are 'glm_moe_dsa' and "
                "'deepseek_v32' (models with kv_lora_rank and index_topk); point `model.path` at such a checkpoint"
            )
        need = ("num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim",
                "index_topk", "max_position_embeddings", "vocab_size")
        missing = [name for name in need if config.get(name) is None]
        if missing:
            raise ConfigError(f"config.json of a {model_type} checkpoint lacks {', '.join(missing)}")
        num_layers = int(config["num_hidden_layers"])
        return cls(
            model_type=model_type,
            num_layers=num_layers,
            num_heads=int(config["num_attention_heads"]),
            kv_lora_rank=int(config["kv_lora_rank"]),
            rope_dim=int(config["qk_rope_head_dim"]),
            index_head_dim=int(config["index_head_dim"]),
            top_k=int(config["index_topk"]),
            max_positions=int(config["max_position_embeddings"]),
            vocab_size=int(config["vocab_size"]),
            index_groups=_index_groups(indexer_types(config, num_layers)),
        )


def indexer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """'full' or 'shared' per layer, from `indexer_types` or derived by the GLM rule; V3.2 has an indexer everywhere."""
    if config.get("model_type") != "glm_moe_dsa":
        return ["full"] * num_layers
    given = config.get("indexer_types")
    if given is not None:
        if len(given) != num_layers:
            raise ConfigError(f"indexer_types has {len(given)} entries for {num_layers} layers")
        return [str(kind) for kind in given]
    freq = int(config.get("index_topk_freq") or 1)
    offset = int(config.get("index_skip_topk_offset") or 0)
    return ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(num_layers)]


def _index_groups(kinds: Sequence[str]) -> tuple[IndexGroup, ...]:
    if not kinds or kinds[0] != "full":
        raise ConfigError("the first layer must own an indexer ('full'); got " + (repr(kinds[0]) if kinds else "no layer"))
    groups: list[list[int]] = []
    for layer, kind in enumerate(kinds):
        if kind == "full":
            groups.append([layer])
        elif kind == "shared":
            groups[-1].append(layer)
        else:
            raise ConfigError(f"indexer_types[{layer}] must be 'full' or 'shared', got {kind!r}")
    return tuple(IndexGroup(leader=layers[0], layers=tuple(layers)) for layers in groups)


# ---------------------------------------------------------------------------------------------- cache groups


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerGroup:
    """Indexer keys of every layer that owns an indexer: GPU, prefix-cacheable, transferable."""

    group_id: int
    layers: tuple[int, ...]
    block_pool_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceGroup:
    """The whole sparse-MLA KV in host memory: prefix-cacheable, transferable, in no device pool."""

    group_id: int
    layers: tuple[int, ...]
    block_pool_id: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentGroup:
    """Whole pages of some index groups on the GPU: not prefix-cacheable, not transferable as such."""

    group_id: int
    layers: tuple[int, ...]
    index_groups: tuple[int, ...]
    block_pool_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HotGroup:
    """Hot regions of the same index groups as one resident group; same base pointer and strides."""

    group_id: int
    layers: tuple[int, ...]
    index_groups: tuple[int, ...]
    block_pool_id: int = 0


CacheGroup = IndexerGroup | SourceGroup | ResidentGroup | HotGroup


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

    @classmethod
    def build(cls, shape: ModelShape, *, block_size: int = 64, dtype: str = "float32",
              indexer_dtype: str | None = None, num_groups: int | None = None) -> KVCacheLayout:
        """Packs the index groups so that one block of every GPU group has the same size with the least waste.

        Args:
            block_size: tokens per page, a power of two in 4..64 (a page's row mask is a uint64).
            dtype: of the latent rows. indexer_dtype: of the indexer keys, default the same.
            num_groups: resident groups; None chooses the number with the fewest bytes per page.
        Raises:
            ConfigError: block size, row size or number of groups is impossible.
        """
        if block_size not in (4, 8, 16, 32, 64):
            raise ConfigError(f"block_size must be a power of two in 4..64 tokens, got {block_size}")
        row = RowFormat(dtype=dtype, latent_dim=shape.kv_lora_rank, rope_dim=shape.rope_dim)
        indexer_dtype = indexer_dtype or dtype
        if indexer_dtype not in ITEM_BYTES:
            raise ConfigError(f"indexer dtype must be one of {sorted(ITEM_BYTES)}, got {indexer_dtype!r}")
        indexer_layers = tuple(group.leader for group in shape.index_groups)
        indexer_bytes = len(indexer_layers) * block_size * shape.index_head_dim * ITEM_BYTES[indexer_dtype]
        page_bytes = block_size * row.row_bytes
        sizes = [len(group.layers) for group in shape.index_groups]
        choices = [num_groups] if num_groups is not None else range(1, len(sizes) + 1)
        best: tuple[int, int, list[list[int]]] | None = None
        for n in choices:
            if not 1 <= n <= len(sizes):
                raise ConfigError(f"num_groups must be in 1..{len(sizes)} (index groups of the model), got {n}")
            bins = _pack(sizes, n)
            largest = max(sum(sizes[i] for i in b) for b in bins)
            block_bytes = _round_up(max(largest * page_bytes, indexer_bytes), math.lcm(row.row_bytes, ROW_ALIGN_BYTES))
            total = (len(bins) + 1) * block_bytes
            if best is None or total < best[0]:
                best = (total, block_bytes, bins)
        assert best is not None
        _, block_bytes, bins = best
        offsets, owner = [0] * shape.num_layers, [0] * shape.num_layers
        residents, hots = [], []
        for g, members in enumerate(bins):
            layers = tuple(layer for i in members for layer in shape.index_groups[i].layers)
            for place, layer in enumerate(layers):
                offsets[layer], owner[layer] = place * block_size, g
            residents.append(ResidentGroup(group_id=2 + g, layers=layers, index_groups=tuple(members)))
            hots.append(HotGroup(group_id=2 + len(bins) + g, layers=layers, index_groups=tuple(members)))
        return cls(
            shape=shape, block_size=block_size, row=row, indexer_dtype=indexer_dtype, block_bytes=block_bytes,
            indexer=IndexerGroup(group_id=0, layers=indexer_layers),
            source=SourceGroup(group_id=1, layers=tuple(range(shape.num_layers))),
            residents=tuple(residents), hots=tuple(hots),
            layer_row_offset=tuple(offsets), layer_group=tuple(owner),
        )

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
        return self.shape.index_head_dim * ITEM_BYTES[self.indexer_dtype]

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
        used = self.indexer_page_bytes + self.host_block_bytes
        return 1.0 - used / ((1 + self.num_resident_groups) * self.block_bytes)

    def fingerprint(self) -> str:
        """Hash of everything two sides must agree on before they exchange pages. Same in every process."""
        shape = self.shape
        facts = {
            "v": 1, "model_type": shape.model_type, "layers": shape.num_layers, "block_size": self.block_size,
            "row": [self.row.dtype, self.row.latent_dim, self.row.rope_dim],
            "indexer": [self.indexer_dtype, shape.index_head_dim, list(self.indexer.layers)],
            "groups": [list(group.layers) for group in self.residents], "block_bytes": self.block_bytes,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _pack(sizes: Sequence[int], num_bins: int) -> list[list[int]]:
    """Longest-first into the least filled bin; members of a bin, and bins by first member, stay in layer order."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = [0] * num_bins
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        target = min(range(num_bins), key=lambda b: (load[b], b))
        bins[target].append(i)
        load[target] += sizes[i]
    return sorted((sorted(members) for members in bins if members), key=lambda members: members[0])
