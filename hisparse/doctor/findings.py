"""What a probe found, and what it is held against."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """WARN: works, but slower, or only on a CPU. FAIL: what is configured will not work. SKIP: does not apply here."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. `fix`: what to do; every WARN and FAIL has one."""

    check: str
    status: Status
    text: str
    fix: str = ""

    def asdict(self) -> dict[str, str]:
        return {"check": self.check, "status": self.status.value, "text": self.text, "fix": self.fix}

    @classmethod
    def parse(cls, data: dict[str, str]) -> Finding:
        """The inverse of `asdict`."""
        return cls(check=data["check"], status=Status(data["status"]), text=data["text"], fix=data["fix"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a configuration asks of one node, if all of its replicas run there; the defaults ask nothing.

    Attributes:
        shared_bytes: host pools in /dev/shm. memory_bytes: host and device pools in host memory.
        pinned_bytes: host pools registered with CUDA, once for each rank.
        num_cpus, num_gpus: that Ray must have, in the whole cluster. cuda: model.device is cuda.
        host, port: where HTTP is served; port 0 = any.
    """

    shared_bytes: int = 0
    memory_bytes: int = 0
    pinned_bytes: int = 0
    num_cpus: float = 0.0
    num_gpus: float = 0.0
    cuda: bool = False
    host: str = "127.0.0.1"
    port: int = 8000

    def asdict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


Probe = Callable[[Needs], Iterable[Finding]]


def examine(probes: Iterable[tuple[str, Probe]], needs: Needs) -> Iterator[Finding]:
    """Runs named probes. One that raises becomes a FAIL of that name; the others still run."""
    for name, probe in probes:
        try:
            yield from probe(needs)
        except Exception as error:
            yield Finding(check=name, status=Status.FAIL, text=f"the probe ended with {type(error).__name__}: {error}",
                          fix="please report this together with the output of --json")
