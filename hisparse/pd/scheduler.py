"""Scheduler half of the P/D connector: both roles in one class, because an engine may do both.

Prefill role: leases finished requests' pages (`grant`), ends leases (`take_expired`).
Decode role: takes `kv_transfer_params` (`add_remote`), chooses the landing, plans imports, tells prefill when done.
No bytes, no transport here: work leaves through `build_metadata`, outcomes come through `update`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hisparse.config import PDConfig
from hisparse.connector.base import LoadEvents, PageGenerations
from hisparse.layout import KVCacheLayout
from hisparse.pd.commands import PDCommand, PDOutput
from hisparse.pd.endpoint import RankEndpoint
from hisparse.types import ImportTarget, Landing, RequestPages


@dataclass(frozen=True, slots=True, kw_only=True)
class PDStats:
    """Counters since start, and gauges (leases_held, imports_in_flight)."""

    leases_held: int = 0
    leases_granted: int = 0
    leases_released: int = 0
    leases_expired: int = 0
    imports_in_flight: int = 0
    imports_ok: int = 0
    imports_failed: Mapping[str, int] = field(default_factory=dict)
    """By reason class: refused, timeout, transfer, generation, cancelled, restarted."""
    landings: Mapping[str, int] = field(default_factory=dict)
    import_bytes: int = 0
    import_seconds: float = 0.0
    late_acks_ignored: int = 0
    bad_notices: int = 0


class PDConnectorScheduler:
    """Implements SchedulerConnector, RemotePrefill (decode) and RemoteDecode (prefill). Engine-loop thread only.

    Args:
        engine_id: unique among a deployment's engines, stable over restarts. incarnation: random, new at each start.
        num_ranks: of this engine. fingerprint: what both sides must agree on; default the layout's own (pass one that
            also covers the checkpoint where peers may run other weights of the same shape).
    """

    name = "pd"

    def __init__(self, layout: KVCacheLayout, config: PDConfig, *, engine_id: str, incarnation: int, num_ranks: int,
                 fingerprint: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        raise NotImplementedError

    # ---- set-up
    def set_endpoints(self, endpoints: Sequence[RankEndpoint]) -> None:
        """The own ranks' `PDConnectorWorker.handshake()` results, by rank. Needed before grant and start_import."""

    def workers_restarted(self, incarnation: int, endpoints: Sequence[RankEndpoint]) -> None:
        """All ranks were replaced: leases end, imports in flight fail at the next update, late acks are ignored."""

    # ---- prefill role (RemoteDecode)
    def grant(self, request_id: str, pages: RequestPages, generations: PageGenerations) -> Mapping[str, Any]:
        """Leases the pages (first_page must be 0) and returns `kv_transfer_params`: JSON types only.

        An empty page list gives parameters that decode refuses, and the request is in take_expired() at once.
        """
        raise NotImplementedError

    def release_request(self, request_id: str) -> None:
        """The client of this prefill request is gone: end its lease now, or as soon as it is granted."""

    def take_expired(self) -> tuple[str, ...]:
        """Request ids (as given to grant) whose lease ended since the last call: released or out of time."""
        raise NotImplementedError

    # ---- decode role (RemotePrefill)
    def add_remote(self, request_id: str, kv_transfer_params: Mapping[str, Any]) -> int:
        """Checks and keeps a prefill answer; returns the tokens it holds. Call before the engine schedules the request.

        Raises:
            ProtocolError: it does not fit; where the lease could be read, prefill is told to release it.
        """
        raise NotImplementedError

    def remote_tokens(self, request_id: str) -> int:
        """Tokens that can be imported for this request; 0 = none, given up, or failed."""
        raise NotImplementedError

    def choose_landing(self, request_id: str, fits_resident: bool, fits_host: bool) -> Landing | None:
        """The recorded landing, or records one if one fits now; None = wait, nothing recorded."""
        raise NotImplementedError

    def start_import(self, request_id: str, target: ImportTarget) -> None:
        """Plans the READs; travels in the next build_metadata. Nothing to read: loaded at the next update."""

    def release_unused(self, request_id: str, reason: str) -> None:
        """Nothing (more) will be read: prefill is told to release. Idempotent."""

    # ---- SchedulerConnector
    def build_metadata(self, step: int) -> PDCommand | None:
        raise NotImplementedError

    def update(self, outputs: Sequence[PDOutput]) -> LoadEvents:
        """Call in every engine iteration, also with no outputs: time passes here."""
        raise NotImplementedError

    def request_closed(self, request_id: str) -> None:
        """Import in flight: cancelled; LoadEvents.drained names the request when every rank drained."""

    def loading(self) -> frozenset[str]:
        """Live requests with an import planned or in flight."""
        raise NotImplementedError

    def has_pending_work(self) -> bool:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError

    def stats(self) -> PDStats:
        raise NotImplementedError
