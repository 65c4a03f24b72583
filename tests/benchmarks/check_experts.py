"""Exactness of a model with experts: the same bits, wherever its experts are and whatever a pass holds.

    python tests/benchmarks/check_experts.py MODEL.gguf [--split MODEL-00001-of-00003.gguf] [--records FILE]
        [--caches memory,least,25,50,75] [--threads 1,2] [--sizes 1-16] [--chunks 1,7,64,512]

The logits of each token of a text, from passes of one token with all experts in memory, are what all others must equal,
bit by bit: all cache sizes (least: the smallest that a pass can run with, others: percent of the experts), with the
text read in chunks and n = 1..16 tokens in one pass, with 1 and 2 threads, with prefetch and without, from the packed
file, from the model's own, and from those of the same model split into several (make_experts.py --shards). Then greedy
answers with drafts and without, which must be the same tokens. It says what it compared. --records keeps each
comparison: the same command goes on where it was stopped. Exits with 1 if anything differs. One JSON line on stdout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from expert_sessions import cache_bytes, open_model
from machine import machine
from records import Records
from text import SAMPLE_TEXT

import edgeinfer
from edgeinfer.backends.native.packing.packed import packed_path
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

N_BEHIND = 16  # tokens behind the prompt, which passes of n = 1..16 begin with
N_BATCH = 512


@dataclass(frozen=True)
class Case:
    """One way to run the model. cache: "memory", "least" or percent.  source: "packed", "model" or "split"."""

    cache: str
    n_threads: int
    source: str
    prefetch: float | None = None  # share of a token's experts, None as the engine has it

    def __str__(self) -> str:
        ahead = "" if self.prefetch is None else f", prefetch {self.prefetch:g}"
        percent = "" if self.cache in ("memory", "least") else " %"
        return f"cache {self.cache}{percent}, {self.n_threads} thread(s){ahead}, {self.source} file"


def row_hashes(logits: np.ndarray) -> list[str]:
    """SHA-256 of the bits of each row, shortened."""
    return [hashlib.sha256(np.ascontiguousarray(row)).hexdigest()[:16] for row in logits]


def one_by_one(session: Any, tokens: np.ndarray) -> list[str]:
    """Hashes of the logits behind each token; the tokens are committed."""
    found = []
    for token in tokens:
        found += row_hashes(session.forward([int(token)], logits="all").logits)
        session.commit([0])
    return found


def in_chunks(session: Any, tokens: np.ndarray, chunk: int) -> list[str]:
    """The same in passes of several tokens."""
    found = []
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk]
        found += row_hashes(session.forward(part, logits="all").logits)
        session.commit(range(len(part)))
    return found


def differences(got: Sequence[str], wanted: Sequence[str]) -> int:
    """Rows that are not the same."""
    return sum(a != b for a, b in zip(got, wanted, strict=True))


class Check:
    """A model, a text, and what its logits are."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.path = arguments, arguments.model
        if not packed_path(self.path.resolve()).exists():
            raise SystemExit(f"there is no packed file to compare with: edgeinfer pack {self.path}")
        with ModelFile.open(self.path) as file:
            text = Tokenizer.from_file(file).encode(SAMPLE_TEXT)
        self.tokens = np.array(text[: arguments.tokens + N_BEHIND], dtype=np.int32)

    def cases(self) -> Iterator[Case]:
        """All ways; memory has no prefetch, and other sources than the packed file are tried with some caches only."""
        for cache in self.arguments.caches:
            for n_threads in self.arguments.threads:
                for prefetch in (0.0, 1.0) if cache != "memory" else (None,):
                    yield Case(cache, n_threads, "packed", prefetch)
        for source in ("model", *(["split"] if self.arguments.split else [])):
            for cache in self.arguments.caches:
                if cache in ("memory", "least", "25"):
                    yield Case(cache, max(self.arguments.threads), source)

    def open(self, case: Case) -> Any:
        """A model that is run so, for a with statement."""
        path = self.arguments.split if case.source == "split" else self.path
        return open_model(
            path,
            n_ctx=len(self.tokens) + N_BEHIND,
            n_batch=N_BATCH,
            n_threads=case.n_threads,
            expert_cache=cache_bytes(path, case.cache),
            prefetch=case.prefetch,
            packed=case.source == "packed",
        )

    def reference(self) -> list[str]:
        """Of each token, one by one, all experts in memory."""
        with self.open(Case("memory", max(self.arguments.threads), "packed")) as model:
            session = model.session()
            found = one_by_one(session, self.tokens)
            session.close()
        return found

    def run(self, case: Case, wanted: Sequence[str]) -> dict[str, int]:
        """Rows that differ, by what was compared."""
        with self.open(case) as model:
            session = model.session()
            found = {}
            for chunk in self.arguments.chunks:
                session.reuse_prefix([])
                found[f"in chunks of {chunk}"] = differences(in_chunks(session, self.tokens, chunk), wanted)
            n_prompt = len(self.tokens) - N_BEHIND
            for n in self.arguments.sizes:
                session.truncate(n_prompt)
                behind = self.tokens[session.n_past :]
                got = row_hashes(session.forward(behind[: n_prompt - session.n_past + n], logits="all").logits)[-n:]
                found[f"{n} in a pass"] = differences(got, wanted[n_prompt : n_prompt + n])
            session.close()
        return found

    def answer(self, cache: str, draft: str) -> list[int]:
        """Tokens of a greedy answer, through the engine that people use."""
        n_threads = max(self.arguments.threads)
        n_bytes = cache_bytes(self.path, cache)
        options: Any = {} if n_bytes is None else {"expert_cache": n_bytes}
        common: Any = {"n_ctx": 512, "n_threads": n_threads, "backend": "native", "draft": draft}
        with edgeinfer.load(self.path, **common, **options) as engine:
            return list(engine.generate(SAMPLE_TEXT[:400], max_tokens=48, temperature=0).tokens)


def numbers(text: str) -> list[int]:
    """1-16 or 1,2,4."""
    first, dash, last = text.partition("-")
    return list(range(int(first), int(last) + 1)) if dash else [int(number) for number in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--split", type=Path, help="first file of the same model in several")
    parser.add_argument("--caches", type=lambda s: s.split(","), default=["memory", "least", "25", "50", "75"])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--sizes", type=numbers, default=list(range(1, 17)))
    parser.add_argument("--chunks", type=numbers, default=[1, 7, 64, 512])
    parser.add_argument("--tokens", type=int, default=80, help="of the text before the last 16")
    parser.add_argument("--records", type=Path, help="keep comparisons here, and leave out those that it has")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    check = Check(arguments)
    records = Records(arguments.records, {"model": arguments.model.name, "tokens": len(check.tokens)})
    rows = records.rows
    if "reference" not in rows:
        records.add("reference", check.reference())
    for case in check.cases():
        if str(case) not in rows:
            records.add(str(case), check.run(case, rows["reference"]))
        different = {what: n for what, n in rows[str(case)].items() if n}
        print(f"{arguments.model.name}: {case}: {different or 'equal'}", file=sys.stderr, flush=True)
    for cache in arguments.caches:
        for draft in ("none", "auto"):
            if (key := f"answer, cache {cache}, draft {draft}") not in rows:
                records.add(key, check.answer(cache, draft))
    answers = {key: tokens for key, tokens in rows.items() if key.startswith("answer")}
    first = next(iter(answers.values()))
    counts = {key: sum(n > 0 for n in value.values()) for key, value in rows.items() if isinstance(value, dict)}
    counts |= {key: int(tokens != first) for key, tokens in answers.items()}
    n_compared = sum(len(value) for value in rows.values() if isinstance(value, dict)) + len(answers) - 1
    different = {key: n for key, n in counts.items() if n}
    found = {"model": arguments.model.name, "compared": n_compared, "different": different}
    print(json.dumps({"benchmark": "experts exact", "machine": machine(), **found}))
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
