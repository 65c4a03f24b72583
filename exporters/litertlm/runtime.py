"""A .litertlm file in the runtime LiteRT-LM, in a process of its own."""

from __future__ import annotations

from typing import Any

from edgeinfer.exporters.checks.runtime import peak_bytes
from edgeinfer.exporters.litertlm.library import open_runtime, versions

NAME = "litert-lm-api"


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Run a file: question has path, folder, prompt (a text), n_tokens, messages or None, texts.

    folder: for packed weights, which the runtime shares between its graphs by a file. Gives version, text: what follows
    the prompt, the most likely token each time; tokens: prompt and text cut into ids by the runtime, those of the
    prompt left out; rendered: the messages by the template; ids of each text; peak_bytes; or the error.
    """
    runtime = open_runtime()
    try:
        return _run(runtime, question)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}


def _run(runtime: Any, question: dict[str, Any]) -> dict[str, Any]:
    engine = runtime.Engine(question["path"], backend=runtime.Backend.CPU(), cache_dir=question["folder"])
    try:
        prompt = question["prompt"]
        text = _generated(runtime, engine, prompt, question["n_tokens"])
        return {
            "version": versions()[NAME],
            "text": text,
            "tokens": engine.tokenize(prompt + text)[len(engine.tokenize(prompt)) :],
            "rendered": _rendered(engine, question["messages"]),
            "ids": [list(engine.tokenize(text)) for text in question["texts"]],
            "peak_bytes": peak_bytes(),
        }
    finally:
        engine.close()


def _generated(runtime: Any, engine: Any, prompt: str, n_tokens: int) -> str:
    greedy = runtime.SamplerConfig(top_k=1)
    session = engine.create_session(apply_prompt_template=False, sampler_config=greedy, max_output_tokens=n_tokens)
    try:
        session.run_prefill([prompt])
        return str(session.run_decode().texts[0])
    finally:
        session.close()


def _rendered(engine: Any, messages: list[dict[str, str]] | None) -> list[str] | None:
    """What the template makes of the first message, of the first two, and so on; "" where it fails."""
    if messages is None:
        return None
    found = []
    for index, message in enumerate(messages):
        conversation = engine.create_conversation(messages=messages[:index])
        try:
            found.append(conversation.render_message_to_string(message))
        finally:
            conversation.close()
    return found
