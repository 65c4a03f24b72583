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
    lines = [*server.metrics.lines(_gauges(server)), *_lines_of_llama(server)]
    text = "\n".join(lines) + "\n"
    await exchange.reply(200, text.encode(), _METRICS, {"Process-Start-Time-Unix": str(server.started)})


def _lines_of_llama(server: Server) -> Iterator[str]:
    for name, kind, about, value in _of_llama(server):
        yield f"# HELP llamacpp:{name} {about}"
        yield f"# TYPE llamacpp:{name} {kind}"
        yield f"llamacpp:{name} {value:g}" if value != int(value) else f"llamacpp:{name} {int(value)}"


def _gauges(server: Server) -> Iterator[tuple[str, str, float]]:
    """(name, help, value) of what is so now."""
    running = _n_running(server)
    yield "texts_running", "Texts that have a place.", running
    yield "texts_waiting", "Texts that wait for a place.", max(0, server.n_texts - running)
    yield "places", "Texts that can run at once.", server.n_parallel
    put_aside = sum(each.engine.scheduler.n_put_aside for each in server.models.loaded)
    yield "texts_put_aside", "How often a text made room for others.", put_aside
    counted = server.metrics
    share = _share(counted.steps["accepted"], counted.steps["drafted"])
    yield "draft_acceptance", "Share of the draft tokens that were accepted.", share
    hits = _share(counted.tokens["cached"], counted.tokens["prompt"])
    yield "prefix_hit_rate", "Share of the prompt tokens that were in the cache.", hits
    for served in server.models.loaded:
        for item in served.engine.memory.items:
            labels = f'model="{_escaped(served.id)}",purpose="{_escaped(item.name)}"'
            yield f"memory_planned_bytes{{{labels}}}", "Bytes that are planned.", item.planned
            if item.taken is not None:
                yield f"memory_taken_bytes{{{labels}}}", "Bytes that are taken.", item.taken


def _of_llama(server: Server) -> Iterator[tuple[str, str, str, float]]:
    """(name, type, help, value) by llama.cpp's names, for boards that were made for them."""
    counted, schedulers = server.metrics, [served.engine.scheduler for served in server.models.loaded]
    n_read, n_made = counted.tokens["prompt"] - counted.tokens["cached"], counted.tokens["completion"]
    n_passes = sum(each.n_passes for each in schedulers)
    for name, about, value in (
        ("prompt_tokens_total", "Prompt tokens that were read.", n_read),
        ("prompt_tokens_cached_total", "Prompt tokens that were in the cache.", counted.tokens["cached"]),
        ("prompt_seconds_total", "Seconds until first tokens.", counted.prompt_seconds),
        ("tokens_predicted_total", "Tokens of answers.", n_made),
        ("tokens_predicted_seconds_total", "Seconds of tokens after the first.", counted.decode_seconds),
        ("n_decode_total", "Passes of the models that are loaded.", n_passes),
        ("n_tokens_max", "Most tokens of a prompt and its answer.", counted.longest),
        ("spec_decode_num_draft_tokens_total", "Draft tokens.", counted.steps["drafted"]),
        ("spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted.", counted.steps["accepted"]),
        ("spec_decode_num_drafts_total", "Passes with draft tokens.", counted.steps["drafts"]),
    ):
        yield name, "counter", about, value
    running, n_later = _n_running(server), max(0, n_made - sum(counted.finished.values()))
    for name, about, value in (
        ("prompt_tokens_seconds", "Prompt tokens a second.", _share(n_read, counted.prompt_seconds)),
        ("predicted_tokens_seconds", "Tokens a second of a text.", _share(n_later, counted.decode_seconds)),
        ("requests_processing", "Texts that have a place.", running),
        ("requests_deferred", "Texts that wait for a place.", max(0, server.n_texts - running)),
        ("n_busy_slots_per_decode", "Texts in a pass.", _share(sum(each.n_in_passes for each in schedulers), n_passes)),
    ):
        yield name, "gauge", about, value


def _n_running(server: Server) -> int:
    """Texts that have a place."""
    loaded = server.models.loaded
    return sum(each.session is not None for served in loaded for each in served.engine.scheduler.texts)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
