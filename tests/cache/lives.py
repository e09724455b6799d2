"""Seeded random lives, without hypothesis: fast, and reproducible by their seed."""

from __future__ import annotations

import random

from hisparse.types import Landing
from tests.cache.laws import check
from tests.cache.steps import MAX_LEN
from tests.cache.world import LANDINGS, World

WORDS = ("hear", "hear_again", "hear_a_ghost", "lose_a_word")
"""Moves of the mail."""
MOVES = {
    "arrive": (3, 6, 2), "admit": (4, 10, 3), "load_done": (4, 8, 3), "end_request": (0.3, 3, 0.1),
    "come_back": (0.5, 1, 0.3), "preempt": (0.3, 2, 0.2),
    "dispatch": (12, 12, 12), "turn": (8, 7, 9), "execute": (6, 7, 5), "retire": (3, 4, 3), "complete": (8, 8, 8),
    "hear": (6, 6, 6),
    "hear_again": (0.5, 0.5, 0.5), "hear_a_ghost": (0.5, 0.5, 0.3), "lose_a_word": (0.1, 0.1, 0.03), "time_out": (1, 1, 1),
    "drop_rows": (1, 1, 1), "hold": (0.4, 1, 0.2), "store_done": (2, 2, 2), "fork": (2, 3, 2),
    "report_page_copies": (3, 3, 3), "late_load": (0.1, 0.1, 0.1), "crash": (0.1, 0.1, 0.03),
}
"""Weights of a calm life, of a hectic one, in which requests come and go while steps are in flight, and of a long one."""


def birth(seed: int, *, pipelined: bool | None = None, trace: bool = False) -> World:
    """pipelined: None = in half of the lives."""
    rng = random.Random(seed)
    roomy = rng.random() < 0.3  # host memory and an indexer store for everything, and next to no device memory
    return World(seed, groups=rng.randint(1, 2), spare=rng.choice((0, 4) if roomy else (0, 4, 10, 20, 30)),
                 host=80 if roomy else rng.choice((0, 5, 10, 20)), store=80 if roomy else rng.choice((0, 0, 3)),
                 drafts=rng.random() < 0.5, elastic=rng.randint(0, 6), uneven=rng.choice((0, 0, 1, 2)),
                 ranks=rng.choice((1, 1, 2, 3)),
                 private=rng.random() < 0.5, pipelined=seed % 4 > 1 if pipelined is None else pipelined,
                 trace=trace)


def move(world: World, name: str, rng: random.Random) -> None:
    """One move with arguments of its kind."""
    arguments: dict[str, dict[str, object]] = {
        "arrive": {"length": rng.randint(1, 36), "kind": rng.randint(0, 5), "max_tokens": rng.choice((1, 2, 5, 12)),
                   "salt": rng.random() < 0.1},
        "admit": {"landing": rng.choice(LANDINGS)},
        "load_done": {"failed": rng.random() < 0.3, "num_rows": rng.randint(0, MAX_LEN)},
        "end_request": {"finished": rng.random() < 0.5},
        "dispatch": {"use_drafts": rng.random() < 0.5, "most": rng.randint(1, 4)},
        "execute": {"rank": rng.randint(0, 2)},
        "complete": {"rank": rng.randint(0, 2), "fail": rng.random() < 0.15, "mask_only": rng.random() < 0.5},
        "hear": {"most": rng.choice((1, 2, 4, 100))},
        "drop_rows": {"rank": rng.randint(0, 2), "num_rows": rng.randint(1, 3)},
        "fork": {"max_tokens": rng.randint(1, 6)},
        "report_page_copies": {"rank": rng.randint(0, 2)},
        "crash": {"host_lost": rng.random() < 0.3},
    }
    owner = world.mail if name in WORDS else world
    getattr(owner, name)(**arguments.get(name, {}))


def live(seed: int, steps: int = 250, *, pipelined: bool | None = None, trace: bool = False) -> World:
    """One random life, without hypothesis: fast, and reproducible by its seed."""
    world = birth(seed, pipelined=pipelined, trace=trace)
    rng = random.Random(seed + 1)
    names, weights = list(MOVES), [weight[seed % 3] for weight in MOVES.values()]
    for _ in range(steps):
        move(world, rng.choices(names, weights)[0], rng)
        check(world)
    world.settle()
    return world


def import_over_an_aborted_request(seed: int) -> None:
    """A step that mirrors into host pages is in flight, its request is aborted, and an import needs host pages."""
    world = World(seed, groups=1, spare=40, host=0, store=0, drafts=False)
    world.arrive(length=7, kind=0, max_tokens=4)
    world.admit(landing=None)
    world.dispatch(use_drafts=False, most=1)
    world.end_request(finished=False)
    world.arrive(length=24, kind=1, max_tokens=8)
    world.admit(landing=Landing.HOST)
    world.dispatch(use_drafts=False, most=0)
    world.load_done(failed=False, num_rows=0)
    for _ in range(2):
        world.execute(0)
        world.retire()
    world.dispatch(use_drafts=False, most=1)
    world.execute(0)
    check(world)
    world.settle()


def imports_at_once(seed: int) -> None:
    """Two prompts land resident in the same step: more sealed pages than one command may spill."""
    world = World(seed, groups=1, spare=60, host=60, store=0, drafts=False)
    for kind in range(2):
        world.arrive(length=36, kind=kind, max_tokens=4)
        world.admit(landing=Landing.RESIDENT)
    world.dispatch(use_drafts=False, most=0)
    for _ in range(2):
        world.load_done(failed=False, num_rows=0)
    world.dispatch(use_drafts=False, most=2)
    check(world)
    world.settle()


def import_over_a_fork(seed: int) -> None:
    """Parent and child end before the copies between them have run, and an import needs every block there is."""
    world = World(seed, groups=1, spare=8, host=8, store=0, drafts=False)
    world.arrive(length=7, kind=0, max_tokens=4)
    world.admit(landing=None)
    for _ in range(2):
        world.dispatch(use_drafts=False, most=1)
        world.turn()
    world.fork(max_tokens=3)
    for req in list(world.h.reqs.values()):
        world.finish(req, finished=False)
    world.arrive(length=36, kind=1, max_tokens=4)
    world.admit(landing=Landing.HOST)
    world.dispatch(use_drafts=False, most=0)
    world.load_done(failed=False, num_rows=0)
    world.execute(0)
    check(world)
    world.retire()
    world.settle()


def import_beside_a_grown_region(seed: int) -> None:
    """A hot region has grown into blocks that the next import needs at once."""
    world = World(seed, groups=1, spare=9 + seed % 5, host=60, store=0, drafts=False, elastic=6)
    world.arrive(length=32, kind=0, max_tokens=8)
    world.admit(landing=Landing.HOST)
    world.dispatch(use_drafts=False, most=0)
    world.load_done(failed=False, num_rows=0)
    for step in range(12):
        if step == 6:
            world.arrive(length=28, kind=1, max_tokens=6)
            world.admit(landing=Landing.HOST)
            check(world)
        world.dispatch(use_drafts=False, most=4)
        world.turn()
        world.mail.hear(100)
        check(world)
    world.settle()


def late_bytes_of_an_aborted_import(seed: int) -> None:
    """The bytes arrive when another request has taken every block that it could get."""
    world = World(seed, groups=2, spare=20, host=20, store=0, drafts=False)
    world.arrive(length=20, kind=0, max_tokens=4)
    world.admit(landing=(Landing.HOST, Landing.RESIDENT)[seed % 2])
    world.dispatch(use_drafts=False, most=0)
    world.turn()
    world.end_request(finished=False)
    world.arrive(length=24, kind=1, max_tokens=4)
    world.admit(landing=None)
    for _ in range(3):
        world.dispatch(use_drafts=False, most=1)
        world.turn()
    world.load_done(failed=False, num_rows=0)
    check(world)
    world.settle()


def readmission_under_spills(seed: int) -> None:
    """A request is preempted under its spills and admitted again before they are over."""
    world = World(seed, groups=2, spare=30, host=20, store=0, drafts=False)
    world.arrive(length=16, kind=0, max_tokens=8)
    world.admit(landing=None)
    for _ in range(2):
        world.dispatch(use_drafts=False, most=1)
        world.turn()
    old = list(world.h.worker.copies)
    world.preempt()
    world.admit(landing=None)
    world.dispatch(use_drafts=False, most=1)
    world.turn()
    for transfer_id in old:
        world.h.worker.complete(transfer_id)
    world.mail.hear(100)
    check(world)
    world.settle()


SCRIPTS = (import_over_an_aborted_request, imports_at_once, import_over_a_fork, import_beside_a_grown_region,
           late_bytes_of_an_aborted_import, readmission_under_spills)
"""What random moves meet too rarely."""
