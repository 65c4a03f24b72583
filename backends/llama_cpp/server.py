"""The process that llama.cpp runs in: it answers the host's requests, one after the other, and ends with the host."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgeinfer.backends.llama_cpp.context import Context
from edgeinfer.backends.llama_cpp.library import open_library
from edgeinfer.backends.llama_cpp.log import log
from edgeinfer.backends.llama_cpp.messages import Ints, receive, send
from edgeinfer.backends.llama_cpp.model import Model
from edgeinfer.backends.llama_cpp.passes import Passes
from edgeinfer.backends.llama_cpp.shared import SharedMemory, Words
from edgeinfer.common.errors import EdgeInferError, Interrupted
from edgeinfer.common.settings import LoadSettings

Reply = dict[str, Any]


class Server:
    """What the host can ask for: each public method is a request, its arguments the request's fields and arrays."""

    def __init__(self, library: Any, shared: SharedMemory) -> None:
        self._library = library
        self._shared = shared
        self._described: Model | None = None
        self._context: Context | None = None
        self._passes: Passes | None = None

    def describe(self, path: str, name: str, extra_buffers: bool) -> Reply:
        """Read a model without its weights: its sizes."""
        self._described = None  # first: there is never memory for two
        self._described = Model(self._library, Path(path), Path(name), extra_buffers)
        return asdict(self._described.sizes)

    def plan(self, settings: dict[str, Any]) -> Reply:
        """Bytes of the model that was described, and of such a context. settings: the fields of LoadSettings."""
        assert self._described is not None
        context = Context(self._described, LoadSettings(**settings), self._shared.flag)
        context.close()
        return _bytes_of(context)

    def load(self, path: str, name: str, extra_buffers: bool, settings: dict[str, Any]) -> Reply:
        """Load a model: its sizes, and the bytes that it takes. See `plan`. Raises Interrupted."""
        self._described = None

        def is_to_go_on(share: float, _: object) -> bool:
            self._shared.share = share
            return not self._shared.flag[0]

        try:
            model = Model(self._library, Path(path), Path(name), extra_buffers, is_to_go_on)
        except EdgeInferError as error:
            if self._shared.flag[0]:
                raise Interrupted("loading was interrupted") from error
            raise
        self._context = Context(model, LoadSettings(**settings), self._shared.flag)
        self._passes = Passes(self._context)
        self._passes.warm_up()
        return {"sizes": asdict(model.sizes), **_bytes_of(self._context)}

    def forward(self, n_past: int, kept: Ints, ids: Ints, links: Ints, wanted: Ints) -> Reply:
        """Keep what was committed since the last pass, and run another; its logits are then in the shared array."""
        assert self._context is not None and self._passes is not None
        self._passes.keep(kept, n_past)
        self._passes.run(ids, links, wanted, self._shared.array((len(wanted), self._context.model.n_vocab)))
        return {}

    def answer(self, request: dict[str, Any], arrays: Sequence[Ints]) -> Reply:
        """The reply to a request, or the error that it ends in."""
        log.every = [] if request.pop("log") else None
        method: Callable[..., Reply] = getattr(self, request.pop("do"))
        try:
            reply = method(*request.pop("options"), *arrays)
        except EdgeInferError as error:
            reply = {"error": type(error).__name__, "text": str(error)}
        return {**reply, "log": log.every or []}


def _bytes_of(context: Context) -> Reply:
    return {"bytes": [context.model.n_bytes, context.kv_bytes, context.activation_bytes]}


def main() -> None:
    """Serve the host. Arguments: descriptors of the connection and of the shared memory, and the host's process id."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the host's
    connection_fd, shared_fd, host = map(int, sys.argv[1:])
    connection, shared = socket.socket(fileno=connection_fd), SharedMemory(shared_fd)
    threading.Thread(target=_end_with_host, args=(connection_fd, host), daemon=True).start()
    _no_core_dumps()
    try:
        library = open_library()
    except EdgeInferError as error:
        send(connection, {"error": type(error).__name__, "text": str(error), "log": []})
        return
    build = os.stat(os.path.dirname(library.__file__)).st_mtime_ns
    send(connection, {"build": f"{library.__version__} {build}", "log": []})
    server = Server(library, shared)
    while True:
        try:
            request, arrays = receive(connection)
        except (EOFError, OSError):
            os._exit(0)  # at once: llama.cpp frees nothing that the system does not
        Words.forget_old(sys.stderr.fileno())
        send(connection, server.answer(request, arrays))


def _end_with_host(connection: int, host: int) -> None:
    """End this process, whatever llama.cpp does meanwhile, once the host has."""
    hangup = select.poll()
    hangup.register(connection, 0)
    # The process id too: a fork of the host would keep the connection open.
    while not hangup.poll(1000) and os.getppid() == host:
        pass
    os._exit(0)


def _no_core_dumps() -> None:
    """A crash is told by the host, at once and without a file."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
