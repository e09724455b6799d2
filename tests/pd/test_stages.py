"""Each failure at each stage of an import: what becomes of the request, and that both sides are whole again afterwards.

The table in docs/pd.md is this one: `test_the_table_in_the_documentation` compares them cell by cell.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hisparse.config import PDConfig
from hisparse.engine.load_failures import LoadFailurePolicy
from hisparse.pd.running_import import Phase
from hisparse.types import Landing
from tests.pd.pools import Content, ids_of
from tests.pd.prefill import Prefill
from tests.pd.requests import Request, State
from tests.pd.schedules import one_round, settle
from tests.pd.world import FAULTS, World

STAGES = ("asked", "answered", "planned", "reading", "verifying", "acknowledged", "decoding")
"""Prefill computes; its answer waits for admission; the import is with the ranks, nothing was read; some bytes are here; all
are, the generations are being read; every rank has said ok; the request decodes."""
IMPORTING = ("planned", "reading", "verifying")
SEEDS = 4
DOCS = Path(__file__).parents[2] / "docs" / "pd.md"

OWN, CLOSED, ERROR, WAITS = "own KV", "closed", "error", "waits, own KV"
Failure = Callable[[World, Request], None]


# ------------------------------------------------------------------------------------ to a stage
def quiet_world(seed: int) -> World:
    """Of an engine pair without faults, until a test wants one; seeds give its ranks, pages, paths and landings."""
    world = World(4 * seed + 1)
    for lever in (*FAULTS, "late"):
        setattr(world.levers, lever, 0.0)
    world.faulty, world.prefixes = False, False
    world.failures = LoadFailurePolicy(PDConfig(local_prefill_tokens=1000))
    world.decode.config = world.decode.config.model_copy(update={
        "kv_load_failure_policy": "recompute", "local_prefill_tokens": 1000, "max_retries": 1})
    return world


def anything(world: World, request: Request) -> bool:
    return True


def worlds(stage: str, wanted: Callable[[World, Request], bool] = anything) -> Iterator[tuple[World, Request]]:
    """Some worlds whose request is at the stage."""
    found, seed = 0, 0
    while found < SEEDS:
        seed += 1
        world = quiet_world(seed)
        request = world.arrive(world.prefills[0])
        reach(world, request, stage)
        if wanted(world, request):
            found += 1
            yield world, request


def reach(world: World, request: Request, stage: str) -> None:
    at, prefill, decode = STAGES.index(stage), request.prefill, world.decode
    prefill.begin()
    prefill.write(2)
    if at >= STAGES.index("answered"):
        while prefill.write(1000):
            pass
        world.answer(prefill)
        world.deliver()
        assert request.state is State.OFFERED
    if at >= STAGES.index("planned"):
        world.admit()
        assert request.state is State.IMPORTING
        world.step()
    for rank in range(decode.num_ranks) if at >= STAGES.index("planned") else ():
        decode.obey(rank)
        (job,) = decode.importers[rank]._jobs.values()
        if stage == "reading":
            decode.pump(rank)
            decode.transports[rank].move(2)
        if at < STAGES.index("verifying"):
            continue
        while job.phase is not Phase.VERIFY or not job.posted:
            decode.pump(rank)
            while job.phase is Phase.DATA and (decode.transports[rank].move(1 << 30) or decode.copy(rank)):
                pass
        while at >= STAGES.index("acknowledged") and not decode.outputs[rank]:
            decode.transports[rank].move(1 << 30)
            decode.copy(rank)
            decode.pump(rank)
    if stage == "decoding":
        world.hear(100)
        assert request.state is State.LOADED


# ------------------------------------------------------------------------------------ the failures
def prefill_killed(world: World, request: Request) -> None:
    request.prefill.ranks_die()
    request.prefill.alive = False


def prefill_cut_off(world: World, request: Request) -> None:
    """It hears and says nothing any more, but its memory can be read."""
    request.prefill.ranks_die(linger=True)
    request.prefill.alive = False


def prefill_restarted(world: World, request: Request) -> None:
    request.prefill.ranks_die()
    request.prefill.start()


def prefill_ranks_replaced(world: World, request: Request) -> None:
    world.restart_prefill_ranks(request.prefill)


def decode_restarted(world: World, request: Request) -> None:
    world.restart_decode()


def decode_ranks_replaced(world: World, request: Request) -> None:
    world.restart_ranks()


def client_gone(world: World, request: Request) -> None:
    world.close(request)


def answer_lost(world: World, request: Request) -> None:
    while request.prefill.write(1000):
        pass
    world.answer(request.prefill)
    world.answers.clear()


def answer_repeated(world: World, request: Request) -> None:
    """It comes again when its request is already further."""
    world.answers.append((request.prefill_id, world.sent[-1][1]))
    world.deliver()


def other_layout(world: World, request: Request) -> None:
    while request.prefill.write(1000):
        pass
    world.answer(request.prefill)
    world.answers[0] = (request.prefill_id, world.answers[0][1] | {"fingerprint": "0" * 32})


def reuse(prefill: Prefill, request: Request, *, lease_ends: bool) -> None:
    """The pages have another owner, who writes to all of them."""
    pages = prefill.leased[request.prefill_id]
    if lease_ends:
        prefill.pd.release_request(request.prefill_id)
        prefill.collect()
    for ids, generations in zip(ids_of(pages), prefill.pools.generations, strict=True):
        generations[list(ids)] += 1
    for rank, memory in enumerate(prefill.memories):
        prefill.hand_out(rank, pages)
        device, host = ids_of(pages)
        memory.memory.device[list(device)] = 0xEE
        memory.memory.host[:, list(host)] = 0xEE  # type: ignore[index]


def lease_over_and_pages_reused(world: World, request: Request) -> None:
    reuse(request.prefill, request, lease_ends=True)


def pages_reused_under_the_lease(world: World, request: Request) -> None:
    """Prefill's own bug; decode finds out all the same."""
    reuse(request.prefill, request, lease_ends=False)


def lease_over(world: World, request: Request) -> None:
    """By its time; the pages lie free, nobody has written to them."""
    request.prefill.clock.advance(100.0)
    request.prefill.collect()
    assert request.prefill_id not in request.prefill.leased


def reads_fail(world: World, request: Request) -> None:
    world.levers.fail = 1.0
    for transport in world.decode.transports:
        for flight in transport._flights.values():
            flight.ends_at = min(flight.moved, len(flight.pieces) - 1)


def reads_hang(world: World, request: Request) -> None:
    world.levers.hang = 1.0
    for transport in world.decode.transports:
        for flight in transport._flights.values():
            flight.hung = True


def reads_refused(world: World, request: Request) -> None:
    world.levers.refuse = 1.0


def transport_call_blocks(world: World, request: Request) -> None:
    """On every rank, for as long as anybody waits."""
    world.decode.blocked_until_s = [float("inf")] * world.decode.num_ranks


def notices_lost(world: World, request: Request) -> None:
    world.levers.drop = 1.0


def notices_repeated(world: World, request: Request) -> None:
    world.levers.repeat = 1.0


def notices_late(world: World, request: Request) -> None:
    """READs are on time."""
    for transport in (*world.prefills[0].transports, *world.prefills[1].transports):
        transport._levers = replace(world.levers, late=0.5)


def row(asked: str = "", answered: str = "", planned: str = "", reading: str = "", verifying: str = "",
        acknowledged: str = OWN, decoding: str = OWN) -> tuple[str, ...]:
    return asked, answered, planned, reading, verifying, acknowledged, decoding


CUT_OFF = row("no answer", *(OWN,) * 4)
GONE = row("no answer", "refused", "transfer", "transfer", "transfer")
FINE = (OWN,) * len(STAGES)
REUSED = row("", *("generation",) * 4)
RESULTS: dict[Failure, tuple[str, ...]] = {
    prefill_killed: GONE, prefill_cut_off: CUT_OFF, prefill_restarted: GONE,
    prefill_ranks_replaced: row(OWN, "refused", "transfer", "transfer", "transfer"),
    decode_restarted: (ERROR,) * len(STAGES),
    decode_ranks_replaced: (OWN, OWN, *("restarted",) * 5),
    client_gone: (CLOSED,) * len(STAGES),
    answer_lost: row("no answer", acknowledged="", decoding=""),
    answer_repeated: row("", *(OWN,) * 4),
    other_layout: row("answer refused", acknowledged="", decoding=""),
    lease_over: row("", *(OWN,) * 4),
    lease_over_and_pages_reused: REUSED, pages_reused_under_the_lease: REUSED,
    reads_fail: row("", *("transfer",) * 4), reads_refused: row("", *("transfer",) * 3, OWN),
    reads_hang: row("", *("timeout",) * 4),
    transport_call_blocks: row(*("overdue",) * 5),
    notices_lost: FINE, notices_repeated: FINE, notices_late: FINE,
}
"""By stage; "" = cannot happen then. A word that is no constant is the reason for which the attempt failed: a retry or the
failure policy is next (recompute here, or 503), and no byte of the attempt is ever selectable."""

NAMED = ("no answer", "answer refused", "overdue")
CELLS = [(failure, stage) for failure, results in RESULTS.items() for stage, result in zip(STAGES, results) if result]


@pytest.mark.parametrize(("failure", "stage"), CELLS, ids=lambda value: getattr(value, "__name__", value))
def test_cell(failure: Failure, stage: str) -> None:
    expected = RESULTS[failure][STAGES.index(stage)]
    for world, request in worlds(stage):
        world.prefills[1].alive = True
        before = request.prefill_id
        failure(world, request)
        for _ in range(60):
            one_round(world)
            if world.met["no answer"] or request.state not in (State.ASKED, State.OFFERED, State.IMPORTING) \
                    or request.prefill_id != before:
                break
        settle(world)
        check(world, request, expected, before)


def check(world: World, request: Request, expected: str, before: str) -> None:
    """`settle` has checked bytes, pools, slots and leases."""
    reasons = [name for name in world.met if name.startswith("failed: ") or name in NAMED]
    again = (State.DONE, State.RECOMPUTED)
    if expected == OWN:
        assert request.state is State.DONE and request.prefill_id == before and not reasons, (request.error, reasons)
    elif expected == CLOSED:
        assert request.state is State.CLOSED and request.pages is None and not reasons
    elif expected == ERROR:
        assert request.state is State.ERROR and request.error
    elif expected == "restarted":
        assert request.state in again and (request.prefill_id != before or "restarted" in request.error)
    else:
        wanted = expected if expected in NAMED else f"failed: {expected}"
        assert reasons == [wanted], reasons
        assert request.state in again and (request.state is State.RECOMPUTED or request.prefill_id != before)
        assert request.state is State.DONE or request.error


# ------------------------------------------------------------------------------------ no room
def test_a_full_pool_keeps_the_answer_waiting_under_its_lease() -> None:
    """Nothing is read while there is no room; heartbeats go on, however long it takes."""
    for world, request in worlds("answered"):
        pools = world.decode.pools
        device, pools.device = pools.device, []
        for _ in range(80):
            one_round(world)
        assert request.state is State.OFFERED and request.prefill.clock() > 20.0
        pools.device = device
        settle(world)
        assert request.state is State.DONE and request.prefill.pd.stats().leases_expired == 0


def staged(world: World, request: Request) -> bool:
    return request.landing is Landing.HOST and world.decode.config.landing_path == "staged"


@pytest.mark.parametrize("in_time", [True, False])
def test_exhausted_staging_waits_until_the_deadline(in_time: bool) -> None:
    """Another peer's READs hold every slot: the import waits for them, but not for ever."""
    for world, request in worlds("planned", staged):
        taken = []
        for pool in (importer.slots.cpu for importer in world.decode.importers):
            pool.quota, quota = pool.memory.shape[0], pool.quota
            taken.append((pool, [slot for slot in iter(lambda pool=pool: pool.acquire("somebody"), None)]))
            pool.quota = quota
            pool.check = lambda: None  # type: ignore[method-assign]
        for importer in world.decode.importers:
            importer.check = lambda: None  # type: ignore[method-assign]
        for _ in range(4 if in_time else 12):
            one_round(world)
        for pool, slots in taken:
            for slot in slots:
                pool.release(slot)
        settle(world)
        assert (request.attempts == 1 and request.state is State.DONE) is in_time
        assert world.met["failed: timeout"] == (0 if in_time else 1)


# ------------------------------------------------------------------------------------ the documentation
def table() -> dict[str, list[str]]:
    """Rows of the table of failures and stages: name -> cells."""
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {cells[0].strip("`"): cells[1:] for cells in rows if len(cells) == len(STAGES) + 2}


def test_the_table_in_the_documentation() -> None:
    rows = table()
    assert set(rows) == {failure.__name__ for failure in RESULTS}
    for failure, results in RESULTS.items():
        assert rows[failure.__name__][:-1] == [result or "-" for result in results], failure.__name__


def test_every_test_that_the_documentation_names_exists() -> None:
    root = DOCS.parents[1]
    names = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", DOCS.read_text())
    assert len(names) > 20
    for file, name in names:
        tree = ast.parse((root / file).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{file} has no {name}"


def test_content_is_its_own() -> None:
    """The oracle tells prompts apart: no two share a page by chance."""
    world = quiet_world(1)
    a, b = (Content(name, 20, world.bytes) for name in "ab")
    assert not (a.rows == b.rows).all(axis=-1).any() and not (a.keys == b.keys).all(axis=-1).any()
