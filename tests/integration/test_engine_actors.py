"""The actors of one engine without Serve: several ranks, a failed start, a clean stop."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from hisparse.actors import handles
from hisparse.actors.coordinator import EngineRequest
from hisparse.actors.engine import EngineActors, EngineIdentity, actor_prefix
from hisparse.actors.handles import find_actors
from hisparse.checkpoints import recall_checkpoint
from hisparse.config import HiSparseConfig, load_config
from hisparse.engine.tokenizer import Tokenizer
from hisparse.errors import ConfigError
from hisparse.testing.recall_documents import build_recall_document
from hisparse.types import RequestOutput, SamplingParams
from tests.integration.service import SMALL

pytestmark = pytest.mark.usefixtures("cluster")


def config(**changes: object) -> HiSparseConfig:
    return load_config(SMALL, dict(changes), environ={}).for_role("colocated")


def free_cpus() -> float:
    return float(handles.ray.available_resources().get("CPU", 0.0))


def assert_given_back(cpus: float) -> None:
    deadline = time.monotonic() + 30
    while free_cpus() < cpus - 1e-6:
        assert time.monotonic() < deadline, f"{free_cpus()} of {cpus} CPUs are free: the placement group was not removed"
        time.sleep(0.2)


def test_two_ranks_share_one_pool() -> None:
    cpus = free_cpus()
    identity = EngineIdentity.new("colocated", "test-ranks")
    engine = EngineActors.start(config(tensor_parallel_size=2), identity)
    tokenizer = Tokenizer(recall_checkpoint())
    documents = [build_recall_document(seed, budget=1200) for seed in (1, 2, 3)]

    async def ask(i: int) -> str:
        request = EngineRequest(request_id=f"r{i}", prompt_token_ids=tuple(tokenizer.encode(documents[i].prompt)),
                                sampling=SamplingParams(max_tokens=8))
        outputs: list[RequestOutput] = [output async for output in engine.generate(request)]
        assert outputs[-1].error is None
        return "".join(output.new_text for output in outputs)

    async def body() -> dict[str, object]:
        answers = await asyncio.gather(*(ask(i) for i in range(3)))
        assert [item.is_answer(text) for item, text in zip(documents, answers)] == [True] * 3
        assert (await engine.health())["ok"]
        return await engine.stats(True)

    try:
        stats = asyncio.run(body())
        assert stats["check"] == "ok" and len(set(stats["rank_pids"])) == 2  # type: ignore[call-overload]
        assert [actor.label for actor in find_actors(actor_prefix("test-ranks"))] == [identity.actor_name]
        assert engine.segment is not None
        pool = Path(engine.segment.path)
        assert pool.stat().st_size == engine.segment.nbytes == stats["host_pool_bytes"]
    finally:
        engine.stop()
        engine.stop()
    assert not pool.exists() and engine.coordinator is None
    assert_given_back(cpus)
    assert find_actors(actor_prefix("test-ranks")) == []


@pytest.mark.parametrize(("changes", "text"), [
    ({"cache": {"host_pool_gib": 1e6}}, "host pool needs"),
    ({"tensor_parallel_size": 3}, "does not divide"),
])
def test_a_start_that_fails_says_why_and_leaves_nothing(changes: dict[str, object], text: str) -> None:
    cpus = free_cpus()
    identity = EngineIdentity.new("colocated", "test-failed")
    with pytest.raises(ConfigError, match=text):
        EngineActors.start(config(**changes), identity)
    assert list(Path("/dev/shm").glob(f"hisparse-{identity.engine_id}*")) == []
    assert_given_back(cpus)
    assert find_actors(actor_prefix("test-failed")) == []
