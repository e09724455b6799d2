"""The requests of an engine that have not ended, by id and by the name that their callers know."""

from __future__ import annotations

import itertools

from hisparse.engine.request import Request


class OpenRequests(dict[str, Request]):
    """By `Request.request_id`. It differs from `Request.name` once a request had to leave its id behind."""

    def __init__(self) -> None:
        super().__init__()
        self._renamed: dict[str, str] = {}  # name -> request id
        self._numbers = itertools.count(1)

    def named(self, name: str) -> Request | None:
        """The request that its caller knows by this name."""
        return self.get(self._renamed.get(name, name))

    def is_taken(self, name: str) -> bool:
        """A new request must have another name."""
        return name in self or name in self._renamed

    def rename(self, request: Request) -> None:
        """Gives it an id that no request had before: the ranks may still know every earlier one."""
        del self[request.request_id]
        numbered = (f"{request.name}~{i}" for i in self._numbers)
        request.request_id = next(new for new in numbered if new not in self)
        self[request.request_id] = request
        self._renamed[request.name] = request.request_id

    def drop(self, request: Request) -> None:
        """It has ended. Idempotent."""
        self.pop(request.request_id, None)
        self._renamed.pop(request.name, None)
