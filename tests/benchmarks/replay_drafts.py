"""Model-free drafts replayed on recorded answers: passes, and the time they take by a given curve of costs.

    python tests/benchmarks/replay_drafts.py MODEL.gguf --prompts FILE [--tokens 400] [--default-chat] [--record FILE]
        [--every N] [--skip N] [--out FILE.json]

FILE: as for bench_speculation.py; edits.jsonl beside this has edits. Each prompt is answered once, greedily, or with
--default-chat as `edgeinfer chat` samples this model; the answer is kept with its most probable tokens, in --record
FILE, from which the same command goes on. Then the drafters' trees are selected and compared with the answer as the
speculation loop does it, and each pass is charged what a curve of costs says: so nothing that else runs on the machine
changes the result. Contenders: the suffix drafter without realignment and without knowledge of penalties ("before"),
and as it is ("ours"), both with token recycling. Curves: of two cores each; measured were that of the default model on
Zen 3, and one and eight tokens of Qwen2.5-Coder 1.5B on Zen 4 and Zen 5, around which the other sizes are estimates.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from answer_logits import logits_from
from asked import add_flags, asked_prompts
from dialogues import Dialogue
from machine import machine
from numpy.typing import NDArray
from records import Records

import edgeinfer
from edgeinfer.backends.native import top_k
from edgeinfer.common.settings import DEFAULT_DRAFT_MAX
from edgeinfer.engine import Engine
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.acceptance import AcceptanceTable
from edgeinfer.speculation.cost import CostCurve, CostModel
from edgeinfer.speculation.drafters.base import Context, Drafter
from edgeinfer.speculation.drafters.foresight import Foresight
from edgeinfer.speculation.drafters.realignment import Realignment
from edgeinfer.speculation.drafters.recycling import RecyclingDrafter
from edgeinfer.speculation.drafters.suffix import SuffixDrafter
from edgeinfer.speculation.policy import Proposal, VerifyTree, min_useful_probability, select_tree

SYSTEM = "You are a helpful assistant."
N_KEPT = 16  # tokens of each row of logits
CURVES = {
    "Zen 3": {1: 1.0, 2: 1.12, 4: 1.21, 8: 2.2, 16: 4.18, 32: 7.76},
    "Zen 4": {1: 1.0, 2: 1.06, 4: 1.22, 8: 1.82, 16: 3.1, 32: 5.6},
    "Zen 5": {1: 1.0, 2: 1.02, 4: 1.06, 8: 1.17, 16: 1.9, 32: 3.4},
}
"""Costs of a pass by tokens, over those of one token."""


def record(engine: Engine, prompt: dict[str, Any], n_tokens: int, params: SamplingParams, chat: bool) -> dict[str, Any]:
    """An answer, and the most probable tokens at each of its places."""
    asked = Dialogue(engine, None if chat else SYSTEM).asked(prompt["turns"][0])
    answer = list(engine.generate(asked, max_tokens=n_tokens, params=params).tokens)
    rows = []
    for row in logits_from(engine.session, [*asked, *answer][:-1], len(asked) - 1) if len(answer) > 1 else ():
        found = top_k(row, N_KEPT)
        ids = [id for id, _ in found]
        rows.append([ids, [round(float(row[id]), 4) for id in ids], found[0][1]])
    return {"category": prompt["category"].split(":")[0], "asked": asked, "answer": answer, "rows": rows}


class Replay:
    """Drafters along recorded answers; what was learnt about them is kept from one to the next."""

    def __init__(self, milliseconds: Sequence[float], n_vocab: int, params: SamplingParams) -> None:
        self._milliseconds, self._n_vocab, self._params = milliseconds, n_vocab, params
        self._tables = [AcceptanceTable(), AcceptanceTable()]

    def __call__(self, answer: dict[str, Any]) -> tuple[float, int, int, int]:
        """(milliseconds, passes, tokens, drafted tokens) after the first token."""
        drafters: list[Drafter] = [SuffixDrafter(16384), RecyclingDrafter()]
        params, tokens = self._params, answer["answer"]
        is_plain = params.is_greedy and not params.changes_logits
        context = Context(list(answer["asked"]), lambda row, text: 0, params.is_greedy, is_plain=is_plain)
        context.params = params
        for drafter, table in zip(drafters, self._tables, strict=True):
            table.start_request()
            drafter.start(context)
        place, time, n_passes, n_drafted = 1, 0.0, 0, 0
        self._observe(drafters, context, answer, 0, 1)
        while place < len(tokens):
            proposals = self._proposals(drafters, context) if len(tokens) - place > 1 else []
            tree = self._selected(proposals, len(tokens) - place - 1)
            new = tokens[place : place + 1 + n_accepted(tree, tokens[place:])]
            time, n_passes = time + self._milliseconds[len(tree.tokens) + 1], n_passes + 1
            n_drafted += len(tree.tokens)
            for _, draft, table in proposals:
                table.learn(draft, new)
            self._observe(drafters, context, answer, place, len(new))
            place += len(new)
        return time, n_passes, len(tokens) - 1, n_drafted

    def _selected(self, proposals: Sequence[Proposal], max_depth: int) -> VerifyTree:
        least = min_useful_probability(self._milliseconds)
        return select_tree(proposals, self._milliseconds, DEFAULT_DRAFT_MAX, max_depth, least)

    def _proposals(self, drafters: Sequence[Drafter], context: Context) -> list[Proposal]:
        found = []
        for drafter, table in zip(drafters, self._tables, strict=True):
            table.min_probability = min_useful_probability(self._milliseconds)
            context.acceptance = table
            tree = drafter.propose(context, DEFAULT_DRAFT_MAX)
            if len(tree):
                found.append(Proposal(drafter.name, tree, table))
        return sorted(found, key=lambda proposal: proposal.of_first, reverse=True)

    def _observe(
        self, drafters: Sequence[Drafter], context: Context, answer: dict[str, Any], place: int, n: int
    ) -> None:
        context.tokens.extend(answer["answer"][place : place + n])
        rows = [self._row(*kept) for kept in answer["rows"][place : place + n]]
        for drafter in drafters:
            drafter.observe(context, n, rows)

    def _row(self, ids: list[int], logits: list[float], p: float) -> NDArray[np.float32]:
        """A row with these logits, whose first token has its probability: another one stands for all that were left."""
        row = np.full(self._n_vocab, -1e4, np.float32)
        row[ids] = logits
        rest = max(1.0 - p * float(np.exp(np.array(logits) - logits[0]).sum()), 1e-9)
        row[-1] = min(logits[0] + float(np.log(rest / p)), logits[-1] - 1.0)
        return row


def n_accepted(tree: VerifyTree, coming: Sequence[int]) -> int:
    """Draft tokens that are what comes."""
    children = {pair: node for node, pair in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    node, n = -1, 0
    while (node := children.get((node, coming[n]), -2)) != -2:
        n += 1
    return n


@contextmanager
def as_before() -> Iterator[None]:
    """Within, the suffix drafter realigns nothing and does not know of penalties."""
    with (
        mock.patch.object(Realignment, "guesses", lambda self, n: []),
        mock.patch.object(Foresight, "is_penalised", lambda self, id, path: False),
    ):
        yield


def replayed(answers: Sequence[dict[str, Any]], costs: dict[int, float], params: SamplingParams) -> dict[str, Any]:
    """Speed over plain decoding, and tokens a pass, by category."""
    model = CostModel(CostCurve(0, {n: 1e-2 * cost for n, cost in costs.items()}, 0, {}))
    milliseconds = list(model.milliseconds(0))
    n_vocab = 2 + max(max(*one["asked"], *one["answer"], *(max(ids) for ids, _, _ in one["rows"])) for one in answers)
    replay = Replay(milliseconds, n_vocab, params)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for one in answers:
        if one["rows"]:
            of_one = replay(one)
            for category in (one["category"], "all"):
                sums[category] = [sum(pair) for pair in zip(sums[category], of_one, strict=True)]
    return {
        category: {
            "speed": round(tokens * milliseconds[1] / time, 3),
            "tokens_per_pass": round(tokens / passes, 3),
            "drafted_per_pass": round(drafted / passes, 2),
        }
        for category, (time, passes, tokens, drafted) in sums.items()
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--default-chat", action="store_true")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    settings = {"model": arguments.model.name, "tokens": arguments.tokens, "default_chat": arguments.default_chat}
    records = Records(arguments.record, settings)
    with edgeinfer.load(arguments.model, n_ctx=4096) as engine:
        params = engine.default_params if arguments.default_chat else SamplingParams(temperature=0.0)
        params = replace(params, seed=1)
        for prompt in asked_prompts(arguments):
            if prompt["id"] not in records.rows:
                answer = record(engine, prompt, arguments.tokens, params, arguments.default_chat)
                records.add(prompt["id"], answer)
            print(f"{len(records.rows)} recorded", file=sys.stderr, end="\r", flush=True)
    answers, figures = list(records.rows.values()), dict[str, Any]()
    ours: Callable[[dict[int, float]], dict[str, Any]] = lambda costs: replayed(answers, costs, params)  # noqa: E731
    for name, costs in CURVES.items():
        with as_before():
            figures[name] = {"before": ours(costs)}
        figures[name]["ours"] = ours(costs)
    command = " ".join(["python", *sys.argv])
    result = {"benchmark": "replayed drafts", "machine": machine(), "prompts": len(answers), "command": command}
    result |= settings | {"prompts_file": arguments.prompts.name, "costs": CURVES, "figures": figures}
    print(json.dumps(result))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
