"""A package in ONNX Runtime GenAI, in a process of its own; no other file imports that library."""

from __future__ import annotations

import importlib
import importlib.util
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import BackendUnavailable
from edgeinfer.exporters.checks.runtime_process import peak_bytes

WANTED = "onnxruntime-genai 0.18.0"  # what the packages need at least: drafts came with it


def check_installed() -> None:
    """Raises BackendUnavailable where the library is missing."""
    if importlib.util.find_spec("onnxruntime_genai") is None:
        raise BackendUnavailable(
            "the check of a package needs onnxruntime-genai: pip install 'edgeinfer[genai]', or --no-check"
        )


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Run a package: question has folder, prompt and tokens (ids), n_ctx, messages or None, texts, and logits, a file.

    Gives version, answer (ids), rendered (the messages by the template), ids of each text, n_passes and n_accepted of
    drafting, peak_bytes; or the error. The file gets the logits that follow the prompt and each token but the last,
    (len(tokens), n_vocab) float32.
    """
    library = importlib.import_module("onnxruntime_genai")
    library.disable_telemetry_events()
    try:
        return _run(library, question)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}


def _run(library: Any, question: dict[str, Any]) -> dict[str, Any]:
    model = library.Model(question["folder"])
    tokenizer = library.Tokenizer(model)
    messages, rendered = question["messages"], None
    if messages is not None:
        rendered = tokenizer.apply_chat_template(messages=json.dumps(messages), add_generation_prompt=True)
    found, stats = _answer(library, model, question)
    np.save(question["logits"], _logits(library, model, question))
    return {
        "version": library.__version__,
        "answer": found,
        "rendered": rendered,
        "ids": [[int(id) for id in tokenizer.encode(text)] for text in question["texts"]],
        "n_passes": int(stats["target_forward_passes"]) + int(stats["standard_fallback_steps"]),
        "n_accepted": stats["draft_tokens_accepted"],
        "peak_bytes": peak_bytes(),
    }


def _answer(library: Any, model: Any, question: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Greedy tokens behind the prompt, without one that ends the answer, and what drafting came to."""
    generator, n_made = _generator(library, model, question), 0
    while not generator.is_done() and n_made < len(question["tokens"]):
        generator.generate_next_token()
        n_made += 1
    sequence = [int(id) for id in generator.get_sequence(0)]
    return sequence[len(question["prompt"]) :], generator.get_speculative_stats()


def _logits(library: Any, model: Any, question: dict[str, Any]) -> NDArray[np.float32]:
    generator = _generator(library, model, question)
    rows = []
    for token in question["tokens"]:
        logits = generator.get_logits()
        rows.append(np.array(logits, np.float32).reshape(-1, logits.shape[-1])[-1])
        generator.append_tokens([token])
    return np.stack(rows)


def _generator(library: Any, model: Any, question: dict[str, Any]) -> Any:
    """A generator without sampling, behind the prompt, with caches for the whole context."""
    params = library.GeneratorParams(model)
    params.set_search_options(do_sample=False, repetition_penalty=1.0, max_length=question["n_ctx"])
    generator = library.Generator(model, params)
    generator.append_tokens(question["prompt"])
    return generator
