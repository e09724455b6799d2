"""Decode role: prefill's answers, imports of a prompt's KV that failed, and what becomes of their requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.cache.prefix import ExtraKeys
from hisparse.connector.base import SchedulerConnector
from hisparse.engine.load_failures import LoadFailurePolicy, Recovery
from hisparse.engine.open_requests import OpenRequests
from hisparse.engine.outputs import Outputs
from hisparse.engine.protocols import PDConnector
from hisparse.engine.request import Request, RequestState
from hisparse.engine.scheduler import Scheduler
from hisparse.errors import ProtocolError, TransferError


class Imports:
    """Carries out what `LoadFailurePolicy` decides. The imports themselves are the P/D connector's.

    Args:
        connectors: of every load of the engine, so that a closed id drains everywhere.
        pd: None = this engine cannot import, and every answer is unusable.
        refuse: ends a request with this error.
    Attributes:
        failures: answers that could not be used, and imports that failed.
    """

    def __init__(self, cache: KVCacheManager, scheduler: Scheduler, connectors: SchedulerConnector, pd: PDConnector | None,
                 policy: LoadFailurePolicy, requests: OpenRequests, outputs: Outputs, *,
                 refuse: Callable[[Request, str], None]) -> None:
        self._cache, self._scheduler, self._connectors, self._pd = cache, scheduler, connectors, pd
        self._policy, self._requests, self._outputs, self._refuse = policy, requests, outputs, refuse
        self.failures = 0

    def take_answer(self, request: Request, kv_transfer_params: Mapping[str, Any]) -> str | None:
        """Offers prefill's answer to the scheduler. Why it cannot be used, or None."""
        try:
            if self._pd is None:
                raise ProtocolError("this engine has no P/D connector (pd.role = colocated)")
            self._pd.add_remote(request.request_id, kv_transfer_params, num_prompt_tokens=request.num_prompt_tokens,
                                digest_of=lambda tokens: request.prompt_digest(self._cache.layout, tokens))
        except (ProtocolError, TransferError) as error:
            self._count(request)
            return f"prefill's answer is unusable: {error}"
        return None

    def failed(self, request: Request, problem: str) -> None:
        """An import failed and has drained; the request waits and holds nothing."""
        self._count(request)
        request.landing, request.imported_tokens = None, 0
        self.recover(request, self.decide(request), problem)

    def overdue(self, request: Request, problem: str) -> None:
        """An import failed and may still write to its pages, nobody knows for how long. They stay with the request's id, which
        drains when the ranks have said so; the request goes on under another one."""
        left = request.request_id
        self._connectors.request_closed(left)
        self._scheduler.remove(request)
        self._cache.close(left)
        self._requests.rename(request)
        request.computed, request.seat = 0, -1
        self._cache.open(request.request_id, request.token_ids, extra_keys=ExtraKeys(cache_salt=request.cache_salt),
                         max_tokens=request.sampling.max_tokens)
        self.failed(request, problem)

    def decide(self, request: Request) -> Recovery:
        """What is here already need not be computed, and does not count against the budget."""
        tokens = max(request.num_prompt_tokens - self._cache.prefix(request.request_id).tokens, 1)
        return self._policy.decide(request.name, tokens=tokens, retries_left=request.retries_left)

    def recover(self, request: Request, recovery: Recovery, problem: str) -> None:
        """Does what the policy decided for a request that holds nothing."""
        if recovery is Recovery.RETRY:
            self._scheduler.remove(request)
            request.state = RequestState.RETRYING
            self._outputs.ask_for_prefill(request, problem)
        elif recovery is Recovery.RECOMPUTE:
            request.recomputes = True
            if request not in self._scheduler.waiting:
                self._scheduler.add(request)
        else:
            self._refuse(request, f"{problem}; {self._policy.refusal()}")

    def _count(self, request: Request) -> None:
        request.import_failures += 1
        self.failures += 1
