"""What those who run a server look at: /health and /metrics."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.server.exchange import Exchange
from edgeinfer.server.server import Server

_METRICS = "text/plain; version=0.0.4; charset=utf-8"


async def health(server: Server, exchange: Exchange) -> None:
    """Whether the server takes requests."""
    if server.is_draining:
        await exchange.reply_json({"status": "shutting down"}, 503)
    else:
        await exchange.reply_json({"status": "ok"})


async def metrics(server: Server, exchange: Exchange) -> None:
    """Counters and times, as Prometheus reads them."""
    text = "\n".join(server.metrics.lines(_gauges(server))) + "\n"
    await exchange.reply(200, text.encode(), _METRICS)


def _gauges(server: Server) -> Iterator[tuple[str, str, float]]:
    """(name, help, value) of what is so now."""
    running = sum(each.session is not None for served in server.models.loaded for each in served.engine.scheduler.texts)
    yield "texts_running", "Texts that have a place.", running
    yield "texts_waiting", "Texts that wait for a place.", max(0, server.n_texts - running)
    yield "places", "Texts that can run at once.", server.n_parallel
    put_aside = sum(each.engine.scheduler.n_put_aside for each in server.models.loaded)
    yield "texts_put_aside", "How often a text made room for others.", put_aside
    counted = server.metrics
    share = counted.steps["accepted"] / counted.steps["drafted"] if counted.steps["drafted"] else 0.0
    yield "draft_acceptance", "Share of the draft tokens that were accepted.", share
    hits = counted.tokens["cached"] / counted.tokens["prompt"] if counted.tokens["prompt"] else 0.0
    yield "prefix_hit_rate", "Share of the prompt tokens that were in the cache.", hits
    for served in server.models.loaded:
        for item in served.engine.memory.items:
            labels = f'model="{_escaped(served.id)}",purpose="{_escaped(item.name)}"'
            yield f"memory_planned_bytes{{{labels}}}", "Bytes that are planned.", item.planned
            if item.taken is not None:
                yield f"memory_taken_bytes{{{labels}}}", "Bytes that are taken.", item.taken


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
