"""Pools of one engine as lists of free ids with generations, and the true KV of a prompt."""

from __future__ import annotations

import random

import numpy as np

from hisparse.types import RequestPages
from tests.pd.rig import GROUPS, LAYOUT

DEVICE_BLOCKS, HOST_BLOCKS = 40, 16
NUM_LAYERS = 5


class Content:
    """The true KV of one prompt: what the oracle knows.

    Attributes:
        indexer: uint8 [pages, indexer_page_bytes]. rows: uint8 [layers, pages, layer_page_bytes].
    """

    def __init__(self, name: str, num_tokens: int, rng: np.random.Generator) -> None:
        self.name, self.num_tokens, self.num_pages = name, num_tokens, LAYOUT.pages(num_tokens)
        self.indexer = rng.integers(0, 256, (self.num_pages, LAYOUT.indexer_page_bytes), dtype=np.uint8)
        self.rows = rng.integers(0, 256, (NUM_LAYERS, self.num_pages, LAYOUT.layer_page_bytes), dtype=np.uint8)
        self.digest = f"{rng.integers(1 << 62):064x}"


class Pools:
    """Free ids of the two tiers of one engine, and the generation of every id. Freed pages are handed out first or last."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.device, self.host = list(range(1, DEVICE_BLOCKS)), list(range(1, HOST_BLOCKS))
        rng.shuffle(self.device)
        rng.shuffle(self.host)
        self.generations = (np.full(DEVICE_BLOCKS, rng.getrandbits(63), np.uint64),
                            np.full(HOST_BLOCKS, rng.getrandbits(63), np.uint64))

    def fits(self, num_device: int, num_host: int) -> bool:
        return num_device <= len(self.device) and num_host <= len(self.host)

    def take(self, num_tokens: int, resident: list[bool], host: list[bool]) -> RequestPages | None:
        """Pages of a request, each in the tiers named, with new generations; None = no room."""
        count = len(resident)
        if not self.fits(count + GROUPS * sum(resident), sum(host)):
            return None
        pages = RequestPages(
            first_page=0, num_tokens=num_tokens, indexer_blocks=tuple(self.device.pop() for _ in range(count)),
            resident_blocks=tuple(tuple(self.device.pop() if held else 0 for held in resident) for _ in range(GROUPS)),
            host_blocks=tuple(self.host.pop() if held else 0 for held in host))
        for ids, generations in zip(ids_of(pages), self.generations, strict=True):
            generations[list(ids)] += np.uint64(1)
        return pages

    def give(self, pages: RequestPages) -> None:
        device, host = ids_of(pages)
        assert not set(device) & set(self.device) and not set(host) & set(self.host), "freed twice"
        for free, ids in ((self.device, device), (self.host, host)):
            free[:] = [*free, *ids] if self.rng.random() < 0.5 else [*ids, *free]

    def full(self) -> bool:
        return len(self.device) == DEVICE_BLOCKS - 1 and len(self.host) == HOST_BLOCKS - 1


def ids_of(pages: RequestPages) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Device ids, host ids."""
    device = (*pages.indexer_blocks, *(i for group in pages.resident_blocks for i in group if i))
    return device, tuple(i for i in pages.host_blocks if i)
