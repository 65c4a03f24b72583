"""What a draft model gains and loses with logits for fewer tokens (`edgeinfer export --draft-vocab`).

    python tests/benchmarks/bench_draft_vocab.py TARGET.gguf DRAFT.gguf [DRAFT.gguf ...] --prompts FILE.jsonl
        [--every 8] [--answer 64] [--rounds 40] [--texts FILE.json] [--whole]

The target answers every 8th prompt greedily; each draft model reads prompt and answer as it is loaded for drafts.
accepted: share of the answers' tokens that are the draft model's most likely ones.  known: share that has logits.
ms: median of passes of one token behind 256 others, the models by turns.  --texts: keeps the target's answers.
--whole: the first draft model again, with logits for all tokens, which it never has when it drafts. One JSON line on
stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from edgeinfer.backends.native import NativeBackend, weights
from edgeinfer.backends.native.model import NativeModel
from edgeinfer.common import devices
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.exporters.calibration.running import greedy_tokens, native_model
from edgeinfer.models import read_draft_spec
from edgeinfer.models.chat_template import ChatTemplate
from edgeinfer.models.draft_vocab import draft_vocab_of
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

Text = tuple[list[int], list[int]]  # prompt and answer
N_PAST, MOST_PROMPT = 256, 512


def answered(path: Path, lines: list[dict[str, Any]], n_answer: int) -> list[Text]:
    """Prompts with the target's greedy answers, as tokens."""
    with ModelFile.open(path) as file:
        tokenizer = Tokenizer.from_file(file)
        chat = ChatTemplate.from_file(file, tokenizer)
        asked = [chat.encode(tokenizer, [{"role": "user", "content": line["turns"][0]}]) for line in lines]
        asked = [prompt for prompt in asked if len(prompt) <= MOST_PROMPT]
        with native_model(file, MOST_PROMPT + n_answer) as model:
            answers = greedy_tokens(model, asked, n_answer, tokenizer.stop_ids)
    return list(zip(asked, answers, strict=True))


def opened(path: Path, most_logits: int = weights.DRAFT_TOKENS) -> tuple[NativeModel, np.ndarray]:
    """A draft model as it drafts, and its tokens by row of logits."""
    weights.DRAFT_TOKENS = most_logits
    with ModelFile.open(path) as file:
        spec, n_threads = read_draft_spec(file), devices.default_n_threads()
        backend = NativeBackend(for_drafts=True, resident=True)
        model = backend.load(
            file,
            spec,
            backend.plan(file, spec, LoadSettings(1024, n_batch=128, n_threads=n_threads)),
            Device(n_threads),
        )
        ids = draft_vocab_of(file, spec.n_vocab)
    return model, np.arange(model.spec.n_logits) if ids is None else ids


def agreement(model: NativeModel, ids: np.ndarray, texts: list[Text]) -> dict[str, float]:
    """How many tokens of the answers a draft model would have drafted."""
    right = known = n = 0
    for prompt, answer in texts:
        session, tokens, found = model.session(1024), [*prompt, *answer[:-1]], []
        for first in range(0, len(tokens), 128):
            piece = tokens[first : first + 128]
            found.append(ids[session.forward(piece, logits="all").logits.argmax(axis=1)])
            session.commit(range(len(piece)))
        session.close()
        right += int(np.sum(np.concatenate(found)[len(prompt) - 1 :] == answer))
        known += int(np.isin(answer, ids).sum())
        n += len(answer)
    return {"accepted": round(right / n, 4), "known": round(known / n, 4), "tokens": n}


def milliseconds(models: list[NativeModel], rounds: int) -> list[list[float]]:
    """Of passes of one token, the models by turns."""
    sessions = [model.session(N_PAST + rounds + 8) for model in models]
    for session in sessions:
        for first in range(0, N_PAST, 128):
            session.forward([7 + n % 1000 for n in range(first, first + 128)])
            session.commit(range(128))
    times: list[list[float]] = [[] for _ in models]
    for n in range(rounds):
        for place in range(len(models)):
            which = (place + n) % len(models)
            started = time.perf_counter()
            sessions[which].forward([100 + n])
            times[which].append(1e3 * (time.perf_counter() - started))
            sessions[which].commit([0])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafts", type=Path, nargs="+")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--texts", type=Path, help="Keeps the target's answers.")
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    held = lines[:: arguments.every]
    if arguments.texts is not None and arguments.texts.exists():
        texts = [tuple(text) for text in json.loads(arguments.texts.read_text())]
    else:
        texts = answered(arguments.target, held, arguments.answer)
        if arguments.texts is not None:
            arguments.texts.write_text(json.dumps(texts))
    models = [opened(path) for path in arguments.drafts]
    if arguments.whole:
        arguments.drafts.insert(0, arguments.drafts[0])
        models.insert(0, opened(arguments.drafts[0], most_logits=1 << 30))
    times = milliseconds([model for model, _ in models], arguments.rounds)
    results = [
        {
            "draft": path.name,
            "logits": len(ids),
            "weight_bytes": model.memory().weights,
            "ms": round(statistics.median(of_model), 3),
            "ms_quartiles": [round(each, 3) for each in statistics.quantiles(of_model, n=4)[::2]],
            **agreement(model, ids, texts),
        }
        for path, (model, ids), of_model in zip(arguments.drafts, models, times, strict=True)
    ]
    ask, here = ["git", "rev-parse", "--short", "HEAD"], Path(__file__).parent
    commit = subprocess.run(ask, capture_output=True, text=True, cwd=here).stdout.strip()
    facts = {"target": arguments.target.name, "prompts": len(texts), "machine": machine(), "commit": commit}
    print(json.dumps({"benchmark": "bench_draft_vocab", **facts, "drafts": results}))


if __name__ == "__main__":
    main()
