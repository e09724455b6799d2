"""A prefill engine without a model, in its own process: real pools, real NIXL agent, real scheduler half."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from hisparse.config import PDConfig
from hisparse.pd.connector import PDConnectorScheduler, PDConnectorWorker
from hisparse.types import RequestPages
from tests.pd.rig import LAYOUT, RankMemory

SEED = 1


def serve(conn: Connection, engine_id: str, incarnation: int, config: dict[str, Any]) -> None:
    """Steps an engine every 2 ms and obeys: ("grant", id, pages), ("bump", pages), ("expired",), ("stats",), ("stop",)."""
    memory = RankMemory(SEED)
    settings = PDConfig(**config)
    worker = PDConnectorWorker(LAYOUT, settings, cache=memory.cache, host_pool=memory.pool, engine_id=engine_id,
                               incarnation=incarnation, rank=0, host_writer=True)
    scheduler = PDConnectorScheduler(LAYOUT, settings, engine_id=engine_id, incarnation=incarnation, num_ranks=1)
    scheduler.set_endpoints([worker.handshake()])
    conn.send(("ready", os.getpid()))
    step, ended = 0, []
    while True:
        step += 1
        worker.start_step(scheduler.build_metadata(step))
        worker.end_step()
        output = worker.output()
        scheduler.update([output] if output is not None else [])
        scheduler.check()
        ended += scheduler.take_expired()
        if not conn.poll(0.002):
            continue
        order = conn.recv()
        if order[0] == "grant":
            conn.send(dict(scheduler.grant(order[1], order[2], memory.generations_of(order[2]), prompt_digest="d" * 64)))
        elif order[0] == "bump":
            memory.cache.generations[order[1]] += np.uint64(1)
            conn.send("bumped")
        elif order[0] == "expired":
            conn.send(ended)
            ended = []
        elif order[0] == "stats":
            conn.send(scheduler.stats())
        else:
            worker.shutdown()
            conn.send("stopped")
            return


class PrefillProcess:
    """Handle of a `serve` process."""

    def __init__(self, engine_id: str, incarnation: int, **config: Any) -> None:
        context = mp.get_context("spawn")
        self.conn, far = context.Pipe()
        self.process = context.Process(target=serve, args=(far, engine_id, incarnation, config), daemon=True)
        self.process.start()
        self.ready = False

    def wait_ready(self) -> PrefillProcess:
        if not self.ready:
            assert self.conn.poll(60), "the prefill process did not start"
            assert self.conn.recv()[0] == "ready"
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
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
        self.process.join(10)
