"""Scheduler half of the P/D connector: both roles in one class, because an engine may do both.

Prefill role: leases finished requests' pages (`grant`), ends leases (`take_expired`).
Decode role: takes `kv_transfer_params` (`add_remote`), chooses the landing, plans imports, tells prefill when done.
No bytes, no transport here: work leaves through `build_metadata`, outcomes come through `update`.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hisparse.config import PDConfig
from hisparse.connector.base import LoadEvents, PageGenerations
from hisparse.errors import ConfigError, InvariantError, ProtocolError
from hisparse.layout import KVCacheLayout
from hisparse.pd.commands import ImportFailure, ImportPlan, OutgoingNotice, PDCommand, PDOutput
from hisparse.pd.endpoint import RankEndpoint, check_regions
from hisparse.pd.grants import Grants
from hisparse.pd.held import HeldLeases
from hisparse.pd.import_jobs import ImportJob, ImportJobs
from hisparse.pd.incarnations import Incarnations
from hisparse.pd.landings import LandingLog
from hisparse.pd.leases import LeaseTable
from hisparse.pd.pages import table_of
from hisparse.pd.paging import Fingerprint, PeerLayouts, source_pages
from hisparse.pd.planner import LandingPlanner
from hisparse.pd.protocol import RemoteKV, decode_header, decode_params
from hisparse.pd.stats import PDStats
from hisparse.pd.watch import TransferWatch
from hisparse.types import ImportTarget, Landing, RequestPages

MAX_ENGINE_ID_CHARS = 200
"""Agent names add incarnation and rank, and are bounded on the wire."""


class _RemoteState(enum.Enum):
    OFFERED = "offered"
    IMPORTING = "importing"
    FAILED = "failed"
    DONE = "done"


@dataclass(slots=True)
class _Remote:
    kv: RemoteKV
    state: _RemoteState = _RemoteState.OFFERED


class PDConnectorScheduler:
    """Implements SchedulerConnector, RemotePrefill (decode) and RemoteDecode (prefill). Engine-loop thread only.

    Args:
        engine_id: unique among a deployment's engines, stable over restarts. incarnation: random, new at each start.
        num_ranks: of this engine. fingerprint: of a layout, what both sides must agree on (pass one that also covers the
            checkpoint where peers may run other weights of the same shape).
    """

    name = "pd"

    def __init__(self, layout: KVCacheLayout, config: PDConfig, *, engine_id: str, incarnation: int, num_ranks: int,
                 fingerprint: Fingerprint = KVCacheLayout.fingerprint,
                 clock: Callable[[], float] = time.monotonic) -> None:
        if not 0 < len(engine_id) <= MAX_ENGINE_ID_CHARS:
            raise ConfigError(f"engine_id must have 1..{MAX_ENGINE_ID_CHARS} characters, got {len(engine_id)}")
        self._layout, self._config, self._num_ranks = layout, config, num_ranks
        self.engine_id, self.incarnation = engine_id, incarnation
        self._fingerprint, self._layouts = fingerprint, PeerLayouts(layout)
        self._leases = LeaseTable(clock)
        self._grants = Grants(layout, self._leases, engine_id=engine_id, lease_s=config.lease_s,
                              fingerprint=fingerprint(layout))
        self._planner = LandingPlanner()
        self._held = HeldLeases(clock)
        self._remotes: dict[str, _Remote] = {}
        self._incarnations = Incarnations(clock)
        self._jobs = ImportJobs()
        self._loaded: set[str] = set()  # known without any worker
        self._failed: dict[str, str] = {}
        self._drained: list[str] = []
        self._failures: Counter[str] = Counter()
        self._ok = self._bytes = 0
        self._watch = TransferWatch()
        self._landings = LandingLog()
        self._seconds = 0.0

    # ---- set-up
    def set_endpoints(self, endpoints: Sequence[RankEndpoint]) -> None:
        """The own ranks' `PDConnectorWorker.handshake()` results, by rank. Needed before `grant`.

        Raises:
            ProtocolError: a rank is missing, out of order, or its regions do not fit the layout.
        """
        if [endpoint.rank for endpoint in endpoints] != list(range(self._num_ranks)):
            raise ProtocolError(f"expected the endpoints of ranks 0..{self._num_ranks - 1} in order, got "
                                f"{[endpoint.rank for endpoint in endpoints]}")
        for endpoint in endpoints:
            check_regions(endpoint, self._layout)
        self._grants.endpoints = tuple(endpoints)

    def workers_restarted(self, incarnation: int, endpoints: Sequence[RankEndpoint]) -> None:
        """All ranks were replaced: leases end, imports that were not reported yet fail at the next update (also those of
        nothing: the prefix they relied on is gone), late acks are ignored."""
        self.incarnation = incarnation
        self.set_endpoints(endpoints)
        self._leases.end_all()
        self._watch.forget()
        for request_id in self._loaded:
            self._remotes[request_id].state = _RemoteState.FAILED
            self._failed[request_id] = f"{ImportFailure.RESTARTED.value}: the workers restarted before the import was used"
        self._loaded.clear()
        for job in self._jobs.end_all(ImportFailure.RESTARTED, "the workers restarted during the import"):
            self._end_job(job, self._loaded, self._failed, self._drained)

    # ---- prefill role (RemoteDecode)
    def grant(self, request_id: str, pages: RequestPages, generations: PageGenerations, *,
              prompt_digest: str) -> Mapping[str, Any]:
        """See Grants.grant."""
        return self._grants.grant(request_id, pages, generations, prompt_digest=prompt_digest,
                                  incarnation=self.incarnation)

    def release_request(self, request_id: str) -> None:
        """The client of this prefill request is gone: end its lease now, or as soon as it is granted."""
        self._leases.release_request(request_id)

    def take_expired(self) -> tuple[str, ...]:
        """Request ids (as given to grant) whose lease ended since the last call: released or out of time."""
        self._leases.expire()
        return self._leases.take_ended()

    # ---- decode role (RemotePrefill)
    def add_remote(self, request_id: str, kv_transfer_params: Mapping[str, Any], *,
                   num_prompt_tokens: int | None = None,
                   digest_of: Callable[[int], str] | None = None) -> int:
        """Checks and keeps a prefill answer; returns the tokens it holds. Call before the engine schedules the request.

        Several requests may share one answer (n > 1): prefill is told to release when the last of them is done.
        A second answer for a request (a retry) replaces the first; the landing on record stays.
        Args:
            num_prompt_tokens: of this request; an answer for more tokens than that is another prompt's.
            digest_of: digest of this request's first n prompt tokens, which the answer for n tokens must carry.
        Raises:
            ProtocolError: it does not fit; where the lease could be read, prefill is told to release it.
        """
        current = self._remotes.get(request_id)
        if current is not None and current.state is _RemoteState.IMPORTING:
            raise InvariantError(f"request {request_id} is importing; a new prefill answer cannot replace that")
        try:
            kv = decode_params(kv_transfer_params, layouts=self._layouts, fingerprint=self._fingerprint)
            self._incarnations.check(kv.engine_id, kv.incarnation)
            if num_prompt_tokens is not None and kv.num_tokens > num_prompt_tokens:
                raise ProtocolError(f"prefill holds {kv.num_tokens} tokens for a prompt of {num_prompt_tokens}")
            if digest_of is not None and kv.prompt_digest != digest_of(kv.num_tokens):
                raise ProtocolError(f"prefill answered for another prompt or cache salt: the digest of its {kv.num_tokens} "
                                    f"tokens is {kv.prompt_digest[:16]}..., ours is {digest_of(kv.num_tokens)[:16]}...")
        except ProtocolError as error:
            self._failures[ImportFailure.REFUSED.value] += 1
            self._landings.add(request_id, failure=ImportFailure.REFUSED.value, reason=str(error))
            self.reject_remote(kv_transfer_params, str(error))
            raise
        self.release_unused(request_id, "replaced by a newer prefill answer")
        self._remotes[request_id] = _Remote(kv=kv)
        self._held.add(request_id, kv.engine_id, kv.incarnation, kv.endpoints[0], kv.lease_id, kv.lease_s)
        return kv.num_tokens

    def reject_remote(self, kv_transfer_params: Any, reason: str) -> None:
        """The request that came with this answer is refused before it was added: prefill is told to release.

        Never raises for what the peer sent: where the lease or its owner cannot be read, it runs out by itself.
        """
        try:
            header = decode_header(kv_transfer_params, layouts=self._layouts, fingerprint=self._fingerprint)
            self._incarnations.check(header.engine_id, header.incarnation)
        except ProtocolError:
            return
        if header.num_tokens:
            self._held.release_unheld(header.engine_id, header.incarnation, header.endpoints[0], header.lease_id, reason)

    def remote_tokens(self, request_id: str) -> int:
        """Tokens that can be imported for this request; 0 = none, given up, or failed."""
        remote = self._remotes.get(request_id)
        return remote.kv.num_tokens if remote is not None and remote.state is _RemoteState.OFFERED else 0

    def choose_landing(self, request_id: str, fits_resident: bool, fits_host: bool) -> Landing | None:
        """The recorded landing, or records one if one fits now; None = wait, nothing recorded."""
        return self._planner.choose(request_id, fits_resident, fits_host)

    def start_import(self, request_id: str, target: ImportTarget) -> None:
        """Plans the READs; travels in the next build_metadata. Nothing to read: loaded at the next update; the prefill engine
        has restarted since it answered: failed at the next update.

        Raises:
            InvariantError: nothing is offered for the request, or the target does not fit what is offered.
        """
        remote = self._remotes.get(request_id)
        if remote is None or remote.state is not _RemoteState.OFFERED:
            raise InvariantError(f"request {request_id} has nothing to import"
                                 + (f" ({remote.state.value})" if remote is not None else ""))
        pages, kv = target.pages, remote.kv
        last = self._layout.pages(pages.num_tokens)
        if pages.num_tokens > kv.num_tokens or pages.num_pages != max(0, last - pages.first_page):
            raise InvariantError(
                f"import of {request_id}: pages {pages.first_page}..{pages.first_page + pages.num_pages} for "
                f"{pages.num_tokens} tokens do not fit the {kv.num_tokens} tokens that prefill holds")
        if pages.num_pages == 0:
            remote.state = _RemoteState.DONE
            self._loaded.add(request_id)
            self._held.drop(request_id, "nothing to read")
            return
        if not self._incarnations.is_current(kv.engine_id, kv.incarnation):
            remote.state = _RemoteState.FAILED
            self._failures[ImportFailure.RESTARTED.value] += 1
            reason = f"prefill engine {kv.engine_id} has restarted since it answered; its pages are gone"
            self._failed[request_id] = f"{ImportFailure.RESTARTED.value}: {reason}"
            self._landings.add(request_id, peer=kv.engine_id, landing=target.landing, failure=ImportFailure.RESTARTED.value,
                               reason=reason)
            self._held.drop(request_id, "the engine restarted")
            return
        ranks = range(self._num_ranks)
        first, behind, skip = source_pages(first_token=pages.first_page * self._layout.block_size,
                                           num_tokens=pages.num_tokens, block_size=kv.paging.block_size)
        plan = ImportPlan(
            job_id=self._jobs.next_id(), peer_id=kv.engine_id, landing=target.landing,
            sources=tuple(kv.endpoints[rank * len(kv.endpoints) // self._num_ranks] for rank in ranks),
            source=kv.pages.slice(first, behind), source_paging=kv.paging, source_skip=skip, destination=table_of(pages),
            tail_rows=pages.num_tokens - (last - 1) * self._layout.block_size,
            deadline_s=self._config.transfer_deadline_s)
        self._jobs.start(request_id, plan, ranks, num_tokens=plan.num_tokens(self._layout.block_size))
        remote.state = _RemoteState.IMPORTING

    def release_unused(self, request_id: str, reason: str) -> None:
        """Nothing (more) will be read: prefill is told to release. An import under way is cancelled. Idempotent."""
        if self._jobs.cancel(request_id):
            return
        self._remotes.pop(request_id, None)
        self._held.drop(request_id, reason)

    # ---- SchedulerConnector
    def build_metadata(self, step: int) -> PDCommand | None:
        self._leases.expire()
        notices: tuple[OutgoingNotice, ...] = self._held.take_notices(self._incarnations.is_current)
        plans, cancels = self._jobs.take_orders()
        if not (plans or cancels or notices):
            return None
        return PDCommand(imports=plans, cancels=cancels, notices=notices)

    def update(self, outputs: Sequence[PDOutput]) -> LoadEvents:
        """Call in every engine iteration, also with no outputs: time passes here."""
        loaded, self._loaded = self._loaded, set()
        failed, self._failed = self._failed, {}
        drained, self._drained = self._drained, []
        overdue: dict[str, str] = {}
        for output in outputs:
            if output.incarnation != self.incarnation:
                self._jobs.late_acks += len(output.acks)
                continue
            for payload in output.notices:
                self._grants.hear(payload)
            for ack in output.acks:
                job = self._jobs.take_ack(output.rank, ack)
                if job is not None:
                    self._end_job(job, loaded, failed, drained)
            self._watch.hear(output)
            overdue |= self._overdue(output)
        self._leases.expire()
        return LoadEvents(loaded=frozenset(loaded), failed=failed, drained=tuple(drained), overdue=overdue)

    def request_closed(self, request_id: str) -> None:
        """Import in flight: cancelled; LoadEvents.drained names the request when every rank drained, at the next update
        when its end was about to be reported."""
        self._planner.forget(request_id)
        self._remotes.pop(request_id, None)
        if request_id in self._loaded or request_id in self._failed:
            self._loaded.discard(request_id)
            self._failed.pop(request_id, None)
            self._drained.append(request_id)
        self._held.drop(request_id, "the request was closed")
        job = self._jobs.close(request_id)
        if job is not None:
            self._drained.append(request_id)
            self._failures[ImportFailure.CANCELLED.value] += 1
            self._landings.add(request_id, peer=job.peer_id, landing=job.landing, failure=ImportFailure.CANCELLED.value,
                               reason="the request was closed before any rank began")

    def loading(self) -> frozenset[str]:
        """Live requests with an import planned, in flight or about to be reported."""
        return frozenset((*self._jobs.requests(), *self._loaded, *self._failed))

    def has_pending_work(self) -> bool:
        """Imports, cancels or notices under way, or a lease held on either side (heartbeats and time-outs need steps)."""
        return bool(len(self._jobs) or self._jobs.has_orders() or self._loaded or self._failed or self._drained
                    or len(self._leases) or self._leases.has_ended() or self._held.has_work())

    def check(self) -> None:
        """Jobs, remotes and leases name each other."""
        self._leases.check()
        self._held.check()
        self._jobs.check()
        importing = {name for name, remote in self._remotes.items() if remote.state is _RemoteState.IMPORTING}
        if importing != set(self._jobs.requests()):
            raise InvariantError(f"requests {sorted(importing)} import, but {sorted(self._jobs.requests())} have jobs")

    def problem(self) -> str:
        """Why this engine should be replaced; "" = it is fine."""
        return self._watch.problem()

    def stats(self) -> PDStats:
        leases, (slots, free) = self._leases, self._watch.staging_slots()
        return PDStats(
            leases_held=len(leases), leases_granted=leases.granted, leases_released=leases.released,
            leases_expired=leases.expired, early_releases=leases.early_releases, imports_in_flight=len(self._jobs),
            imports_ok=self._ok, imports_failed=dict(self._failures),
            landings={landing.value: count for landing, count in self._planner.counts.items()},
            import_bytes=self._bytes, import_seconds=self._seconds, late_acks_ignored=self._jobs.late_acks,
            bad_notices=self._grants.bad_notices, imports_overdue=self._watch.overdue, stuck=dict(self._watch.stuck),
            peers=self._watch.peers(), staging_slots=slots, staging_slots_free=free)

    def landing_log(self) -> list[dict[str, Any]]:
        """The last imports, newest first: `LandingEntry` as dictionaries."""
        return self._landings.newest()

    # ---- inside
    def _overdue(self, output: PDOutput) -> dict[str, str]:
        """Requests whose import a rank cannot end: it is told once, and drains when the rank's word comes after all."""
        overdue: dict[str, str] = {}
        for job_id, why in output.overdue.items():
            job = self._jobs.take_overdue(output.rank, job_id)
            if job is not None:
                self._watch.overdue += 1
                overdue[job.request_id] = f"rank {output.rank} could not end the import: {why}; its pages stay in quarantine"
        return overdue

    def _end_job(self, job: ImportJob, loaded: set[str], failed: dict[str, str], drained: list[str]) -> None:
        """Every rank is done with the job (or gone)."""
        self._bytes += job.num_bytes
        self._seconds += job.seconds
        failure = job.failure
        if failure is not None:
            self._failures[failure[1].value] += 1
        self._landings.add(job.request_id, peer=job.peer_id, landing=job.landing, tokens=job.num_tokens,
                           num_bytes=job.num_bytes, seconds=job.seconds,
                           failure=failure[1].value if failure is not None else "",
                           reason=failure[2] if failure is not None else "")
        if job.closed:
            drained.append(job.request_id)
            return
        remote = self._remotes[job.request_id]
        if failure is None:
            self._ok += 1
            remote.state = _RemoteState.DONE
            loaded.add(job.request_id)
            self._held.drop(job.request_id, "imported")
        else:
            rank, kind, text = failure
            remote.state = _RemoteState.FAILED
            where = f"rank {rank}: " if rank >= 0 else ""
            failed[job.request_id] = f"{where}{kind.value}: {text}"
            self._held.drop(job.request_id, f"import failed: {kind.value}")
