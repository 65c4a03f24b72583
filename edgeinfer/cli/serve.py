"""`edgeinfer serve`: answer programs over HTTP."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgeinfer.cli.model_names import ModelCommand
from edgeinfer.cli.options import (
    FileName,
    backend_option,
    load_keywords,
    max_tokens,
    model_options,
    open_engine,
    quiet_option,
    sampling_given,
    sampling_options,
    template_options,
    variable_option,
    warnings_as_notes,
)
from edgeinfer.cli.terminal import note
from edgeinfer.common.user_text import decoded

if TYPE_CHECKING:
    from edgeinfer.engine import Engine
    from edgeinfer.server.access import Access
    from edgeinfer.server.served import Models, Served

_KEY = "EDGEINFER_API_KEY"  # the key itself, which is no flag: others see those


@click.command(cls=ModelCommand, model="model", draft="model_draft", finds=False)
@variable_option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on, or several with commas between them; 0.0.0.0: all.",
)
@variable_option(
    "--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port to listen on, 0: a free one."
)
@variable_option(
    "--api-key-file",
    type=FileName(exists=True, dir_okay=False),
    help="Keys, one a line, one of which a request must have.",
)
@click.option("--no-auth", is_flag=True, help="Answer other machines without a key.")
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="Answer by this name too; may be repeated.")
@click.option(
    "--cors-origin", "origins", multiple=True, metavar="URL", help="Let pages of this site ask; may be repeated."
)
@click.option("-a", "--alias", "aliases", multiple=True, metavar="NAME", help="Name of the model; others are aliases.")
@click.option(
    "--models",
    "others",
    multiple=True,
    type=FileName(),
    metavar="FOLDER|NAME",
    help="Further models, loaded when they are asked for, within the budget; may be repeated.",
)
@click.option("--any-model", is_flag=True, help="Answer whatever model a request names.")
@click.option("--tags", metavar="TAG,...", help="Tags of the model in /v1/models, with commas between them.")
@click.option("--slots/--no-slots", "slots", default=True, help="Show at /slots what runs.  [default: slots]")
@click.option("--ui/--no-ui", "--webui/--no-webui", "page", default=True, help="Show the page at /.  [default: ui]")
@click.option(
    *("-v", "--verbose", "--log-verbose", "verbose"),
    is_flag=True,
    help="Send the prompt with each answer of OpenAI's dialect, as __verbose.",
)
@model_options
@template_options
@backend_option
@sampling_options
@quiet_option
def serve(
    host: str,
    port: int,
    api_key_file: Path | None,
    no_auth: bool,
    hosts: tuple[str, ...],
    origins: tuple[str, ...],
    aliases: tuple[str, ...],
    others: tuple[Path, ...],
    any_model: bool,
    tags: str | None,
    slots: bool,
    page: bool,
    verbose: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Answer programs over HTTP.

    In the dialects of OpenAI, Ollama, Anthropic and llama.cpp, on this machine alone unless --host says otherwise,
    which needs a key. SIGTERM and Ctrl-C let answers end for 10 seconds.
    """
    from edgeinfer.server.library import open_routing, open_uvicorn

    open_uvicorn(), open_routing()  # before a model is loaded
    from edgeinfer.server.limits import Limits
    from edgeinfer.server.server import Server, Shown
    from edgeinfer.server.serving import bind
    from edgeinfer.server.serving import serve as run

    if others and any_model:
        raise click.UsageError("--any-model answers with one model: leave out --models")
    addresses = list(dict.fromkeys(filter(None, (each.strip() for each in host.split(",")))))
    access = _access(addresses, api_key_file, no_auth, hosts, origins)
    sampling_given(flags)  # refuses values out of range, before a model is loaded
    shown = Shown(page, slots, verbose, [each.strip() for each in (tags or "").split(",") if each.strip()])
    with ExitStack() as opened:
        listening = [opened.enter_context(bind(addresses[0], port))]
        at = listening[0].getsockname()[1]
        listening += [opened.enter_context(bind(each, at)) for each in addresses[1:]]
        models, n_parallel = _models(flags, aliases, others, any_model, opened)
        limits, log = Limits(predict=max_tokens(flags)), _silent if quiet else _log
        server = Server(models, limits, access, n_parallel, log, shown)
        places = [f"[{each}]" if ":" in each else each for each in (one.getsockname()[0] for one in listening)]
        told = f"{', '.join(models.names())}: listening on {', '.join(f'http://{place}:{at}' for place in places)}"
        run(server, listening, lambda stop: note(told))


def _models(
    flags: dict[str, Any], aliases: tuple[str, ...], others: tuple[Path, ...], any_model: bool, opened: ExitStack
) -> tuple[Models, int]:
    """The models of the server, and the number of texts that run at once."""
    from edgeinfer.common.settings import DEFAULT_PARALLEL
    from edgeinfer.memory.process import THREAD_BYTES, expect_threads
    from edgeinfer.server.limits import Limits
    from edgeinfer.server.served import Models
    from edgeinfer.server.server import n_threads

    n_beside = n_threads(flags["parallel"] or DEFAULT_PARALLEL, Limits())
    if not others:
        expect_threads(n_beside)
        engine = opened.enter_context(_with_defaults(open_engine(flags), flags))
        return Models(_served(engine, flags, aliases), any_model), engine.scheduler.n_parallel
    from edgeinfer.memory.limit import limit_of, parse_budget
    from edgeinfer.memory.process import resident_bytes
    from edgeinfer.server.several import SeveralModels

    files = _files(others)
    budget = limit_of(parse_budget(flags["budget"]), resident_bytes(), flags["n_threads"] or 1).n_bytes
    budget -= n_beside * THREAD_BYTES
    is_given = flags["model"] is not None or flags["hf_repo"] is not None
    if not is_given and (flags["chat_template"] or flags["chat_template_file"]):
        raise click.UsageError("a chat template is for one model: name that with -m")
    own = opened.enter_context(_with_defaults(open_engine(flags), flags)) if is_given else None
    first = None if own is None else _served(own, flags, aliases)
    loader = opened.enter_context(ThreadPoolExecutor(1, "edgeinfer-load"))
    models = SeveralModels(files, lambda path, n_bytes: _load(path, n_bytes, flags), budget, loader, first)
    opened.callback(models.close)
    return models, flags["parallel"] or DEFAULT_PARALLEL


def _load(path: Path, n_bytes: int | None, flags: dict[str, Any]) -> Engine:
    """Load a model that was asked for, without a bar."""
    from edgeinfer.loading.open import load

    keywords = load_keywords({**flags, "chat_template": None, "chat_template_file": None})
    if n_bytes is not None:
        keywords["budget"] = n_bytes
    with warnings_as_notes():
        return _with_defaults(load(path, **keywords), flags)


def _with_defaults(engine: Engine, flags: dict[str, Any]) -> Engine:
    """The engine, whose requests have the sampling parameters of the flags where they give none."""
    engine.default_params = engine.default_params.changed(sampling_given(flags))
    return engine


def _files(others: tuple[Path, ...]) -> dict[str, Path]:
    """Files of models by their ids: those of folders, and those that are named. Raises as find_model."""
    from edgeinfer.library.gguf_names import is_gguf, models_among, stem_of
    from edgeinfer.library.names import find_model

    found: dict[str, Path] = {}
    for given in others:
        if given.is_dir():
            names = models_among(sorted(path.name for path in given.iterdir() if is_gguf(path.name)))
            found |= {stem_of(name): given / name for name in names}
        else:
            path = find_model(given, "the model")
            found[stem_of(path.name) if path == given else str(given)] = path
    if not found:
        raise click.UsageError(f"--models: there is no GGUF file in {', '.join(map(str, others))}")
    return found


def _silent(line: str) -> None:
    """No log."""


def _access(
    addresses: Sequence[str], api_key_file: Path | None, no_auth: bool, hosts: tuple[str, ...], origins: tuple[str, ...]
) -> Access:
    """Who may ask. Raises click.UsageError for a server of other machines without a key."""
    from edgeinfer.server.access import Access, is_loopback, read_keys

    lines = [] if api_key_file is None else decoded(api_key_file.read_bytes(), api_key_file).splitlines()
    if api_key_file is None and os.environ.get(_KEY):
        lines = [os.environ[_KEY]]
    keys = read_keys(lines) if lines or api_key_file is not None else ()
    if not addresses:
        raise click.UsageError("--host names no address")
    is_local = all(is_loopback(each.lower()) for each in addresses)
    if not is_local and not keys and not no_auth:
        raise click.UsageError(
            f"--host {','.join(addresses)} lets other machines ask: give --api-key-file FILE, or --no-auth if that is "
            "meant"
        )
    return Access(keys, is_local, frozenset(name.lower() for name in hosts), frozenset(origins))


def _served(engine: Engine, flags: dict[str, Any], aliases: tuple[str, ...]) -> Served:
    """The model by the names that a client may use."""
    from edgeinfer.server.served import Served

    given = flags["hf_repo"] or (None if flags["model"] is None else str(flags["model"]))
    names = [*aliases, *([given.removeprefix("./")] if given and os.sep not in given else []), engine.path.stem]
    names += [given] if given else []
    ids = [name.removesuffix(".gguf") for name in names]
    return Served(engine, ids[0], frozenset((*names, *ids, engine.name, engine.path.name)))


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
