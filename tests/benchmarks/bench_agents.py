"""Drafts from earlier answers: an agent's dialogues, each in a new process, with and without a file of answers.

    python tests/benchmarks/bench_agents.py MODEL.gguf [--tokens 160] [--threads 2] [--out FILE.json]

Five scripted dialogues of a program that releases packages: its messages are fixed, what a tool gives back among them;
the model's answers are tool calls and whole files, greedy, and part of what follows. Each dialogue is held three times,
by engines that know nothing of the one before: without drafts ("plain"), with those that need no file ("before"), and
with a file of answers that the dialogues before it have left ("answers"). The first dialogue has none, and is reported
apart. Texts must be equal. Given are tokens per pass, the measured speed, and the speed by the model's own costs of
passes, which other work on the machine does not disturb: the milliseconds that the passes of each size take, by the
costs of the last engine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dialogues import Dialogue, finish, held

import edgeinfer

SYSTEM = """You release Python packages. You answer with exactly one tool call as JSON, and nothing else.
Tools:
{"tool": "read_file", "path": PATH}
{"tool": "write_file", "path": PATH, "content": TEXT}
{"tool": "run", "command": COMMAND}
{"tool": "done", "message": TEXT}"""
PACKAGES = (
    ("ferry", "1.4.2", "1.5.0", "timetables can be exported as CSV"),
    ("lantern", "0.9.1", "0.10.0", "lamps are dimmed at night"),
    ("quarry", "2.0.0", "2.0.1", "stones are no longer counted twice"),
    ("orchard", "3.2.5", "3.3.0", "trees have a planting date"),
    ("beacon", "1.0.3", "1.1.0", "signals are repeated after a storm"),
)


def messages_of(name: str, old: str, new: str, change: str) -> list[str]:
    """What the program says in one dialogue."""
    project = f'''[project]
name = "{name}"
version = "{old}"
requires-python = ">=3.10"
dependencies = ["click", "requests"]

[project.scripts]
{name} = "{name}.cli:main"

[tool.ruff]
line-length = 100'''
    return [
        f"Release {name} {new}. Begin by reading pyproject.toml.",
        f"pyproject.toml:\n{project}\n\nWrite pyproject.toml with the version {new} and everything else unchanged.",
        f"Written. Now read {name}/__init__.py.",
        f'{name}/__init__.py:\n"""The package {name}."""\n\n__version__ = "{old}"\n__all__ = ["main"]\n\n'
        f"Write {name}/__init__.py with the version {new} and everything else unchanged.",
        "Written. Now run the tests with pytest, quietly, stopping at the first failure.",
        "41 passed in 2.31s\n\nRead CHANGELOG.md.",
        f"CHANGELOG.md:\n# Changes of {name}\n\n## {old}\n- bugs were fixed\n\n"
        f"Write CHANGELOG.md with a section for {new} above the others, which says: {change}",
        f"Written. Commit everything with the message: Release {name} {new}",
        f"[main 1f3c2d4] Release {name} {new}\n\nTag the commit v{new} and push the tag.",
        f"Pushed. Say that {name} {new} is released, in one sentence, with the tool done.",
    ]


def what_it_took(answers: Sequence[edgeinfer.Completion]) -> Counter[str]:
    """Tokens, passes and time of the answers of a dialogue, and draft tokens by drafter."""
    took = Counter[str]()
    for answer in answers:
        of = answer.timings.speculation
        n = len(answer.tokens) - 1
        took.update({"tokens": n, "passes": of.steps if of else n})
        took.update({"microseconds": round(1e6 * answer.timings.decode_seconds)})
        for name, counts in (of.by_drafter if of else {}).items():
            took.update({f"{name} drafted": counts.drafted, f"{name} accepted": counts.accepted})
    return took


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        contenders: dict[str, dict[str, Any]] = {
            "plain": {"draft": "none"},
            "before": {"draft": ["suffix", "recycling"]},
            "answers": {"draft_memory": Path(folder) / "answers"},
        }
        sums: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
        different = 0
        for number, package in enumerate(PACKAGES):
            texts = {}
            for name, options in contenders.items():
                with edgeinfer.load(arguments.model, n_ctx=4096, n_threads=arguments.threads, **options) as engine:
                    passes = watched(engine)
                    said, greedy = messages_of(*package), edgeinfer.SamplingParams(temperature=0.0)
                    answers = held(engine, Dialogue(engine, SYSTEM), said, arguments.tokens, greedy)
                    texts[name], took = [answer.tokens for answer in answers], what_it_took(answers)
                    for n in passes:
                        took[f"passes of {n}"] += passes[n]
                    if engine.speculator is not None:
                        costs = engine.speculator.costs.milliseconds(512)
                sums["first" if number == 0 else "later"][name].update(took)
                print(number, name, dict(took), file=sys.stderr, flush=True)
            different += sum(text != texts["plain"] for text in texts.values())
        report(arguments, sums, costs, different)


def watched(engine: edgeinfer.Engine) -> Counter[int]:
    """Counts the passes of each number of tokens that an engine makes while it drafts."""
    counts: Counter[int] = Counter()
    if engine.speculator is None:
        return counts
    forward = engine.session.forward

    def counted(tokens: Any, parents: Any = None, **options: Any) -> Any:
        if parents is not None:
            counts[len(tokens)] += 1
        return forward(tokens, parents, **options)

    engine.session.forward = counted  # type: ignore[method-assign]
    return counts


def report(
    arguments: argparse.Namespace, sums: dict[str, dict[str, Counter[str]]], costs: list[float], different: int
) -> None:
    """Prints the figures, and writes them."""
    figures: dict[str, Any] = {}
    for part, of_part in sums.items():
        for name, took in of_part.items():
            cost = sum(took[f"passes of {n}"] * costs[n] for n in range(1, len(costs)))
            figures[f"{part} {name}"] = {
                "tokens": took["tokens"],
                "tokens_per_pass": round(took["tokens"] / took["passes"], 3),
                "tokens_per_second": round(1e6 * took["tokens"] / took["microseconds"], 2),
                "by_costs": round(took["tokens"] * costs[1] / cost, 3) if cost else 1.0,
                "drafts": {key: n for key, n in took.items() if key.endswith(("drafted", "accepted"))},
            }
    found = {"milliseconds_by_tokens": [round(each, 2) for each in costs], "figures": figures}
    finish("agents", arguments.model, arguments.out, {"different": different, **found})


if __name__ == "__main__":
    main()
