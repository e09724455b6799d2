"""The wire: round trips, and hostile or broken prefill answers."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.errors import ProtocolError
from hisparse.layout import KVCacheLayout
from hisparse.pd.endpoint import HOST, INDEXER, RankEndpoint, Region, agent_name, check_regions, local_regions
from hisparse.pd.loopback import LoopbackNetwork
from hisparse.pd.pages import table_of
from hisparse.pd.paging import PeerLayouts
from hisparse.pd.protocol import Notice, decode_notice, decode_params, encode_notice, encode_params
from tests.pd.rig import LAYOUT, SHAPE, Side, pick_pages

PAGES = 5
LAYOUTS = PeerLayouts(LAYOUT)


def answer() -> dict[str, Any]:
    side = Side("p", LoopbackNetwork(), num_ranks=2)
    pages = pick_pages(3, PAGES, 18, resident=[True, True, False, True, True], host=[True, False, True, False, True])
    return encode_params(
        layout=LAYOUT, fingerprint=LAYOUT.fingerprint(), engine_id="p", incarnation=0xABC, lease_id="lease-1", lease_s=30.0,
        prompt_digest="d" * 64, num_tokens=18, endpoints=side.endpoints,
        table=table_of(pages, side.ranks[0].generations_of(pages)))


def decode(params: Any) -> Any:
    return decode_params(params, layouts=LAYOUTS, fingerprint=KVCacheLayout.fingerprint)


def test_round_trip_through_json() -> None:
    side = Side("p", LoopbackNetwork(), num_ranks=2)
    pages = pick_pages(3, PAGES, 18, resident=[True] * PAGES, host=[False, True, True, False, True])
    generations = side.ranks[0].generations_of(pages)
    params = encode_params(
        layout=LAYOUT, fingerprint=LAYOUT.fingerprint(), engine_id="p", incarnation=0xABC, lease_id="lease-1", lease_s=30.0,
        prompt_digest="d" * 64, num_tokens=18, endpoints=side.endpoints,
        table=table_of(pages, generations))
    kv = decode(json.loads(json.dumps(params)))
    assert (kv.engine_id, kv.incarnation, kv.lease_id, kv.lease_s, kv.num_tokens) == ("p", 0xABC, "lease-1", 30.0, 18)
    assert kv.endpoints == tuple(side.endpoints)
    assert kv.pages.indexer.tolist() == list(pages.indexer_blocks)
    assert kv.pages.resident.tolist() == [list(row) for row in pages.resident_blocks]
    assert kv.pages.host.tolist() == list(pages.host_blocks)
    assert kv.pages.resident_generations.tolist() == [list(row) for row in generations.resident]
    assert kv.pages.host_generations.tolist() == list(generations.host)


def packed(values: list[int], least: int = 1, width: int = 4) -> str:
    """By hand: width, the least value, and what lies above it plus 1."""
    above = b"".join((value - least + 1 if value else 0).to_bytes(width, "little") for value in values)
    return base64.b64encode(bytes([width]) + least.to_bytes(8, "little") + above).decode()


def unpacked(text: str) -> list[int]:
    raw = base64.b64decode(text)
    width, least = raw[0], int.from_bytes(raw[1:9], "little")
    values = [int.from_bytes(raw[i : i + width], "little") for i in range(9, len(raw), width)]
    return [value + least - 1 if value else 0 for value in values]


def set_page(params: dict[str, Any], name: str, i: int, value: int) -> None:
    ids = unpacked(params["pages"][name])
    ids[i] = value
    params["pages"][name] = packed([value % (1 << 64) for value in ids], width=8)


def region(params: dict[str, Any], name: str, rank: int = 1) -> dict[str, Any]:
    return next(r for r in params["ranks"][rank]["regions"] if r["name"] == name)


def zeros(params: dict[str, Any], num_tokens: int) -> None:
    """Each list says that all of its many values are 0."""
    params["num_tokens"] = num_tokens
    nothing = base64.b64encode(bytes(9)).decode()
    for lists in (params["pages"], params["generations"]):
        lists.update(indexer=nothing, host=nothing, resident=[nothing] * len(lists["resident"]))


Change = Callable[[dict[str, Any]], Any]
HOSTILE: list[tuple[str, Change, str]] = [
    ("no version", lambda p: p.pop("version"), "version"),
    ("future version", lambda p: p.update(version=4), "wire version 4"),
    ("past version", lambda p: p.update(version=2), "wire version 2"),
    ("version is a bool", lambda p: p.update(version=True), "version"),
    ("other page size than it was", lambda p: p.update(block_size=8), "for its pages of 8 tokens in 2 groups we have"),
    ("page size that does not divide", lambda p: p.update(block_size=6), "pages of 6 tokens, decode 4; one must be a multiple"),
    ("page size that no engine can have", lambda p: p.update(block_size=128), "power of two in 4..64"),
    ("page size of 0", lambda p: p.update(block_size=0), "block_size"),
    ("absurd page size", lambda p: p.update(block_size=1 << 40), "block_size"),
    ("page size as text", lambda p: p.update(block_size="4"), "block_size"),
    ("other number of groups than it was", lambda p: p.update(num_groups=3), "pages of 4 tokens in 3 groups we have"),
    ("number of groups that no engine can have", lambda p: p.update(num_groups=77), "77 groups are impossible"),
    ("no number of groups", lambda p: p.pop("num_groups"), "num_groups"),
    ("other fingerprint", lambda p: p.update(fingerprint="0" * 32), "fingerprint"),
    ("fingerprint is a list", lambda p: p.update(fingerprint=["x"]), "fingerprint"),
    ("no prompt digest", lambda p: p.pop("prompt"), "prompt"),
    ("empty page list", lambda p: p.update(num_tokens=0), "empty page list"),
    ("negative tokens", lambda p: p.update(num_tokens=-4), "num_tokens"),
    ("tokens of another length", lambda p: p.update(num_tokens=22), "expected 6"),
    ("tokens as float", lambda p: p.update(num_tokens=18.0), "num_tokens"),
    ("absurd tokens", lambda p: p.update(num_tokens=1 << 39), "expected"),
    ("absurd tokens in lists that take no bytes", lambda p: zeros(p, 1 << 39), "pages.indexer is nothing but zeros"),
    ("lease of no time", lambda p: p.update(lease_s=0), "lease_s"),
    ("lease for ever", lambda p: p.update(lease_s=float("inf")), "lease_s"),
    ("lease is nan", lambda p: p.update(lease_s=float("nan")), "lease_s"),
    ("lease id of 10 MB", lambda p: p.update(lease_id="x" * 10_000_000), "lease_id"),
    ("no incarnation", lambda p: p.update(incarnation=5), "incarnation"),
    ("incarnation not hex", lambda p: p.update(incarnation="zzzzzzzzzzzzzzzz"), "incarnation"),
    ("tp does not match", lambda p: p.update(tp=3), "3 prefill ranks"),
    ("tp of 0", lambda p: p.update(tp=0, ranks=[]), "tp"),
    ("ranks is a dict", lambda p: p.update(ranks={}), "prefill ranks"),
    ("ranks swapped", lambda p: p["ranks"].reverse(), "says it is rank"),
    ("agent of another engine", lambda p: p["ranks"][0].update(agent="q/0/0"), "agent"),
    ("metadata not base64", lambda p: p["ranks"][0].update(metadata="***"), "base64"),
    ("metadata missing", lambda p: p["ranks"][0].pop("metadata"), "metadata"),
    ("short indexer list", lambda p: p["pages"].update(indexer=packed([1, 2, 3])), "covers 3 pages"),
    ("half an id", lambda p: p["pages"].update(indexer=base64.b64encode(b"\4" * 28).decode()), "4.75 pages"),
    ("ids of a width that does not exist", lambda p: p["pages"].update(indexer=base64.b64encode(b"\5" * 34).decode()),
     r"begins with 05 in 34 bytes; expected a width of \(0, 1, 2, 3, 4, 8\)"),
    ("a list of nothing", lambda p: p["pages"].update(indexer=""), "begins with nothing in 0 bytes"),
    ("a list that ends in its head", lambda p: p["pages"].update(indexer="AQAA"), "begins with 01 in 3 bytes"),
    ("generations that wrap", lambda p: p["generations"].update(
        host=base64.b64encode(b"\1" + ((1 << 64) - 2).to_bytes(8, "little") + b"\3" * 5).decode()),
     "host has values beyond 64 bits"),
    ("indexer is a list", lambda p: p["pages"].update(indexer=[1, 2, 3, 4, 5]), "base64 string"),
    ("huge list", lambda p: p["pages"].update(host="A" * 1_000_000), "too long"),
    ("a group is missing", lambda p: p["pages"]["resident"].pop(), "2 resident groups"),
    ("null indexer block", lambda p: set_page(p, "indexer", 2, 0), r"indexer\[2\] = 0"),
    ("indexer block out of range", lambda p: set_page(p, "indexer", 0, 64), r"indexer\[0\] = 64"),
    ("negative host block", lambda p: set_page(p, "host", 0, -1), r"host\[0\] = -1"),
    ("host block out of range", lambda p: set_page(p, "host", 4, 32), r"host\[4\] = 32"),
    ("page in no tier", lambda p: set_page(p, "host", 2, 0), "page 2 neither"),
    ("generation 0", lambda p: p["generations"].update(indexer=packed([0] * 5)), "is 0 for page"),
    ("short generations", lambda p: p["generations"].update(host=packed([1] * 4)), "covers 4 pages"),
    ("no generations", lambda p: p.pop("generations"), "generations"),
    ("region missing", lambda p: p["ranks"][1]["regions"].pop(0), "regions are"),
    ("region twice", lambda p: p["ranks"][1]["regions"].append(region(p, INDEXER)), "regions are|must list"),
    ("region longer than its destination", lambda p: region(p, INDEXER).update(page_bytes=4096, page_stride=4096),
     f"4096 bytes, its destination page {LAYOUT.indexer_page_bytes} bytes"),
    ("page longer than its stride", lambda p: region(p, INDEXER).update(page_stride=LAYOUT.indexer_page_bytes - 16),
     "more than its stride"),
    ("address is a string", lambda p: region(p, HOST).update(address="0x7f"), "address"),
    ("address wraps", lambda p: region(p, HOST).update(address=(1 << 62) - 1, plane_stride=(1 << 60) - 1), "address space"),
    ("host region of another depth", lambda p: region(p, HOST).update(num_planes=4), "4 planes"),
    ("host planes overlap", lambda p: region(p, HOST).update(plane_stride=64), "planes"),
    ("generation array too short", lambda p: p["ranks"][0]["generations"][0].update(num_pages=8), "generation arrays"),
    ("no host generation array", lambda p: p["ranks"][0]["generations"].pop(), "generation arrays"),
]


@pytest.mark.parametrize(("name", "change", "message"), HOSTILE, ids=[case[0] for case in HOSTILE])
def test_hostile_answer_is_refused_with_what_is_wrong(name: str, change: Change, message: str) -> None:
    params = answer()
    decode(params)
    change(params)
    with pytest.raises(ProtocolError, match=message) as caught:
        decode(params)
    assert len(str(caught.value)) < 1000, "a message must not echo megabytes"


def test_nothing_behind_a_foreign_fingerprint_is_decoded() -> None:
    """With another fingerprint every other fault is irrelevant: the message is about the fingerprint."""
    bad = {"version": 3, "block_size": 4, "num_groups": 2, "fingerprint": "f" * 32, "ranks": object(), "pages": object()}
    with pytest.raises(ProtocolError, match="fingerprint"):
        decode(bad)
    for junk in (None, [], "x", 5, {}):
        with pytest.raises(ProtocolError):
            decode(junk)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=6)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_replaced_field_is_refused_or_harmless(data: st.DataObject) -> None:
    params = copy.deepcopy(ANSWER)
    node: Any = params
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
            node = node[key]
            continue
        node[key] = data.draw(json_values)
        break
    try:
        kv = decode(params)
    except ProtocolError:
        return
    assert kv.pages.num_pages == LAYOUT.pages(kv.num_tokens)
    assert kv.pages.indexer.min() >= 1 and kv.pages.indexer.max() < 64


ANSWER = answer()


def test_b05_one_region_per_cache_with_the_packed_stride() -> None:
    """Caches share the packed storage: each region has its own page bytes and the block's stride."""
    layout = KVCacheLayout.build(SHAPE, block_size=4, dtype="float32", num_groups=2)
    regions = {r.name: r for r in local_regions(layout, device_address=1 << 20, num_device_blocks=8, host_address=1 << 30,
                                                num_host_blocks=6)}
    assert regions["indexer"].page_bytes == 3 * 4 * 8 * 4 and regions["indexer"].page_stride == layout.block_bytes
    assert [regions[f"resident.{g}"].page_bytes for g in range(2)] == [layout.resident_page_bytes(g) for g in range(2)]
    assert regions["resident.0"].page_bytes != regions["resident.1"].page_bytes, "one of them is padded"
    assert regions["indexer"].page_addresses(np.array([0, 7])).tolist() == [1 << 20, (1 << 20) + 7 * layout.block_bytes]
    host = regions["host"]
    assert host.page_addresses(np.array([5]), plane=4).tolist() == [(1 << 30) + layout.host_page_byte_offset(4, 5, 6)]
    too_long = tuple(
        Region(name=r.name, address=r.address, page_bytes=layout.block_bytes, page_stride=r.page_stride,
               num_pages=r.num_pages) if r.name == "resident.1" else r for r in regions.values())
    side = Side("p", LoopbackNetwork())
    endpoint = RankEndpoint(rank=0, agent=agent_name("p", 1, 0), metadata=b"m", regions=too_long,
                            generations=side.endpoints[0].generations)
    with pytest.raises(ProtocolError, match=rf"{layout.block_bytes} bytes, its destination page "
                                            rf"{layout.resident_page_bytes(1)} bytes"):
        check_regions(endpoint, layout)


def test_notices_round_trip_and_junk_is_refused() -> None:
    notice = Notice(kind="release", lease_id="lease-1", reason="imported")
    assert decode_notice(encode_notice(notice)) == notice
    long = decode_notice(encode_notice(Notice(kind="renew", lease_id="x", reason="r" * 9999)))
    assert len(long.reason) == 200
    for junk in (b"", b"\xff\xfe", b"[]", b'{"v":3}', b'{"v":3,"kind":"release"}', b'{"v":2,"kind":"release","lease":"x"}',
                 b'{"v":3,"kind":"drop","lease":"x"}', b'{"v":3,"kind":"renew","lease":7}', b"[" * 4000, b"x" * 5000):
        with pytest.raises(ProtocolError):
            decode_notice(junk)
