"""An engine core without cache or model: one token per request and step, scripted failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hisparse.errors import InvariantError, RequestError
from hisparse.types import FinishReason, RequestOutput, SamplingParams


@dataclass(frozen=True)
class FakeStats:
    running: int

    def asdict(self) -> dict[str, Any]:
        return {"running": self.running}


@dataclass(frozen=True)
class FakeResidency:
    names: tuple[str, ...]

    def report(self) -> dict[str, Any]:
        return {"requests": [{"id": name} for name in self.names], "pending": [["gone", 0, "sent", 0.1]], "landings": [],
                "ended": [{"request_id": "past"}]}


class FakeCore:
    """`step_s`: how long a step takes. `fail`: raised by the next step. `block`: a step waits for it."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.fail: Exception | None = None
        self.block: threading.Event | None = None
        self.left: dict[str, int] = {}
        self.outputs: list[RequestOutput] = []
        self.aborted: list[str] = []
        self.steps = 0
        self.leases = False
        self.idle = True
        self.broken = ""
        self.trouble = ""
        self.shut = self.draining = False
        self.never_begun = 0
        self.threads: set[str] = set()

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams, *,
                    cache_salt: str | None = None, priority: int = 0,
                    kv_transfer_params: Mapping[str, Any] | None = None, do_remote_decode: bool = False,
                    prefill_failed: str | None = None, prefill_retries: int = 0) -> None:
        self.threads.add(threading.current_thread().name)
        if not prompt_token_ids:
            raise RequestError("the prompt is empty", field="prompt")
        self.left[request_id] = sampling.max_tokens

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if self.left.pop(request_id, None) is not None:
            self.outputs.append(RequestOutput(request_id=request_id, finish_reason=FinishReason.ABORT))

    def drain(self) -> int:
        self.draining = True
        return self.never_begun

    def step(self) -> list[RequestOutput]:
        self.threads.add(threading.current_thread().name)
        if self.block is not None:
            self.block.wait()
        time.sleep(self.step_s)
        if self.fail is not None:
            raise self.fail
        self.steps += 1
        self.idle = not self.left
        for request_id in list(self.left):
            self.left[request_id] -= 1
            last = self.left[request_id] == 0
            if last:
                del self.left[request_id]
            self.outputs.append(RequestOutput(request_id=request_id, new_token_ids=(self.steps,), new_text=f"{self.steps} ",
                                              finish_reason=FinishReason.LENGTH if last else None))
        return self.take_outputs()

    def take_outputs(self) -> list[RequestOutput]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def problem(self) -> str:
        return self.trouble

    def has_work(self) -> bool:
        return bool(self.left or self.outputs or self.leases)

    def stats(self) -> FakeStats:
        return FakeStats(len(self.left))

    def residency(self) -> FakeResidency:
        self.threads.add(threading.current_thread().name)
        return FakeResidency(tuple(self.left))

    def check(self) -> None:
        if self.broken:
            raise InvariantError(self.broken)

    def shutdown(self) -> None:
        self.shut = True
        for request_id in list(self.left):
            self.abort(request_id)
