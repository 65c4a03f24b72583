"""A package for ExecuTorch in its runtime, against the model that it was made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.common.errors import ModelFileError
from edgeinfer.common.files import temporary_folder, utf8_name
from edgeinfer.exporters.checks.runtime import GreedyRun, answer_tokens, compare_logits, run_greedily
from edgeinfer.exporters.checks.runtime_process import ask_runtime
from edgeinfer.exporters.divergence import distance
from edgeinfer.exporters.tokenizer_json import probes_of
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

RUNTIME = "edgeinfer.exporters.pte.library"  # the module that is asked
_MAX_DIVERGENCE = 1.0  # of weights rounded to 4 bits: more is another model


def check_package(file: ModelFile, folder: Path, n_ctx: int, four_bits: bool) -> tuple[str, dict[str, Any], int | None]:
    """Run a package against its source; gives a sentence, facts for the manifest, and the most memory that it took.

    four_bits: whether its weights were rounded again.  Raises ModelFileError where it is another model, where a text is
    cut into other tokens, and where ExecuTorch refuses it; BackendUnavailable without ExecuTorch.
    """
    tokenizer = Tokenizer.from_file(file)
    run = run_greedily(file, answer_tokens(file, n_ctx))
    with temporary_folder() as scratch, utf8_name(folder) as place:
        logits = scratch / "logits.npy"
        question = {
            "do": "run",
            "folder": str(place),
            "prompt": run.prompt,
            "tokens": run.forced,
            "text": run.text,
            "texts": probes_of(file),
            "logits": str(logits),
        }
        found = ask_runtime(RUNTIME, question, "ExecuTorch")
        rows = np.load(logits)
    runtime = f"ExecuTorch {found['version']}"
    compare = _compare_rounded if four_bits else compare_logits
    said, figures = compare(run, rows, runtime)
    _check_texts(file, tokenizer, found, runtime)
    text, answer = tokenizer.decode(run.tokens, skip_special=True), found["answer"]
    same_text = None if answer is None else answer.startswith(text)
    return said, {"checked_in": runtime, "same_text_from_runner": same_text, **figures}, found["peak_bytes"]


def _compare_rounded(run: GreedyRun, rows: Any, runtime: str) -> tuple[str, dict[str, float]]:
    """As compare_logits, of weights that were rounded again: only another model is an error."""
    loss = distance(run.logits, rows).divergence
    n_equal = int(np.sum(rows.argmax(axis=1) == np.array(run.forced)))
    said = f"{n_equal} of {len(rows)} greedy tokens equal the source in {runtime}, KL divergence {loss:.2g}"
    if not loss <= _MAX_DIVERGENCE:
        raise ModelFileError(f"the package gives another text than its source: {said}; nothing was written")
    return f"{said} (weights rounded again to 4 bits)", {"n_equal_tokens": n_equal, "kl_divergence": loss}


def _check_texts(file: ModelFile, tokenizer: Tokenizer, found: Mapping[str, Any], runtime: str) -> None:
    """Raises ModelFileError where a text is cut into tokens otherwise than the file says."""
    for text, ids in zip(probes_of(file), found["ids"], strict=True):
        wanted = tokenizer.encode(text, parse_special=True, add_special=False)
        if ids != wanted:
            raise ModelFileError(
                f"{file.path}: {runtime} cuts {text!r:.60} into other tokens: wanted {wanted[:40]}, found {ids[:40]}; "
                "nothing was written"
            )
