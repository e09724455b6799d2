"""What one attention layer sees of the cache. Skeleton."""

from __future__ import annotations

from torch import Tensor

from hisparse.worker.batch import RowBatch


class HiSparseCacheHandle:
    """Append and attend for one layer. Layers of a forward call in model order, append before attend.

    Attributes:
        layer: model layer index.
    """

    layer: int

    def append(self, rows: Tensor, batch: RowBatch) -> None:
        """Writes `rows` [n, row_elems] (latent, then rope key) through to the resident page and the mirrored host page.

        Rows that do not write are skipped. The host page's row mask gets its bits when every layer has appended.
        Raises:
            InvariantError: a written position has no resident page, or this layer appended in this batch before.
        """
        raise NotImplementedError

    def attend(self, q: Tensor, topk: Tensor, batch: RowBatch, scaling: float) -> Tensor:
        """Sparse MLA over the rows that `topk` names.

        Args:
            q: absorbed queries [n, heads, row_elems] (latent part, then rope part).
            topk: int32 or int64 [n, k] positions; -1 or outside [0, position] = none. Of a follower: its leader's.
            batch: the same object for every layer of a forward.
            scaling: factor of the scores.
        Returns:
            [n, heads, latent_dim] in q's dtype; zero for a row without any valid position.
        Raises:
            InvariantError: a position is neither resident nor on the host, or a follower attends before its leader.
        """
        raise NotImplementedError
