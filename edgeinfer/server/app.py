"""The application: paths, who may ask, errors in the form of their dialect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from edgeinfer.server.dialects.anthropic import common as anthropic_common
from edgeinfer.server.dialects.anthropic import messages
from edgeinfer.server.dialects.llama_cpp import completion as llama_completion
from edgeinfer.server.dialects.llama_cpp import tokens as llama_tokens
from edgeinfer.server.dialects.ollama import answers as ollama_answers
from edgeinfer.server.dialects.ollama import common as ollama_common
from edgeinfer.server.dialects.ollama import models as ollama_models
from edgeinfer.server.dialects.openai import chat, common, completions, models, responses
from edgeinfer.server.exchange import ClientGone, Exchange, Receive, Scope, Send
from edgeinfer.server.library import open_routing
from edgeinfer.server.openapi import document, openapi
from edgeinfer.server.operation import health, metrics
from edgeinfer.server.problem import Problem, problem_of
from edgeinfer.server.server import Server
from edgeinfer.server.web.page import page

Handler: TypeAlias = Callable[[Server, Exchange], Awaitable[None]]
ErrorOf: TypeAlias = Callable[[Exchange, Problem], Any]

_EXCHANGE = "edgeinfer.exchange"
ROUTES: Mapping[str, Mapping[str, Handler]] = {  # by path and method
    "/": {"GET": page},
    "/openapi.json": {"GET": openapi},
    "/health": {"GET": health},
    "/v1/health": {"GET": health},
    "/metrics": {"GET": metrics},
    "/v1/chat/completions": {"POST": chat.chat},
    "/v1/chat/completions/input_tokens": {"POST": chat.count_tokens},
    "/v1/completions": {"POST": completions.complete},
    "/v1/responses": {"POST": responses.respond},
    "/v1/models": {"GET": models.list_models},
    "/v1/models/{model:path}": {"GET": models.retrieve_model},
    "/v1/embeddings": {"POST": models.embeddings},
    "/v1/messages": {"POST": messages.answer_messages},
    "/v1/messages/count_tokens": {"POST": messages.count_tokens},
    **{path: {"POST": llama_completion.complete} for path in ("/completion", "/completions")},
    "/infill": {"POST": llama_completion.infill},
    "/tokenize": {"POST": llama_tokens.tokenize},
    "/detokenize": {"POST": llama_tokens.detokenize},
    "/tokenizer_info": {"GET": llama_tokens.tokenizer_info},
    "/apply-template": {"POST": llama_tokens.apply_template},
    "/props": {"GET": llama_tokens.props},
    "/slots": {"GET": llama_tokens.slots},
    "/chat/completions": {"POST": chat.chat},
    "/chat/completions/input_tokens": {"POST": chat.count_tokens},
    "/responses": {"POST": responses.respond},
    "/models": {"GET": models.list_models},
    "/api/version": {"GET": ollama_models.version},
    "/api/tags": {"GET": ollama_models.tags},
    "/api/ps": {"GET": ollama_models.running},
    "/api/show": {"POST": ollama_models.show},
    "/api/chat": {"POST": ollama_answers.chat},
    "/api/generate": {"POST": ollama_answers.generate},
    **{f"/api/{name}": {"POST": ollama_models.lacking} for name in ("pull", "push", "create", "copy", "embed")},
    "/api/embeddings": {"POST": ollama_models.lacking},
    "/api/delete": {"DELETE": ollama_models.lacking},
}
_LLAMA = ("/completion", "/infill", "/tokenize", "/detokenize", "/apply-template", "/props", "/slots")
_ERRORS: Mapping[str, ErrorOf] = {  # by the beginning of a path; all others are OpenAI's
    "/api/": ollama_common.error_of,
    "/v1/messages": anthropic_common.error_of,
    **dict.fromkeys(_LLAMA, llama_completion.error_of),
    "/chat/completions": common.llama_error_of,
}
_CORS = {
    "access-control-allow-methods": "GET, POST, OPTIONS",
    "access-control-allow-headers": "authorization, content-type, x-api-key",
    "access-control-max-age": "600",
}


class Application:
    """The ASGI application of a server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        server.document = document({path: list(handlers) for path, handlers in ROUTES.items()})
        routing = open_routing()
        routes = [routing.Route(path, _Endpoint(server, path, handlers)) for path, handlers in ROUTES.items()]
        self._router = routing.Router(routes, redirect_slashes=False, default=_Endpoint(server, "", {}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, self._server.limits)
        scope[_EXCHANGE] = exchange
        try:
            await self._answer(exchange, scope, receive, send)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if not exchange.is_gone:
                raise
        finally:
            exchange.end()
            seconds = time.monotonic() - exchange.started
            self._server.metrics.requests[scope.get("edgeinfer.path", "other"), exchange.status or 0] += 1
            self._server.log_request(exchange, seconds)

    async def _answer(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            exchange.key = self._server.access.check(exchange.method, exchange.path, exchange.headers)
            if (origin := self._server.access.allowed_origin(exchange.headers)) is not None:
                exchange.extra |= {"access-control-allow-origin": origin, "vary": "origin"}
                if exchange.method == "OPTIONS":
                    await exchange.reply(204, b"", "text/plain", _CORS)
                    return
            await self._router(scope, receive, send)
        except ClientGone:
            raise
        except Exception as error:
            problem = problem_of(error)
            if problem.status == 500:
                self._server.log_error(exchange, error)
            if exchange.status is not None:  # it broke in the midst of a reply
                raise ClientGone from error  # and the connection is closed
            await exchange.reply_json(error_of(exchange)(exchange, problem), problem.status, problem.headers)


def error_of(exchange: Exchange) -> ErrorOf:
    """How the dialect of a request writes errors."""
    return next((form for start, form in _ERRORS.items() if exchange.path.startswith(start)), common.error_of)


class _Endpoint:
    """A path. No function, which starlette would wrap."""

    def __init__(self, server: Server, path: str, handlers: Mapping[str, Handler]) -> None:
        self._server, self._path, self._handlers = server, path, handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[_EXCHANGE]
        if not self._path:
            raise Problem(404, "there is nothing at this path", code="not_found")
        scope["edgeinfer.path"] = self._path
        handler = self._handlers.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            allowed = ", ".join(self._handlers)
            raise Problem(405, f"this path takes {allowed}: found {exchange.method[:20]}", headers={"allow": allowed})
        exchange.parameters = scope.get("path_params", {})
        await handler(self._server, exchange)
