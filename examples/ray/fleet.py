"""A fleet of edgeinfer servers on Ray Serve: one address, as many replicas as the requests need.

Each conversation stays with the replica that has its beginning in memory (a consistent hash). An answer whose replica
is lost goes on at another one, with the same bits. See docs/scaling.md.

Run: pip install 'edgeinfer[server]' -r examples/ray/requirements.txt
     python examples/ray/fleet.py MODEL.gguf --replicas 3
On a cluster: serve run --app-dir examples/ray fleet:build model=/models/model.gguf replicas=1 most=16
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import click
import ray
from delivered import CONTINUE, TOKENS, Delivered, conversation_of
from pydantic import BaseModel
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
REPLICA = "x-edgeinfer-replica"  # in replies: the process that began it
_MOST_LOST = 3  # replicas that an answer may lose
_OWN = frozenset({"content-length", "transfer-encoding", "connection", "date", "server"})  # headers of one connection


@dataclass(frozen=True)
class Asked:
    """A request, as replicas get it."""

    method: str
    path: str
    query: bytes
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Start:
    """How a reply begins."""

    status: int
    headers: Mapping[str, str]


class Arguments(BaseModel):
    """Of the application.

    replicas: at least and at first; most: with autoscaling, after so many seconds (grow) of more requests than they
    have places, and fewer after so many (shrink) of fewer.  threads: of each, which is also what Ray counts as CPUs.
    parallel: texts that run at once in one; it has as many requests again waiting before it is passed over.
    n_ctx: positions of all texts.  draft: as --drafter.
    """

    model: str
    replicas: int = 1
    most: int | None = None
    grow: float = 30.0
    shrink: float = 600.0
    threads: int = 2
    parallel: int = 4
    n_ctx: int = 8192
    draft: str = "auto"


@serve.deployment
class Replica:
    """One engine, and the server's application in front of it, without a socket."""

    def __init__(self, arguments: Arguments) -> None:
        import edgeinfer
        from edgeinfer.server.access import Access, read_keys
        from edgeinfer.server.app import Application
        from edgeinfer.server.limits import Limits
        from edgeinfer.server.served import Models, Served
        from edgeinfer.server.server import Server

        self._engine = edgeinfer.load(
            arguments.model,
            n_ctx=arguments.n_ctx,
            n_threads=arguments.threads,
            parallel=arguments.parallel,
            draft=arguments.draft,
        )
        served = Served(self._engine, self._engine.path.stem, frozenset({self._engine.name, self._engine.path.name}))
        key = os.environ.get("EDGEINFER_API_KEY")
        access = Access(read_keys([key]) if key else (), is_local=not key)
        self._server = Server(Models(served), Limits(), access, arguments.parallel, print)
        self._application = Application(self._server)

    async def answer(self, asked: Asked) -> AsyncIterator[Start | bytes]:
        """The reply: its start, then its parts. Closed early, it frees the places of the request."""
        sent: asyncio.Queue[Any] = asyncio.Queue(16)
        gone = asyncio.Event()
        received = iter([{"type": "http.request", "body": asked.body}])

        async def receive() -> Any:
            if (message := next(received, None)) is None:
                await gone.wait()
                return {"type": "http.disconnect"}
            return message

        async def work() -> None:
            try:
                await self._application(_scope(asked), receive, sent.put)
            finally:
                if not gone.is_set():
                    await sent.put(None)

        task = asyncio.create_task(work())
        try:
            while (message := await sent.get()) is not None:
                if message["type"] == "http.response.start":
                    headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
                    yield Start(message["status"], headers | {REPLICA: str(os.getpid())})
                elif message.get("body"):
                    yield message["body"]
        finally:
            gone.set()
            while not sent.empty():  # so that what waits for room can end
                sent.get_nowait()
            await asyncio.shield(task)

    def __del__(self) -> None:
        self._server.close()
        self._engine.close()


def _scope(asked: Asked) -> dict[str, Any]:
    headers = [(name.encode(), value.encode("latin-1")) for name, value in asked.headers.items()]
    return {
        "type": "http",
        "method": asked.method,
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "query_string": asked.query,
        "headers": headers,
        "root_path": "",
        "client": None,
    }


@serve.deployment
class Entry:
    """Where requests come in: hands each to its replica, and goes on elsewhere where that is lost."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas

    async def __call__(self, request: Request) -> Response:
        """The reply of a replica."""
        headers = {name: value for name, value in request.headers.items() if name not in _OWN}
        path = request.scope["path"]
        asked = Asked(request.method, path, request.scope["query_string"], headers, await request.body())
        reply = self._reply(asked)
        start = await anext(reply)
        assert isinstance(start, Start)
        kept = {name: value for name, value in start.headers.items() if name not in _OWN}
        return StreamingResponse(reply, start.status, kept)  # type: ignore[arg-type]  # the others are bytes

    async def _reply(self, asked: Asked) -> AsyncIterator[Start | bytes]:
        """The start of a reply once there is something of it, and its parts, from one replica after another."""
        replicas = self._replicas.options(stream=True, session_id=conversation_of(asked.headers, asked.body))
        delivered: Delivered | None = None
        start: Start | None = None
        going_on: Mapping[str, str] = {}
        for n_lost in range(_MOST_LOST + 1):
            headers = {TOKENS: "1", **asked.headers, **going_on}
            parts = replicas.answer.remote(replace(asked, headers=headers))
            try:
                async for part in parts:
                    if isinstance(part, Start):
                        if delivered is not None and part.status != 200:
                            raise RuntimeError(f"the answer could not go on: {part.status}")
                        start = part if delivered is None else None
                        given = delivered or Delivered(_seed(part), asked.headers.get(TOKENS) == "1")
                    elif data := given.take(part):
                        if start is not None:
                            yield start
                            start, delivered = None, given
                        yield data
                if start is not None:
                    yield start
                yield given.end()
                return
            except RayActorError:
                if n_lost == _MOST_LOST or (delivered is not None and CONTINUE in asked.headers):
                    raise
                going_on = {} if delivered is None else delivered.going_on()
                if delivered is not None and not going_on:
                    raise
            finally:
                parts.cancel()


def _seed(start: Start) -> str | None:
    """The seed of a stream of one text."""
    is_stream = start.headers.get("content-type", "").startswith("text/event-stream")
    return start.headers.get("x-edgeinfer-seed") if is_stream and start.status == 200 else None


def build(arguments: Arguments) -> Any:
    """The application, for `serve run`."""
    most = arguments.most or arguments.replicas
    look_back = min(30.0, arguments.grow, arguments.shrink)
    replicas = Replica.options(
        ray_actor_options={"num_cpus": arguments.threads},
        max_ongoing_requests=2 * arguments.parallel,
        autoscaling_config=AutoscalingConfig(
            min_replicas=arguments.replicas,
            max_replicas=most,
            target_ongoing_requests=arguments.parallel,  # those that wait and run, on average
            upscale_delay_s=arguments.grow,
            downscale_delay_s=arguments.shrink,
            look_back_period_s=look_back,
            metrics_interval_s=look_back / 3,
        ),
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER, request_router_kwargs={"num_fallback_replicas": max(0, most - 1)}
        ),
        health_check_period_s=2,
        graceful_shutdown_timeout_s=60,
    ).bind(arguments)
    return Entry.options(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}).bind(replicas)


@click.command()
@click.argument("model", type=click.Path(exists=True))
@click.option("--replicas", default=1, show_default=True, help="Replicas at first and at least.")
@click.option("--most", type=int, help="Replicas at most.")
@click.option("--grow", default=30.0, show_default=True, help="Seconds of more requests, after which replicas come.")
@click.option("--shrink", default=600.0, show_default=True, help="Seconds of fewer requests, after which they go.")
@click.option("--threads", default=2, show_default=True, help="Threads of each.")
@click.option("--draft", default="auto", show_default=True, help="As --drafter of edgeinfer serve.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8080, show_default=True)
def main(
    model: str,
    replicas: int,
    most: int | None,
    grow: float,
    shrink: float,
    threads: int,
    draft: str,
    host: str,
    port: int,
) -> None:
    """Run a fleet on this machine until Ctrl-C."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=threads * (most or replicas), include_dashboard=False)
    serve.start(http_options={"host": host, "port": port})
    arguments = Arguments(model=os.path.abspath(model), replicas=replicas, most=most, threads=threads, draft=draft)
    serve.run(build(arguments.model_copy(update={"grow": grow, "shrink": shrink})), name="fleet")
    print(f"listening on http://{host}:{port}", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        serve.shutdown()


if __name__ == "__main__":
    main()
