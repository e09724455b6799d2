"""Where a rank's caches live and how to reach them: regions, generation arrays, and their check against a layout."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hisparse.errors import ProtocolError
from hisparse.layout import KVCacheLayout
from hisparse.pd.fields import read_int, read_mapping, read_text

MAX_RANKS = 64
INDEXER, HOST = "indexer", "host"
DEVICE_GENERATIONS, HOST_GENERATIONS = "device", "host"

Ids = npt.NDArray[np.int64]


def resident_region(group: int) -> str:
    """Name of the region of resident group `group`."""
    return f"resident.{group}"


RETIRED_S = 60.0
"""How long answers of a replaced incarnation are refused unread. Incarnations have no order: a late answer of an older one,
seen first after the newer one, looks newer. Longer than a lease lives without heartbeats, and no ban for ever."""


def agent_name(engine_id: str, incarnation: int, rank: int) -> str:
    """Name of a rank's transport agent. A restarted engine has another incarnation, hence other agents."""
    return f"{engine_id}/{incarnation:016x}/{rank}"


def peer_of(agent: str) -> str:
    """The engine id in an agent's name."""
    return agent.rsplit("/", 2)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Pages of one cache in one registered slab: page p of plane l is at address + l * plane_stride + p * page_stride.

    Attributes:
        page_bytes: bytes of a page that belong to this cache; never more than `page_stride`.
        num_planes, plane_stride: layers of the host pool (layer outermost); one plane for device caches.
    """

    name: str
    address: int
    page_bytes: int
    page_stride: int
    num_pages: int
    num_planes: int = 1
    plane_stride: int = 0

    def page_addresses(self, pages: Ids, plane: int = 0) -> Ids:
        """Byte address of each page. Args: pages int64 [n]. Returns: int64 [n]."""
        return self.address + plane * self.plane_stride + pages * self.page_stride


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationArray:
    """One uint64 per page of a pool, readable by peers: page p's at address + p * stride."""

    name: str
    address: int
    num_pages: int
    stride: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEndpoint:
    """How to reach one rank's memory: agent name, opaque agent metadata, and where each cache lives."""

    rank: int
    agent: str
    metadata: bytes
    regions: tuple[Region, ...]
    generations: tuple[GenerationArray, ...]

    def region(self, name: str) -> Region:
        """Raises KeyError when this rank has no such cache."""
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(name)

    def generation_array(self, name: str) -> GenerationArray:
        """Raises KeyError when this rank has no such pool."""
        for array in self.generations:
            if array.name == name:
                return array
        raise KeyError(name)

    def has_host(self) -> bool:
        return any(region.name == HOST for region in self.regions)


def local_regions(layout: KVCacheLayout, *, device_address: int, num_device_blocks: int, host_address: int = 0,
                  num_host_blocks: int = 0) -> tuple[Region, ...]:
    """Regions of one rank: one per cache, with the cache's own page bytes and the packed block's stride.

    Args:
        device_address: of the packed allocation. host_address, num_host_blocks: of the host pool's body; 0 = no pool.
    Example: an indexer page of 177,408 B in blocks of 294,912 B gives page_bytes=177408, page_stride=294912.
    """
    def device(name: str, page_bytes: int) -> Region:
        return Region(name=name, address=device_address, page_bytes=page_bytes, page_stride=layout.block_bytes,
                      num_pages=num_device_blocks)

    regions = [device(INDEXER, layout.indexer_page_bytes)]
    regions += [device(resident_region(g), layout.resident_page_bytes(g)) for g in range(layout.num_resident_groups)]
    if num_host_blocks:
        regions.append(Region(
            name=HOST, address=host_address, page_bytes=layout.layer_page_bytes, page_stride=layout.layer_page_bytes,
            num_pages=num_host_blocks, num_planes=layout.shape.num_layers,
            plane_stride=layout.host_layer_stride_bytes(num_host_blocks)))
    return tuple(regions)


def encode_endpoint(endpoint: RankEndpoint) -> dict[str, Any]:
    return {
        "rank": endpoint.rank, "agent": endpoint.agent, "metadata": base64.b64encode(endpoint.metadata).decode(),
        "regions": [{
            "name": r.name, "address": r.address, "page_bytes": r.page_bytes, "page_stride": r.page_stride,
            "num_pages": r.num_pages, "num_planes": r.num_planes, "plane_stride": r.plane_stride,
        } for r in endpoint.regions],
        "generations": [{"name": a.name, "address": a.address, "num_pages": a.num_pages, "stride": a.stride}
                        for a in endpoint.generations],
    }


def decode_endpoint(item: Any, *, rank: int, agent: str, layout: KVCacheLayout) -> RankEndpoint:
    where = f"ranks[{rank}]"
    item = read_mapping(item, where)
    if read_int(item, "rank", 0, MAX_RANKS) != rank:
        raise ProtocolError(f"{where} says it is rank {item['rank']}")
    if read_text(item, "agent") != agent:
        raise ProtocolError(f"{where}.agent is {item['agent']!r:.200}, expected {agent!r}")
    metadata = item.get("metadata")
    if not isinstance(metadata, str) or not metadata:
        raise ProtocolError(f"{where}.metadata must be a base64 string")
    try:
        raw = base64.b64decode(metadata, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ProtocolError(f"{where}.metadata is not base64: {error}") from error
    regions = item.get("regions")
    arrays = item.get("generations")
    if not isinstance(regions, list) or not isinstance(arrays, list) or len(regions) > layout.num_resident_groups + 2 \
            or len(arrays) > 2:
        raise ProtocolError(f"{where} must list its regions and generation arrays")
    endpoint = RankEndpoint(
        rank=rank, agent=agent, metadata=raw,
        regions=tuple(_decode_region(read_mapping(r, f"{where}.regions"), where) for r in regions),
        generations=tuple(
            GenerationArray(name=read_text(read_mapping(a, f"{where}.generations"), "name"),
                            address=read_int(a, "address", 1, 1 << 62), num_pages=read_int(a, "num_pages", 2, 1 << 40),
                            stride=read_int(a, "stride", 8, 1 << 12))
            for a in arrays))
    check_regions(endpoint, layout)
    return endpoint


def _decode_region(item: Mapping[str, Any], where: str) -> Region:
    region = Region(
        name=read_text(item, "name"), address=read_int(item, "address", 1, 1 << 62),
        page_bytes=read_int(item, "page_bytes", 1, 1 << 40),
        page_stride=read_int(item, "page_stride", 1, 1 << 40), num_pages=read_int(item, "num_pages", 2, 1 << 40),
        num_planes=read_int(item, "num_planes", 1, 1 << 16), plane_stride=read_int(item, "plane_stride", 0, 1 << 60))
    end = region.address + (region.num_planes - 1) * region.plane_stride + region.num_pages * region.page_stride
    if end >= 1 << 63:
        raise ProtocolError(f"{where}: region {region.name!r} ends beyond the address space")
    return region


def check_regions(endpoint: RankEndpoint, layout: KVCacheLayout) -> None:
    """Raises ProtocolError unless the endpoint has exactly the caches of `layout`, with its page bytes."""
    where = f"rank {endpoint.rank} of {endpoint.agent}"
    expected = {INDEXER: layout.indexer_page_bytes}
    expected |= {resident_region(g): layout.resident_page_bytes(g) for g in range(layout.num_resident_groups)}
    names = [region.name for region in endpoint.regions]
    if endpoint.has_host():
        expected[HOST] = layout.layer_page_bytes
    if sorted(names) != sorted(expected):
        raise ProtocolError(f"{where}: regions are {sorted(names)}, expected {sorted(expected)}")
    pools = {DEVICE_GENERATIONS: endpoint.region(INDEXER).num_pages}
    for region in endpoint.regions:
        if region.page_bytes != expected[region.name]:
            raise ProtocolError(f"{where}: a page of region {region.name!r} has {region.page_bytes} bytes, "
                                f"its destination page {expected[region.name]} bytes")
        if region.page_bytes > region.page_stride:
            raise ProtocolError(f"{where}: a page of region {region.name!r} has {region.page_bytes} bytes, "
                                f"more than its stride of {region.page_stride} bytes")
        if region.name == HOST:
            pools[HOST_GENERATIONS] = region.num_pages
            planes, least = layout.shape.num_layers, region.num_pages * region.page_stride
            if region.num_planes != planes or (planes > 1 and region.plane_stride < least):
                raise ProtocolError(f"{where}: host region has {region.num_planes} planes of {region.plane_stride} "
                                    f"bytes, expected {planes} of at least {least}")
        elif region.num_planes != 1 or region.num_pages != pools[DEVICE_GENERATIONS]:
            raise ProtocolError(f"{where}: region {region.name!r} has {region.num_planes} planes of "
                                f"{region.num_pages} pages, expected 1 of {pools[DEVICE_GENERATIONS]}")
    got = {array.name: array.num_pages for array in endpoint.generations}
    if len(endpoint.generations) != len(got) or got != pools:
        raise ProtocolError(f"{where}: generation arrays are {got}, expected {pools}")
