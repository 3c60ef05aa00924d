"""What goes wrong, in the words of OpenAI's interface: a status and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from ..errors import BusyError, ClosedError, ContextLengthError, LinAttnError, MemoryLimitError

RETRY_SECONDS = 1  # after which a caller may try a full queue again


class ApiError(Exception):
    """An answer of ``status``; ``param`` is the field of the request that it is about."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        extra = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": str(RETRY_SECONDS)}}
        return extra.get(self.status, {})


INTERNAL = ApiError(500, "internal error; the server's log has the details", "internal_error")  # a bug


def invalid(param: str, message: str) -> ApiError:
    """A field of the request is wrong."""
    return ApiError(400, f"{param}: {message}", "invalid_value", param)


def unsupported(param: str, message: str) -> ApiError:
    """A field asks for something that OpenAI's interface has and this server has not."""
    return ApiError(400, f"{param}: {message}", "unsupported_parameter", param)


def as_api_error(error: Exception) -> ApiError | None:
    """The answer to one of our errors; None for any other, which is a bug."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BusyError):
        return ApiError(429, str(error), "rate_limit_exceeded")
    if isinstance(error, ClosedError):
        return ApiError(503, str(error), "service_unavailable")
    if isinstance(error, (ContextLengthError, MemoryLimitError)):
        return ApiError(400, str(error), "context_length_exceeded")
    if isinstance(error, LinAttnError):
        return ApiError(400, str(error))
    return None
