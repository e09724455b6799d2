"""A prefill engine without a model, in its own process: real pools, real NIXL agent, real scheduler half."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hisparse.config import PDConfig
from hisparse.pd.connector import PDConnectorScheduler, PDConnectorWorker
from hisparse.types import RequestPages
from tests.pd.device_rank import rank_on
from tests.pd.paging_case import LAYOUTS

SEED = 1
CANARY = 0xC5
PAGING = (4, 2)
"""Of `rig.LAYOUT`."""


class PrefillEngine:
    """Its rank's memory and both halves. Obeys: ("grant", id, pages), ("bump", blocks), ("reuse", pages), ("fill",), ("lease",
    seconds), ("expired",), ("stats",).

    Args:
        device: where the packed allocation lies. paging: block size and groups. sizes: as RankMemory's.
    """

    def __init__(self, engine_id: str, incarnation: int, config: Mapping[str, Any], *, device: str = "cpu",
                 paging: tuple[int, int] = PAGING, **sizes: int) -> None:
        layout = LAYOUTS[paging]
        self.memory = rank_on(device, SEED, layout=layout, **sizes)
        settings = PDConfig(role="prefill", **config)
        self.worker = PDConnectorWorker(layout, settings, cache=self.memory.cache, host_pool=self.memory.pool,
                                        engine_id=engine_id, incarnation=incarnation, rank=0, host_writer=True)
        self.scheduler = PDConnectorScheduler(layout, settings, engine_id=engine_id, incarnation=incarnation, num_ranks=1)
        self.scheduler.set_endpoints([self.worker.handshake()])
        self.steps, self.ended = 0, list[str]()

    def step(self) -> None:
        self.steps += 1
        self.worker.start_step(self.scheduler.build_metadata(self.steps))
        self.worker.end_step()
        output = self.worker.output()
        self.scheduler.update([output] if output is not None else [])
        self.scheduler.check()
        self.ended += self.scheduler.take_expired()

    def obey(self, order: tuple[Any, ...]) -> Any:
        if order[0] == "grant":
            pages = order[2]
            return dict(self.scheduler.grant(order[1], pages, self.memory.generations_of(pages), prompt_digest="d" * 64))
        if order[0] == "bump":
            self.memory.cache.generations[order[1]] += np.uint64(1)
            return "bumped"
        if order[0] == "reuse":
            self.memory.give_away(order[1], CANARY)
            return "reused"
        if order[0] == "fill":
            self.memory.fill(SEED)
            return "filled"
        if order[0] == "lease":
            self.scheduler._grants._lease_s = order[1]
            return "set"
        if order[0] == "expired":
            ended, self.ended = self.ended, []
            return ended
        assert order[0] == "stats"
        return self.scheduler.stats()


def serve(conn: Connection, engine_id: str, incarnation: int, tls: str, device: str, paging: tuple[int, int],
          config: dict[str, Any]) -> None:
    """Steps an engine every 2 ms until ("stop",)."""
    if tls:
        os.environ["UCX_TLS"] = tls
    if device != "cpu":
        torch.cuda.set_device(device)
    engine = PrefillEngine(engine_id, incarnation, config, device=device, paging=paging)
    conn.send(("ready", os.getpid()))
    while True:
        engine.step()
        if not conn.poll(0.002):
            continue
        order = conn.recv()
        if order[0] == "stop":
            engine.worker.shutdown()
            conn.send("stopped")
            return
        conn.send(engine.obey(order))


def process_state(pid: int) -> str:
    """The kernel's letter: T = stopped, Z = dead and not waited for; X = gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def wait_for_state(pid: int, states: str) -> None:
    """A signal is obeyed some time after it was sent."""
    deadline = time.monotonic() + 5.0
    while process_state(pid) not in states:
        assert time.monotonic() < deadline, f"process {pid} is {process_state(pid)}, not {states}"
        time.sleep(0.001)


class PrefillProcess:
    """Handle of a `serve` process. They are forked from a server that has imported everything and started nothing.

    Args:
        tls: UCX_TLS, the transports that UCX may use; "" = its own choice. device: where its packed allocation lies.
        paging: block size and groups.
    """

    def __init__(self, engine_id: str, incarnation: int, *, tls: str = "", device: str = "cpu",
                 paging: tuple[int, int] = PAGING, **config: Any) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.conn, far = context.Pipe()
        self.process = context.Process(target=serve, args=(far, engine_id, incarnation, tls, device, paging, config),
                                       daemon=True)
        self.process.start()
        self.ready = False
        self.pid = 0

    def wait_ready(self) -> PrefillProcess:
        if not self.ready:
            assert self.conn.poll(60), "the prefill process did not start"
            word, self.pid = self.conn.recv()
            assert word == "ready"
            self.ready = True
        return self

    def ask(self, *order: Any) -> Any:
        self.wait_ready()
        self.conn.send(order)
        assert self.conn.poll(10), f"no answer to {order[0]}"
        return self.conn.recv()

    def grant(self, request_id: str, pages: RequestPages) -> dict[str, Any]:
        return self.ask("grant", request_id, pages)  # type: ignore[no-any-return]

    def wait_expired(self, timeout_s: float) -> tuple[list[str], float]:
        """Requests whose lease ended, and how long that took."""
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            ended = self.ask("expired")
            if ended:
                return ended, time.monotonic() - started
            time.sleep(0.01)
        return [], timeout_s

    def signal(self, number: int) -> None:
        os.kill(self.wait_ready().pid, number)

    def freeze(self) -> None:
        """Returns when no thread of it runs any more."""
        self.signal(signal.SIGSTOP)
        wait_for_state(self.pid, "T")

    def wait_awake(self) -> None:
        """Until it answers, so its threads ran, or has ended."""
        with contextlib.suppress(OSError, EOFError):
            self.ask("stats")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGCONT)
            os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join(10)
