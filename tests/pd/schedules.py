"""Random schedules of prefill/decode, reproducible by their seed: every message, byte, copy and failure at any moment.

A schedule makes random moves on a `World`, then the faults stop and the world must settle in a bounded number of rounds.
"""

from __future__ import annotations

import itertools

from hisparse.pd.endpoint import RETIRED_S
from tests.pd.disasters import MAX_LIVE
from tests.pd.requests import LIVE, State
from tests.pd.world import FAULTS, World

SETTLE_ROUNDS, BLOCKED_ROUNDS, ROUND_S = 300, 20, 0.25
TICKS_S, CALM_TICKS_S = (0.02, 0.02, 0.02, 0.02, 0.1, 0.1, 0.1, 0.1, 0.3, 0.3, 0.3, 1.0, 1.0, 4.0), (0.02, 0.3, 0.8)


def settle(world: World) -> None:
    """The faults stop: every request ends within a bounded number of rounds, and all pools are full again. Until then
    nobody waits for a transport call that does not come back."""
    decode = world.decode
    if world.faulty and world.rng.random() < 0.3:
        world.block(world.rng.randrange(decode.num_ranks))
    world.faulty = False
    for lever in (*FAULTS, "late"):
        setattr(world.levers, lever, 0.0)
    if any(map(decode.blocked, range(decode.num_ranks))):
        waiting = {(request.client, request.attempts) for request in world.of(State.IMPORTING)}
        for _ in range(BLOCKED_ROUNDS):
            one_round(world)
        still = {(request.client, request.attempts) for request in world.of(State.IMPORTING)} & waiting
        assert not still, f"requests that wait for a transport call that does not come back: {still}"
        decode.blocked_until_s = [0.0] * decode.num_ranks
    for _ in range(SETTLE_ROUNDS):
        one_round(world)
        if not world.of(*LIVE) and is_quiet(world):
            break
    waiting = {request.request_id: request.state.value for request in world.of(*LIVE)}
    assert not waiting, f"requests that wait for ever: {waiting}"
    assert world.decode.pools.full(), "decode has lost pages"
    assert not world.failures.tokens, "the budget for local prefills was not given back"
    for engine in (*world.prefills, world.decode):
        if not engine.alive:
            continue
        assert engine.pools.full(), f"{engine.name} has lost pages"
        assert not engine.pd.has_pending_work(), f"{engine.name} is never idle"
        for importer in engine.importers:
            pools = [pool for pool in (importer.slots.cpu, importer.slots.gpu) if pool is not None]
            free = {pool.num_free for pool in pools}
            assert not importer.busy() and free == {engine.config.staging_slots}, "slots in quarantine"
            assert not importer._lost, "an endpoint is being closed for ever"
    world.check()
    for request in world.requests.values():
        assert request.state is not State.ERROR or request.error, "an error without a reason"
    if world.calm:
        expired = [engine.pd.stats().leases_expired for engine in world.prefills]
        assert expired == [0, 0], f"leases ran out though every notice arrived: {expired}"


def is_quiet(world: World) -> bool:
    """Nothing is under way, and no endpoint is being closed (imports from there are refused until it is)."""
    engines = [engine for engine in (*world.prefills, world.decode) if engine.alive]
    busy = any(engine.pd.has_pending_work() or not engine.pools.full() for engine in engines)
    closing = any(importer._lost for importer in world.decode.importers)
    serving = any(prefill.queue or prefill.jobs for prefill in world.prefills if prefill.alive)
    return not (busy or closing or serving or world.answers)


def one_round(world: World) -> None:
    """Everything that can happen happens once."""
    for prefill in world.prefills:
        if prefill.alive:
            while prefill.begin() or prefill.write(1000) or world.answer(prefill):
                pass
    while world.deliver():
        pass
    while world.admit():
        pass
    world.step()
    for rank in range(world.decode.num_ranks):
        while world.decode.obey(rank):
            pass
        for _ in range(200):
            while world.decode.transports[rank].move(1 << 30) or world.decode.copy(rank):
                pass
            if not world.decode.pump(rank):
                break
    world.hear(1000)
    for request in world.of(State.LOADED):
        world.finish(request)
    while world.compute():
        pass
    for prefill in world.prefills:
        world.listen(prefill)
    world.tick(ROUND_S)


def probe(world: World) -> None:
    """The survivors are usable: each prefill engine that lives serves a new request at the first attempt; at once, unless the
    last answer that decode saw was one of an earlier incarnation (incarnations have no order)."""
    for prefill in world.prefills:
        if prefill.alive:
            if world.decode.pd._incarnations._current.get(prefill.name, prefill.incarnation) != prefill.incarnation:
                world.met["stale answer seen last"] += 1
                world.tick(RETIRED_S + 1)
            request = world.arrive(prefill)
            for _ in range(20):
                one_round(world)
            assert request.state is State.DONE and request.attempts == 1, \
                f"{prefill.name} is of no use any more: {request.state.value} {request.error}"


MOVES: dict[str, tuple[float, float]] = {
    "arrive": (6, 6), "begin": (8, 8), "write": (14, 14), "answer": (8, 8), "deliver": (6, 6), "admit": (8, 8), "step": (8, 8),
    "obey": (10, 10), "pump": (20, 20), "move": (24, 24), "copy": (8, 6), "hear": (8, 8), "listen": (2, 2), "finish": (3, 3),
    "compute": (2, 2),
    "close": (0.5, 0.7), "tick": (3, 2.5), "kill": (0, 0.05), "restart": (0, 0.25), "lose_lease": (0, 5),
    "restart_prefill_ranks": (0, 0.2), "restart_decode": (0, 0.05), "restart_ranks": (0, 0.25), "lose_answer": (0, 0.1),
    "late_twin": (0, 0.7), "block": (0, 0.1),
}
"""Weights in a calm schedule and in others, of moves that are possible."""


def move(world: World, name: str) -> bool:
    """One move with random arguments. False = it was not possible now, and nothing happened."""
    rng, decode = world.rng, world.decode
    prefill, rank = rng.choice(world.prefills), rng.randrange(decode.num_ranks)
    if name == "arrive":
        possible = len(world.of(*LIVE)) < MAX_LIVE
        if possible:
            world.arrive()
        return possible
    if name in ("begin", "write"):
        return prefill.alive and (prefill.begin() if name == "begin" else prefill.write(rng.choice((4, 40, 400))))
    if name == "answer":
        return prefill.alive and world.answer(prefill)
    if name in ("listen", "kill", "restart", "restart_prefill_ranks", "lose_lease"):
        return getattr(world, name)(prefill) is not False
    if name in ("obey", "pump", "copy", "block"):
        return bool(getattr(world if name == "block" else decode, name)(rank))
    if name == "move":
        return decode.transports[rank].move(rng.choice((3, 10, 100, 1000)))
    if name == "hear":
        return world.hear(rng.choice((1, 3, 100)))
    if name in ("finish", "close"):
        requests = world.of(State.LOADED) if name == "finish" else world.of(*LIVE)
        if requests:
            getattr(world, name)(rng.choice(requests))
        return bool(requests)
    if name == "tick":
        world.tick(rng.choice(CALM_TICKS_S if world.calm else TICKS_S))
    elif name == "lose_answer":
        if not world.answers:
            return False
        world.answers.pop()
    else:
        return getattr(world, name)() is not False
    return True


def live(seed: int, *, steps: int = 300) -> World:
    """One schedule of `steps` moves, to its end; then its pools are closed."""
    world = World(seed)
    kind = 0 if world.calm else 1
    names, weights = list(MOVES), list(itertools.accumulate(weight[kind] for weight in MOVES.values()))
    for number in range(steps):
        while not move(world, world.rng.choices(names, cum_weights=weights)[0]):
            pass
        if number % 16 == 0:
            world.check()
    settle(world)
    probe(world)
    settle(world)
    world.met["read over a mapping"] += sum(gpu.reads for gpu in world.decode.gpus)
    for engine in (*world.prefills, world.decode):
        for memory in (*engine.ruins, *engine.memories):
            memory.pool.close()
    return world
