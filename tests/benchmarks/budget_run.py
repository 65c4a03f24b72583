"""One load within a budget and an answer that fills its context, for check_budget.py; reads a Job as JSON from stdin.

Prints one JSON line: what was planned and taken, the tokens, what was told; or the error and its exit code.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from dataclasses import dataclass
from typing import Any

N_TOKENS, MOST_PROMPT = 24, 4096  # of an answer and of its prompt


@dataclass(frozen=True)
class Job:
    """path: of the model.  options: of `load`.  with_least: find out first what it needs at least.
    loads: False for that alone.
    """

    path: str
    options: dict[str, Any]
    with_least: bool = False
    loads: bool = True


def run(job: Job) -> dict[str, Any]:
    import edgeinfer
    from edgeinfer.common.errors import EdgeInferError

    least = {"least": least_of(job)} if job.with_least else {}
    if not job.loads:
        return least
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            engine = edgeinfer.load(job.path, **job.options)
        except EdgeInferError as error:
            return {"error": str(error), "exit_code": error.exit_code}
    with engine:
        return {**answered(engine), **least, "notes": [str(one.message) for one in caught]}


def least_of(job: Job) -> int:
    """Bytes that a load needs at least, as its refusal says it."""
    from edgeinfer.common.errors import BudgetExceeded
    from edgeinfer.loading.options import LoadOptions
    from edgeinfer.loading.plan import plan_load
    from edgeinfer.models.gguf import ModelFile

    with ModelFile.open(job.path) as file:
        try:
            plan_load(file, LoadOptions(**{**job.options, "budget": 1}))
        except BudgetExceeded as error:
            found = re.search(r"needs at least ([\d.]+) ([KMG]iB)", str(error))
            assert found is not None, error
            return round((float(found[1]) + 0.1) * {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[found[2]])
    raise AssertionError("a budget of one byte was enough")


def answered(engine: Any) -> dict[str, Any]:
    """Two answers, the first of which fills the context."""
    words = engine.tokenize("one and then there is the other, hello world ")
    prompt = (words * (engine.n_ctx // len(words) + 1))[: max(1, min(engine.n_ctx - N_TOKENS, MOST_PROMPT))]
    tokens = []
    for text in (prompt, words[:20]):
        completion = engine.generate(text, max_tokens=N_TOKENS, temperature=0.8, seed=7, loop_guard=0)
        tokens.append(list(completion.tokens))
    memory = engine.memory
    return {"planned": memory.peak, "taken": memory.taken, "peak_taken": memory.peak_taken, "tokens": tokens}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(json.dumps(run(Job(**json.load(sys.stdin)))))
