"""The wire between prefill and decode: `kv_transfer_params` and notices, and the checks of what a peer sends.

Everything is JSON and base64, no pickle; nothing behind the fingerprint is decoded before the fingerprint matches: that of
the peer's layout, rebuilt here from the block size and number of groups it names (`hisparse.pd.paging`).
Page lists are packed arrays (`hisparse.pd.narrow`); generations are absolute uint64; durations are relative seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hisparse.errors import ProtocolError
from hisparse.layout import KVCacheLayout
from hisparse.pd.endpoint import (
    HOST,
    INDEXER,
    MAX_RANKS,
    RankEndpoint,
    agent_name,
    decode_endpoint,
    encode_endpoint,
)
from hisparse.pd.fields import pack_array, read_hex64, read_int, read_mapping, read_text, unpack_array
from hisparse.pd.pages import Generations, PageTable
from hisparse.pd.paging import Fingerprint, Paging, PeerLayouts

WIRE_VERSION = 3
MAX_NOTICE_BYTES = 4096
MAX_LEASE_S = 86_400.0
MAX_BLOCK_SIZE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteHeader:
    """Who holds what under which lease, without the page lists."""

    engine_id: str
    incarnation: int
    lease_id: str
    lease_s: float
    num_tokens: int
    prompt_digest: str
    """Of the prompt whose KV it is; see `hisparse.cache.prefix.prompt_digest`."""
    paging: Paging
    endpoints: tuple[RankEndpoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteKV(RemoteHeader):
    """Decoded and checked `kv_transfer_params`: KV of positions [0, num_tokens) held by a prefill engine, in its pages."""

    pages: PageTable


# ------------------------------------------------------------------------------------ kv_transfer_params


def encode_params(*, layout: KVCacheLayout, fingerprint: str, engine_id: str, incarnation: int, lease_id: str,
                  lease_s: float, num_tokens: int, prompt_digest: str, endpoints: Sequence[RankEndpoint],
                  table: PageTable) -> dict[str, Any]:
    """The dictionary that prefill answers with; only str, int, float, list and dict inside."""
    return {
        "version": WIRE_VERSION, "block_size": layout.block_size, "num_groups": layout.num_resident_groups,
        "fingerprint": fingerprint,
        "engine_id": engine_id, "incarnation": f"{incarnation:016x}", "lease_id": lease_id, "lease_s": float(lease_s),
        "num_tokens": num_tokens, "prompt": prompt_digest, "tp": len(endpoints),
        "pages": {
            "indexer": pack_array(table.indexer), "resident": [pack_array(row) for row in table.resident],
            "host": pack_array(table.host),
        },
        "generations": {
            "indexer": pack_array(table.indexer_generations),
            "resident": [pack_array(row) for row in table.resident_generations],
            "host": pack_array(table.host_generations),
        },
        "ranks": [encode_endpoint(endpoint) for endpoint in endpoints],
    }


def decode_params(params: Any, *, layouts: PeerLayouts, fingerprint: Fingerprint) -> RemoteKV:
    """Checks and decodes what a prefill engine answered.

    Args:
        layouts: of peers of this (decode) side. fingerprint: of a layout, as the peer makes it.
    Raises:
        ProtocolError: version, block size, fingerprint, a length, an id, a generation or a region does not fit, or the
            page list is empty (that is a failed prefill, never "no prefix"). Says what was expected and what came.
    """
    header = decode_header(params, layouts=layouts, fingerprint=fingerprint)
    if header.num_tokens == 0:
        raise ProtocolError("prefill answered with an empty page list; that is a failed prefill, not an absent prefix")
    layout = layouts.of(header.paging)
    table = _decode_table(params, layout, layout.pages(header.num_tokens))
    _check_table(table, header.endpoints)
    return RemoteKV(engine_id=header.engine_id, incarnation=header.incarnation, lease_id=header.lease_id,
                    lease_s=header.lease_s, num_tokens=header.num_tokens, prompt_digest=header.prompt_digest,
                    paging=header.paging, endpoints=header.endpoints, pages=table)


def decode_header(params: Any, *, layouts: PeerLayouts, fingerprint: Fingerprint) -> RemoteHeader:
    """Everything but the page lists, checked: enough to release the lease. Raises ProtocolError."""
    params = read_mapping(params, "kv_transfer_params")
    version = read_int(params, "version", 0, 1 << 31)
    if version != WIRE_VERSION:
        raise ProtocolError(f"prefill speaks wire version {version}, decode {WIRE_VERSION}; run one release on both")
    paging = Paging(read_int(params, "block_size", 1, MAX_BLOCK_SIZE), read_int(params, "num_groups", 1, MAX_BLOCK_SIZE))
    theirs = read_text(params, "fingerprint")
    layout = layouts.of(paging)
    if theirs != fingerprint(layout):
        raise ProtocolError(f"layout fingerprint of prefill is {theirs}, for its pages of {paging.block_size} tokens in "
                            f"{paging.num_groups} groups we have {fingerprint(layout)}; the sides run different models, row "
                            "formats or releases")
    lease_s = params.get("lease_s")
    if isinstance(lease_s, bool) or not isinstance(lease_s, int | float) or not 0 < lease_s <= MAX_LEASE_S:
        raise ProtocolError(f"lease_s must be a number of seconds in (0, {MAX_LEASE_S:.0f}], got {lease_s!r:.80}")
    incarnation = read_hex64(params, "incarnation")
    engine_id = read_text(params, "engine_id")
    tp = read_int(params, "tp", 1, MAX_RANKS)
    ranks = params.get("ranks")
    if not isinstance(ranks, list) or len(ranks) != tp:
        raise ProtocolError(f"expected a list of {tp} prefill ranks, got "
                            + (f"{len(ranks)}" if isinstance(ranks, list) else type(ranks).__name__))
    return RemoteHeader(
        engine_id=engine_id, incarnation=incarnation, lease_id=read_text(params, "lease_id"), lease_s=float(lease_s),
        num_tokens=read_int(params, "num_tokens", 0, 1 << 40), prompt_digest=read_text(params, "prompt"), paging=paging,
        endpoints=tuple(
            decode_endpoint(item, rank=rank, agent=agent_name(engine_id, incarnation, rank), layout=layout)
            for rank, item in enumerate(ranks)))


def _decode_table(params: Mapping[str, Any], layout: KVCacheLayout, num_pages: int) -> PageTable:
    pages, gens = read_mapping(params.get("pages"), "pages"), read_mapping(params.get("generations"), "generations")
    groups = layout.num_resident_groups
    indexer = unpack_array(pages.get("indexer"), num_pages, "pages.indexer", zeros=False).view(np.int64)

    def rows(source: Mapping[str, Any], what: str) -> Generations:
        lists = source.get("resident")
        if not isinstance(lists, list) or len(lists) != groups:
            raise ProtocolError(f"{what}.resident must list {groups} resident groups, got "
                                + (f"{len(lists)}" if isinstance(lists, list) else type(lists).__name__))
        out = [unpack_array(item, num_pages, f"{what}.resident[{g}]") for g, item in enumerate(lists)]
        return np.stack(out) if out else np.zeros((0, num_pages), np.uint64)

    return PageTable(
        indexer=indexer,
        resident=rows(pages, "pages").view(np.int64),
        host=unpack_array(pages.get("host"), num_pages, "pages.host").view(np.int64),
        indexer_generations=unpack_array(gens.get("indexer"), num_pages, "generations.indexer"),
        resident_generations=rows(gens, "generations"),
        host_generations=unpack_array(gens.get("host"), num_pages, "generations.host"))


def _check_table(table: PageTable, endpoints: Sequence[RankEndpoint]) -> None:
    device = min(endpoint.region(INDEXER).num_pages for endpoint in endpoints)
    host = min((endpoint.region(HOST).num_pages if endpoint.has_host() else 1) for endpoint in endpoints)
    checks = [("indexer", table.indexer, table.indexer_generations, device, 1),
              ("host", table.host, table.host_generations, host, 0)]
    checks += [(f"resident[{g}]", table.resident[g], table.resident_generations[g], device, 0)
               for g in range(table.resident.shape[0])]
    for name, ids, gens, limit, least in checks:
        bad = np.flatnonzero((ids < least) | (ids >= limit))
        if bad.size:
            raise ProtocolError(f"pages.{name}[{bad[0]}] = {ids[bad[0]]} is outside {least}..{limit - 1}")
        bad = np.flatnonzero((ids != 0) & (gens == 0))
        if bad.size:
            raise ProtocolError(f"generations.{name}[{bad[0]}] is 0 for page {ids[bad[0]]}")
    held = (table.resident != 0).all(axis=0) if table.resident.shape[0] else np.zeros(table.num_pages, bool)
    bad = np.flatnonzero(~held & (table.host == 0))
    if bad.size:
        raise ProtocolError(f"prefill holds page {bad[0]} neither resident in every group nor on the host")


# ------------------------------------------------------------------------------------ notices


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """What decode tells prefill about a lease: `release` (drop it) or `renew` (heartbeat)."""

    kind: str
    lease_id: str
    reason: str = ""


def encode_notice(notice: Notice) -> bytes:
    """UTF-8 JSON, at most MAX_NOTICE_BYTES."""
    return json.dumps({"v": WIRE_VERSION, "kind": notice.kind, "lease": notice.lease_id,
                       "reason": notice.reason[:200]}).encode()


def decode_notice(payload: bytes) -> Notice:
    """Raises ProtocolError when the bytes are not a notice of this version."""
    if len(payload) > MAX_NOTICE_BYTES:
        raise ProtocolError(f"a notice has {len(payload)} bytes, at most {MAX_NOTICE_BYTES} are allowed")
    try:
        data = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a notice is not JSON: {type(error).__name__}") from error
    data = read_mapping(data, "notice")
    if data.get("v") != WIRE_VERSION or data.get("kind") not in ("release", "renew"):
        raise ProtocolError(f"unknown notice: version {data.get('v')!r:.40}, kind {data.get('kind')!r:.40}")
    reason = data.get("reason", "")
    return Notice(kind=data["kind"], lease_id=read_text(data, "lease"),
                  reason=reason if isinstance(reason, str) else "")
