"""The lightning indexer over our pages: Hugging Face's projections, our key store and top-k.

Hugging Face's own forward scores every cached key densely and returns positions beyond the context when there are few; this
one asks the pages, allocates nothing that depends on data, and can be captured in a CUDA graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hisparse.engine.models.seams import seam_error

if TYPE_CHECKING:
    from hisparse.worker.batch import RowBatch
    from hisparse.worker.indexer_pages import IndexerPages

_ROPES = {"GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave", "DeepseekV32Indexer": "apply_rotary_pos_emb"}
"""The rope that each indexer class uses, in its own module: neither follows a flag of config.json."""
_NEEDS = ("wq_b", "wk", "k_norm", "weights_proj", "n_heads", "head_dim", "qk_rope_head_dim", "index_topk", "softmax_scale")


class PagedIndexer:
    """Stands in for the `forward` of one indexer module.

    Args:
        indexer: the module; its weights are used as they are. i: which of the layers that own an indexer.
        batch: gives the rows of the forward in progress.
    Raises:
        ConfigError: the module is not one that this was written for.
    """

    def __init__(self, indexer: Any, pages: IndexerPages, i: int, batch: Callable[[], RowBatch]) -> None:
        name = type(indexer).__name__
        missing = [attribute for attribute in _NEEDS if not hasattr(indexer, attribute)]
        rope = getattr(sys.modules[type(indexer).__module__], _ROPES.get(name, ""), None)
        if missing or rope is None:
            what = f"no {missing[0]}" if missing else f"no known rope; known are {', '.join(_ROPES)}"
            raise seam_error(f"the indexer {name} has {what}")
        self._indexer, self._pages, self._i, self._batch = indexer, pages, i, batch
        self._rope: Any = rope

    def __call__(self, hidden_states: Tensor, q_resid: Tensor, position_embeddings: tuple[Tensor, Tensor],
                 *args: Any, **kwargs: Any) -> Tensor:
        """Stores this forward's keys and selects.

        Args:
            hidden_states: [B, S, hidden]. q_resid: [B, S, q_lora]. position_embeddings: (cos, sin).
        Returns:
            int32 [B, S, k], positions ascending, -1 behind where a context has fewer than k tokens.
        """
        own, batch = self._indexer, self._batch()
        size, length = hidden_states.shape[:2]
        cos, sin = position_embeddings
        split = [own.qk_rope_head_dim, own.head_dim - own.qk_rope_head_dim]
        q = own.wq_b(q_resid).view(size, length, own.n_heads, own.head_dim)
        k = own.k_norm(own.wk(hidden_states)).unsqueeze(2)
        (q_rot, q_pass), (k_rot, k_pass) = torch.split(q, split, dim=-1), torch.split(k, split, dim=-1)
        q_rot, k_rot = self._rope(q_rot, k_rot, cos, sin, unsqueeze_dim=2)
        q, k = torch.cat([q_rot, q_pass], dim=-1), torch.cat([k_rot, k_pass], dim=-1)
        weights = own.weights_proj(hidden_states.to(own.weights_proj.weight.dtype)).float() * (own.n_heads**-0.5)
        self._pages.write(self._i, k.flatten(0, 2), batch)
        chosen = self._pages.top_k(self._i, q.flatten(0, 1), weights.flatten(0, 1), batch, own.index_topk, own.softmax_scale)
        return chosen.view(size, length, -1)
