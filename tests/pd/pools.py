"""Pools of one engine as lists of free ids with generations, and the true KV of a prompt."""

from __future__ import annotations

import os
import random
import tempfile

import numpy as np

from hisparse.layout import KVCacheLayout
from hisparse.types import RequestPages
from hisparse.worker.host_pool import HostPool
from tests.pd.rig import LAYOUT, SHAPE

DEVICE_BLOCKS, HOST_BLOCKS = 40, 16
NUM_LAYERS = SHAPE.num_layers
MAX_TOKENS = 20
LAYOUTS = {(size, groups): KVCacheLayout.build(SHAPE, block_size=size, dtype="float32", num_groups=groups)
           for size in (4, 8, 16) for groups in (1, 2, 3)}
"""Ways to cut the same KV into pages: (tokens of a page, resident groups)."""


class Content:
    """The true KV of one prompt, by token: what the oracle knows. It goes on behind the prompt, as pages do.

    Attributes:
        keys: uint8 [indexer layers, tokens, key bytes]. rows: uint8 [layers, tokens, row bytes].
    """

    def __init__(self, name: str, num_tokens: int, rng: np.random.Generator) -> None:
        self.name, self.num_tokens = name, num_tokens
        padded = LAYOUTS[16, 2].pages(num_tokens) * 16
        self.keys = rng.integers(0, 256, (len(LAYOUT.indexer.layers), padded, LAYOUT.indexer_row_bytes), dtype=np.uint8)
        self.rows = rng.integers(0, 256, (NUM_LAYERS, padded, LAYOUT.row.row_bytes), dtype=np.uint8)
        self.digest = f"{rng.integers(1 << 62):064x}"

    def page(self, layer: int, page: int, size: int) -> np.ndarray:
        """Bytes of a page of `size` tokens of a layer; -1 = of the indexer."""
        tokens = slice(page * size, (page + 1) * size)
        return (self.keys[:, tokens] if layer < 0 else self.rows[layer, tokens]).ravel()


class Pools:
    """Free ids of the two tiers of one engine, and the generation of every id. Freed pages are handed out first or last."""

    def __init__(self, rng: random.Random, layout: KVCacheLayout) -> None:
        self.rng, self.layout = rng, layout
        self.device, self.host = list(range(1, DEVICE_BLOCKS)), list(range(1, HOST_BLOCKS))
        rng.shuffle(self.device)
        rng.shuffle(self.host)
        self.generations = (np.full(DEVICE_BLOCKS, rng.getrandbits(63), np.uint64),
                            np.full(HOST_BLOCKS, rng.getrandbits(63), np.uint64))

    def fits(self, num_device: int, num_host: int) -> bool:
        return num_device <= len(self.device) and num_host <= len(self.host)

    def fits_resident(self, num_pages: int) -> bool:
        return self.fits((1 + self.layout.num_resident_groups) * num_pages, num_pages)

    def take(self, num_tokens: int, resident: list[bool], host: list[bool], first_page: int = 0) -> RequestPages | None:
        """Pages of a request from `first_page` on, each in the tiers named, with new generations; None = no room."""
        count, groups = len(resident), self.layout.num_resident_groups
        if not self.fits(count + groups * sum(resident), sum(host)):
            return None
        pages = RequestPages(
            first_page=first_page, num_tokens=num_tokens, indexer_blocks=tuple(self.device.pop() for _ in range(count)),
            resident_blocks=tuple(tuple(self.device.pop() if held else 0 for held in resident) for _ in range(groups)),
            host_blocks=tuple(self.host.pop() if held else 0 for held in host))
        for ids, generations in zip(ids_of(pages), self.generations, strict=True):
            generations[list(ids)] += np.uint64(1)
        return pages

    def give(self, pages: RequestPages, *, next_out: bool = False) -> None:
        """Frees pages. next_out: those of one tier or both are the first to be handed out again; else by chance."""
        device, host = ids_of(pages)
        assert not set(device) & set(self.device) and not set(host) & set(self.host), "freed twice"
        first = self.rng.choice(((True, True), (True, False), (False, True))) if next_out else \
            (self.rng.random() < 0.5, self.rng.random() < 0.5)
        for free, ids, soon in zip((self.device, self.host), (device, host), first, strict=True):
            free[:] = [*free, *ids] if soon else [*ids, *free]

    def full(self) -> bool:
        return len(self.device) == DEVICE_BLOCKS - 1 and len(self.host) == HOST_BLOCKS - 1


def ids_of(pages: RequestPages) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Device ids, host ids."""
    device = (*pages.indexer_blocks, *(i for group in pages.resident_blocks for i in group if i))
    return device, tuple(i for i in pages.host_blocks if i)


def host_pools(layout: KVCacheLayout, num_ranks: int, *, shared: bool) -> list[HostPool]:
    """One for each rank: its own memory, or its own mapping of the one that rank 0 made."""
    if not shared:
        return [HostPool.private(layout, HOST_BLOCKS, populate=False) for _ in range(num_ranks)]
    path = f"{tempfile.gettempdir()}/hisparse-test-{os.getpid()}-{id(layout)}"
    first = HostPool.shared(layout, HOST_BLOCKS, path)
    try:
        return [first, *(HostPool.attach(layout, HOST_BLOCKS, path) for _ in range(1, num_ranks))]
    finally:
        first.unlink()
