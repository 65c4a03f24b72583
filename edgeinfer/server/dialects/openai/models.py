"""/v1/models, and what this server lacks."""

from __future__ import annotations

from typing import Any

from edgeinfer.server.exchange import Exchange
from edgeinfer.server.problem import Problem
from edgeinfer.server.served import Served
from edgeinfer.server.server import Server


async def list_models(server: Server, exchange: Exchange) -> None:
    """The models of the server."""
    await exchange.reply_json({"object": "list", "data": [_entry(server, name) for name in server.models.names()]})


async def retrieve_model(server: Server, exchange: Exchange) -> None:
    """One model. Raises Problem."""
    name = server.models.find(exchange.parameters["model"])
    await exchange.reply_json(_entry(server, name))


async def embeddings(server: Server, exchange: Exchange) -> None:
    """Raises Problem: there are none."""
    raise Problem(501, "this server makes texts and no embeddings: use another one for them", code="not_supported")


def _entry(server: Server, name: str) -> dict[str, Any]:
    served = next((each for each in server.models.loaded if each.id == name), None)
    names: dict[str, Any] = {} if served is None else {"aliases": sorted(served.aliases - {name})}
    if server.shown.tags and name == server.models.names()[0]:
        names["tags"] = list(server.shown.tags)
    return {
        "id": name,
        "object": "model",
        "created": server.started,
        "owned_by": "edgeinfer",
        **names,
        **_sizes(served),
    }


def _sizes(served: Served | None) -> dict[str, Any]:
    """What agents look for, of a model that is loaded."""
    if served is None:
        return {}
    engine = served.engine
    meta = {"n_ctx_train": engine.session.spec.n_ctx_train, "n_vocab": engine.tokenizer.n_vocab}
    return {"context_length": engine.n_ctx, "max_model_len": engine.n_ctx, "meta": meta}
