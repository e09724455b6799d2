"""The decode engine of a schedule: it imports prompts, and knows the laws of what it may select and of what is free."""

from __future__ import annotations

import numpy as np

from hisparse.types import Landing, RequestPages
from tests.pd.engines import CANARY, Engine
from tests.pd.pools import HOST_BLOCKS, NUM_LAYERS, Content, ids_of
from tests.pd.rig import RankMemory


class Decode(Engine):
    """Imports prompts. The pages of a request are pinned from the plan until loaded, failed or drained."""

    def allocate(self, content: Content, landing: Landing, first_page: int) -> RequestPages | None:
        """Fresh pages from `first_page` on, of which no rank holds any row yet."""
        count = self.layout.pages(content.num_tokens) - first_page
        resident = [landing is Landing.RESIDENT or i == count - 1 or self.rng.random() < 0.3 for i in range(count)]
        pages = self.pools.take(content.num_tokens, resident, [True] * count, first_page)
        if pages is not None:
            for rank in range(self.num_ranks):
                self.hand_out(rank, pages)
        return pages

    def reads(self, request_id: str) -> bool:
        """Some rank has begun with the request's import and is not done."""
        return any(self.pd._jobs._by_request.get(request_id) in importer._jobs for importer in self.importers)

    def free(self, pages: RequestPages) -> None:
        """Nothing may be on its way to free pages. They carry a canary: whoever writes to them all the same is found."""
        device, host = ids_of(pages)
        for memory, transport in zip(self.memories, self.transports, strict=True):
            self._check_not_written(memory, transport.destinations(), device, host)
        for memory in self.memories:
            memory.memory.device[list(device)] = CANARY
            memory.memory.host[:, list(host)] = CANARY  # type: ignore[index]
        self.pools.give(pages)

    def _check_not_written(self, memory: RankMemory, near: np.ndarray, device: tuple[int, ...], host: tuple[int, ...]) -> None:
        view = memory.memory
        assert view.host is not None
        for name, slab, size, ids in (("device", view.device, self.layout.block_bytes, device),
                                      ("host", view.host, self.layout.layer_page_bytes, host)):
            offsets = near - slab.ctypes.data
            blocks = offsets[(offsets >= 0) & (offsets < slab.nbytes)] // size
            written = set((blocks if name == "device" else blocks % HOST_BLOCKS).tolist()) & set(ids)
            assert not written, f"{name} pages {sorted(written)} are free while READs may still write to them"

    def check_free(self) -> None:
        """Nobody wrote to a free page."""
        for rank, memory in enumerate(self.memories):
            assert memory.memory.host is not None
            assert (memory.memory.device[self.pools.device] == CANARY).all(), f"rank {rank}: a free device page was written"
            assert (memory.memory.host[:, self.pools.host] == CANARY).all(), f"rank {rank}: a free host page was written"

    def check_bytes(self, content: Content, pages: RequestPages, landing: Landing) -> None:
        """What may be selected is this prompt's own KV, on every rank."""
        layout, count = self.layout, pages.num_pages
        if not count:
            return
        first, size = pages.first_page * layout.block_size, layout.block_size
        tail = content.num_tokens - first - (count - 1) * size
        want, keys = content.rows[:, first : content.num_tokens], content.keys[:, first : content.num_tokens]
        mirrored = [i for i in range(count) if pages.resident_blocks[0][i]]
        rows_of = np.array([i * size + k for i in mirrored for k in range(size if i < count - 1 else tail)])
        for rank, memory in enumerate(self.memories):
            near, where = memory.memory, f"{content.name} on rank {rank}"
            assert near.host is not None
            got = near.device[list(pages.indexer_blocks), : layout.indexer_page_bytes]
            got = got.reshape(count, len(keys), size, -1).swapaxes(0, 1).reshape(len(keys), count * size, -1)
            assert (got[:, : keys.shape[1]] == keys).all(), f"{where}: indexer keys of another page"
            for layer, group in enumerate(layout.layer_group) if mirrored else ():
                blocks, start = [pages.resident_blocks[group][i] for i in mirrored], layout.layer_byte_offset(layer)
                rows = near.device[blocks, start : start + layout.layer_page_bytes].reshape(len(mirrored) * size, -1)
                assert (rows[: len(rows_of)] == want[layer, rows_of]).all(), f"{where}: resident rows of another page"
            hosts = list(pages.host_blocks)
            if landing is Landing.HOST:
                rows = near.host[:, hosts].reshape(NUM_LAYERS, count * size, -1)
                assert (rows[:, : want.shape[1]] == want).all(), f"{where}: host rows of another page"
                masks = memory.pool.row_masks[hosts]
                assert (masks[:-1] == memory.pool.full_mask).all() and masks[-1] == (1 << tail) - 1, f"{where}: row masks"
            else:
                assert not memory.pool.row_masks[hosts].any(), f"{where}: durable without a host page"
