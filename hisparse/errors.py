"""Exceptions of hisparse, by whose fault it is: the caller's, the peer's, or ours.

`None` or `False` from a query means "no room now" and is never an exception.
"""

from __future__ import annotations


class HiSparseError(Exception):
    """Base of every error hisparse raises on purpose."""


class ConfigError(HiSparseError, ValueError):
    """The caller asked for something impossible. Says what, the limit, what was given and how to fix it."""


class RequestError(ConfigError):
    """One request is invalid or can never be served; the engine itself is fine.

    Attributes:
        field: the request field at fault, or None.
        status: the HTTP status an API server should answer with (4xx).
    """

    def __init__(self, message: str, *, field: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field = field
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_request_error, (str(self), self.field, self.status))


def _rebuild_request_error(message: str, field: str | None, status: int) -> RequestError:
    return RequestError(message, field=field, status=status)


class TransferError(HiSparseError):
    """A copy or a one-sided read failed or timed out; nothing it covered may be used."""


class ProtocolError(HiSparseError):
    """A peer sent something that does not fit: version, fingerprint, list lengths, ids out of range."""


class InvariantError(HiSparseError):
    """Our own bug: a state, id or count that cannot be. Carries the ids needed to reproduce it."""


class EngineDeadError(HiSparseError):
    """The engine loop or one of its workers is gone; requests in flight did not finish."""
