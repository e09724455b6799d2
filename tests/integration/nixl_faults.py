"""Faults at every stage of an import over real NIXL between two processes: where they strike, and what must hold after them.

A gate on the decode side's transfer thread brings the fault before a chosen READ is posted, so that each stage is hit exactly.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from hisparse.pd import worker as pd_worker
from hisparse.pd.transport import Descriptors
from hisparse.types import Landing
from tests.integration.nixl_decode import SOURCE, Decode
from tests.integration.nixl_prefill import PrefillProcess

STAGES = ("before", "first", "middle", "generations")
"""Before the import begins, before its first data READ, between data READs, between the data and the generation READ."""


class Way(NamedTuple):
    """How an import lands."""

    landing: Landing
    path: str = "staged"

    def __str__(self) -> str:
        return self.landing.value if self.landing is Landing.RESIDENT else f"{self.landing.value}-{self.path}"


WAYS = (Way(Landing.RESIDENT), Way(Landing.HOST), Way(Landing.HOST, "direct"))
CASES = [pytest.param(way, stage, id=f"{way}-{stage}") for way in WAYS for stage in STAGES
         if way.path == "staged" or stage in ("middle", "generations")]
DEADLINE_S, LEASE_S, DRAIN_S = 0.5, 0.3, 0.3
SCRIBBLE = 0x5A
NUMBERS = itertools.count(1)
"""Incarnations and request names, each used once."""


class Fleet:
    """Prefill engine "p", started anew on demand; the next one is always being forked.

    Args:
        tls: UCX_TLS of its processes. device: where their packed allocations lie. one_sided: READs go on without the peer's
            process, so that an import may well be whole although the peer is stopped or dead.
    """

    def __init__(self, tls: str, *, device: str = "cpu", one_sided: bool = False) -> None:
        self._tls, self._device, self.one_sided = tls, device, one_sided
        self._started: list[PrefillProcess] = []
        self._spare = self._fork()
        self.current = self._next()

    def _fork(self) -> PrefillProcess:
        self._started.append(PrefillProcess("p", next(NUMBERS), tls=self._tls, device=self._device, lease_s=30.0))
        return self._started[-1]

    def _next(self) -> PrefillProcess:
        current, self._spare = self._spare.wait_ready(), self._fork()
        return current

    def restart(self) -> PrefillProcess:
        """The old process is gone; a new incarnation serves under the same engine id."""
        self.current.end()
        self.current = self._next()
        return self.current

    def succeed(self) -> tuple[PrefillProcess, PrefillProcess]:
        """(old, new): a new incarnation serves, while the old one's process is still there."""
        old, self.current = self.current, self._next()
        return old, self.current

    def end(self) -> None:
        """Also of those that a failed test left stopped: the interpreter would wait for them at its exit."""
        for process in self._started:
            process.end()


def decode_engines(tls: str, *, device: str = "cpu", **config: Any) -> Iterator[dict[str, Decode]]:
    """By landing path. What a fixture yields from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pd_worker, "DRAIN_S", DRAIN_S)
        if tls:
            patch.setenv("UCX_TLS", tls)
        engines = {path: Decode(incarnation=77 + i, device=device, landing_path=path,
                                transfer_deadline_s=DEADLINE_S, **config)
                   for i, path in enumerate(("staged", "direct"))}
    yield engines
    for engine in engines.values():
        engine.worker.shutdown()


def reads_generations(params: dict[str, Any]) -> Callable[[Descriptors], bool]:
    """Tells the generation READ from data READs by where it reads."""
    arrays = params["ranks"][0]["generations"]
    spans = [(array["address"], array["address"] + array["num_pages"] * array["stride"]) for array in arrays]

    def tell(descriptors: Descriptors) -> bool:
        return any(first <= address < end for address in descriptors[:, 0].tolist() for first, end in spans)

    return tell


class Attempt:
    """One import with a fault at a stage: `cause` runs once, before that stage's READ is posted."""

    def __init__(self, decode: Decode, prefill: PrefillProcess, way: Way, stage: str, cause: Callable[[], None]) -> None:
        self.decode, self.landing, self.name = decode, way.landing, f"r{next(NUMBERS)}"
        self.params = prefill.grant(self.name, SOURCE)
        self.hit, self.at = False, 1 << 30
        # Without slots: indexer pages, then all rows, both posted at once. On CUDA a GPU's pages reach the host by slots.
        slots = way.landing is Landing.HOST and (way.path == "staged" or decode.memory.memory.on_cuda)
        middle = 2 if slots else 1
        is_generations = reads_generations(self.params)

        def gate(number: int, descriptors: Descriptors) -> None:
            last = is_generations(descriptors)
            here = {"first": number == 0, "middle": number == middle, "generations": last}[stage]
            if here and not self.hit:
                self.hit, self.at = True, number
                cause()

        decode.transport.restart(gate if stage != "before" else lambda number, descriptors: None)
        decode.memory.pool.row_masks[:] = 0
        if stage == "before":
            self.hit, self.at = True, 0
            cause()
        self.target = decode.start(f"d-{self.name}", self.params, way.landing, seed=40)

    def run(self, timeout_s: float, watch: Callable[[], None] = lambda: None) -> tuple[str, float]:
        outcome = self.decode.run(f"d-{self.name}", timeout_s, watch=watch)
        assert self.hit, "the stage was never reached"
        print(f"{self.name}: {outcome[0] or 'own bytes'} after {outcome[1]:.2f} s")
        return outcome

    def check(self, reason: str) -> None:
        """Own bytes, or nothing of it may be selected. Either way its pages are free now, and somebody else gets them."""
        if reason:
            assert not self.decode.memory.pool.row_masks.any()
        else:
            self.decode.check_bytes(self.target, self.landing)
        self.decode.check_quiet()
        self.decode.scribble(self.target, SCRIBBLE)

    def check_untouched(self) -> None:
        assert self.decode.untouched(self.target, SCRIBBLE), "a transfer wrote to pages after its import had ended"


def check_works(decode: Decode, prefill: PrefillProcess, landing: Landing) -> None:
    """Another import has the right bytes, and prefill has nothing left to hold."""
    decode.transport.restart()
    decode.memory.pool.row_masks[:] = 0
    name = f"r{next(NUMBERS)}"
    target = decode.start(f"d-{name}", prefill.grant(name, SOURCE), landing, seed=50, upper=True)
    assert decode.run(f"d-{name}", 10.0)[0] == ""
    decode.check_bytes(target, landing)
    decode.check_quiet()
    deadline = time.monotonic() + 5.0
    while prefill.ask("stats").leases_held:
        decode.step()
        assert time.monotonic() < deadline, "prefill was not told"
