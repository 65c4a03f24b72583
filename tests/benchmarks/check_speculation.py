"""Exactness of speculation on real models: the same tokens with every drafter.

    python tests/benchmarks/check_speculation.py MODEL.gguf --prompts FILE [--draft DRAFT.gguf] [--tokens 128]
        [--every N] [--skip N] [--drafters suffix,recycling,model,head,all,random,malicious] [--costs free|measured]
        [--record FILE]

For every prompt (JSON Lines with "turns", the first of which is asked), greedily and at temperature 0.8, top-p 0.95
with three seeds: tokens with each drafter against tokens without. Exits with 1 if any differ. By default verifying is
assumed to cost nothing, so everything drafted is verified, up to 31 nodes; --costs measured takes the trees that are
fastest on this machine, except for drafters that are bad on purpose. --record keeps the result of every prompt, and the
same command continues after the last one. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asked import add_flags, asked_prompts
from machine import machine
from records import Records

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from drafting import MALICIOUS, FixedCosts, FunctionDrafter, random_tree  # noqa: E402

import edgeinfer  # noqa: E402
from edgeinfer.common.settings import DEFAULT_DRAFT_MAX  # noqa: E402
from edgeinfer.engine import Engine  # noqa: E402
from edgeinfer.speculation.cost import CostModel  # noqa: E402
from edgeinfer.speculation.drafters.base import Drafter  # noqa: E402
from edgeinfer.speculation.pipeline import Speculator  # noqa: E402

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    *({"temperature": 0.8, "top_p": 0.95, "seed": seed} for seed in (1, 2, 3)),
]

BAD = ("random", "malicious")


def sets_of_drafters(engine: Engine, own: list[Drafter], names: list[str]) -> Iterator[tuple[str, list[Drafter]]]:
    """The drafters to try, by name; own: the engine's."""
    n_vocab, rng = engine.tokenizer.n_vocab, random.Random(1)
    bad = list(MALICIOUS.items())
    known: dict[str, list[Drafter]] = {drafter.name: [drafter] for drafter in own}
    known["all"] = own
    known["random"] = [FunctionDrafter(lambda context, limit: random_tree(n_vocab, rng, min(limit, 6)), "random")]
    known["malicious"] = [FunctionDrafter(propose, name) for name, propose in bad]
    return ((name, known[name]) for name in names if name in known)


def check(
    engine: Engine, asked: list[dict[str, Any]], names: list[str], n_tokens: int, measured: bool, records: Records
) -> None:
    """Record the number of texts that differ by drafter, for every prompt. measured: as --costs measured."""
    own = engine.speculator.drafters if engine.speculator is not None else []
    costs = engine.speculator.costs if engine.speculator is not None and measured else None
    for i, prompt in enumerate(asked):
        if prompt["id"] not in records.rows:
            records.add(prompt["id"], differences(engine, prompt, own, names, n_tokens, costs))
        n = sum(sum(row.values()) for row in records.rows.values())
        print(f"{i + 1} of {len(asked)} prompts, {n} differences", file=sys.stderr, flush=True)


def differences(
    engine: Engine,
    prompt: dict[str, Any],
    own: list[Drafter],
    names: list[str],
    n_tokens: int,
    costs: CostModel | None,
) -> dict[str, int]:
    """Number of requests to one prompt whose text differs from the plain one, by drafter. costs: None for no costs."""
    different: dict[str, int] = {}
    for request in REQUESTS:
        texts = {}
        for name, drafters in [("plain", []), *sets_of_drafters(engine, own, names)]:
            of_it = FixedCosts() if costs is None or name in BAD else costs
            engine.speculator = (
                Speculator(engine.session, drafters, of_it, engine.tokenizer.n_vocab, DEFAULT_DRAFT_MAX)
                if drafters
                else None
            )
            answer = engine.chat().send(prompt["turns"][0], max_tokens=n_tokens, **request)
            for _ in answer:
                pass
            texts[name] = answer.completion.tokens
            if texts[name] != texts["plain"]:
                print(f"DIFFERENT: {prompt['id']} {request} {name}", file=sys.stderr, flush=True)
            if drafters:
                different[name] = different.get(name, 0) + (texts[name] != texts["plain"])
    return different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--drafters", default="suffix,recycling,model,head,all,random,malicious")
    parser.add_argument(
        "--costs", choices=("free", "measured"), default="free", help="of checking, as drafters see them"
    )
    parser.add_argument("--record", type=Path, help="keep what every prompt gave, and go on from there")
    arguments = parser.parse_args()
    names = arguments.drafters.split(",")
    if arguments.draft is None:
        names = [name for name in names if name not in ("model", "head")]
    asked = asked_prompts(arguments)
    settings = {"model": arguments.model.name, "draft": arguments.draft and arguments.draft.name}
    settings |= {"costs": arguments.costs}
    records = Records(arguments.record, settings | {"tokens": arguments.tokens, "drafters": names})
    with edgeinfer.load(arguments.model, draft=str(arguments.draft) if arguments.draft else "auto") as engine:
        check(engine, asked, names, arguments.tokens, arguments.costs == "measured", records)
    rows = records.rows.values()
    different = {name: sum(row[name] for row in rows) for name in names if any(name in row for row in rows)}
    record = {"benchmark": "same text", "machine": machine(), "prompts": len(records.rows)} | settings
    print(json.dumps(record | {"different": different}))
    sys.exit(1 if any(different.values()) else 0)


if __name__ == "__main__":
    main()
