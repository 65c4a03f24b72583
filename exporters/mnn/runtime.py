"""A package in MNN, in a process of its own; no other file imports that library."""

from __future__ import annotations

import importlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.exporters.checks.runtime_process import peak_bytes

MIN_RUNTIME = "MNN 3.6.1"  # what the packages were run with


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Run a package: question has folder, prompt and tokens (ids), message or None, texts, n_threads, and logits,
    a file.

    Gives version, answer (ids), rendered (the message by the template), ids of each text, peak_bytes; or the error. The
    file gets the logits that follow the prompt and each token but the last, (len(tokens), n_vocab) float32.
    """
    try:
        library = importlib.import_module("MNN.llm")
        return _run(library, question)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}


def _run(library: Any, question: dict[str, Any]) -> dict[str, Any]:
    config = Path(question["folder"]) / "config.json"
    changed = config.with_name("check.json")
    here = {
        "sampler_type": "greedy",
        "thread_num": question["n_threads"],
    }  # more threads than cores wait for each other
    changed.write_text(json.dumps(json.loads(config.read_text()) | here))
    try:
        model = library.create(str(changed))
        model.load()
    finally:
        changed.unlink()
    message = question["message"]
    found = {
        "version": version("MNN"),
        "rendered": None if message is None else model.apply_chat_template(message),
        "ids": [[int(id) for id in model.tokenizer_encode(text)] for text in question["texts"]],
        # Its method of Python leaves out the number of tokens, which then is 0.
        "answer": [int(id) for id in model._c_obj.generate(question["prompt"], len(question["tokens"]))],
    }
    model.reset()
    np.save(question["logits"], _logits(model, question))
    return {**found, "peak_bytes": peak_bytes()}


def _logits(model: Any, question: dict[str, Any]) -> NDArray[np.float32]:
    rows, given = [], question["prompt"]
    for token in question["tokens"]:
        logits = np.array(model.forward(given).read(), np.float32)
        rows.append(logits.reshape(-1, logits.shape[-1])[-1])
        given = [token]
    return np.stack(rows)
