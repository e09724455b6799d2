"""Outputs of open requests on their way from the thread of the engine loop to whoever listens on the event loop."""

from __future__ import annotations

import asyncio

from hisparse.errors import RequestError
from hisparse.types import FinishReason, RequestOutput


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two increments of one request, in order, as one."""
    return RequestOutput(
        request_id=first.request_id,
        new_token_ids=first.new_token_ids + second.new_token_ids,
        new_text=first.new_text + second.new_text,
        logprobs=first.logprobs + second.logprobs,
        finish_reason=second.finish_reason,
        error=second.error,
        retry=second.retry,
        stats=second.stats,
        kv_transfer_params=second.kv_transfer_params,
        retry_prefill=second.retry_prefill,
        timeline=second.timeline or first.timeline,
    )


class OutputStreams:
    """A queue for each open request. Opened, closed and read on the event loop; `deliver` and `fail` come from the thread."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[RequestOutput]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, request_id: str) -> asyncio.Queue[RequestOutput]:
        self._loop = asyncio.get_running_loop()
        if request_id in self._queues:
            raise RequestError(f"request id {request_id!r} is in use; ids must be distinct", status=409)
        return self._queues.setdefault(request_id, asyncio.Queue())

    def close(self, request_id: str) -> None:
        self._queues.pop(request_id, None)

    def deliver(self, outputs: list[RequestOutput]) -> None:
        if outputs and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._route, outputs)

    def fail(self, reason: str) -> None:
        """Ends every open request."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail, reason)

    def _route(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            queue = self._queues.get(output.request_id)
            if queue is not None:
                queue.put_nowait(output)

    def _fail(self, reason: str) -> None:
        for request_id, queue in self._queues.items():
            queue.put_nowait(RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=reason,
                                           retry=True))
