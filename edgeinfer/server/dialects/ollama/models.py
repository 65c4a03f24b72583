"""/api/version, /api/tags, /api/show and /api/ps."""

from __future__ import annotations

import time
from typing import Any

from edgeinfer.server.about import About, abilities
from edgeinfer.server.dialects.ollama import common
from edgeinfer.server.exchange import Exchange
from edgeinfer.server.fill_in import marks_of
from edgeinfer.server.problem import Problem
from edgeinfer.server.served import Served
from edgeinfer.server.server import Server


async def version(server: Server, exchange: Exchange) -> None:
    """The version of Ollama whose interface this is."""
    await exchange.reply_json({"version": common.VERSION})


async def tags(server: Server, exchange: Exchange) -> None:
    """The models of the server."""
    await exchange.reply_json({"models": [_entry(name, server.models.about(name)) for name in server.models.names()]})


async def running(server: Server, exchange: Exchange) -> None:
    """The models in memory."""
    await exchange.reply_json({"models": [_running(server, served) for served in server.models.loaded]})


async def show(server: Server, exchange: Exchange) -> None:
    """What a model is and can do."""
    body = await exchange.json()
    name = body.get("model", body.get("name"))
    if not isinstance(name, str):
        raise Problem(400, "model must be a name", param="model")
    id = server.models.find(name)
    served = next((each for each in server.models.loaded if each.id == id), None)  # no model is loaded to be shown
    await exchange.reply_json(_shown(id, served, server.models.about(id)))


async def lacking(server: Server, exchange: Exchange) -> None:
    """Raises Problem: models are neither fetched nor made here."""
    raise Problem(
        501, "this server has the models that it was started with, and makes texts only: no pull, create, push or embed"
    )


def _entry(name: str, about: About) -> dict[str, Any]:
    named = common.tagged(name)
    return {
        "name": named,
        "model": named,
        "modified_at": common.moment(about.modified),
        "size": about.n_bytes,
        "digest": common.digest(name, about),
        "details": common.details(about),
    }


def _running(server: Server, served: Served) -> dict[str, Any]:
    about = server.models.about(served.id)
    entry = _entry(served.id, about)
    del entry["modified_at"]
    left = min(served.until - time.monotonic(), common.FOREVER)
    return {
        **entry,
        "size": served.engine.memory.planned,
        "expires_at": common.moment(time.time() + left),
        "size_vram": 0,
        "context_length": served.engine.n_ctx,
    }


def _shown(id: str, served: Served | None, about: About) -> dict[str, Any]:
    architecture, capabilities, template = about.architecture, ["completion"], about.template
    if served is None:
        capabilities += ["tools"] if about.template else []
    else:
        can = abilities(served.engine)
        template = served.engine.template.source if served.engine.has_given_template else template
        capabilities += [*(["tools"] if can.chats else []), *(["thinking"] if can.reasons else [])]
        capabilities += ["insert"] if marks_of(served.engine) is not None else []
    return {
        "modelfile": f"FROM {id}\n",
        "parameters": "",
        "template": template,
        "license": "",
        "modified_at": common.moment(about.modified),
        "details": common.details(about),
        "model_info": {
            "general.architecture": architecture,
            "general.basename": id,
            "general.parameter_count": about.n_parameters,
            f"{architecture}.context_length": about.n_ctx_train if served is None else served.engine.n_ctx,
            f"{architecture}.block_count": about.n_layers,
            f"{architecture}.embedding_length": about.n_embd,
        },
        "capabilities": capabilities,
    }
