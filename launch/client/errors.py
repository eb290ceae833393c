"""API errors in OpenAI's format."""

from __future__ import annotations

from functools import partial
from typing import Any

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}

REFUSED = 3  # exit code of a run that refused some prompts and completed the others
WRONG_SETTINGS = 2  # exit code of a job whose settings were rejected before ranks started


class ApiError(Exception):
    """A refused or failed request.

    Args:
        param: the request field that is wrong.
        retry_s: seconds after which the client should retry.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_s = retry_s
        self.headers = {} if retry_s is None else {"Retry-After": str(retry_s)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(ApiError, param=self.param, code=self.code, retry_s=self.retry_s)
        return made, (self.status, self.message)

    def body(self, request_id: str | None = None) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error")
        error = {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
        return error if request_id is None else error | {"request_id": request_id}
