"""Prefill and decode engines as Ray actors with real NIXL: tensor-parallel degrees that differ, and faults in between.

Everything below Serve is the service's own: rank, keeper and coordinator actors, the prefill client with its retries, the
decode service with its fallback. Oracle: unmodified transformers on the same tiny checkpoint.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hisparse.actors.engine import EngineActors, EngineIdentity
from hisparse.engine.tokenizer import Tokenizer
from hisparse.serve.calls import Chunk, GenerateCall, PrefillAnswer, PrefillCall
from hisparse.serve.decode import DecodeService
from hisparse.serve.errors import ENGINE_UNAVAILABLE
from hisparse.serve.failover import with_failover
from hisparse.serve.prefill import PrefillClient, PrefillService
from hisparse.types import SamplingParams
from tests.integration.nixl_prefill import wait_for_state
from tests.integration.test_engine_actors import assert_given_back, free_cpus
from tests.parity.rig import check_tokens, engine_config, prompt_of

pytestmark = pytest.mark.usefixtures("cluster")
TOKENS = 8
LEASE_S, DEADLINE_S = 2.0, 1.5
Between = Callable[["Deployment", int], Awaitable[None]]
"""What happens between prefill's answer and decode: (deployment, replica that answered)."""


class Engines:
    """Engines by role and degree, each started once, all at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pool = ThreadPoolExecutor(8)
        self._started: dict[str, Future[EngineActors]] = {}

    def prepare(self, name: str, ranks: int) -> None:
        role = name.split("-")[0]
        config = engine_config(self.path, role, tensor_parallel_size=ranks, host_pages=80, slack=20 if role == "decode" else 60,
                               pd={"transport": "nixl", "lease_s": LEASE_S, "transfer_deadline_s": DEADLINE_S})
        identity = EngineIdentity.new(role, f"test-{name}")
        self._started[name] = self._pool.submit(EngineActors.start, config, identity)

    def get(self, name: str) -> EngineActors:
        return self._started[name].result(180)

    def stop(self) -> None:
        stops = [self._pool.submit(self.get(name).stop) for name in self._started if not self._started[name].exception()]
        for stop in stops:
            stop.result(60)


class Deployment:
    """Prefill replicas in turn, and one decode replica. Made inside the event loop that uses it."""

    def __init__(self, path: Path, prefill: list[EngineActors], decode: EngineActors) -> None:
        self.path, self.prefill, self.decode = path, prefill, decode
        self.between: dict[str, Between] = {}
        self.turn = 0
        client = PrefillClient(self._send, decode.config.pd)
        self.service = DecodeService(decode.config, decode, Tokenizer(path), client)

    async def _send(self, call: PrefillCall) -> PrefillAnswer:
        number, self.turn = self.turn % len(self.prefill), self.turn + 1
        answer = await PrefillService(self.prefill[number]).prefill(call)
        fault = self.between.pop(call.request_id.rsplit("-p", 1)[0], None)
        if fault is not None and answer.error is None:
            await fault(self, number)
        return answer

    async def ask(self, name: str, prompt: tuple[int, ...]) -> list[Chunk]:
        call = GenerateCall(request_id=name, token_ids=prompt, max_tokens=TOKENS, timeout_s=40.0, cache_salt=name,
                            sampling=SamplingParams(ignore_eos=True))
        return [chunk async for chunk in self.service.generate(call)]

    async def check(self, name: str, prompt: tuple[int, ...]) -> dict[str, Any]:
        """Asks; the answer is right. Returns its facts."""
        chunks = await self.ask(name, prompt)
        assert chunks[-1].error is None, (name, chunks[-1].error)
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        check_tokens(name, self.path, prompt, tokens, complete=TOKENS)
        assert chunks[-1].stats is not None
        return dict(chunks[-1].stats)

    async def check_empty(self) -> dict[str, Any]:
        """Soon both sides' pools and staging are full, nothing is leased, every account adds up. Returns decode's counters."""
        deadline = time.monotonic() + 3 * LEASE_S + 10
        while True:
            reports = [await engine.stats(True) for engine in (*self.prefill, self.decode)]
            busy = [{key: report[key] for key in ("running", "waiting", "loading", "held") if report[key]}
                    | {key: used for key, used in in_use(report["cache"]).items() if used} for report in reports]
            if not any(busy):  # copies to the host may end after the last request
                break
            assert time.monotonic() < deadline, busy
            await asyncio.sleep(0.05)
        for report in reports:
            pd = report["pd"]
            assert report["check"] == "ok" and report["health"]["ok"], report
            assert pd["leases_held"] == pd["imports_in_flight"] == 0 and not pd["stuck"]
            assert pd["staging_slots_free"] == pd["staging_slots"]
        return dict(reports[-1]["pd"])


def in_use(cache: dict[str, Any]) -> dict[str, int]:
    return {kind: cache[f"{kind}_blocks_total"] - cache[f"{kind}_blocks_free"] for kind in ("device", "host")}


@pytest.fixture(scope="module")
def engines(cluster: str, tiny_checkpoints: dict[str, Path]) -> Iterator[Engines]:
    engines = Engines(tiny_checkpoints["glm52"])
    cpus = free_cpus()
    for name, ranks in (("prefill-two", 2), ("decode-one", 1), ("prefill-one", 1), ("decode-two", 2)):
        engines.prepare(name, ranks)
    yield engines
    engines.stop()
    assert_given_back(cpus)


def mapped_pools(pid: int) -> set[tuple[str, str]]:
    """(inode, path) of the shared host pools in a process's address space."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {(fields[4], fields[5]) for fields in lines if len(fields) > 5 and fields[5].endswith(".pool")}


def test_each_engine_of_a_node_has_one_physical_pool(engines: Engines) -> None:
    """Every rank of an engine maps the same segment, counted once; engines beside each other have others."""
    inodes = []
    for name, ranks in (("prefill-two", 2), ("decode-one", 1), ("decode-two", 2)):
        engine = engines.get(name)
        stats = asyncio.run(engine.stats())
        path = Path(stats["host_pool"])
        maps = [mapped_pools(pid) for pid in stats["rank_pids"]]
        assert len(maps) == ranks and set.union(*maps) == {(str(path.stat().st_ino), str(path))}
        on_disk = path.stat()
        assert stats["host_pool_bytes"] == on_disk.st_size <= on_disk.st_blocks * 512, "all of it exists, and once"
        inodes.append(on_disk.st_ino)
    assert len(set(inodes)) == 3


@pytest.mark.parametrize(("prefill", "decode"), [("two", "one"), ("one", "two")])
def test_tensor_parallel_degrees_may_differ(engines: Engines, prefill: str, decode: str) -> None:
    """P TP 2 -> D TP 1, P TP 1 -> D TP 2: each D rank reads from one P rank; both landings; right tokens."""
    async def body() -> None:
        deployment = Deployment(engines.path, [engines.get(f"prefill-{prefill}")], engines.get(f"decode-{decode}"))
        prompts = [prompt_of(length, length) for length in (1, 15, 16, 17, 150, 290)]
        facts = await asyncio.gather(*(deployment.check(f"tp{decode}-{len(p)}", p) for p in prompts))
        assert all(fact["prefill"] == "remote" and fact["import_failures"] == 0 for fact in facts)
        assert [fact["imported_tokens"] for fact in facts] == [len(prompt) for prompt in prompts]
        assert {fact["landing"] for fact in facts} == {"resident", "host"}
        pd = await deployment.check_empty()
        ranks = {"one": 1, "two": 2}[decode]
        (traffic,) = pd["peers"].values()
        assert pd["imports_ok"] == len(prompts) and traffic["connects"] == ranks
        assert traffic["reads"] >= 2 * ranks * len(prompts), "data and generations, on every rank"
        assert traffic["num_bytes"] == pd["import_bytes"] > 0 and traffic["failures"] == 0

    asyncio.run(body())


async def rank_pid(engine: EngineActors) -> int:
    return int((await engine.stats())["rank_pids"][0])


async def kill(deployment: Deployment, number: int) -> None:
    """The replica's only rank is gone when decode comes to read."""
    pid = await rank_pid(deployment.prefill[number])
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(wait_for_state, pid, "ZX")


async def freeze(deployment: Deployment, number: int) -> None:
    pid = await rank_pid(deployment.prefill[number])
    os.kill(pid, signal.SIGSTOP)
    await asyncio.to_thread(wait_for_state, pid, "T")
    asyncio.get_running_loop().call_later(DEADLINE_S + 1.0, os.kill, pid, signal.SIGCONT)


async def expire(deployment: Deployment, number: int) -> None:
    """The lease runs out, and its pages are handed out again."""
    engine = deployment.prefill[number]
    while (await engine.stats())["pd"]["leases_held"]:
        await asyncio.sleep(0.02)
    for i in range(3):
        call = PrefillCall(request_id=f"reuse{i}", prompt_token_ids=prompt_of(250, 900 + i))
        answer = await PrefillService(engine).prefill(call)
        assert answer.error is None
        PrefillClient(deployment._send, deployment.decode.config.pd).release(answer)


def test_faults_between_prefill_and_decode(engines: Engines) -> None:
    """Concurrent requests; every few of them prefill is killed or frozen, a lease runs out, or a client leaves."""
    async def body() -> None:
        replicas = [engines.get("prefill-one"), engines.get("prefill-two")]
        deployment = Deployment(engines.path, replicas, engines.get("decode-one"))
        before = (await deployment.check_empty())["imports_failed"]
        faults: dict[int, Between] = {2: expire, 5: freeze}
        deployment.between = {f"f{i}": fault for i, fault in faults.items()}
        prompts = [prompt_of(40 + 30 * (i % 4), 50 + i) for i in range(8)]
        facts = await asyncio.gather(*(deployment.check(f"f{i}", prompt) for i, prompt in enumerate(prompts)))
        assert facts[2]["import_failures"] == 1, "its pages belong to somebody else"
        assert facts[2]["prefill_attempts"] == 2 and facts[2]["imported_tokens"] == len(prompts[2]), "the next answer was read"
        assert not deployment.between
        call = GenerateCall(request_id="leaves", token_ids=prompts[0], max_tokens=200, timeout_s=30.0,
                            sampling=SamplingParams(ignore_eos=True))
        stream = deployment.service.generate(call)
        assert (await anext(stream)).token_ids
        await stream.aclose()  # type: ignore[attr-defined]
        after = (await deployment.check_empty())["imports_failed"]
        assert after["generation"] == before.get("generation", 0) + 1

    asyncio.run(body())


def test_nobody_notices_that_a_keeper_is_gone(engines: Engines) -> None:
    """Ranks keep their mapping: requests are answered right as before, from the same pool. The next test stops this engine."""
    async def body() -> None:
        engine = engines.get("decode-two")
        assert engine.keeper is not None
        pid = await engine.keeper.acall("pid", timeout_s=10)
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(wait_for_state, pid, "ZX")
        deployment = Deployment(engines.path, [engines.get("prefill-two")], engine)
        for i in range(2):
            await deployment.check(f"kept{i}", prompt_of(70 + 100 * i, 400 + i))
        stats = await engine.stats(True)
        assert stats["health"]["ok"] and stats["check"] == "ok" and Path(stats["host_pool"]).exists()

    asyncio.run(body())


def test_a_request_of_a_dead_decode_engine_moves_to_another(engines: Engines) -> None:
    """Its coordinator is killed. A stream that had begun gets a clear error; what had not begun is answered elsewhere, right;
    the end of the dead engine, whose keeper is dead, too, leaves neither a process nor its pool."""
    async def body() -> None:
        dying, living = engines.get("decode-two"), engines.get("decode-one")
        replicas = [Deployment(engines.path, [engines.get("prefill-two")], engine) for engine in (dying, living)]
        stats = await dying.stats()
        stream = replicas[0].service.generate(GenerateCall(
            request_id="begun", token_ids=prompt_of(80, 300), max_tokens=200, timeout_s=30.0,
            sampling=SamplingParams(ignore_eos=True)))
        assert (await anext(stream)).token_ids
        os.kill(stats["pid"], signal.SIGKILL)
        last = [chunk async for chunk in stream][-1]
        assert last.error is not None and last.error.status == 503 and "coordinator of decode-" in last.error.message
        assert last.error.code == ENGINE_UNAVAILABLE and not (await dying.probe())["ok"]

        turns = itertools.count()
        prompts = [prompt_of(60 + 50 * i, 310 + i) for i in range(3)]

        def attempt(call: GenerateCall) -> AsyncGenerator[Chunk]:
            return replicas[min(next(turns), 1)].service.generate(call)

        for i, prompt in enumerate(prompts):
            call = GenerateCall(request_id=f"moved{i}", token_ids=prompt, max_tokens=TOKENS, timeout_s=40.0,
                                sampling=SamplingParams(ignore_eos=True))
            chunks = [chunk async for chunk in with_failover(attempt, call)]
            tokens = [token for chunk in chunks for token in chunk.token_ids]
            check_tokens(f"moved{i}", engines.path, prompt, tokens, complete=TOKENS)
        assert next(turns) == 4, "one attempt at the dead engine, then each at the living one"
        await replicas[1].check_empty()
        pool = Path(stats["host_pool"])
        assert pool.exists()
        await asyncio.to_thread(dying.stop)
        assert not pool.exists()
        for pid in stats["rank_pids"]:
            await asyncio.to_thread(wait_for_state, pid, "ZX")

    asyncio.run(body())


def test_prefill_that_dies_before_decode_reads(engines: Engines) -> None:
    """The READs fail, and prefill is asked again; attempts meet the dead replica and go to the living one."""
    async def body() -> None:
        victim = engines.get("prefill-one")
        deployment = Deployment(engines.path, [victim, engines.get("prefill-two")], engines.get("decode-one"))
        deployment.between = {"k0": kill}
        facts = await asyncio.gather(*(deployment.check(f"k{i}", prompt_of(60 + 40 * i, 70 + i)) for i in range(3)))
        assert facts[0]["import_failures"] == 1 and facts[0]["prefill_attempts"] >= 2
        later = [await deployment.check(f"later{i}", prompt_of(90, 80 + i)) for i in range(3)]
        assert [fact["prefill"] for fact in later] == ["remote"] * 3
        assert max(fact["prefill_attempts"] for fact in later) == 2, "a retry went to the living replica"
        deployment.prefill = deployment.prefill[1:]
        await deployment.check_empty()
        assert not (await victim.health())["ok"]

    asyncio.run(body())
