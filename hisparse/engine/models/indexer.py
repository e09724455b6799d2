"""The lightning indexer over our pages: Hugging Face's projections, our key store and top-k.

Hugging Face's own forward scores every cached key densely and returns positions beyond the context when there are few; this
one asks the pages, allocates nothing that depends on data, and can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hisparse.engine.models.seams import seam_error
from hisparse.ops import backend

if TYPE_CHECKING:
    from hisparse.worker.batch import RowBatch
    from hisparse.worker.indexer_pages import IndexerPages

_INTERLEAVED = {"GlmMoeDsaIndexer": True, "DeepseekV32Indexer": False}
"""Whether a class's rope pairs neighbours or halves: neither follows a flag of config.json."""
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
        if missing or name not in _INTERLEAVED:
            what = f"no {missing[0]}" if missing else f"no known rope; known are {', '.join(_INTERLEAVED)}"
            raise seam_error(f"the indexer {name} has {what}")
        self._indexer, self._pages, self._i, self._batch = indexer, pages, i, batch
        self._interleaved = _INTERLEAVED[name]
        self._ops = backend(indexer.wk.weight.device)

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
        num = size * length
        cos, sin = (part.flatten(0, 1) for part in position_embeddings)
        q = own.wq_b(q_resid).view(num, own.n_heads, own.head_dim)
        k = own.k_norm(own.wk(hidden_states)).view(num, 1, own.head_dim)
        q, k = (self._ops.rotate_heads(part, cos, sin, interleaved=self._interleaved) for part in (q, k))
        weights = own.weights_proj(hidden_states.to(own.weights_proj.weight.dtype)).float() * (own.n_heads**-0.5)
        self._pages.write(self._i, k.flatten(0, 1), batch)
        chosen = self._pages.top_k(self._i, q, weights.flatten(0, 1), batch, own.index_topk, own.softmax_scale)
        return chosen.view(size, length, -1)
