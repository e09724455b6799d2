"""The boundary of a KV connector: a scheduler half and a worker half, and the protocols the engine takes instead of classes.

The scheduler half never touches bytes; the worker half never sees a request, a hash or a policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from hisparse.types import ImportTarget, Landing, PageGenerations, RequestPages

__all__ = [
    "IndexerOffload", "LoadEvents", "PageGenerations", "RemoteDecode", "RemotePrefill", "SchedulerConnector",
    "WorkerConnector",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEvents:
    """What a connector's scheduler half learned from one step's worker outputs.

    Attributes:
        loaded: requests whose asynchronous load is done on every rank.
        failed: request id -> reason; every rank has drained, nothing of the load may be used.
        released_device_blocks: indexer blocks whose pin (taken for a store) may be dropped.
        drained: requests that were closed while loading and whose load has now drained on every rank: nothing of it may
            be used, but its pins may go. One entry per closed load, also for one whose end was about to be reported:
            whoever saw the request in `loading()` waits for its end.
        overdue: request id -> reason; the load should have ended long ago and has not drained: its pages may still be
            written. The request id must be closed, whatever becomes of its request; `drained` names it if that ever comes.
    """

    loaded: frozenset[str] = frozenset()
    failed: Mapping[str, str] = field(default_factory=dict)
    released_device_blocks: tuple[int, ...] = ()
    drained: tuple[str, ...] = ()
    overdue: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class SchedulerConnector(Protocol):
    """Scheduler half. Called from the engine loop's thread only."""

    name: str

    def build_metadata(self, step: int) -> Any | None:
        """Drains the work planned since the last call, for the workers. None = nothing."""

    def update(self, outputs: Sequence[Any]) -> LoadEvents:
        """Takes the outputs of every rank that had one for this connector in a retired step."""

    def request_closed(self, request_id: str) -> None:
        """The request finished, was preempted or aborted. Idempotent. Loads in flight keep their pins until drained."""

    def has_pending_work(self) -> bool:
        """True while transfers are planned or in flight, or leases are held: the engine keeps stepping."""

    def check(self) -> None:
        """Raises InvariantError unless the connector's own accounts are consistent."""


@runtime_checkable
class WorkerConnector(Protocol):
    """Worker half, one per rank. `start_step` .. `output` run on the step's thread, in this order."""

    name: str

    def start_step(self, metadata: Any | None) -> None:
        """Before the forward: apply tables, wait for fences, start loads."""

    def end_step(self) -> None:
        """After the forward: start stores and spills."""

    def output(self) -> Any | None:
        """What the scheduler half must hear with this step's result; None = nothing. Never blocks on a transfer."""

    def shutdown(self) -> None:
        """Drains transfers, then releases memory and registrations. Idempotent."""


class IndexerOffload(Protocol):
    """Scheduler half of the generic offload of indexer pages (OffloadingConnector). Blocks are pinned by the caller."""

    def hit(self, keys: Sequence[bytes], first_page: int) -> int:
        """Consecutive pages from `keys[first_page]` on that the store holds. Pure."""

    def plan_store(self, key: bytes, device_block: int) -> bool:
        """Plans a copy of one sealed indexer page. False = not needed or no room: nothing planned, no pin needed.
        After True the block stays pinned by the caller until a LoadEvents.released_device_blocks names it."""

    def plan_load(self, request_id: str, keys: Sequence[bytes], device_blocks: Sequence[int]) -> None:
        """Plans the load of `keys[i]` into `device_blocks[i]`; the outcome comes as LoadEvents for this request."""


class RemotePrefill(Protocol):
    """Scheduler half of a P/D connector, decode side. The engine's scheduler uses nothing else of it."""

    def remote_tokens(self, request_id: str) -> int:
        """Prompt tokens whose KV the prefill side holds for this request; 0 = none or already given up."""

    def choose_landing(self, request_id: str, fits_resident: bool, fits_host: bool) -> Landing | None:
        """The recorded landing, or records one now if exactly the design's rule allows; None = wait."""

    def start_import(self, request_id: str, target: ImportTarget) -> None:
        """Plans the READs of the target's pages; the outcome comes as LoadEvents for this request."""

    def release_unused(self, request_id: str, reason: str) -> None:
        """Nothing (more) will be read for this request: tell prefill to release its lease. Idempotent."""


class RemoteDecode(Protocol):
    """Scheduler half of a P/D connector, prefill side."""

    def grant(self, request_id: str, pages: RequestPages, generations: PageGenerations, *,
              prompt_digest: str) -> Mapping[str, Any]:
        """Leases the pages of the prompt named; returns `kv_transfer_params` for decode. The caller pinned the pages."""

    def take_expired(self) -> tuple[str, ...]:
        """Leases that ended (released by decode or out of time) since the last call; the caller drops the pins."""
