"""Answers of an engine with an expert cache whose reads may fail: each is a text, or ends with an error.

Run: python try_answers.py MODEL CACHE N. Prints a line of JSON for each of N answers: {"text": ...} or {"error": ...,
"before": the text up to there}.
"""

from __future__ import annotations

import json
import sys

import edgeinfer
from edgeinfer.common.errors import ExpertReadError


def answer(engine: edgeinfer.Engine) -> dict[str, str]:
    """See the module."""
    text = ""
    try:
        for piece in engine.stream("ab", max_tokens=12, temperature=0.0, loop_guard=0):
            text += piece.text
    except ExpertReadError as error:
        return {"error": str(error), "before": text}
    return {"text": text}


if __name__ == "__main__":
    with edgeinfer.load(sys.argv[1], expert_cache=sys.argv[2], n_ctx=64, n_threads=1, draft="none") as loaded:
        for _ in range(int(sys.argv[3])):
            print(json.dumps(answer(loaded)), flush=True)
