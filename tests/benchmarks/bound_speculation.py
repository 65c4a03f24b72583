"""Upper bounds for speculation: the same drafters, with a policy that knows the future text.

    python tests/benchmarks/bound_speculation.py MODEL.gguf --prompts FILE [--draft DRAFT.gguf] [--tokens 128]
        [--every N] [--skip N] [--costs RECORD.json] [--draft-cost D]

The greedy answer to each prompt (JSON Lines with "category" and "turns", the first of which is asked) is recorded, and
at each of its positions what the model-free drafters would have drafted and how much of it was right; with a draft
model, how much of its chain was right. Then the fastest way through the answer is computed, from its end, with the
measured costs of passes, or those of a record of bench_speculation.py (its milliseconds_by_tokens). D is the time of a
drafted token of the model in passes of one token, 0 if it is hidden. No policy with one chain per step can exceed the
result; compare it with bench_speculation.py on the same costs. One JSON line on stdout at the end, with the speed
relative to plain decoding, weighted by time, by category, and the acceptance that other speeds would need.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from answer_logits import logits_from
from asked import add_flags, asked_prompts
from bench_speculation import SYSTEM
from machine import machine

import edgeinfer
from edgeinfer.common.settings import DEFAULT_DRAFT_MAX
from edgeinfer.engine import Engine
from edgeinfer.speculation.cost import MAX_TOKENS
from edgeinfer.speculation.drafters.base import Context, Drafter
from edgeinfer.speculation.drafters.model import ModelDrafter
from edgeinfer.speculation.drafters.recycling import RecyclingDrafter
from edgeinfer.speculation.drafters.suffix import SuffixDrafter
from edgeinfer.speculation.throughput import chain_rate
from edgeinfer.speculation.tree import DraftTree

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
DRAFT_COSTS = (0.0, 0.05, 0.1, 0.2, 0.3)


class Everything:
    """An acceptance model with which every node is worth its cost."""

    min_probability = 0.0

    def probability(self, kind: int, depth: int, p: float) -> float:
        return p

    def should_extend(self, path_probabilities: Sequence[float]) -> bool:
        return True


@dataclass
class Answer:
    """How many drafted tokens were right at each place of an answer; by the free drafters, and by the model."""

    category: str
    free: list[int] = field(default_factory=list)
    model: list[int] = field(default_factory=list)


def greedy(tokens: Sequence[int]) -> Context:
    """A greedy request with this text so far."""
    context = Context(list(tokens), lambda row, text: int(row.argmax()), True)
    context.acceptance = Everything()
    return context


def right_path(tree: DraftTree, coming: Sequence[int]) -> int:
    """Length of the longest path of a tree along the text that comes."""
    depths: list[int] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        depth = 0 if parent < 0 else depths[parent]
        is_right = depth >= 0 and depth < len(coming) and coming[depth] == token
        depths.append(depth + 1 if is_right else -1)
    return max([0, *depths])


def record(engine: Engine, model: ModelDrafter | None, prompt: dict[str, Any], n_tokens: int) -> Answer:
    """What drafters would have had right at each place of the greedy answer to a prompt."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt["turns"][0]}]
    asked = engine.template.encode(engine.tokenizer, messages, add_generation_prompt=True)
    engine.speculator = None
    answer = list(engine.generate(asked, max_tokens=n_tokens, params=edgeinfer.SamplingParams(temperature=0.0)).tokens)
    found = Answer(prompt["category"].split(":")[0])
    if len(answer) < 2:
        return found
    text = asked + answer
    logits = logits_from(engine.session, text[:-1], len(asked) - 1)
    drafters: list[Drafter] = [SuffixDrafter(SuffixDrafter.most_tokens(engine.n_ctx)), RecyclingDrafter()]
    context = greedy(asked)
    for drafter in drafters:
        drafter.start(context)
    for i, token in enumerate(answer):
        if i:
            coming = answer[i:]
            trees = [drafter.propose(context, DEFAULT_DRAFT_MAX) for drafter in drafters]
            found.free.append(max(right_path(tree, coming) for tree in trees))
        context.tokens.append(token)
        for drafter in drafters:
            drafter.observe(context, 1, [logits[i]])
    if model is not None:
        found.model = lengths_of_model(model, text, len(asked))
    return found


def lengths_of_model(model: ModelDrafter, text: list[int], n_asked: int) -> list[int]:
    """How long the model's own greedy chain goes along the text, from the second token of the answer on."""
    rows = range(n_asked, len(text) - 1)  # row i predicts token i + 1
    guesses = logits_from(model.session, text[:-1], n_asked).argmax(axis=-1)
    lengths: list[int] = []
    for row, guess in zip(reversed(rows), guesses[::-1], strict=True):
        lengths.append(1 + lengths[-1] if lengths and guess == text[row + 1] else int(guess == text[row + 1]))
    return lengths[::-1]


def fastest(n: int, milliseconds: Sequence[float], ways: Sequence[tuple[list[int], float]]) -> float:
    """Milliseconds through n tokens. ways: right lengths at each place and the cost of a drafted token."""
    best = np.zeros(n + 1)
    for place in range(n - 1, -1, -1):
        times = [milliseconds[1] + best[place + 1]]
        for lengths, each in ways:
            most = min(lengths[place], MAX_TOKENS - 1, n - place - 1)
            times += [milliseconds[k + 1] + k * each + best[place + k + 1] for k in range(1, most + 1)]
        best[place] = min(times)
    return float(best[0])


def bounds(answers: Sequence[Answer], milliseconds: Sequence[float], draft: float) -> dict[str, dict[str, float]]:
    """Speed over one by one of the fastest ways, by category, "all" last."""
    ways: dict[str, Callable[[Answer], list[tuple[list[int], float]]]] = {"free": lambda one: [(one.free, 0.0)]}
    if any(one.model for one in answers):
        ways["model"] = lambda one: [(one.model, draft)]
        ways["free and model"] = lambda one: [(one.free, 0.0), (one.model, draft)]
    groups: dict[str, list[Answer]] = defaultdict(list)
    for one in answers:
        groups[one.category].append(one)
    result: dict[str, dict[str, float]] = {}
    for category, group in [*sorted(groups.items()), ("all", list(answers))]:
        plain = sum(milliseconds[1] * len(one.free) for one in group)
        result[category] = {
            name: round(plain / sum(fastest(len(one.free), milliseconds, way(one)) for one in group), 3)
            for name, way in ways.items()
            if plain
        }
    return result


def needed(milliseconds: Sequence[float]) -> dict[str, dict[str, float]]:
    """Best speed over one by one of chains whose tokens are each right with one rate, by rate and draft cost."""
    one = milliseconds[1]
    return {
        f"acceptance {rate}": {
            f"draft {cost}": round(max(1.0, one * chain_rate(rate, cost * one, milliseconds, MAX_TOKENS - 1)), 2)
            for cost in DRAFT_COSTS
        }
        for rate in ACCEPTANCES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--costs", type=Path, help="a record of bench_speculation.py, whose costs are taken")
    parser.add_argument("--draft-cost", type=float, help="of a drafted token, in passes of one token")
    arguments = parser.parse_args()
    asked = asked_prompts(arguments)
    draft = "auto" if arguments.draft is None else str(arguments.draft)
    with edgeinfer.load(arguments.model, n_ctx=4096, draft=draft) as engine:
        speculator = engine.speculator
        if speculator is None:
            raise SystemExit("this engine drafts nothing")
        milliseconds = list(speculator.costs.milliseconds(256))
        if arguments.costs is not None:
            by_tokens = json.loads(arguments.costs.read_text())["milliseconds_by_tokens"]
            milliseconds = [by_tokens[str(n)] for n in range(MAX_TOKENS + 1)]
        model = next((one for one in speculator.drafters if isinstance(one, ModelDrafter)), None)
        each = (arguments.draft_cost or 0.0) * milliseconds[1]
        if model is not None and arguments.draft_cost is None:
            each = model.cost(greedy([0]))[0]
        answers = []
        for i, prompt in enumerate(asked):
            answers.append(record(engine, model, prompt, arguments.tokens))
            print(f"{i + 1} of {len(asked)}", file=sys.stderr, end="\r", flush=True)
    result = {"benchmark": "bound of speculation", "machine": machine(), "model": arguments.model.name}
    result |= {"draft": arguments.draft and arguments.draft.name, "prompts": len(asked), "tokens": arguments.tokens}
    result |= {"costs": [round(ms / milliseconds[1], 3) for ms in milliseconds[1:]], "draft_cost": round(each, 3)}
    result |= {"bounds": bounds(answers, milliseconds, each), "chains": needed(milliseconds)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
