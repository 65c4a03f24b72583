"""Whether a package gives the text of its source in the runtime that it is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.native import NativeBackend
from edgeinfer.common import devices
from edgeinfer.common.errors import InvalidArgument, ModelFileError, NumericalError
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.exporters.calibration.running import check_logits
from edgeinfer.exporters.checks.runtime_process import ask_runtime as ask_runtime
from edgeinfer.exporters.checks.runtime_process import peak_bytes as peak_bytes
from edgeinfer.exporters.divergence import distance
from edgeinfer.models import read_spec
from edgeinfer.models.chat_template import ChatTemplate
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

# On most models no two tokens of the answer are nearly as likely.
MESSAGES = [{"role": "user", "content": "Write the numbers from 1 to 30, one on each line."}]
_PLAIN = "The numbers from 1 to 30, one on each line:\n1\n2\n3\n"
N_TOKENS = 32
# Up to here a package is taken for the same model: a runtime rounds activations and sums in its own ways.
_MAX_APART, _MAX_DIVERGENCE, TIE = 0.5, 0.02, 0.05


def minimum_runtime(wanted: str) -> dict[str, str]:
    """For the manifest: what a package needs at least. wanted: a name and a version."""
    return dict(zip(("name", "at_least"), wanted.split(), strict=True))


@dataclass(frozen=True)
class GreedyRun:
    """What the native engine makes of a prompt without sampling.

    text, prompt: of the prompt, and its ids.  tokens: the most likely ones behind it, without one that ends the answer.
    forced: the same, and those behind the end, up to the number that was wanted.  logits: (len(forced), n_vocab)
    float32, those that each token was chosen by.
    """

    text: str
    prompt: list[int]
    tokens: list[int]
    forced: list[int]
    logits: NDArray[np.float32]


def check_prompt(file: ModelFile, template: str | None = None) -> tuple[str, list[int]]:
    """MESSAGES as the chat template writes them, or a plain text where there is none, and the ids.

    template: in place of the file's own. Raises TemplateError.
    """
    tokenizer = Tokenizer.from_file(file)
    if template is None and tokenizer.chat_template is None:
        return _PLAIN, tokenizer.encode(_PLAIN)
    names = [tokenizer.name(id) if id is not None else "" for id in (tokenizer.bos_id, tokenizer.eos_id)]
    chat = ChatTemplate.from_file(file, tokenizer) if template is None else ChatTemplate(template, *names)
    return chat.render(MESSAGES), chat.encode(tokenizer, MESSAGES)


def answer_tokens(file: ModelFile, n_ctx: int, spare: int = 0) -> int:
    """Tokens of the answer that a check compares in a context: N_TOKENS, or as many as the prompt leaves room for.

    spare: positions that a runtime needs beyond them. Raises InvalidArgument with the least context, TemplateError.
    """
    n_taken = len(check_prompt(file)[1]) + spare
    if n_ctx <= n_taken:
        raise InvalidArgument(
            f"the prompt of the check does not fit into {n_ctx} tokens (-c): take at least {n_taken + 1}, or --no-check"
        )
    return min(N_TOKENS, n_ctx - n_taken)


def run_greedily(file: ModelFile, n_tokens: int = N_TOKENS, template: str | None = None) -> GreedyRun:
    """Run the native engine on check_prompt.

    Raises UnsupportedModel, BackendUnavailable, TemplateError, NumericalError.
    """
    text, prompt = check_prompt(file, template)
    stops = Tokenizer.from_file(file).stop_ids
    backend, spec, n_ctx = NativeBackend(tuned=False), read_spec(file), len(prompt) + n_tokens
    n_threads = devices.default_n_threads()
    plan = backend.plan(file, spec, LoadSettings(n_ctx, n_threads=n_threads))
    model = backend.load(file, spec, plan, Device(n_threads))
    tokens: list[int] = []
    rows: list[NDArray[np.float32]] = []
    try:
        session = model.session()
        given = prompt
        for _ in range(n_tokens):
            rows.append(np.array(check_logits(session.forward(np.array(given, np.int32)).logits)[-1]))
            session.commit(range(len(given)))
            given = [int(rows[-1].argmax())]
            tokens += given
    except NumericalError as error:
        raise NumericalError(f"{file.path}: {error}") from error
    finally:
        model.close()
    n_answer = next((i for i, token in enumerate(tokens) if token in stops), n_tokens)
    return GreedyRun(text, prompt, tokens[:n_answer], tokens, np.stack(rows))


def compare_tokens(run: GreedyRun, found: Sequence[int], runtime: str) -> str:
    """A sentence about the answer that a runtime gave of itself, for Result.check. found: without what ends it.

    Raises ModelFileError where another token follows that is no tie, whose logits are _MAX_APART apart or less, and
    where there is nothing to compare.
    """
    wanted = run.tokens
    if not wanted and not found:
        raise ModelFileError(
            f"the check has compared nothing: the answer of the source to {run.text!r:.60} ends at its first token, "
            f"and so does that of {runtime}; nothing was written; --no-check writes it unchecked"
        )
    n_equal = next((i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), None)
    if n_equal is None and len(found) == len(wanted):
        return f"{len(found)} of {len(wanted)} greedy tokens equal the source in {runtime}"
    n_equal = min(len(found), len(wanted)) if n_equal is None else n_equal
    row = run.logits[min(n_equal, len(run.logits) - 1)]
    apart = float(row.max() - row[found[n_equal]]) if n_equal < len(found) else 0.0
    said = f"{n_equal} of {len(wanted)} greedy tokens equal the source in {runtime}, the next is {apart:.3f} below"
    if apart > _MAX_APART or n_equal == len(found):
        raise ModelFileError(f"the package gives another text than its source: {said}; nothing was written")
    return said


def compare_logits(run: GreedyRun, rows: NDArray[np.float32], runtime: str) -> tuple[str, dict[str, float]]:
    """A sentence about the logits behind the tokens of the source, and figures.

    rows: (len(run.forced), n_vocab) of a runtime, which was given run.forced one by one.
    Raises ModelFileError where they are those of another model.
    """
    chosen = rows.argmax(axis=1)
    others = [i for i, (a, b) in enumerate(zip(chosen, run.forced, strict=True)) if a != b]
    apart = max((float(run.logits[i].max() - run.logits[i, chosen[i]]) for i in others), default=0.0)
    loss = distance(run.logits, rows).divergence
    n_equal = len(chosen) - len(others)
    said = f"{n_equal} of {len(chosen)} greedy tokens equal the source in {runtime}, KL divergence {loss:.2g}"
    if others:
        said += f", the other{'s' if len(others) > 1 else ''} at most {apart:.3f} below in the logits"
    if apart > _MAX_APART or not loss <= _MAX_DIVERGENCE:
        raise ModelFileError(f"the package gives another text than its source: {said}; nothing was written")
    return said, {"n_equal_tokens": n_equal, "kl_divergence": loss, "most_apart": apart}
