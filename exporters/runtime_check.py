"""Whether a package gives the text of its source in the runtime that it is for."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer import devices
from edgeinfer.backends.driver_probe import interpreter
from edgeinfer.backends.native import NativeBackend
from edgeinfer.errors import BackendUnavailable, ModelFileError
from edgeinfer.models import read_spec
from edgeinfer.models.chat_template import ChatTemplate
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.types import Device

# On most models no two tokens of the answer are nearly as likely.
MESSAGES = [{"role": "user", "content": "Write the numbers from 1 to 30, one on each line."}]
_PLAIN = "The numbers from 1 to 30, one on each line:\n1\n2\n3\n"
N_TOKENS, N_EQUAL, TIE = 32, 24, 0.05
_PATIENCE_SECONDS = 1800


@dataclass(frozen=True)
class GreedyRun:
    """What the native engine makes of a prompt without sampling, from the most likely token on.

    text, prompt: of the prompt, and its ids.  tokens: what follows, without a token that ends the answer.  logits:
    (len(tokens) + 1, n_vocab), those behind the prompt and behind each token; the last row is missing where the answer
    was not over.  stops: ids of tokens that end it.
    """

    text: str
    prompt: list[int]
    tokens: list[int]
    logits: NDArray[np.float32]
    stops: frozenset[int]


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


def run_greedily(file: ModelFile, n_tokens: int = N_TOKENS, template: str | None = None) -> GreedyRun:
    """Run the native engine on check_prompt. Raises UnsupportedModel, BackendUnavailable, TemplateError."""
    text, prompt = check_prompt(file, template)
    stops = Tokenizer.from_file(file).stop_ids
    backend, spec, n_ctx = NativeBackend(tuned=False), read_spec(file), len(prompt) + n_tokens
    n_threads = devices.default_n_threads()
    model = backend.load(file, spec, backend.plan(file, spec, n_ctx, n_threads=n_threads), Device(n_threads))
    tokens: list[int] = []
    rows: list[NDArray[np.float32]] = []
    try:
        session = model.session()
        given = prompt
        while len(tokens) < n_tokens:
            rows.append(np.array(session.forward(np.array(given, np.int32)).logits[-1]))
            token = int(rows[-1].argmax())
            if token in stops:
                break
            tokens.append(token)
            session.commit(range(len(given)))
            given = [token]
    finally:
        model.close()
    return GreedyRun(text, prompt, tokens, np.stack(rows), stops)


def compare_tokens(run: GreedyRun, found: Sequence[int], runtime: str) -> str:
    """A sentence for Result.check. found: the tokens that a runtime gave, without one that ends the answer.

    Raises ModelFileError where fewer than N_EQUAL are those of the source and the first other one is no tie, whose
    logits are TIE apart or less.
    """
    n_equal = next((i for i, (a, b) in enumerate(zip(run.tokens, found, strict=False)) if a != b), None)
    if n_equal is None and len(found) == len(run.tokens):
        return f"{len(found)} of {len(run.tokens)} greedy tokens equal the source in {runtime}"
    n_equal = min(len(found), len(run.tokens)) if n_equal is None else n_equal
    apart = _apart(run, n_equal, found)
    said = (
        f"{n_equal} of {len(run.tokens)} greedy tokens equal the source in {runtime}, then comes another, "
        f"{apart:.3f} below in the logits"
    )
    if n_equal < N_EQUAL and apart > TIE:
        raise ModelFileError(f"the package gives another text than its source: {said}; nothing was written")
    return said


def _apart(run: GreedyRun, at: int, found: Sequence[int]) -> float:
    """How far the token that a runtime took is below that of the source; infinite where the source took no more."""
    if at >= len(run.logits):
        return float("inf")
    row = run.logits[at]
    taken = row[found[at]] if at < len(found) else max(row[id] for id in run.stops)
    return float(row.max() - taken)


def divergence(run: GreedyRun, rows: NDArray[np.float32]) -> float:
    """Mean Kullback-Leibler divergence of a runtime's next tokens from the source's, in nats, over the same tokens.

    rows: (n, n_vocab) logits of the runtime, those of run.logits in order, as far as its tokens are the same.
    """
    n = min(len(rows), len(run.logits))
    ours, theirs = (_log_softmax(np.asarray(each[:n], np.float64)) for each in (run.logits, rows))
    return float(np.mean(np.sum(np.exp(ours) * (ours - theirs), axis=1)))


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def ask_runtime(module: str, question: Mapping[str, Any], runtime: str) -> dict[str, Any]:
    """What answer(question) of a module gives in a process of its own, which a runtime that crashes ends alone.

    Both are JSON; the answer is the last line on stdout. An answer {"missing": reason} raises BackendUnavailable,
    {"error": reason}, a crash and an answer that does not come raise ModelFileError.
    """
    program = f"import json, sys, {module} as asked; print(json.dumps(asked.answer(json.load(sys.stdin))))"
    command = [interpreter(), "-P", "-c", program]
    try:
        run = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=_PATIENCE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ModelFileError(f"{runtime} did not answer within {_PATIENCE_SECONDS} s: nothing was written") from None
    if run.returncode or not run.stdout.strip():
        words = " ".join(run.stderr.split())[-400:] or "without a word"
        raise ModelFileError(f"{runtime} ended with exit code {run.returncode} on the package: {words}")
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    if "missing" in found:
        raise BackendUnavailable(str(found["missing"]))
    if "error" in found:
        raise ModelFileError(f"{runtime} refuses the package: {found['error']}")
    return found


def peak_bytes() -> int | None:
    """Most memory that this process has had at once; None where the system does not say."""
    try:
        with open("/proc/self/status") as status:
            kib = next(line.split()[1] for line in status if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None
    return int(kib) << 10
