"""Prefill role: prompts that are done and whose pages a decode engine may still read."""

from __future__ import annotations

from hisparse.cache.kv_cache_manager import KVCacheManager
from hisparse.connector.base import RemoteDecode
from hisparse.engine.outputs import Outputs
from hisparse.engine.request import Request, RequestState
from hisparse.engine.scheduler import Scheduler
from hisparse.types import FinishReason


class HeldPrompts:
    """Requests whose prompt's pages are leased; the connector decides when a lease ends."""

    def __init__(self, cache: KVCacheManager, scheduler: Scheduler, leases: RemoteDecode, outputs: Outputs) -> None:
        self._cache, self._scheduler, self._leases, self._outputs = cache, scheduler, leases, outputs
        self._held: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request: Request) -> None:
        """Leases the pages instead of freeing them. The request's last output says where they are."""
        self._scheduler.remove(request)
        pages, generations = self._cache.hold(request.request_id)
        params = self._leases.grant(request.request_id, pages, generations,
                                    prompt_digest=request.prompt_digest(self._cache.layout, pages.num_tokens))
        request.state = RequestState.HELD
        self._held[request.request_id] = request
        self._outputs.emit(request, "", finish=FinishReason.STOP, params=params)

    def take_ended(self) -> list[Request]:
        """Requests whose lease has ended since the last call; their pages are given back."""
        ended = [request for request_id in self._leases.take_expired()
                 if (request := self._held.pop(request_id, None)) is not None]
        for request in ended:
            self._scheduler.finish(request, FinishReason.STOP)
        return ended
