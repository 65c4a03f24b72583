"""A package in ONNX Runtime GenAI, in a process of its own; no other file imports that library."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import BackendUnavailable
from edgeinfer.exporters.runtime_check import peak_bytes

WANTED = "onnxruntime-genai 0.18.0"  # what the packages need at least: drafts came with it


def check_installed() -> None:
    """Raises BackendUnavailable where the library is missing."""
    if importlib.util.find_spec("onnxruntime_genai") is None:
        raise BackendUnavailable(
            "the check of a package needs onnxruntime-genai: pip install 'edgeinfer[genai]', or --no-check"
        )


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Run a package: question has folder, prompt (ids), n_tokens, n_ctx, messages or None, texts, and logits: a file.

    Gives version, tokens, rendered (the messages by the template), ids of each text, n_passes of the target where it
    drafts, peak_bytes; or the error. Without drafts the file gets the logits of each token, (n, n_vocab) float32.
    """
    library = importlib.import_module("onnxruntime_genai")
    library.disable_telemetry_events()
    try:
        return _run(library, question)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}


def _run(library: Any, question: dict[str, Any]) -> dict[str, Any]:
    folder = question["folder"]
    model = library.Model(folder)
    tokenizer = library.Tokenizer(model)
    messages, rendered = question["messages"], None
    if messages is not None:
        rendered = tokenizer.apply_chat_template(messages=json.dumps(messages), add_generation_prompt=True)
    drafts = "speculative" in json.loads((Path(folder) / "genai_config.json").read_text())
    tokens, stats = _generated(library, model, question, None if drafts else question["logits"])
    return {
        "version": library.__version__,
        "tokens": tokens,
        "rendered": rendered,
        "ids": [[int(id) for id in tokenizer.encode(text)] for text in question["texts"]],
        "n_passes": _passes(stats) if drafts else None,
        "n_accepted": stats["draft_tokens_accepted"] if drafts else None,
        "peak_bytes": peak_bytes(),
    }


def _generated(
    library: Any, model: Any, question: dict[str, Any], logits: str | None
) -> tuple[list[int], dict[str, Any]]:
    """Greedy tokens behind a prompt, without one that ends the answer, and what drafting came to."""
    prompt, n_tokens = question["prompt"], question["n_tokens"]
    params = library.GeneratorParams(model)
    params.set_search_options(do_sample=False, repetition_penalty=1.0, max_length=question["n_ctx"])
    generator = library.Generator(model, params)
    generator.append_tokens(prompt)
    rows = []
    n_made = 0
    while not generator.is_done() and n_made < n_tokens:
        if logits is not None:
            rows.append(np.array(generator.get_logits(), np.float32).reshape(-1, generator.get_logits().shape[-1])[-1])
        generator.generate_next_token()
        n_made += 1
    if logits is not None:
        np.save(logits, np.stack(rows))
    sequence = [int(id) for id in generator.get_sequence(0)]
    return sequence[len(prompt) :], generator.get_speculative_stats()


def _passes(stats: dict[str, Any]) -> int:
    """Passes of the target behind the prompt: those of rounds, and the steps without a draft."""
    return int(stats["target_forward_passes"]) + int(stats["standard_fallback_steps"])
