"""Speculation against decoding one by one, ours and llama.cpp's, in one run and in turns.

    python tests/benchmarks/bench_speculation.py MODEL.gguf --prompts FILE [--draft DRAFT.gguf] [--peer-dir FOLDER]
        [--peer FLAGS ...] [--tokens 128] [--threads 2] [--temp 0] [--every N] [--skip N] [--only NAME,...]
        [--record FILE]

FILE: JSON Lines with "category" and "turns", the first of which is asked. For each prompt every contender makes that
many tokens: ours one by one, with the free drafters, with the draft model too; llama-cpp-python one by one and with
its prompt lookup (2 and 10 tokens); and with --peer-dir, which holds llama.cpp's llama-speculative-simple, that with
the draft model and its n-gram drafter, or instead with each --peer "FLAGS" as the program takes them (the contender
"llama.cpp FLAGS"). The order is turned with every prompt. Speed is that of all tokens behind the
first, time-weighted by category; what a draft model takes to read the prompts stands beside it. The process is pinned
to as many cores as there are threads. --only names the contenders, as the table does; --record keeps what every prompt
gave, and the same command goes on behind the last one. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from asked import add_flags, asked_prompts
from machine import machine
from records import Records

import edgeinfer
from edgeinfer.drafters.recycling import RecyclingDrafter
from edgeinfer.drafters.suffix import SuffixDrafter
from edgeinfer.engine import Engine
from edgeinfer.speculation.cost import DEFAULT_DRAFT_MAX
from edgeinfer.speculation.pipeline import Speculator

SYSTEM = "You are a helpful assistant."
LLAMA_CPP = {"llama.cpp plain": 0, "llama-cpp-python lookup 2": 2, "llama-cpp-python lookup 10": 10}  # tokens looked up
PEERS = ("--spec-type ngram-simple", "--spec-type draft-simple")  # of llama-speculative-simple
PAUSE_SECONDS = 0.05  # OpenMP's threads spin for some milliseconds after llama.cpp's turn


@dataclass
class Run:
    """One answer: tokens behind the first and their seconds; forward passes, drafted and accepted tokens if known."""

    n_tokens: int
    seconds: float
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    prompt_seconds: float = 0.0


Contender = Callable[[list[int]], Run]
Runs = dict[str, dict[str, list[Run]]]  # by category and contender


def ours(engine: Engine, speculator: Speculator | None, n_tokens: int, temperature: float) -> Contender:
    """The engine with this speculator, or one by one."""

    def run(prompt: list[int]) -> Run:
        engine.speculator = speculator
        if speculator is not None and speculator.taps is not False:
            engine.session.truncate(0)  # features of a prompt come where it is read
        completion = engine.generate(prompt, max_tokens=n_tokens, temperature=temperature, seed=1)
        timings, of = completion.timings, completion.timings.speculation
        n = round(timings.decode_tokens_per_second * timings.decode_seconds)
        if of is None:
            return Run(n, timings.decode_seconds, n, prompt_seconds=timings.prompt_seconds)
        drafted, accepted = (sum(getattr(one, name) for one in of.by_depth) for name in ("drafted", "accepted"))
        return Run(n, timings.decode_seconds, of.steps, drafted, accepted, of.draft_seconds, timings.prompt_seconds)

    return run


def llama_cpp(path: Path, n_threads: int, n_tokens: int, temperature: float, n_lookup: int) -> Contender:
    """llama-cpp-python, with prompt lookup of n_lookup tokens where that is not 0."""
    import llama_cpp as lib
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    model = lib.Llama(
        str(path),
        n_ctx=4096,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=n_lookup) if n_lookup else None,
        logits_all=bool(n_lookup),
        seed=1,
        verbose=False,
    )

    def run(prompt: list[int]) -> Run:
        tokens = model.generate(prompt, temp=temperature)
        next(tokens)
        started, n = time.perf_counter(), 0
        for token in tokens:
            n += 1
            if n == n_tokens - 1 or lib.llama_vocab_is_eog(lib.llama_model_get_vocab(model.model), token):
                break
        return Run(n, time.perf_counter() - started)

    return run


def speculative_simple(arguments: argparse.Namespace, flags: str, engine: Engine) -> Contender:
    """llama.cpp's own program with these flags. It takes the prompt as a text."""
    command = [str(arguments.peer_dir / "llama-speculative-simple"), "-m", str(arguments.model), *flags.split()]
    if "--spec-type draft" in flags:
        command += ["-md", str(arguments.draft)]
    command += ["-n", str(arguments.tokens), "-t", str(arguments.threads), "-tb", str(arguments.threads)]
    command += ["--temp", str(arguments.temp), "-s", "1", "-c", "4096", "-p"]

    def run(prompt: list[int]) -> Run:
        text = engine.detokenize(prompt)
        done = subprocess.run([*command, text], capture_output=True, text=True, errors="replace")
        report = done.stdout + done.stderr
        found = re.search(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds", report)
        if done.returncode or found is None:
            raise RuntimeError(f"{' '.join(command[:6])} gave {done.returncode}: {report[-500:]}")
        counts = {name: re.search(rf"n_{name}\s*=\s*(\d+)", report) for name in ("drafted", "drafts", "accept")}
        drafted, accepted = (
            int(of[1]) if of else 0 for of in (counts["drafted"] or counts["drafts"], counts["accept"])
        )
        return Run(int(found[1]), float(found[2]), 0, drafted, accepted)

    return run


def contenders(arguments: argparse.Namespace, engine: Engine) -> dict[str, Contender]:
    """What is to be compared, by name."""
    path, draft, n_threads = arguments.model, arguments.draft, arguments.threads
    n_tokens, temperature = arguments.tokens, arguments.temp
    whole = engine.speculator
    if whole is None:
        raise SystemExit("this engine drafts nothing")
    # Drafters of its own: another contender's have read the answer.
    free = [SuffixDrafter(engine.n_ctx), RecyclingDrafter()]
    alone = Speculator(engine.session, free, whole.costs, engine.tokenizer.n_vocab, DEFAULT_DRAFT_MAX)
    known: dict[str, Callable[[], Contender]] = {"ours plain": lambda: ours(engine, None, n_tokens, temperature)}
    if draft is not None:
        known[f"ours with {whole.drafters[-1].name}"] = lambda: ours(engine, whole, n_tokens, temperature)
    known["ours"] = lambda: ours(engine, alone, n_tokens, temperature)
    for name, n_lookup in LLAMA_CPP.items():
        known[name] = partial(llama_cpp, path, n_threads, n_tokens, temperature, n_lookup)
    if arguments.peer_dir is not None:
        for flags in arguments.peer or PEERS:
            if draft is not None or "--spec-type draft" not in flags:
                known[f"llama.cpp {flags}"] = partial(speculative_simple, arguments, flags, engine)
    names = arguments.only.split(",") if arguments.only else list(known)
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"--only {','.join(unknown)}: there are {', '.join(known)}")
    return {name: make() for name, make in known.items() if name in names}


def measure(engine: Engine, found: dict[str, Contender], asked: list[dict[str, Any]], records: Records) -> Runs:
    """What came of every prompt, those of earlier runs among them."""
    names = list(found)
    for i, prompt in enumerate(asked):
        if prompt["id"] not in records.rows:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt["turns"][0]}]
            tokens = engine.template.encode(engine.tokenizer, messages, add_generation_prompt=True)
            runs = {}
            for name in names[i % len(names) :] + names[: i % len(names)]:
                time.sleep(PAUSE_SECONDS)
                runs[name] = asdict(found[name](tokens))
            records.add(prompt["id"], {"category": prompt["category"].split(":")[0], "runs": runs})
        print(f"{i + 1} of {len(asked)}", file=sys.stderr, end="\r", flush=True)
    kept: Runs = defaultdict(lambda: defaultdict(list))
    for of in records.rows.values():
        for name, run in of["runs"].items():
            if run["n_tokens"] > 0:
                kept[of["category"]][name].append(Run(**run))
    return kept


def summary(runs: list[Run]) -> dict[str, float]:
    """All runs of a contender together."""
    n, seconds = sum(run.n_tokens for run in runs), sum(run.seconds for run in runs)
    steps, drafted = sum(run.steps for run in runs), sum(run.drafted for run in runs)
    figures = {"tokens": n, "tokens_per_second": round(n / seconds, 2)}
    if steps:
        figures["tokens_per_step"] = round(n / steps, 3)
        figures["draft_share"] = round(sum(run.draft_seconds for run in runs) / seconds, 4)
        figures["prompt_seconds"] = round(sum(run.prompt_seconds for run in runs), 2)
    if drafted:
        figures["acceptance"] = round(sum(run.accepted for run in runs) / drafted, 3)
    return figures


def table(runs: Runs, names: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by category, "all" last, and contender; with the speed against both engines one by one."""
    whole = {name: [run for of in runs.values() for run in of[name]] for name in names}
    result = {}
    for category, of in [*sorted(runs.items()), ("all", whole)]:
        figures = {name: summary(of[name]) for name in names if of[name]}
        for name, base in (("vs_ours_plain", "ours plain"), ("vs_llama_cpp_plain", "llama.cpp plain")):
            for one in figures.values() if base in figures else ():
                one[name] = round(one["tokens_per_second"] / figures[base]["tokens_per_second"], 3)
        result[category] = figures
    return result


def show(figures: dict[str, dict[str, dict[str, float]]]) -> None:
    for category, of in figures.items():
        print(f"\n{category}", file=sys.stderr)
        for name, one in of.items():
            rest = "  ".join(f"{key} {value}" for key, value in one.items() if key != "tokens")
            print(f"  {name:34} {rest}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.add_argument("--peer-dir", type=Path, help="folder with llama-speculative-simple")
    parser.add_argument("--peer", action="append", metavar="FLAGS", help="of llama-speculative-simple; several times")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--only", help="names of contenders, with commas between them")
    parser.add_argument("--record", type=Path, help="keep what every prompt gave, and go on from there")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: arguments.threads]))
    asked = asked_prompts(arguments)
    draft = "auto" if arguments.draft is None else str(arguments.draft)
    settings = {"model": arguments.model.name, "draft": arguments.draft and arguments.draft.name}
    settings |= {"threads": arguments.threads, "temperature": arguments.temp, "tokens": arguments.tokens}
    records = Records(arguments.record, settings | {"only": arguments.only})
    with edgeinfer.load(arguments.model, n_ctx=4096, n_threads=arguments.threads, draft=draft) as engine:
        found = contenders(arguments, engine)
        figures = table(measure(engine, found, asked, records), list(found))
        show(figures)
        costs = {} if engine.speculator is None else dict(enumerate(engine.speculator.costs.milliseconds(256)))
    record = {"benchmark": "speculation", "machine": machine(), "prompts": len(records.rows)} | settings
    record["milliseconds_by_tokens"] = {n: round(ms, 3) for n, ms in costs.items()}
    print(json.dumps(record | {"figures": figures}))


if __name__ == "__main__":
    main()
