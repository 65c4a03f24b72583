"""lm-eval's `local-completions` on `edgeinfer serve`: its sums of log probabilities against those of Engine.score.

    python tests/benchmarks/judge_lm_eval.py [MODEL.gguf] [--pairs 60]

lm-eval must be importable. Beginnings and ends of sentences of everyday.txt are scored by lm-eval over HTTP, with the
server's tokenizer (tokenizer_backend=remote), as its tasks with choices do it. One JSON line on stdout; exits with 1 if
a sum or a verdict on greediness differs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from bench_server import free_port, model_of, running
from machine import machine

import edgeinfer
from edgeinfer.library.local import default_model

_OPTIONS: dict[str, Any] = {"n_ctx": 4096, "n_threads": 2, "draft": "none"}


def _pairs(n: int) -> list[tuple[str, str]]:
    """Beginnings and ends of texts, cut between two words at another place each time."""
    texts = Path(__file__).with_name("everyday.txt").read_text(encoding="utf-8").splitlines()
    found = []
    for number, text in enumerate([text for text in texts if len(text.split()) > 6][:n]):
        words = text.split()
        at = 2 + number % (len(words) - 3)
        found.append((" ".join(words[:at]), " " + " ".join(words[at:])))
    return found


def _by_lm_eval(port: int, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
    """(sum of the log probabilities, whether each token was the most probable one) of each end."""
    models = importlib.import_module("lm_eval.models.openai_completions")
    instance = importlib.import_module("lm_eval.api.instance").Instance
    model = models.LocalCompletionsAPI(
        base_url=f"http://127.0.0.1:{port}/v1/completions",
        model=model_of(port),
        tokenizer_backend="remote",
        num_concurrent=4,
        max_retries=1,
    )
    asked = [instance(request_type="loglikelihood", doc={}, arguments=pair, idx=at) for at, pair in enumerate(pairs)]
    return [(float(total), bool(is_greedy)) for total, is_greedy in model.loglikelihood(asked, disable_tqdm=True)]


@click.command()
@click.argument("path", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--pairs", "n_pairs", default=60, show_default=True)
def main(path: Path | None, n_pairs: int) -> None:
    """See the top of this file."""
    path, port, pairs = default_model() if path is None else path, free_port(), _pairs(n_pairs)
    options = f"-m edgeinfer serve -q --port {port} -t 2 -c 4096 -np 4 --drafter none -m"
    with running([sys.executable, *shlex.split(options), str(path)], port):
        theirs = _by_lm_eval(port, pairs)
    with edgeinfer.load(path, **_OPTIONS) as engine:
        ours = [engine.score(begin, [end])[0] for begin, end in pairs]
    differ = [
        {"text": pair, "lm_eval": total, "engine": score.logprob}
        for pair, (total, is_greedy), score in zip(pairs, theirs, ours, strict=True)
        if total != score.logprob or is_greedy != score.is_greedy
    ]
    report = {"model": path.name, "lm_eval": importlib.metadata.version("lm_eval"), "pairs": len(pairs)}
    report |= {"equal": len(pairs) - len(differ), "tokens": sum(len(score.tokens) for score in ours)}
    report |= {"greedy": sum(score.is_greedy for score in ours), "differ": differ, "machine": machine()}
    print(json.dumps(report))
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
