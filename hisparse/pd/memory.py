"""One rank's own memory as the importer sees it: regions, raw byte views, row masks, generations. CPU backend."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hisparse.errors import InvariantError
from hisparse.layout import KVCacheLayout
from hisparse.pd.commands import ImportPlan
from hisparse.pd.endpoint import (
    DEVICE_GENERATIONS,
    HOST,
    HOST_GENERATIONS,
    INDEXER,
    GenerationArray,
    RankEndpoint,
    Region,
    check_regions,
    local_regions,
)
from hisparse.types import Landing

Bytes = npt.NDArray[np.uint8]


class Slab(Protocol):
    """What DeviceCache and HostPool have in common here."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def generations(self) -> npt.NDArray[Any]: ...


class HostSlab(Slab, Protocol):
    """A host pool: a slab with a row mask per page, which stays as it is while somebody holds it."""

    @property
    def row_masks(self) -> npt.NDArray[Any]: ...
    def hold(self, owner: str) -> None: ...
    def release(self, owner: str) -> None: ...


class LocalMemory:
    """Byte views of the packed allocation and of the host pool. Holds both alive.

    Attributes:
        device: uint8 [num_blocks, block_bytes]. host: uint8 [layers, num_host_blocks, layer_page_bytes] or None.
        regions: by name. slabs: (address, bytes) to register, each once.
    """

    def __init__(self, layout: KVCacheLayout, cache: Slab, host_pool: HostSlab | None) -> None:
        self.layout = layout
        self._cache, self._pool = cache, host_pool
        num_host = host_pool.num_blocks if host_pool is not None else 0
        self.device = _view(cache.address, cache.nbytes).reshape(cache.num_blocks, layout.block_bytes)
        self.host: Bytes | None = None
        self.row_masks: npt.NDArray[Any] | None = None
        if host_pool is not None:
            shape = (layout.shape.num_layers, num_host, layout.layer_page_bytes)
            self.host = _view(host_pool.address, host_pool.nbytes).reshape(shape)
            self.row_masks = host_pool.row_masks
        regions = local_regions(
            layout, device_address=cache.address, num_device_blocks=cache.num_blocks,
            host_address=host_pool.address if host_pool is not None else 0, num_host_blocks=num_host)
        self.regions: dict[str, Region] = {region.name: region for region in regions}
        arrays = [_generations(DEVICE_GENERATIONS, cache)]
        self.slabs: list[tuple[int, int]] = [(cache.address, cache.nbytes)]
        if host_pool is not None:
            arrays.append(_generations(HOST_GENERATIONS, host_pool))
            self.slabs.append((host_pool.address, host_pool.nbytes))
        self.slabs += [(array.address, (array.num_pages - 1) * array.stride + 8) for array in arrays]
        self._arrays = tuple(arrays)

    @contextlib.contextmanager
    def held(self, owner: str) -> Iterator[None]:
        """While `owner` has the slabs registered: the host pool must be pinned before and unpinned after it."""
        if self._pool is not None:
            self._pool.hold(owner)
        try:
            yield
        finally:
            if self._pool is not None:
                self._pool.release(owner)

    def endpoint(self, rank: int, agent: str, metadata: bytes) -> RankEndpoint:
        """This memory's address for peers. Raises ProtocolError when a region does not fit its layout."""
        endpoint = RankEndpoint(rank=rank, agent=agent, metadata=metadata, regions=tuple(self.regions.values()),
                                generations=self._arrays)
        check_regions(endpoint, self.layout)
        return endpoint

    def check_destination(self, plan: ImportPlan) -> None:
        """Raises InvariantError unless every destination is a page of this rank, and of the kind the landing needs."""
        target = plan.destination
        checks = [("indexer", target.indexer, 1, self.num_device_blocks)]
        least = 1 if plan.landing is Landing.RESIDENT else 0
        checks += [(f"resident[{g}]", target.resident[g], least, self.num_device_blocks)
                   for g in range(target.resident.shape[0])]
        if plan.landing is Landing.HOST:
            checks.append(("host", target.host, 1, self.num_host_blocks))
        for name, ids, first, limit in checks:
            bad = np.flatnonzero((ids < first) | (ids >= limit))
            if bad.size:
                raise InvariantError(f"import {plan.job_id} ({plan.landing.value}): destination {name}[{bad[0]}] = "
                                     f"{ids[bad[0]]} is outside {first}..{limit - 1}")
        if ((target.resident != 0).any(axis=0) != (target.resident != 0).all(axis=0)).any():
            raise InvariantError(f"import {plan.job_id}: a destination page is resident in some groups but not in all")
        if plan.source.num_pages != plan.num_source_pages(self.layout.block_size):
            raise InvariantError(f"import {plan.job_id}: {plan.source.num_pages} source pages of "
                                 f"{plan.source_paging.block_size} tokens for {target.num_pages} of {self.layout.block_size}")

    @property
    def num_device_blocks(self) -> int:
        return self.regions[INDEXER].num_pages

    @property
    def num_host_blocks(self) -> int:
        return self.regions[HOST].num_pages if self.host is not None else 0


def _view(address: int, num_bytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def _generations(name: str, slab: Slab) -> GenerationArray:
    array = slab.generations
    return GenerationArray(name=name, address=int(array.ctypes.data), num_pages=slab.num_blocks,
                           stride=int(array.strides[0]))
