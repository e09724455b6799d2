"""What a large import sends from actor to actor: small beside the pages, and the same after the journey."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from hisparse.config import PDConfig
from hisparse.layout import KVCacheLayout, ModelShape
from hisparse.pd.connector import PDConnectorScheduler
from hisparse.pd.endpoint import GenerationArray, RankEndpoint, agent_name, local_regions
from hisparse.pd.pages import PageTable, table_of
from hisparse.pd.protocol import encode_params
from hisparse.types import ImportTarget, Landing, PageGenerations, RequestPages, StepCommand
from tests.test_layout import GLM52, V32

LIMIT_BYTES = 1_000_000
DEVICE_BLOCKS, HOST_BLOCKS = 200_000, 40_000


def table(groups: int, pages: int, seed: int, *, incarnation: int) -> tuple[RequestPages, PageGenerations]:
    """Blocks anywhere in the pools, each reused up to a million times."""
    rng = np.random.default_rng(seed)

    def ids(limit: int) -> tuple[int, ...]:
        return tuple((rng.permutation(limit - 1)[:pages] + 1).tolist())

    def gens() -> tuple[int, ...]:
        return tuple(incarnation + count for count in rng.integers(0, 1_000_000, pages).tolist())

    request = RequestPages(
        first_page=0, num_tokens=pages * 64 - 5, indexer_blocks=ids(DEVICE_BLOCKS),
        resident_blocks=tuple(ids(DEVICE_BLOCKS) for _ in range(groups)), host_blocks=ids(HOST_BLOCKS))
    return request, PageGenerations(indexer=gens(), resident=tuple(gens() for _ in range(groups)), host=gens())


@pytest.mark.parametrize(("model", "groups", "pages"), [
    (GLM52, None, 2048), (V32, None, 2048), (V32, 50, 2048), (GLM52, None, 8192)],
    ids=["glm52", "v32", "v32-50-groups", "glm52-512k-tokens"])
def test_an_import_is_planned_in_less_than_1_mb(model: dict[str, object], groups: int | None, pages: int) -> None:
    layout = KVCacheLayout.build(ModelShape.from_hf_config(model), block_size=64, dtype="bfloat16", num_groups=groups)
    source, generations = table(layout.num_resident_groups, pages, 1, incarnation=0xFEDC_BA98_7654_0000)
    endpoints = tuple(RankEndpoint(
        rank=rank, agent=agent_name("prefill-1", 7, rank), metadata=bytes(450),
        regions=local_regions(layout, device_address=1 << 40, num_device_blocks=DEVICE_BLOCKS, host_address=1 << 46,
                              num_host_blocks=HOST_BLOCKS),
        generations=(GenerationArray(name="device", address=1 << 39, num_pages=DEVICE_BLOCKS),
                     GenerationArray(name="host", address=1 << 38, num_pages=HOST_BLOCKS))) for rank in range(8))
    params = encode_params(
        layout=layout, fingerprint=layout.fingerprint(), engine_id="prefill-1", incarnation=7, lease_id="l-1", lease_s=30.0,
        num_tokens=source.num_tokens, prompt_digest="d" * 64, endpoints=endpoints, table=table_of(source, generations))
    assert len(pickle.dumps(params)) < LIMIT_BYTES
    destination, _ = table(layout.num_resident_groups, pages, 2, incarnation=1)
    decode = PDConnectorScheduler(layout, PDConfig(role="decode"), engine_id="decode-1", incarnation=9, num_ranks=8)
    decode.add_remote("r", params)
    assert decode.choose_landing("r", False, True) is Landing.HOST
    decode.start_import("r", ImportTarget(landing=Landing.HOST, pages=destination))
    sent = pickle.dumps(StepCommand(step=1, kv={"pd": decode.build_metadata(1)}))
    assert len(sent) < LIMIT_BYTES < pages * layout.host_block_bytes // 100
    (got,) = pickle.loads(sent).kv["pd"].imports
    assert_equal(got.source, table_of(source, generations))
    assert_equal(got.destination, table_of(destination))
    assert got.sources == endpoints


def assert_equal(got: PageTable, want: PageTable) -> None:
    for name in ("indexer", "resident", "host", "indexer_generations", "resident_generations", "host_generations"):
        left, right = getattr(got, name), getattr(want, name)
        assert left.dtype == right.dtype and left.shape == right.shape and (left == right).all(), name


def some_table(ids: list[int], generations: list[int], groups: int = 2) -> PageTable:
    one, gens = np.array(ids, dtype=np.int64), np.array(generations, dtype=np.uint64)
    return PageTable(indexer=one, resident=np.tile(one, (groups, 1)), host=one, indexer_generations=gens,
                     resident_generations=np.tile(gens, (groups, 1)), host_generations=gens)


@pytest.mark.parametrize(("ids", "generations"), [
    ([], []), ([1, 2], [5, 6]), ([0, 7], [0, 1 << 63]), ([3, 0, 9], [(1 << 64) - 1, 0, 1]), ([1 << 40, 2], [3, 3]),
    ([0, 0], [0, 0]), ([-4, 1], [9, 1 << 40]), ([0, 2], [8, 9]),
], ids=str)
def test_every_table_arrives_as_it_was_sent(ids: list[int], generations: list[int]) -> None:
    """Also the odd ones: wide ids, a wrapped incarnation, generations where no page is."""
    for groups in (2, 0):
        sent = some_table(ids, generations, groups)
        assert_equal(pickle.loads(pickle.dumps(sent)), sent)


def test_a_slice_sends_its_own_pages_only() -> None:
    pages, generations = table(4, 2048, 3, incarnation=1 << 62)
    whole = table_of(pages, generations)
    part = whole.slice(100, 110)
    assert_equal(pickle.loads(pickle.dumps(part)), part)
    assert len(pickle.dumps(part)) < 3000
