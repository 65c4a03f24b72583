"""What is wrong with a request, or went wrong with it; each dialect writes it in its own form."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from edgeinfer.common.errors import (
    BackendUnavailable,
    BudgetExceeded,
    CacheFull,
    ConstraintError,
    ContextOverflow,
    DownloadError,
    EngineBusy,
    InvalidArgument,
    ModelNotFound,
    TemplateError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "overloaded_error",
}


class Problem(Exception):
    """A request that gets no answer, or an answer that ends with an error.

    status: of HTTP.  message: what was expected, what was found and what to do.  code, param: what OpenAI calls so.
    retry_after: seconds.  more: further fields of the error.  headers: of the reply.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        more: Mapping[str, Any] = {},
        headers: Mapping[str, str] = {},
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.more = status, message, code, param, dict(more)
        self.headers = dict(headers)
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)

    @property
    def kind(self) -> str:
        """The type of the error, by its status."""
        return _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")


def problem_of(error: BaseException) -> Problem:
    """What a client is told of an error. Of those that are no client's fault or business it is not told the text."""
    if isinstance(error, Problem):
        return error
    message = str(error)
    if isinstance(error, ContextOverflow):
        counts = {"n_prompt_tokens": error.n_tokens, "n_ctx": error.n_ctx}
        return Problem(400, message, code="context_length_exceeded", more=counts)
    if isinstance(error, ModelNotFound):
        return Problem(404, message, code="model_not_found", param="model")
    if isinstance(error, (InvalidArgument, TemplateError, ConstraintError)):
        return Problem(400, message)
    if isinstance(error, EngineBusy):
        return Problem(429, message, code="queue_full", retry_after=1)
    if isinstance(error, BackendUnavailable):
        return Problem(501, message, code="not_installed")
    if isinstance(error, BudgetExceeded):  # of a schema or tools: asking again does not help
        return Problem(501, message, code="over_budget")
    if isinstance(error, (CacheFull, MemoryError, DownloadError)):
        return Problem(503, message or "there is no memory left", retry_after=5)
    return Problem(500, f"the server failed ({type(error).__name__}); its log says more", code="internal_error")


@contextmanager
def about(param: str) -> Iterator[None]:
    """Within, an InvalidArgument is a Problem with this parameter."""
    try:
        yield
    except InvalidArgument as error:
        raise Problem(400, str(error), param=param) from None


def unsupported(name: str, why: str = "") -> Problem:
    """A parameter that would change the text, and is not known here."""
    return Problem(
        400,
        f"{name} is not supported{f': {why}' if why else ''}; leave it out",
        code="unsupported_parameter",
        param=name,
    )
