"""Ranks without a model, for tests of the process side of the executor. Starts fast: imports no torch."""

from __future__ import annotations

import time

from hisparse.types import StepResult


def light_main(pipe, config, rank: int, incarnation: int, pool_path, init_method, behaviours) -> None:
    """Speaks the protocol of a rank; `behaviours[rank]`: ok | config | error | hang | die | late (answers step 1 twice)."""
    behaviour = behaviours[rank]
    if behaviour == "config":
        pipe.send(("config", "model.path: cannot load it"))
        return
    pipe.send(("ok", ()))
    while (command := pipe.recv()) is not None:
        if behaviour == "hang":
            time.sleep(600)
        if behaviour == "die":
            raise SystemExit(3)
        if behaviour == "error":
            pipe.send(("error", "InvariantError: seat 99"))
            return
        step = 1 if behaviour == "late" else command.step
        pipe.send(("ok", StepResult(step=step, rank=rank, incarnation=incarnation)))
