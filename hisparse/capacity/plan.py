"""Requests that fit, per context length, from the arithmetic that admission and the layout use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hisparse.cache.admission import request_blocks, window_pages
from hisparse.capacity.weights import Weights
from hisparse.config import GIB
from hisparse.errors import ConfigError
from hisparse.layout import (
    IndexGroup,
    KVCacheLayout,
    ModelShape,
    check_query_rows,
    hot_state_bytes,
    limit_rows,
    start_rows,
)

CONTEXTS = tuple(1 << power for power in range(13, 21))
"""8k to 1M tokens."""
Dtype = Literal["bf16", "fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What is planned.

    Attributes:
        config: a Hugging Face `config.json`. gpu_bytes: memory of one GPU.
        tp: GPUs of a replica, each of which holds the whole latent KV. dp: replicas. ep: GPUs that share one copy of the
            routed experts, None = all tp * dp.
        row_dtype, indexer_dtype, weights_dtype: "fp8" rows are fp8_ds_mla.
        spec_tokens: drafts verified beside the next token; above 0 the MTP layers are loaded and cached, too.
        hot_rows: of a request and hot group at its start; None = the engine's default, or more if drafts need it.
        gpu_share: of the GPU's memory that is planned with. workspace_bytes: of that, for activations and buffers.
        weights_bytes: on one GPU; None = counted. host_bytes: limit of one replica's pool; None = as much as it takes.
        hashed: `cache.position_table: hashed`.
    """

    model: str
    config: Mapping[str, Any]
    gpu: str
    gpu_bytes: int
    tp: int = 1
    dp: int = 1
    ep: int | None = None
    row_dtype: Dtype = "bf16"
    indexer_dtype: Dtype = "bf16"
    weights_dtype: Dtype = "fp8"
    spec_tokens: int = 0
    hot_rows: int | None = None
    block_size: int = 64
    gpu_share: float = 0.9
    workspace_bytes: int = 4 * GIB
    weights_bytes: int | None = None
    host_bytes: int | None = None
    hashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRow:
    """One context length. Requests are those of the whole deployment.

    Attributes:
        context_tokens: prompt and output of each request.
        requests_device_only: whose every page is on the device, HiSparse off. requests_hisparse: with it.
        landing: how most requests live then, on the "device" or on the "host".
        fixed_bytes: device bytes of a host-backed request that do not grow with its context, but for the position table.
        device_bytes: device bytes of a host-backed request in all. host_bytes: of all host pools.
        limit: what is full at `requests_hisparse`.
    """

    context_tokens: int
    requests_device_only: int
    requests_hisparse: int
    landing: Literal["device", "host"]
    fixed_bytes: int
    device_bytes: int
    host_bytes: int
    limit: Literal["GPU memory", "host memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """All of them, and what they were computed from. `left_out_tokens`: contexts beyond the model's longest."""

    deployment: Deployment
    layout: KVCacheLayout
    hot_rows: tuple[int, ...]
    weights_params: int | None
    weights_bytes: int
    kv_bytes: int
    crossover_tokens: int | None
    rows: tuple[CapacityRow, ...]
    left_out_tokens: tuple[int, ...]

    @classmethod
    def of(cls, deployment: Deployment, contexts: Sequence[int] = CONTEXTS) -> CapacityPlan:
        """Contexts beyond the model's longest are left out.

        Raises:
            ConfigError: an impossible model, split or size, or weights that leave no room for any KV.
        """
        sizes = _Sizes(deployment)
        longest = sizes.layout.shape.max_positions
        fitting = [context for context in contexts if context <= longest]
        if not fitting or min(contexts) < 1:
            raise ConfigError(f"context lengths must be in 1..{longest} tokens for this model, got {list(contexts)}")
        return cls(deployment=deployment, layout=sizes.layout, hot_rows=sizes.hot_rows, weights_params=sizes.weights_params,
                   weights_bytes=sizes.weights_bytes, kv_bytes=sizes.kv_bytes, crossover_tokens=sizes.crossover(longest),
                   rows=tuple(sizes.row(context) for context in fitting),
                   left_out_tokens=tuple(context for context in contexts if context > longest))

    def assumptions(self) -> list[str]:
        """What the numbers rest on, one sentence each."""
        d, layout = self.deployment, self.layout
        ep = d.ep or d.tp * d.dp
        weights = f"Weights: {self.weights_bytes / GIB:,.1f} GiB a GPU, as given."
        if self.weights_params is not None:
            weights = (f"Weights: {d.weights_dtype}, {self.weights_params / 1e9:,.1f} G parameters counted from config.json. "
                       f"Attention by head, dense and shared MLPs and embeddings are split over {d.tp} GPUs, routed experts "
                       f"over {ep}; the rest is on every GPU. The engine of this repository splits attention only.")
        table = "none (hashed)" if d.hashed else "2 bytes a position and index group"
        return [
            weights,
            f"GPU: {d.gpu_share:.0%} of {d.gpu_bytes / GIB:,.1f} GiB, of which {d.workspace_bytes / GIB:g} GiB for "
            "activations, graphs and buffers.",
            f"Every GPU of a replica holds the whole latent KV; a replica has one host pool. Replicas: {d.dp}.",
            f"Each request uses its whole context. Blocks of {layout.block_bytes:,} bytes; {layout.waste_fraction:.1%} of a "
            "page holds nothing.",
            f"Position table: {table}. Hot regions do not grow.",
            *([f"Drafts: {d.spec_tokens} tokens, verified together; the {_mtp_layers(d)} MTP layer is loaded, with its own "
               "indexer and rows. The engine of this repository does not draft yet."] if d.spec_tokens else []),
            *([f"Contexts beyond the model's longest, {layout.shape.max_positions:,} tokens, are left out."]
              if self.left_out_tokens else []),
            "Memory only: what misses cost is shown by 'hisparse trace replay'.",
        ]

    def asdict(self) -> dict[str, Any]:
        """For `--json`."""
        deployment = {field.name: getattr(self.deployment, field.name) for field in dataclasses.fields(self.deployment)
                      if field.name != "config"}
        return {
            "deployment": deployment,
            "kv_bytes_per_token": self.layout.host_block_bytes // self.layout.block_size,
            "indexer_bytes_per_token": self.layout.indexer_page_bytes // self.layout.block_size,
            "block_bytes": self.layout.block_bytes, "num_groups": self.layout.num_resident_groups,
            "hot_rows": list(self.hot_rows), "weights_params": self.weights_params,
            "weights_bytes_per_gpu": self.weights_bytes, "kv_bytes_per_gpu": self.kv_bytes,
            "crossover_tokens": self.crossover_tokens, "left_out_tokens": list(self.left_out_tokens),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "assumptions": self.assumptions(),
        }


class _Sizes:
    """Everything that does not depend on the context length."""

    def __init__(self, d: Deployment) -> None:
        self.d = d
        if not 0 < d.gpu_share <= 1:
            raise ConfigError(f"the share of a GPU's memory must be above 0 and at most 1, got {d.gpu_share}")
        shape = _with_mtp(ModelShape.from_hf_config(d.config), _mtp_layers(d) if d.spec_tokens else 0)
        self.layout = KVCacheLayout.build(shape, block_size=d.block_size, dtype="bfloat16",
                                          row_format="fp8_ds_mla" if d.row_dtype == "fp8" else "auto",
                                          indexer_dtype="uint8" if d.indexer_dtype == "fp8" else None)
        groups, top_k = len(self.layout.hots), shape.top_k
        rows = start_rows(d.hot_rows, num_groups=groups, top_k=top_k, block_size=d.block_size)
        if d.hot_rows is None:
            least = (1 + d.spec_tokens) * top_k
            rows = start_rows(max(rows[0], least), num_groups=groups, top_k=top_k, block_size=d.block_size)
        check_query_rows(rows, top_k, d.spec_tokens)
        self.hot_rows = rows
        self.slots = limit_rows(None, start=rows, block_size=d.block_size)
        self.region_blocks = sum(self.layout.hot_blocks(count) for count in rows)
        self.window = window_pages(self.layout, 1 + d.spec_tokens)
        self.weights_params, self.weights_bytes = _weights(d)
        self.kv_bytes = int(d.gpu_bytes * d.gpu_share) - d.workspace_bytes - self.weights_bytes
        if self.kv_bytes < self.layout.block_bytes:
            raise ConfigError(
                f"no room for KV: {d.gpu_share:.0%} of a GPU is {d.gpu_bytes * d.gpu_share / GIB:,.1f} GiB, weights take "
                f"{self.weights_bytes / GIB:,.1f} and the workspace {d.workspace_bytes / GIB:g}; raise --tp, --dp or --ep, or "
                "take --weights-dtype fp8 or a larger GPU")

    def state_bytes(self, context: int) -> int:
        """Replacement state of one request's seat, all index groups."""
        positions = self.layout.pages(context) * self.layout.block_size
        return sum(hot_state_bytes(slots, positions, hashed=self.d.hashed) * len(group.index_groups)
                   for slots, group in zip(self.slots, self.layout.hots, strict=True))

    def resident_blocks(self, context: int) -> int:
        return self.layout.device_blocks_resident(context)

    def backed_blocks(self, context: int) -> int:
        """Of a host-backed request: as admission counts one that lands on the host."""
        pages = self.layout.pages(context)
        return request_blocks(self.layout, pages=pages, resident_pages=min(pages, self.window),
                              region_blocks=self.region_blocks)

    def fit(self, blocks: int, state_bytes: int) -> int:
        """Requests of so many blocks and bytes beside the null block."""
        return (self.kv_bytes - self.layout.block_bytes) // (self.layout.device_bytes(blocks) + state_bytes)

    def host_fit(self, context: int) -> int | None:
        """Requests whose pages the host pool holds beside its null block; None = no limit."""
        if self.d.host_bytes is None:
            return None
        return max(0, self.layout.host_blocks_in(self.d.host_bytes) - 1) // self.layout.pages(context)

    def row(self, context: int) -> CapacityRow:
        layout, state, pages = self.layout, self.state_bytes(context), self.layout.pages(context)
        backed, resident = self.fit(self.backed_blocks(context), state), self.fit(self.resident_blocks(context), state)
        landing: Literal["device", "host"] = "host" if backed > resident else "device"
        requests = max(backed, resident)
        host = self.host_fit(context)
        limited = host is not None and host < requests
        if host is not None and limited:
            requests = host  # every request has its pages on the host, wherever else they are
        device_bytes = layout.device_bytes(self.backed_blocks(context)) + state
        return CapacityRow(
            context_tokens=context, requests_device_only=self.d.dp * self.fit(self.resident_blocks(context), 0),
            requests_hisparse=self.d.dp * requests, landing=landing, device_bytes=device_bytes,
            fixed_bytes=device_bytes - layout.device_bytes(pages),
            host_bytes=self.d.dp * (1 + requests * pages) * layout.host_block_bytes,
            limit="host memory" if limited else "GPU memory")

    def crossover(self, longest: int) -> int | None:
        """The least context in whole pages from which a host-backed request takes less device memory; None = none does."""
        def backed_is_less(pages: int) -> bool:
            tokens = pages * self.layout.block_size
            backed = self.layout.device_bytes(self.backed_blocks(tokens)) + self.state_bytes(tokens)
            return backed < self.layout.device_bytes(self.resident_blocks(tokens))

        low, high = 1, self.layout.pages(longest)
        if not backed_is_less(high):
            return None
        while low < high:  # a page adds more to a resident request than to a host-backed one
            middle = (low + high) // 2
            low, high = (low, middle) if backed_is_less(middle) else (middle + 1, high)
        return low * self.layout.block_size


def _mtp_layers(d: Deployment) -> int:
    found = int(d.config.get("num_nextn_predict_layers") or 0)
    if d.spec_tokens and not found:
        raise ConfigError(f"--spec-tokens {d.spec_tokens}: this model has no multi-token prediction layer "
                          "(num_nextn_predict_layers); leave it at 0")
    return found


def _with_mtp(shape: ModelShape, layers: int) -> ModelShape:
    """MTP layers have an indexer of their own and are cached like any other."""
    first = shape.num_layers
    own = tuple(IndexGroup(leader=layer, layers=(layer,)) for layer in range(first, first + layers))
    return dataclasses.replace(shape, num_layers=first + layers, index_groups=(*shape.index_groups, *own))


def _weights(d: Deployment) -> tuple[int | None, int]:
    """(parameters, bytes on one GPU)."""
    if d.weights_bytes is not None:
        return None, d.weights_bytes
    heads, gpus = int(d.config.get("num_attention_heads") or 1), d.tp * d.dp
    ep = d.ep or gpus
    if heads % d.tp:
        raise ConfigError(f"--tp {d.tp} does not divide the model's {heads} attention heads")
    if gpus % ep:
        raise ConfigError(f"--ep {ep} does not divide the {gpus} GPUs of --tp {d.tp} and --dp {d.dp}")
    weights = Weights.of(d.config, mtp_layers=_mtp_layers(d) if d.spec_tokens else 0)
    return weights.params, weights.bytes_per_gpu(tp=d.tp, ep=ep, dtype=d.weights_dtype)
