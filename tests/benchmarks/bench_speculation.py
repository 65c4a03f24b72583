"""Speculative decoding against plain decoding, edgeinfer's and llama.cpp's, alternating in one run; texts are compared.

    python tests/benchmarks/bench_speculation.py MODEL.gguf --prompts FILE [--draft DRAFT.gguf] [--peer-dir FOLDER]
        [--peer FLAGS ...] [--tokens 128] [--turns 1] [--threads 2] [--temp 0] [--top-k 40] [--top-p 1] [--min-p 0.05]
        [--repeat-penalty 1] [--frequency-penalty 0] [--presence-penalty 0] [--repeat-last-n 64] [--dry-multiplier 0]
        [--dry-base 1.75] [--dry-allowed-length 2] [--dry-penalty-last-n -1] [--logit-bias ID(+/-)BIAS ...]
        [--default-chat] [--seed 1] [--every N] [--skip N] [--only NAME,...] [--record FILE] [--nodes N]

FILE: JSON Lines with "category" and "turns", the first of which is asked, or with --turns as many as that: each after
those before it and the answers of edgeinfer to them, while the context has room. For each prompt every contender
generates that many tokens: edgeinfer without speculation ("ours plain"), with the model-free drafters ("ours"), with
the --draft file as well ("ours with model", "ours with head"); llama-cpp-python without speculation and with its prompt
lookup (2 and 10 tokens); and with --peer-dir, which holds llama.cpp's llama-speculative-simple, that program with the
draft model and with its n-gram drafter, or with each --peer "FLAGS" (contender "llama.cpp FLAGS"). Only if --only names
them: a single drafter ("ours suffix", "ours answers", "ours recycling", "ours model", "ours head"), and two for the
comparison of texts: "ours random" with random trees, parts of which are right, and "ours malicious" with a drafter that
breaks every rule.

--default-chat: sampled as `edgeinfer chat` samples this model, penalties included, but for what other flags change, and
asked without a system prompt of our own. llama.cpp gets the same parameters; llama-cpp-python, which has no DRY, no
biases, and looks back 64 tokens, is left out where others are asked for.

The order changes with every prompt. Each prompt has its own seed, made of --seed and its id. Speed is that of all
tokens after the first, weighted by time, by category; the time in which a draft model reads the prompts is reported
beside it. The process is pinned to as many cores as there are threads. --nodes N verifies trees of up to N nodes as if
that cost nothing: tokens per step then show the quality of drafts on any machine, and speeds mean nothing. --record
keeps the result of every prompt, and the same command continues after the last one. One JSON line on stdout at the end,
with the number of texts by contender that differ from "ours plain"; if there are any, the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from asked import add_flags, asked_prompts
from dialogues import Dialogue
from machine import machine
from records import Records
from sampled import add_sampling_flags, llama_cpp_flags, sampling

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from drafting import MALICIOUS, FixedCosts, FunctionDrafter, knowing, random_tree  # noqa: E402

import edgeinfer  # noqa: E402
from edgeinfer.common.settings import DEFAULT_DRAFT_MAX  # noqa: E402
from edgeinfer.common.types import Logits  # noqa: E402
from edgeinfer.engine import Engine  # noqa: E402
from edgeinfer.sampling import SamplingParams  # noqa: E402
from edgeinfer.speculation.draft_names import MODEL_FREE  # noqa: E402
from edgeinfer.speculation.drafters.answers import MOST_TOKENS, AnswersDrafter  # noqa: E402
from edgeinfer.speculation.drafters.base import Context, Drafter, ModelBasedDrafter  # noqa: E402
from edgeinfer.speculation.drafters.recycling import RecyclingDrafter  # noqa: E402
from edgeinfer.speculation.drafters.suffix import SuffixDrafter  # noqa: E402
from edgeinfer.speculation.payoff import Payoff  # noqa: E402
from edgeinfer.speculation.pipeline import Speculator  # noqa: E402
from edgeinfer.speculation.tree import DraftTree  # noqa: E402

SYSTEM = "You are a helpful assistant."
LLAMA_CPP = {"llama.cpp plain": 0, "llama-cpp-python lookup 2": 2, "llama-cpp-python lookup 10": 10}  # tokens looked up
PEERS = ("--spec-type ngram-simple", "--spec-type draft-simple")  # of llama-speculative-simple
MISLED = ("ours random", "ours malicious")
N_CTX = 4096
PAUSE_SECONDS = 0.05  # OpenMP's threads spin for some milliseconds after llama.cpp's turn


@dataclass
class Run:
    """One answer: tokens after the first and their seconds; forward passes, drafted and accepted tokens if known."""

    n_tokens: int
    seconds: float
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    prompt_seconds: float = 0.0
    text: int | None = None  # a checksum of the tokens, of ours


Contender = Callable[[list[int], int], Run]  # of a prompt and the seed
Runs = dict[str, dict[str, list[Run]]]  # by category and contender


class Ours:
    """An engine with some speculator, or one by one."""

    def __init__(self, arguments: argparse.Namespace, engine: Engine, speculator: Speculator | None) -> None:
        self._engine = engine
        self._speculator = speculator
        self._n_tokens = arguments.tokens
        self._params = sampling(arguments, engine.default_params)
        self.tokens: Sequence[int] = ()  # of the last answer
        self.answer = ""  # the last one

    def __call__(self, prompt: list[int], seed: int) -> Run:
        engine, speculator = self._engine, self._speculator
        engine.speculator = speculator
        if speculator is not None and speculator.taps is not False:
            engine.session.truncate(0)  # features of a prompt come where it is read
        params = replace(self._params, seed=seed)
        completion = engine.generate(prompt, max_tokens=self._n_tokens, params=params)
        self.tokens, self.answer = completion.tokens, completion.text
        timings, of = completion.timings, completion.timings.speculation
        n = round(timings.decode_tokens_per_second * timings.decode_seconds)
        run = Run(n, timings.decode_seconds, n, prompt_seconds=timings.prompt_seconds)
        run.text = zlib.crc32(json.dumps(completion.tokens).encode())
        if of is not None:
            run.drafted = sum(one.drafted for one in of.by_depth)
            run.accepted = sum(one.accepted for one in of.by_depth)
            run.steps, run.draft_seconds = of.steps, of.draft_seconds
        return run


class Misled(Ours):
    """An engine with new drafters for every prompt, which are bad on purpose."""

    def __init__(self, arguments: argparse.Namespace, engine: Engine, drafters: Callable[[], list[Drafter]]) -> None:
        super().__init__(arguments, engine, None)
        self._drafters = drafters

    def __call__(self, prompt: list[int], seed: int) -> Run:
        session, n_vocab = self._engine.session, self._engine.tokenizer.n_vocab
        self._speculator = Speculator(session, self._drafters(), FixedCosts(), n_vocab, DEFAULT_DRAFT_MAX)
        return super().__call__(prompt, seed)


class RandomDrafter(FunctionDrafter):
    """Proposes tokens at random, or what the answer will be with wrong tokens in and beside it."""

    def __init__(self, n_vocab: int, answer: Sequence[int], rng: random.Random) -> None:
        def propose(context: Context, limit: int) -> DraftTree:
            if rng.random() < 0.5:
                return random_tree(n_vocab, rng, min(limit, 6))
            return knowing(answer, n_vocab, rng, min(limit, 12), self._n_seen)

        super().__init__(propose, "random")
        self._n_seen = 0  # tokens of the answer; others may have spoilt the context

    def observe(self, context: Context, n_new: int, rows: Sequence[Logits]) -> None:
        """See Drafter."""
        self._n_seen += n_new


def llama_cpp(arguments: argparse.Namespace, params: SamplingParams, n_lookup: int) -> Contender:
    """llama-cpp-python, with prompt lookup of n_lookup tokens where that is not 0."""
    import llama_cpp as lib
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    model = lib.Llama(
        str(arguments.model),
        n_ctx=N_CTX,
        n_threads=arguments.threads,
        n_threads_batch=arguments.threads,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=n_lookup) if n_lookup else None,
        logits_all=bool(n_lookup),
        verbose=False,
    )
    names = ("top_k", "top_p", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty")
    sampled = {"temp": params.temperature} | {name: getattr(params, name) for name in names}

    def run(prompt: list[int], seed: int) -> Run:
        model.set_seed(seed)
        tokens = model.generate(prompt, **sampled)
        next(tokens)
        started, n = time.perf_counter(), 0
        for token in tokens:
            n += 1
            if n == arguments.tokens - 1 or lib.llama_vocab_is_eog(lib.llama_model_get_vocab(model.model), token):
                break
        return Run(n, time.perf_counter() - started)

    return run


def is_known_to_llama_cpp_python(params: SamplingParams) -> bool:
    """Whether llama-cpp-python can sample like this."""
    return not params.has_dry and not params.biases and (params.penalty_last_n == 64 or not params.has_penalties)


def speculative_simple(arguments: argparse.Namespace, params: SamplingParams, flags: str, engine: Engine) -> Contender:
    """llama.cpp's own program with these flags. It takes the prompt as a text."""
    command = [str(arguments.peer_dir / "llama-speculative-simple"), "-m", str(arguments.model), *flags.split()]
    if "--spec-type draft" in flags:
        command += ["-md", str(arguments.draft)]
    command += ["-n", str(arguments.tokens), "-t", str(arguments.threads), "-tb", str(arguments.threads)]
    command += ["-c", str(N_CTX), *llama_cpp_flags(params)]

    def run(prompt: list[int], seed: int) -> Run:
        asked = ["-s", str(seed), "-p", engine.detokenize(prompt)]
        done = subprocess.run([*command, *asked], capture_output=True, text=True, errors="replace")
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


def model_free(engine: Engine) -> list[Drafter]:
    """The drafters that need no file, in the order of MODEL_FREE."""
    return [SuffixDrafter(SuffixDrafter.most_tokens(engine.n_ctx)), AnswersDrafter(MOST_TOKENS), RecyclingDrafter()]


def contenders(
    arguments: argparse.Namespace, engine: Engine, whole: Speculator, another: Callable[[], Engine]
) -> dict[str, Contender]:
    """What is to be compared, by name.

    whole: the engine's speculator.  another: a second engine, whose draft model has not read what this one's has.
    """
    draft, n_vocab, costs = arguments.draft, engine.tokenizer.n_vocab, whole.costs

    def alone(*drafters: Drafter) -> Ours:
        """Drafters of its own: another contender's have read the answer."""
        speculator = Speculator(engine.session, list(drafters), costs, n_vocab, DEFAULT_DRAFT_MAX)
        return Ours(arguments, engine, speculator)

    def drafted() -> Ours:
        other = another()
        assert other.speculator is not None
        drafter, costs = other.speculator.drafters[-1], other.speculator.costs
        return Ours(arguments, other, Speculator(other.session, [drafter], costs, n_vocab, DEFAULT_DRAFT_MAX))

    plain = Ours(arguments, engine, None)
    known: dict[str, Callable[[], Contender]] = {"ours plain": lambda: plain}
    has_own = isinstance(whole.drafters[-1], ModelBasedDrafter)  # that was named, or came with the package
    if has_own:
        known[f"ours with {whole.drafters[-1].name}"] = lambda: Ours(arguments, engine, whole)
    known["ours"] = lambda: alone(*model_free(engine))
    params = sampling(arguments, engine.default_params)
    for name, n_lookup in LLAMA_CPP.items() if is_known_to_llama_cpp_python(params) else ():
        known[name] = partial(llama_cpp, arguments, params, n_lookup)
    if arguments.peer_dir is not None:
        for flags in arguments.peer or PEERS:
            if draft is not None or "--spec-type draft" not in flags:
                known[f"llama.cpp {flags}"] = partial(speculative_simple, arguments, params, flags, engine)
    names = arguments.only.split(",") if arguments.only else list(known)
    for number, name in enumerate(MODEL_FREE):
        known[f"ours {name}"] = lambda number=number: alone(model_free(engine)[number])
    if has_own:
        known[f"ours {whole.drafters[-1].name}"] = drafted
    rng = random.Random(1)

    def misled(malicious: bool) -> Misled:
        def drafters() -> list[Drafter]:
            found: list[Drafter] = [RandomDrafter(n_vocab, plain.tokens, rng)]
            return found + [FunctionDrafter(bad, name) for name, bad in MALICIOUS.items() if malicious]

        return Misled(arguments, engine, drafters)

    known["ours random"] = partial(misled, malicious=False)
    known["ours malicious"] = partial(misled, malicious=True)
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"--only {','.join(unknown)}: there are {', '.join(known)}")
    return {name: make() for name, make in known.items() if name in names}


def differing(runs: dict[str, Run]) -> list[str]:
    """The contenders of ours whose answer to a prompt is not that of ours one by one."""
    if "ours plain" not in runs:
        return []
    return [name for name, run in runs.items() if run.text is not None and run.text != runs["ours plain"].text]


def run_all(found: dict[str, Contender], prompt: list[int], seed: int, number: int) -> dict[str, Run]:
    """What every contender makes of a prompt; with each number another one begins."""
    timed = [name for name in found if name not in MISLED]
    last = [name for name in found if name in MISLED]  # one of which needs the answer
    first, runs = number % max(1, len(timed)), {}
    for name in [*timed[first:], *timed[:first], *last]:
        time.sleep(PAUSE_SECONDS)
        runs[name] = found[name](prompt, seed)
    return runs


def answer_of(found: dict[str, Contender]) -> str:
    """The last answer of edgeinfer, "" where only others are asked."""
    return next((contender.answer for contender in found.values() if isinstance(contender, Ours)), "")


def measure(
    engine: Engine,
    found: dict[str, Contender],
    asked: list[dict[str, Any]],
    arguments: argparse.Namespace,
    records: Records,
) -> tuple[Runs, dict[str, int]]:
    """What came of every prompt, those of earlier runs among them; and by contender the number of texts that differ."""
    for i, prompt in enumerate(asked):
        dialogue = Dialogue(engine, None if arguments.default_chat else SYSTEM)
        for turn, question in enumerate(prompt["turns"][: arguments.turns]):
            key, tokens = f"{prompt['id']} turn {turn + 1}" if turn else prompt["id"], dialogue.asked(question)
            if turn and len(tokens) + arguments.tokens > N_CTX:
                break
            if key not in records.rows:
                runs = run_all(found, tokens, arguments.seed + zlib.crc32(prompt["id"].encode()) + turn, i + turn)
                for name in differing(runs):
                    print(f"DIFFERENT: {key} {name}", file=sys.stderr, flush=True)
                of_prompt = {name: asdict(run) for name, run in runs.items()}
                row = {"category": prompt["category"].split(":")[0], "runs": of_prompt}
                records.add(key, row | {"answer": answer_of(found)})
            dialogue.answered(records.rows[key]["answer"])
        print(f"{i + 1} of {len(asked)}", file=sys.stderr, end="\r", flush=True)
    kept: Runs = defaultdict(lambda: defaultdict(list))
    different = {name: 0 for name in found if name.startswith("ours") and name != "ours plain"}
    for of in records.rows.values():
        runs = {name: Run(**run) for name, run in of["runs"].items()}
        for name in differing(runs):
            different[name] += 1
        for name, run in runs.items():
            if run.n_tokens > 0:
                kept[of["category"]][name].append(run)
    return kept, different


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
    parser.add_argument("--turns", type=int, default=1, help="most questions of a dialogue")
    add_sampling_flags(parser)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="names of contenders, with commas between them")
    parser.add_argument("--record", type=Path, help="keep what every prompt gave, and go on from there")
    parser.add_argument("--nodes", type=int, help="check trees of so many nodes, as if that cost nothing")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: arguments.threads]))
    asked = asked_prompts(arguments)
    draft = "auto" if arguments.draft is None else str(arguments.draft)
    settings = {"model": arguments.model.name, "draft": arguments.draft and arguments.draft.name}
    settings |= {"threads": arguments.threads, "tokens": arguments.tokens, "turns": arguments.turns}
    settings |= {"seed": arguments.seed, "default_chat": arguments.default_chat, "nodes": arguments.nodes}
    with ExitStack() as opened:

        def load() -> Engine:
            engine = opened.enter_context(
                edgeinfer.load(arguments.model, n_ctx=N_CTX, n_threads=arguments.threads, draft=draft)
            )
            if arguments.nodes is not None and engine.speculator is not None:
                engine.speculator.costs = FixedCosts(lambda n: 10.0 + 1e-3 * n if n <= arguments.nodes + 1 else 1e4)
            return engine

        if arguments.nodes is not None:  # nothing rests because it takes time
            opened.enter_context(mock.patch.object(Payoff, "needs_plain_step", False))
        engine = load()
        settings |= {"sampling": sampling(arguments, engine.default_params).to_json()}
        records = Records(arguments.record, settings | {"only": arguments.only})
        whole = engine.speculator
        if whole is None:
            raise SystemExit("this engine drafts nothing")
        found = contenders(arguments, engine, whole, load)
        if arguments.turns > 1 and not any(isinstance(contender, Ours) for contender in found.values()):
            raise SystemExit(
                "--turns must have a contender of ours, whose answers dialogues go on with: name one in --only"
            )
        runs, different = measure(engine, found, asked, arguments, records)
        figures = table(runs, list(found))
        show(figures)
        costs = dict(enumerate(whole.costs.milliseconds(256)))
        engine.speculator = whole
    record = {"benchmark": "speculation", "machine": machine(), "prompts": len(records.rows)} | settings
    record["milliseconds_by_tokens"] = {n: round(ms, 3) for n, ms in costs.items()}
    print(json.dumps(record | {"different": different, "figures": figures}))
    sys.exit(1 if any(different.values()) else 0)


if __name__ == "__main__":
    main()
