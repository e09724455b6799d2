"""A Hugging Face DSA model whose KV lives in hisparse: five hooks, the modelling code itself untouched.

1. The cache's layers append latent rows through `HiSparseCacheHandle` and return themselves instead of tensors.
2. `expand_kv` is the identity, so that the "keys" and "values" attention gets are that layer object.
3. The attention function "hisparse" works in latent space (absorbed MLA) and calls `handle.attend` with the top-k.
4. An indexer's forward is `PagedIndexer`: the same projections, scored where the keys lie.
5. The rope function that attention calls is ours: the same bits in fewer launches.

On CUDA a forward asks the device nothing and allocates nothing whose size depends on data, so it can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

from hisparse.config import ModelConfig, model_path, model_shape
from hisparse.engine.models.experts import use_capturable_experts
from hisparse.engine.models.indexer import PagedIndexer
from hisparse.engine.models.norms import use_fused_norms
from hisparse.engine.models.rope import use_fused_rope
from hisparse.engine.models.seams import attention_layers, cache_argument, check_seams, seam_error
from hisparse.engine.parallel import HeadParallel, check_heads
from hisparse.errors import ConfigError, InvariantError
from hisparse.layout import ModelShape

if TYPE_CHECKING:
    from hisparse.worker.batch import RowBatch
    from hisparse.worker.handle import HiSparseCacheHandle
    from hisparse.worker.indexer_pages import IndexerPages

ATTENTION = "hisparse"
_ARCHITECTURES = ("GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM")


class HandleLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of the cache that HF sees: no tensors, only the way to our pages."""

    is_sliding = False
    is_croppable = False

    def __init__(self, handle: HiSparseCacheHandle, attention: Any, parallel: HeadParallel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self.handle = handle
        self.batch: RowBatch | None = None
        self.parallel = parallel
        nope, rope, value = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim
        self.nope_dim, self.rope_dim, self.latent_dim = nope, rope, attention.kv_lora_rank
        num_heads = attention.kv_b_proj.weight.shape[0] // (nope + value)
        self.heads = parallel.heads(num_heads)
        weight = attention.kv_b_proj.weight.detach().view(num_heads, nope + value, self.latent_dim)[self.heads]
        self.key_weight, self.value_weight = weight[:, :nope], weight[:, nope:]  # views [heads, nope | value, latent]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Appends latents [B, 1, S, latent] and rope keys [B, 1, S, rope]; returns the layer in place of both."""
        batch = self.now()
        got = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        if got != (1, self.latent_dim, self.rope_dim):
            raise seam_error(
                f"Cache.update got {tuple(key_states.shape)} and {tuple(value_states.shape)}, expected latents "
                f"[B, 1, S, {self.latent_dim}] and rope keys [B, 1, S, {self.rope_dim}]"
            )
        rows = torch.cat([key_states, value_states], dim=-1).flatten(0, 2)
        self.handle.append(rows, batch)
        return self, self

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Never called: `PagedIndexer` writes keys."""
        raise seam_error("an indexer stores keys through the cache; its forward was not replaced")

    def attend(self, query: Tensor, indices: Tensor, scaling: float) -> Tensor:
        """Absorbed MLA. query [B, H, S, nope + rope], indices int32 [B, S, k] -> [B, S, H, value]."""
        batch = self.now()
        size, _, length, _ = query.shape
        mine = query[:, self.heads].transpose(1, 2).flatten(0, 1)  # [n, heads, nope + rope]
        nope, rope = mine[..., : self.nope_dim], mine[..., self.nope_dim :]
        latent = torch.bmm(nope.transpose(0, 1), self.key_weight).transpose(0, 1)
        mixed = self.handle.attend(torch.cat([latent, rope], dim=-1), indices.flatten(0, 1), batch, scaling)
        mixed = mixed.to(query.dtype)
        values = torch.bmm(mixed.transpose(0, 1), self.value_weight.transpose(1, 2)).transpose(0, 1)
        out = self.parallel.gather_heads(values)
        return out.view(size, length, *out.shape[1:])

    def now(self) -> RowBatch:
        """The rows of the forward in progress."""
        if self.batch is None:
            raise InvariantError("the cache was used outside DSAModel.forward")
        return self.batch

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate."""

    def get_seq_length(self) -> int:
        return 0 if self.batch is None else self.batch.max_len

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.now().max_len, 0


def _attention(module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any, scaling: float,
               dropout: float = 0.0, indices: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    """The function HF calls for `attn_implementation="hisparse"`; `key` is a `HandleLayer`."""
    if not isinstance(key, HandleLayer) or indices is None:
        raise seam_error("attention got " + ("no `indices`" if indices is None else f"{type(key).__name__} as keys"))
    return key.attend(query, indices, scaling), None


def _identity(latent: Any, rope: Any) -> tuple[Any, Any]:
    return latent, rope


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class DSAModel:
    """A loaded model bound to one rank's handles. Not thread-safe: one forward at a time.

    Args:
        network: from `load_network`. handles: one per layer. indexer: keys of the layers that own an indexer.
    """

    def __init__(self, network: Any, shape: ModelShape, handles: Sequence[HiSparseCacheHandle],
                 indexer: IndexerPages, parallel: HeadParallel | None = None) -> None:
        check_seams(network)
        attentions = attention_layers(network)
        if not len(attentions) == len(handles) == shape.num_layers:
            raise ConfigError(f"{len(attentions)} layers, {len(handles)} handles, config.json says {shape.num_layers}; "
                              "all must be of the same checkpoint")
        leaders = [group.leader for group in shape.index_groups]
        for layer, attention in enumerate(attentions):
            if (attention.indexer is not None) != (layer in leaders):
                raise ConfigError(f"layer {layer}: transformers and config.json disagree on who owns an indexer; "
                                  "use the checkpoint's own config.json, with a transformers that knows its indexer_types")
        self.network, self.shape = network, shape
        self._layers = [HandleLayer(handle, attention, parallel or HeadParallel())
                        for handle, attention in zip(handles, attentions)]
        self._cache = Cache(layers=list(self._layers))
        self._cache_argument = cache_argument(network)
        network.set_attn_implementation(ATTENTION)
        for attention in attentions:
            attention.expand_kv = _identity
            use_fused_rope(attention)
        for i, leader in enumerate(leaders):
            own = attentions[leader].indexer
            own.forward = PagedIndexer(own, indexer, i, self._layers[leader].now)
        self._mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.network.device
        return device

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, batch: RowBatch) -> Tensor:
        """Runs the decoder over B sequences of S tokens each; writes their rows and indexer keys as `batch` says.

        Args:
            token_ids, positions: int64 [B, S], positions ascending; `batch` holds the same rows, flattened.
        Returns:
            Hidden states [B, S, hidden] after the last norm.
        """
        mask = self._mask.expand(token_ids.shape[0], 1, token_ids.shape[1], 1)  # given, so that HF makes none; nobody reads it
        for layer in self._layers:
            layer.batch = batch
        try:
            out = self.network.model(
                input_ids=token_ids, position_ids=positions, use_cache=True,
                attention_mask={"indexed_attention": mask, "deepseek_sparse_attention": mask},
                **{self._cache_argument: self._cache},
            )
            hidden: Tensor = out.last_hidden_state
            return hidden
        finally:
            for layer in self._layers:
                layer.batch = None

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> float32 [n, vocab]."""
        out: Tensor = self.network.lm_head(hidden)
        return out.float()


def check_model(config: ModelConfig, *, num_ranks: int = 1) -> ModelShape:
    """What `load_network` can find out without loading weights. Raises ConfigError as it does."""
    shape = model_shape(config)
    check_heads(shape.num_heads, num_ranks)
    return shape


def load_network(config: ModelConfig, *, num_ranks: int = 1,
                 device: torch.device | None = None) -> tuple[Any, ModelShape]:
    """Loads the checkpoint's weights with transformers, from local files only, in `config.dtype`, onto `device` (default: CPU).

    Returns:
        The unmodified network in eval mode, and what the cache needs to know of it.
    Raises:
        ConfigError: not a DSA checkpoint, weights missing or unreadable, this transformers has other seams, or the
            attention heads cannot be split over `num_ranks`.
    """
    shape = check_model(config, num_ranks=num_ranks)
    path = model_path(config)
    bars: Any = logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=getattr(torch, config.dtype), local_files_only=True, output_loading_info=True,
        )
    except Exception as error:  # transformers and safetensors raise what they like; none of it is our bug
        raise ConfigError(f"model.path: transformers cannot load {path}: {error}") from error
    finally:
        if shown:
            bars.enable_progress_bar()
    network, report = loaded
    if type(network).__name__ not in _ARCHITECTURES:
        raise ConfigError(f"model.path: {path} is a {type(network).__name__}, supported: {', '.join(_ARCHITECTURES)}")
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise ConfigError(
            f"model.path: {path} lacks {len(missing)} weights, e.g. {missing[0]}; transformers would fill them with "
            "random numbers; download the checkpoint again"
        )
    check_seams(network)
    if device is not None and device.type == "cuda":
        network.to(device)
        use_capturable_experts(network, network.dtype)
        if network.dtype == torch.bfloat16:
            use_fused_norms(network)
    return network.eval().requires_grad_(False), shape
