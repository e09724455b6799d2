"""How much of an import goes through Ray: commands and page lists between actors, never the pages."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import ray
from ray._private import internal_api

from hisparse.actors.handles import start_actor
from hisparse.config import PDConfig
from hisparse.pd.connector import PDConnectorScheduler, PDConnectorWorker
from hisparse.pd.endpoint import RankEndpoint
from hisparse.types import ImportTarget, Landing, RequestPages, StepCommand, StepResult
from tests.integration.nixl_prefill import SEED, PrefillEngine
from tests.pd.rig import GROUPS, LAYOUT, RankMemory, expected_page, pick_pages

PAGES, LIMIT_BYTES = 2048, 1_000_000
SIZES = {"device_blocks": PAGES * (GROUPS + 1) + 64, "host_blocks": PAGES + 8}


class PrefillActor:
    """A prefill engine without a model; every call is a step."""

    def __init__(self) -> None:
        self.engine = PrefillEngine("p", 1, {"lease_s": 30.0}, **SIZES)

    def obey(self, *order: Any) -> Any:
        self.engine.step()
        return self.engine.obey(order)


class DecodeRankActor:
    """A decode rank without a model."""

    def __init__(self) -> None:
        self.memory = RankMemory(2, **SIZES)
        self.worker = PDConnectorWorker(LAYOUT, PDConfig(role="decode"), cache=self.memory.cache, host_pool=self.memory.pool,
                                        engine_id="d", incarnation=2, rank=0, host_writer=True)

    def handshake(self) -> RankEndpoint:
        return self.worker.handshake()

    def execute(self, command: StepCommand) -> StepResult:
        self.worker.start_step(command.kv.get("pd"))
        self.worker.end_step()
        output = self.worker.output()
        return StepResult(step=command.step, rank=0, incarnation=2, kv={} if output is None else {"pd": output})

    def wrong_rows(self, source: RequestPages, target: RequestPages) -> int:
        """Rows on the host that are not prefill's, by its content rule."""
        far = RankMemory(SEED, **SIZES)
        return sum(not np.array_equal(self.memory.host_row(layer, target.host_blocks[i]), expected_page(far, source, i, layer))
                   for i in range(PAGES) for layer in range(LAYOUT.shape.num_layers))


def created_bytes(address: str) -> int:
    """Of all objects that were ever put into this cluster's store."""
    state = internal_api.get_state_from_address(address)
    return int(internal_api.get_memory_info_reply(state).store_stats.cumulative_created_bytes)


def test_no_page_and_no_list_above_1_mb_goes_through_the_object_store(cluster: str) -> None:
    """2,048 pages land from actor to actor; all objects of the import together stay below the limit of one."""
    prefill, rank = start_actor(PrefillActor, label="prefill"), start_actor(DecodeRankActor, label="decode rank")
    try:
        scheduler = PDConnectorScheduler(LAYOUT, PDConfig(role="decode"), engine_id="d", incarnation=2, num_ranks=1)
        scheduler.set_endpoints([rank.call("handshake", timeout_s=60)])
        source = pick_pages(1, PAGES, PAGES * 4 - 1, resident=[True] * PAGES, host=[False] * PAGES, **SIZES)
        target = pick_pages(2, PAGES, PAGES * 4 - 1, resident=[False] * (PAGES - 1) + [True], host=[True] * PAGES, **SIZES)
        prefill.call("obey", "stats", timeout_s=60)
        before = created_bytes(cluster)
        params = prefill.call("obey", "grant", "r", source, timeout_s=10)
        scheduler.add_remote("r", params)
        assert scheduler.choose_landing("r", False, True) is Landing.HOST
        scheduler.start_import("r", ImportTarget(landing=Landing.HOST, pages=target))
        loaded, step, deadline = False, 0, time.monotonic() + 30.0
        while not loaded:
            step += 1
            metadata = scheduler.build_metadata(step)
            command = StepCommand(step=step, kv={"pd": metadata} if metadata is not None else {})
            result = rank.call("execute", command, timeout_s=20)
            events = scheduler.update(list(result.kv.values()))
            assert not events.failed and time.monotonic() < deadline, events
            loaded = "r" in events.loaded
        through_ray = created_bytes(cluster) - before
        imported = scheduler.stats().import_bytes
        assert imported >= PAGES * LAYOUT.host_block_bytes > 2 * LIMIT_BYTES, "the pages themselves are more than the limit"
        print(f"{imported:,} bytes imported, {through_ray:,} through the object store, {step} steps")
        assert through_ray < LIMIT_BYTES, "smaller messages than 100 KB are not even stored"
        counted, held = created_bytes(cluster), ray.put(bytes(LIMIT_BYTES))
        assert created_bytes(cluster) - counted >= LIMIT_BYTES, "the store's count, by which this test goes, has not moved"
        del held
        assert rank.call("wrong_rows", source, target, timeout_s=60) == 0
    finally:
        prefill.kill()
        rank.kill()
