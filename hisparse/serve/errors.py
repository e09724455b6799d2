"""Errors as an API client sees them: OpenAI's body, a status, and what to do about it."""

from __future__ import annotations

from typing import Any

from hisparse.errors import EngineDeadError, ProtocolError, RequestError, TransferError

RETRY_AFTER_S = 1
ENGINE_UNAVAILABLE = "engine_unavailable"
"""Code of errors that say nothing about the request: another engine may answer it."""
_TYPES = {
    400: ("invalid_request_error", "invalid_value"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "request_timeout"),
    409: ("invalid_request_error", "conflict"),
    413: ("invalid_request_error", "too_large"),
    415: ("invalid_request_error", "unsupported_media_type"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "unavailable"),
    504: ("server_error", "deadline_exceeded"),
}


class ApiError(Exception):
    """An error with its HTTP status; also travels as a value between replicas.

    Attributes:
        param: the request field at fault, or None.
        code: machine-readable; "" = the usual one of the status.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str = "") -> None:
        super().__init__(status, message, param, code)
        self.status, self.message, self.param, self.code = status, message, param, code

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"

    @property
    def retryable(self) -> bool:
        return self.status in (429, 503, 504)

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        default = ("server_error" if self.status >= 500 else "invalid_request_error", "error")
        kind, code = _TYPES.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code or code}}

    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}

    @classmethod
    def of(cls, error: BaseException) -> ApiError:
        """What a client is told of an exception; the inner workings of unexpected ones stay in the log."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, RequestError):
            return cls(error.status, str(error), error.field, ENGINE_UNAVAILABLE if error.status == 503 else "")
        if isinstance(error, TimeoutError):
            return cls(504, str(error) or "the request did not finish before its deadline")
        if isinstance(error, EngineDeadError):
            return cls(503, str(error), code=ENGINE_UNAVAILABLE)
        if isinstance(error, (TransferError, ProtocolError)):
            return cls(503, str(error))
        return cls(500, f"internal error ({type(error).__name__}); the server's log has the details")
