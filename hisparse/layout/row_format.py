"""Format of one row of the latent KV, and sizes of its items."""

from __future__ import annotations

from dataclasses import dataclass

from hisparse.errors import ConfigError

ROW_ALIGN_BYTES = 16
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
