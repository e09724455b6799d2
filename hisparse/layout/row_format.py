"""Format of one row of the latent KV, and sizes of its items."""

from __future__ import annotations

from dataclasses import dataclass

from hisparse.errors import ConfigError

ROW_ALIGN_BYTES = 16
FP8_DS_MLA = "fp8_ds_mla"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STORAGE_BYTES = {**ITEM_BYTES, "uint8": 1}
INDEXER_SCALE_BYTES = 4
"""Of the float32 scale behind the e4m3 codes of an fp8 indexer key."""
SCALED_VALUES = 128
"""Latent values that share one scale in an fp8_ds_mla row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """One token's latent KV in one layer: `latent_dim` values, then `rope_dim` values.

    `dtype` is the torch dtype of the storage. A float dtype holds the values as they are. "uint8" is the format
    fp8_ds_mla: `latent_dim` e4m3 bytes, a float32 scale for each 128 of them (filled up with zeros to 16 bytes), and
    `rope_dim` bfloat16.

    Examples: `RowFormat(dtype="bfloat16", latent_dim=512, rope_dim=64).row_bytes == 1152`; with "uint8" 656 bytes:
    512 values, 4 scales from byte 512, 64 rope values from byte 528.
    """

    dtype: str
    latent_dim: int
    rope_dim: int

    def __post_init__(self) -> None:
        if self.dtype not in STORAGE_BYTES:
            raise ConfigError(f"row dtype must be one of {sorted(ITEM_BYTES)} or 'uint8' ({FP8_DS_MLA}), got {self.dtype!r}")
        if self.is_quantized and (self.latent_dim <= 0 or self.latent_dim % SCALED_VALUES):
            raise ConfigError(
                f"cache.row_format = {FP8_DS_MLA} scales latents in groups of {SCALED_VALUES}, but this model's kv_lora_rank "
                f"is {self.latent_dim}; set cache.row_format to auto"
            )
        if self.row_bytes % ROW_ALIGN_BYTES:
            raise ConfigError(
                f"a row of {self.latent_dim} + {self.rope_dim} values as {self.name} is {self.row_bytes} bytes, which is not "
                f"a multiple of {ROW_ALIGN_BYTES}; use a model whose kv_lora_rank and qk_rope_head_dim fill whole 16-byte units"
            )

    @property
    def name(self) -> str:
        """ "fp8_ds_mla", or the dtype."""
        return FP8_DS_MLA if self.is_quantized else self.dtype

    @property
    def is_quantized(self) -> bool:
        return self.dtype == "uint8"

    @property
    def values(self) -> int:
        """Numbers in a row: latent and rope."""
        return self.latent_dim + self.rope_dim

    @property
    def row_elems(self) -> int:
        """Elements of the storage tensor in a row; `values`, unless the row is quantised."""
        return self.row_bytes // self.item_bytes

    @property
    def item_bytes(self) -> int:
        return STORAGE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        if self.is_quantized:
            return self.rope_byte_offset + 2 * self.rope_dim
        return self.values * self.item_bytes

    @property
    def rope_byte_offset(self) -> int:
        """Of the rope part inside a row."""
        if self.is_quantized:
            return self.latent_dim + scale_bytes(self.latent_dim)
        return self.latent_dim * self.item_bytes


def scale_bytes(latent_dim: int) -> int:
    """Bytes of the scales in an fp8_ds_mla row: 4 for each 128 latents, filled up to whole 16-byte units."""
    return -(-latent_dim * 4 // SCALED_VALUES // ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES


def quantized_latent_dim(values: int, row_bytes: int) -> int:
    """The latent part of an fp8_ds_mla row of `row_bytes` that holds `values` numbers.

    Raises:
        ConfigError: no such row exists.

    Example: 576 values in 656 bytes: 512 latents (and 64 rope).
    """
    for latent_dim in range(SCALED_VALUES, values + 1, SCALED_VALUES):
        if latent_dim + scale_bytes(latent_dim) + 2 * (values - latent_dim) == row_bytes:
            return latent_dim
    raise ConfigError(f"no {FP8_DS_MLA} row of {values} values has {row_bytes} bytes")
