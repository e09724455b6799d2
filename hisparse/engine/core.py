"""The engine: requests in, tokens out, one step at a time. Synchronous and single-threaded; no Ray, no NIXL.

`EngineCore` joins the scheduler, the cache manager with its coordinator, the scheduler halves of the connectors and an
executor that runs each step on every rank. Who calls `step()` in a loop (an actor, a test, a script) is not its concern.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hisparse.cache.prefix import ExtraKeys
from hisparse.config import HiSparseConfig, hot_rows, kv_layout
from hisparse.connector.base import LoadEvents
from hisparse.engine.assembly import build_cache
from hisparse.engine.held_prompts import HeldPrompts
from hisparse.engine.imports import Imports
from hisparse.engine.limits import RequestLimits
from hisparse.engine.load_failures import LoadFailurePolicy, Recovery
from hisparse.engine.open_requests import OpenRequests
from hisparse.engine.outputs import Outputs
from hisparse.engine.protocols import PDConnector, Tokenizer
from hisparse.engine.request import Request, RequestState
from hisparse.engine.residency import NUM_PENDING, EndedLog, ResidencySample, group_facts, sample_request
from hisparse.engine.scheduler import Scheduler
from hisparse.engine.stats import EngineStats, Tally
from hisparse.errors import ConfigError, EngineDeadError, RequestError
from hisparse.types import (
    FinishReason,
    RequestOutput,
    SampledToken,
    SamplingParams,
    ScheduledChunk,
    StepCommand,
    StepResult,
)

if TYPE_CHECKING:  # the executor's module loads models; the scheduler's process needs none
    from hisparse.engine.executor import Executor


class EngineCore:
    """Owns every logical decision of one replica.

    Args:
        executor: runs steps on every rank; its ranks use the same configuration.
        engine_id: distinct per replica. incarnation: 64-bit, distinct per start.
        pd: scheduler half of the P/D connector, for roles prefill and decode.
        tokenizer: for text, stop strings and end-of-sequence ids; None = token ids only.
    Attributes:
        idle: the last step() ran no token: only transfers or leases are open, so the next turn may wait.
    """

    def __init__(self, config: HiSparseConfig, executor: Executor, *, engine_id: str, incarnation: int,
                 pd: PDConnector | None = None, tokenizer: Tokenizer | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self.executor, self.engine_id, self.pd = config, executor, engine_id, pd
        self._clock = clock
        self.layout = kv_layout(config)
        role = config.pd.role
        if (pd is None) != (role == "colocated"):
            fix = "leave it out, or set pd.role" if pd is not None else "pass one, or set pd.role to colocated"
            raise ConfigError(f"pd.role = {role}, but {'a' if pd is not None else 'no'} P/D connector is given; {fix}")
        parts = build_cache(config, self.layout, num_ranks=executor.num_ranks, incarnation=incarnation, pd=pd, clock=clock)
        self.cache, self.offload, self.connectors = parts.cache, parts.offload, parts.connectors
        self.scheduler = Scheduler(config.scheduler, self.cache, offload=self.offload,
                                   remote_prefill=pd if role == "decode" else None, clock=clock)
        self.requests = OpenRequests()
        self.load_failures = LoadFailurePolicy(config.pd)
        self._limits = RequestLimits(max_model_len=config.model.max_model_len, vocab_size=self.layout.shape.vocab_size,
                                     max_waiting=config.scheduler.max_waiting)
        self._arrivals = itertools.count()
        self._step = 0
        self._outputs = Outputs(tokenizer)
        self._imports = Imports(
            self.cache, self.scheduler, self.connectors, pd, self.load_failures, self.requests, self._outputs,
            refuse=lambda request, error: self._close(request, FinishReason.ERROR, error=error))
        self._held: HeldPrompts | None = None
        if pd is not None and role == "prefill":
            self._held = HeldPrompts(self.cache, self.scheduler, pd, self._outputs)
        self._tally = Tally(self.layout)
        self._ended = EndedLog()
        self._groups = group_facts(self.layout, hot_rows(config.cache, self.layout)) if config.cache.enabled else ()
        self._dead: str | None = None
        self._draining = False
        self.idle = True

    # ------------------------------------------------------------------------------------------- requests
    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams, *,
                    cache_salt: str | None = None, priority: int = 0,
                    kv_transfer_params: Mapping[str, Any] | None = None, do_remote_decode: bool = False,
                    prefill_failed: str | None = None, prefill_retries: int = 0) -> None:
        """Queues a request; its outputs come from `step()`.

        Args:
            kv_transfer_params: prefill's answer. prefill_failed: why there is none although prefill was asked: the prompt may
                be computed here, if `pd.kv_load_failure_policy` and the budget allow it.
            prefill_retries: times that the caller will ask prefill again, should the import fail. Each time an output has
                `retry_prefill`, and the caller answers with `resume`; without retries the policy decides at once.

        Raises:
            RequestError: empty or too long prompt, impossible limits, full queue; 503: the prompt's KV did not come from
                prefill and is not to be computed here.
            EngineDeadError: the engine has failed.
        """
        if self._dead:
            raise EngineDeadError(self._dead)
        try:
            self._check_admission(request_id)
            self._limits.check(prompt_token_ids, sampling, num_waiting=len(self.scheduler.waiting))
            if do_remote_decode and self._held is None:
                raise RequestError(f"do_remote_decode needs pd.role = prefill, this engine's is {self.config.pd.role}")
            self.cache.open(request_id, prompt_token_ids, extra_keys=ExtraKeys(cache_salt=cache_salt),
                            max_tokens=sampling.max_tokens)
        except RequestError as error:
            if kv_transfer_params is not None and self.pd is not None:
                self.pd.reject_remote(kv_transfer_params, str(error))
            raise
        request = Request(
            request_id=request_id, name=request_id, token_ids=list(prompt_token_ids), num_prompt_tokens=len(prompt_token_ids),
            sampling=sampling, arrival=next(self._arrivals), arrived_s=self._clock(),
            arrived_unix_s=time.time(), priority=priority, cache_salt=cache_salt,
            do_remote_decode=do_remote_decode,
            remote=kv_transfer_params is not None or prefill_failed is not None, retries_left=prefill_retries,
        )
        problem = prefill_failed if kv_transfer_params is None else self._imports.take_answer(request, kv_transfer_params)
        recovery = None if problem is None else self._imports.decide(request)
        if recovery is Recovery.REFUSE:
            self.cache.close(request_id)
            raise RequestError(f"{problem}; {self.load_failures.refusal()}", status=503)
        self.requests[request_id] = request
        self._outputs.open(request)
        if recovery is None or problem is None:
            self.scheduler.add(request)
        else:
            self._imports.recover(request, recovery, problem)

    def resume(self, request_id: str, *, kv_transfer_params: Mapping[str, Any] | None = None,
               prefill_failed: str = "prefill did not answer", retries_left: int = 0) -> None:
        """Prefill was asked again for a request that had an output with `retry_prefill`.

        A request that is gone meanwhile is ignored, and prefill is told that its answer will not be read.
        Args: as of `add_request`.
        """
        request = self.requests.named(request_id)
        if request is None or request.state is not RequestState.RETRYING:
            if kv_transfer_params is not None and self.pd is not None:
                self.pd.reject_remote(kv_transfer_params, "the request is gone")
            return
        request.retries_left = retries_left
        problem = prefill_failed if kv_transfer_params is None else self._imports.take_answer(request, kv_transfer_params)
        if problem is None:
            self.scheduler.add(request)
        else:
            self._imports.recover(request, self._imports.decide(request), problem)

    def _check_admission(self, request_id: str) -> None:
        if self._draining:
            raise RequestError(f"engine {self.engine_id} is being stopped and takes no new requests; retry", status=503)
        if self.requests.is_taken(request_id):
            raise RequestError(f"request id {request_id!r} is in use; ids must be distinct", status=409)

    def abort(self, request_id: str) -> None:
        """Stops a request wherever it stands; its blocks return once every copy has drained. Unknown ids are ignored."""
        request = self.requests.named(request_id)
        if request is None:
            return
        if request.state is RequestState.HELD:
            assert self.pd is not None
            self.pd.release_request(request_id)
        else:
            self._close(request, FinishReason.ABORT)

    def drain(self) -> int:
        """No new request from now on. Those that have not begun (they wait, or their prompt is being imported) end with an
        error that says to retry; prefill is told. Those that run go on, and so do leases. Idempotent.

        Returns how many it ended. Keep calling `step()` while `has_work()`.
        """
        self._draining = True
        waiting = [request for request in self.requests.values() if not request.num_output_tokens
                   and request.state in (RequestState.WAITING, RequestState.LOADING, RequestState.RETRYING)]
        for request in waiting:
            self._close(request, FinishReason.ERROR, error=f"engine {self.engine_id} is being stopped; retry", retry=True)
        return len(waiting)

    # ------------------------------------------------------------------------------------------- the step
    def step(self) -> list[RequestOutput]:
        """One schedule / execute / retire turn. Returns the increments since the last call.

        Raises:
            EngineDeadError: a rank failed, did not answer, or did not finish a copy in time; every request got a final
                ERROR output before.
        """
        if self._dead:
            raise EngineDeadError(self._dead)
        began_s = self._clock()
        for request in self._held.take_ended() if self._held is not None else ():
            self._forget(request, "lease ended")
        chunks = self.scheduler.schedule()
        self.idle = not chunks
        if chunks or self._has_transfers():
            self._run_step(chunks, began_s)
        return self.take_outputs()

    def _run_step(self, chunks: list[ScheduledChunk], began_s: float) -> None:
        self._step += 1
        step = self._step
        self.cache.plan_step(step, [(c.request_id, c.first_position, len(c.token_ids)) for c in chunks])
        command = StepCommand(
            step=step, chunks=tuple(chunks), kv=self.connectors.build_metadata(step) or {},
            table_updates=() if self.config.cache.enabled else self.cache.take_table_updates(),
        )
        sent_s = self._clock()
        try:
            self.executor.submit(command)
            results = self.executor.collect(self.config.serve.step_timeout_s)
        except Exception as error:
            self._die(f"step {step} failed: {error}")
            raise EngineDeadError(self._dead) from error
        answered_s = self._clock()
        self._retire(command, results)
        self._tally.add_times(began_s=began_s, sent_s=sent_s, answered_s=answered_s, ended_s=self._clock(),
                              rank_s=max(result.worked_s for result in results))
        overdue = self.cache.overdue_transfers()
        if overdue:
            self._die(self._overdue_reason(overdue))
            raise EngineDeadError(self._dead)

    def _overdue_reason(self, overdue: Sequence[tuple[int, int]]) -> str:
        """Never success: the blocks of these copies stay pinned until the workers' processes are gone."""
        ranks = sorted({rank for rank, _ in overdue})
        ids = [transfer_id for _, transfer_id in overdue]
        return (f"rank {', '.join(map(str, ranks))} did not finish {len(ids)} copies between device and host within "
                f"cache.transfer_deadline_s = {self.config.cache.transfer_deadline_s:g} s (transfers {ids[:8]}"
                f"{'...' if len(ids) > 8 else ''}); that worker has failed")

    def _retire(self, command: StepCommand, results: list[StepResult]) -> None:
        sampled: Mapping[str, SampledToken] = next(result.sampled for result in results if result.rank == 0)
        computed = {}
        for chunk in command.chunks:
            request = self.requests.get(chunk.request_id)
            if request is None:
                continue
            request.computed = max(request.computed, chunk.first_position + len(chunk.token_ids))
            computed[chunk.request_id] = request.computed
        self._tally.add_step(results, {chunk.seat: self.requests.get(chunk.request_id) for chunk in command.chunks})
        self.cache.retire(command.step, computed)
        events = self.connectors.update([result.kv for result in results])
        for chunk in command.chunks:
            request = self.requests.get(chunk.request_id)
            if request is not None and chunk.sample:
                self._accept(request, sampled[chunk.request_id])
        if self.offload is not None:
            for key, block in self.cache.take_sealed_indexer_pages():
                if not self.offload.plan_store(key, block):
                    self.cache.unpin_indexer([block])
        self._apply(events)

    def _accept(self, request: Request, token: SampledToken) -> None:
        request.token_ids.append(token.token_id)
        request.new_tokens.append(token)
        is_first = request.first_token_s is None
        if is_first:
            request.first_token_s = self._clock() - request.arrived_s
        self._tally.generated += 1
        if request.recomputes:
            self.load_failures.end(request.name)
        self.cache.extend(request.request_id, [token.token_id])
        if request.do_remote_decode:
            assert self._held is not None
            self._held.hold(request)
            return
        text, reason = self._outputs.accept(request, token)
        if reason is not None:
            self._close(request, reason, text=text)
        else:
            self._outputs.emit(request, text, with_timeline=is_first)

    def _apply(self, events: LoadEvents) -> None:
        if events.released_device_blocks:
            self.cache.unpin_indexer(events.released_device_blocks)
        for request_id in events.drained:
            self.cache.finish_load(request_id, failed=True)
        for request_id, reason in events.overdue.items():
            request = self.requests.get(request_id)
            if request is not None:
                self._imports.overdue(request, f"the prompt's KV from prefill did not arrive: {reason}")
        self.scheduler.loaded(events.loaded)
        for request_id, reason in events.failed.items():
            request = self.scheduler.load_failed(request_id)
            if request is not None and request.importing:  # else the own store's load: computing it again is no news
                self._imports.failed(request, f"the prompt's KV from prefill could not be loaded: {reason}")

    # ------------------------------------------------------------------------------------------- outputs
    def _close(self, request: Request, reason: FinishReason, *, text: str = "", error: str | None = None,
               retry: bool = False) -> None:
        self.connectors.request_closed(request.request_id)
        if request.remote and self.pd is not None:
            self.pd.release_unused(request.request_id, reason.value)
        request.spilled_pages = self.cache.spilled_pages(request.request_id)
        self.scheduler.finish(request, reason, error)
        self._outputs.emit(request, text, finish=reason, retry=retry)
        self._forget(request, reason.value)

    def _forget(self, request: Request, reason: str) -> None:
        self._ended.add(request, reason)
        self.requests.drop(request)
        self._outputs.close(request)
        self.load_failures.end(request.name)
        self._tally.finished += 1

    def _die(self, why: str) -> None:
        self._dead = why
        for request in list(self.requests.values()):
            if request.state is RequestState.HELD:  # it had its last output; decode finds out by itself
                continue
            request.error = f"the engine failed: {why}"
            self._outputs.emit(request, "", finish=FinishReason.ERROR, retry=True)
        self.requests.clear()

    def take_outputs(self) -> list[RequestOutput]:
        """Increments not yet returned, e.g. the final ones after `step()` raised."""
        return self._outputs.take()

    # ------------------------------------------------------------------------------------------- state
    def _has_transfers(self) -> bool:
        return self.cache.has_pending_work() or self.connectors.has_pending_work()

    def has_work(self) -> bool:
        """Requests, transfers or leases are open: keep calling `step()`."""
        return bool(self.scheduler.num_live or self._held or self._outputs or self._has_transfers())

    def stats(self) -> EngineStats:
        counters = self.scheduler.counters
        return EngineStats(
            engine_id=self.engine_id, role=self.config.pd.role, steps=self._step,
            step_seconds=dict(self._tally.step_seconds), running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting), loading=len(self.scheduler.loading), held=len(self._held or ()),
            finished=self._tally.finished, preemptions=counters.preemptions, admissions=counters.admissions,
            resident_landings=counters.resident_landings, host_landings=counters.host_landings,
            import_failures=self._imports.failures, indexer_loads=counters.indexer_loads,
            local_prefill_tokens=counters.local_prefill_tokens, generated_tokens=self._tally.generated,
            resolve=self._tally.resolve, cache=asdict(self.cache.stats()),
            pd=None if self.pd is None else asdict(self.pd.stats()), draining=self._draining,
            indexer_store=None if self.offload is None else asdict(self.offload.stats()),
            index_groups=self._tally.index_groups(),
        )

    def residency(self) -> ResidencySample:
        """Where every request lives now. O(requests), and a byte copied per page."""
        tiers = self.cache.request_tiers()
        return ResidencySample(
            stats=self.stats().asdict(), block_size=self.layout.block_size, groups=self._groups,
            requests=tuple([sample_request(request, tiers.get(name)) for name, request in self.requests.items()]),
            pending=self.cache.oldest_transfers(NUM_PENDING), ended=self._ended.newest(),
            landings=self.pd.landing_log() if self.pd is not None else ())

    def problem(self) -> str:
        """Why this engine should be replaced although it still steps; "" = it is fine."""
        return self.pd.problem() if self.pd is not None else ""

    def check(self) -> None:
        """Conservation laws of both pools and of every connector. Raises InvariantError."""
        if not self.config.cache.enabled:  # else its connector checks it
            self.cache.check()
        self.connectors.check()

    def shutdown(self) -> None:
        """Aborts what is open and stops the ranks. Idempotent."""
        for request in list(self.requests.values()):
            if request.state is not RequestState.HELD and not self._dead:
                self._close(request, FinishReason.ABORT)
        self._dead = self._dead or "the engine was shut down"
        self.executor.shutdown()
