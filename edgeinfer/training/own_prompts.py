"""Prompts that the target writes itself: it continues the chat template from where a person's message begins.

A model that was tuned on conversations then writes a message like those it was tuned on (Magpie, arXiv:2406.08464).
They are more varied than published lists of questions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from edgeinfer.backends.checks import common_length
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.common.files import write_whole
from edgeinfer.engine import Engine
from edgeinfer.sampling import SamplingParams
from edgeinfer.training.corpus import Author, Report
from edgeinfer.training.prompts import Prompt, read_prompts

CATEGORY = "own"
MOST_TRIES = 4  # messages that are begun per requested prompt; some do not end, or come twice
SHORTEST = 8  # characters
_CONTENTS = "Alpha", "9 of them", "(where"  # of messages, which begin with different tokens


def own_prompts(path: Path, engine: Engine, author: Author, n: int, seed: int, report: Report) -> list[Prompt]:
    """n prompts, each once, kept in a file. Raises InvalidArgument if the model ends too few messages."""
    if path.exists():
        return read_prompts(path)
    begin, stops = message_begin(engine), engine.tokenizer.stop_ids
    drawn = SamplingParams(temperature=1.0, top_k=0, top_p=0.95, min_p=0.02)
    found: dict[Prompt, None] = {}
    for first in range(0, MOST_TRIES * n, author.n_prompts):
        params = [
            drawn.changed({"seed": Prompt((str(number),)).number("own", seed)})
            for number in range(first, first + author.n_prompts)
        ]
        for tokens in author.continued([begin] * author.n_prompts, params):
            if tokens and tokens[-1] in stops:
                text = engine.detokenize(tokens, skip_special=True).strip()
                if len(text) >= SHORTEST:
                    found.setdefault(Prompt((text,), CATEGORY))
        report(f"own prompts: {len(found):,}", min(1.0, len(found) / n))
        if len(found) >= n:
            break
    if len(found) < n:
        raise InvalidArgument(
            f"{engine.name} must write {n} prompts: found {len(found)} that ended and differ, of {MOST_TRIES * n} "
            "messages that it began; request fewer by --own-prompts"
        )
    prompts = list(found)[:n]
    lines = [json.dumps({"turns": prompt.turns, "category": prompt.category}) for prompt in prompts]
    write_whole(path, ("\n".join(lines) + "\n").encode())
    return prompts


def message_begin(engine: Engine) -> list[int]:
    """The tokens of the template up to where the first message of a person begins."""
    texts: Sequence[list[int]] = [
        engine.template.encode(engine.tokenizer, [{"role": "user", "content": content}], add_generation_prompt=False)
        for content in _CONTENTS
    ]
    return texts[0][: min(common_length(texts[0], text) for text in texts[1:])]
