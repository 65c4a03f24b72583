"""Types of a draft model or head by accepted tokens a millisecond (`--type auto --target`) against uniform types.

    python tests/benchmarks/bench_auto_drafter.py DRAFTER TARGET.gguf --state FILE.jsonl [--imatrix FILE.gguf]
        [--only-times] [--time-again] [--cost verify:N] [--tokens 384]

What `edgeinfer export --type auto --target` measures and prints, as one JSON line on stdout: for the chosen types and
the uniform ones the acceptance on held-out answers of the target, milliseconds of a draft token and tokens a
millisecond, measured and predicted. Measurements are kept in --state. On a machine that others use: --only-times first,
while it is quiet (kernels, passes of the target), then the rest, and at last --time-again while it is quiet, which
times the draft tokens of all types again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from machine import machine

from edgeinfer.common import devices
from edgeinfer.common.other_work import LoadMeter, MachineClock
from edgeinfer.exporters.auto import draft_choice, draft_search
from edgeinfer.exporters.auto.draft_choice import choose_draft_types
from edgeinfer.exporters.auto.speed import Speeds
from edgeinfer.exporters.auto.trial import digest_of
from edgeinfer.exporters.calibration.imatrix import read_imatrix
from edgeinfer.exporters.request import Request
from edgeinfer.exporters.source import open_source

Types = dict[str, Any]


class TimesOnly(Exception):
    """All times are known."""


def times_only(search: draft_search.DraftSearch, told: Any = None) -> None:
    """In place of measuring: what is timed."""
    speeds = Speeds(devices.default_n_threads())
    for subject in search.subjects:
        speeds.of(subject, subject.formats[0], search._drafter.n_tokens)
    search._overhead = search._measured_overhead()
    raise TimesOnly


def timed_again(search: draft_search.DraftSearch, mixes: dict[str, Types]) -> None:
    """Time the draft tokens of mixes anew."""
    for name, types in mixes.items():
        meter = LoadMeter(MachineClock())
        seconds = search._drafter.seconds(types)
        key = f"drafted {digest_of(types)}"
        search._state.add(f"{key} draft_ms", 1e3 * seconds)
        search._state.add(f"{key} load", meter.load())
        print(f"{name}: {1e3 * seconds:.3f} ms", file=sys.stderr)


def result_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was chosen, and what it and the uniform types give."""
    out = arguments.state.with_name(arguments.state.name.removesuffix(".auto.jsonl"))
    more = {"model": arguments.target}
    request = Request(arguments.drafter, out, "auto", cost=arguments.cost, more=more, told=shown)
    imatrix = None if arguments.imatrix is None else read_imatrix(arguments.imatrix)
    with open_source(arguments.drafter) as source:
        choice = choose_draft_types(source, request, imatrix)
    for line in choice.notes:
        print(line, file=sys.stderr)
    facts = dict(choice.facts["auto"])
    facts["formats"] = dict(Counter(type.name for type in choice.types.values()))
    return facts


def shown(what: str, share: float) -> None:
    print(f"\r{what:60}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--state", type=Path, required=True, help="measurements, named *.auto.jsonl")
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--cost")
    parser.add_argument("--tokens", type=int, default=384, help="of the target, by which losses are measured")
    parser.add_argument("--only-times", action="store_true")
    parser.add_argument("--time-again", action="store_true")
    parser.add_argument("--note", default="")
    arguments = parser.parse_args()
    draft_choice._TEXT_TOKENS = arguments.tokens
    if arguments.only_times:
        draft_search.DraftSearch.measure = times_only  # type: ignore[method-assign]
    if arguments.time_again:
        compare = draft_search.DraftSearch.compare

        def compare_again(search: Any, mixes: Any, texts: Any, told: Any) -> Any:
            timed_again(search, mixes)
            return compare(search, mixes, texts, told)

        draft_search.DraftSearch.compare = compare_again  # type: ignore[method-assign]
    try:
        facts = result_of(arguments)
    except TimesOnly:
        return
    ask, here = ["git", "rev-parse", "--short", "HEAD"], Path(__file__).parent
    commit = subprocess.run(ask, capture_output=True, text=True, cwd=here).stdout.strip()
    named = {"drafter": arguments.drafter.name, "target": arguments.target.name, "note": arguments.note}
    print(json.dumps({"benchmark": "auto-drafter", "machine": machine(), "commit": commit, **named, **facts}))


if __name__ == "__main__":
    main()
