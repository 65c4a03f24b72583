"""Mixes of formats chosen by measured loss (`--type auto`) against uniform formats and llama.cpp's file types.

    python tests/benchmarks/bench_auto.py MODEL-F16.gguf --train PROMPTS.jsonl --held OTHER.jsonl --imatrix FILE.gguf
        [--windows 3] [--threads 2] [--state FILE] [--cost verify:4]

A line of the prompts has "turns", of which the first is asked and answered by the model, or "prompt" and "answer" in
tokens. The model is measured on --train, and compared with its source on --held: the divergence of answer tokens, how
often the likeliest token is the same. Everything is quantised with the importance matrix. For each plain choice: the
mix with as many bytes, and the fastest mix of at most as many bytes and the same predicted loss. Milliseconds are
those of the products of a pass, by the kernels' times; --timed also measures whole passes of a choice and its fastest
mix. --equal looks for the fastest mix whose measured divergence is at most that of a choice, and times whole passes of
both; nothing else is compared then. On a machine that others use: --only-kernels while it is quiet, then without it,
and at last once more while it is quiet, for the passes. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import machine

from edgeinfer.common.errors import BudgetExceeded
from edgeinfer.common.types import Device
from edgeinfer.exporters.auto.candidates import Importance, Subject, subjects_of, uniform
from edgeinfer.exporters.auto.choice import importance_by_tensor, parse_cost
from edgeinfer.exporters.auto.search import Limits, Search
from edgeinfer.exporters.auto.trial import CalibrationText, TrialModel, Window, windows_of
from edgeinfer.exporters.calibration.imatrix import read_imatrix
from edgeinfer.exporters.calibration.running import native_model
from edgeinfer.exporters.calibration.texts import own_answers
from edgeinfer.exporters.divergence import Distance
from edgeinfer.exporters.gguf.file_types import file_type, tensor_types
from edgeinfer.exporters.source import GgufSource
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import GGMLType, ModelFile

UNIFORM = ("Q4_0", "Q4_1", "Q5_0", "Q5_1")
FILE_TYPES = ("Q4_K_M", "Q5_1")
HELD_WINDOW, HELD_ROWS, N_PROMPTS = 512, 400, 16
ROUNDS, STEPS = 12, (0.89, 0.84)  # of the predicted loss

Types = Mapping[str, GGMLType]


def texts_of(path: Path, file: ModelFile, counts_prompts: bool) -> list[CalibrationText]:
    """The texts of a file of prompts; see above."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if "answer" in lines[0]:
        return [
            CalibrationText(line["prompt"] + line["answer"], 1 if counts_prompts else len(line["prompt"]))
            for line in lines
        ]
    with native_model(file, 1024) as model:
        asked = [line["turns"][0] for line in lines[:N_PROMPTS]]
        return [CalibrationText(tokens) for tokens in own_answers(model, file, asked)]


def plain_choices(source: GgufSource, subjects: Sequence[Subject]) -> dict[str, Types]:
    """Uniform formats, and what llama.cpp's file types have."""
    found: dict[str, Types] = {f"uniform {name}": uniform(subjects, GGMLType[name]) for name in UNIFORM}
    for name in FILE_TYPES:
        types = tensor_types(file_type(name), source.metadata, source.tensors, True)
        found[name] = {subject.name: types[subject.name] for subject in subjects}
    return found


def fastest(search: Search, loss: float, n_bytes: int, n_tokens: int) -> Types:
    """The fastest mix of at most so many bytes with a predicted loss of at most so much."""
    best = search.allocate(Limits(n_bytes, n_tokens, float("inf")))
    low, high = 0.0, best.seconds
    for _ in range(12):
        middle = 0.5 * (low + high)
        try:
            mix = search.allocate(Limits(n_bytes, n_tokens, middle))
        except BudgetExceeded:
            low = middle
            continue
        if mix.predicted <= loss:
            best, high = mix, middle
        else:
            low = middle
    return best.types


def equal_pairs(
    search: Search, plain: Mapping[str, Types], names: Sequence[str], held: Sequence[Window], n_tokens: int
) -> dict[str, Types]:
    """Choices, and of each the fastest of a few mixes that has no more bytes and no more measured divergence."""
    ladders = {
        name: [
            fastest(search, step * search.predicted(plain[name]), search.n_bytes(plain[name]), n_tokens)
            for step in STEPS
        ]
        for name in names
    }
    tried = [types for name in names for types in (plain[name], *ladders[name])]
    found = iter(search.compare(tried, held, shown))
    choices: dict[str, Types] = {}
    for name in names:
        wanted, *of_mixes = [next(found).divergence for _ in (0, *STEPS)]
        print(f"\n{name}: KL {wanted:.5f}, of the mixes {of_mixes}", file=sys.stderr)
        good = [mix for mix, kl in zip(ladders[name], of_mixes, strict=True) if kl <= wanted] or ladders[name][-1:]
        choices |= {name: plain[name], f"auto, measured KL of {name}": good[0]}
    return choices


def pass_milliseconds(
    source: GgufSource, pair: Sequence[Types], importance: Importance, n_tokens: int, device: Device
) -> list[float]:
    """Medians of whole passes of n tokens of two models, which take turns."""
    window = [Window(list(range(1, n_tokens + 1)), list(range(n_tokens)))]
    models = [TrialModel(source, types, importance, 64, device) for types in pair]
    times: list[list[float]] = [[] for _ in models]
    for _ in range(ROUNDS):
        for model, measured in zip(models, times, strict=True):
            model.read(window)
            started = time.perf_counter()
            model.read(window)
            measured.append(time.perf_counter() - started)
    for model in models:
        model.close()
    return [1e3 * statistics.median(each) for each in times]


def choices_of(
    search: Search, plain: Mapping[str, Types], n_tokens: int, is_refined: bool
) -> tuple[dict[str, Types], dict[str, tuple[str, str]]]:
    """The mixes beside the plain choices, and which plain choice is compared in time with which mix."""
    choices, pairs = dict(plain), {}
    for name, types in plain.items():
        limits = Limits(search.n_bytes(types), n_tokens, float("inf"))
        mix = search.refine(limits) if is_refined else search.allocate(limits)
        choices[f"auto, bytes of {name}"] = mix.types
        choices[f"auto, KL of {name}"] = fastest(search, search.predicted(types), limits.n_bytes, n_tokens)
        pairs[name] = (name, f"auto, KL of {name}")
    return choices, pairs


def bench(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    source = GgufSource(ModelFile.open(path))
    device, spec = Device(arguments.threads), read_spec(source.file)
    subjects = subjects_of(source, spec)
    importance = importance_by_tensor(subjects, read_imatrix(arguments.imatrix))
    train = windows_of(texts_of(arguments.train, source.file, True), arguments.window, 1, arguments.rows)
    held = windows_of(texts_of(arguments.held, source.file, False), HELD_WINDOW, arguments.windows, HELD_ROWS)
    search = Search(source, subjects, importance, train, device, state=arguments.state)
    started = time.perf_counter()
    search.measure(shown)
    seconds = time.perf_counter() - started
    n_tokens = parse_cost(arguments.cost)[0] or 4
    plain = plain_choices(source, subjects)
    if arguments.only_kernels:
        print([1e3 * search.seconds(types, n) for types in plain.values() for n in (1, n_tokens, 8)], file=sys.stderr)
        return {}
    if arguments.equal:
        choices = equal_pairs(search, plain, arguments.equal, held, n_tokens)
        pairs = {name: (name, f"auto, measured KL of {name}") for name in arguments.equal}
    else:
        choices, pairs = choices_of(search, plain, n_tokens, arguments.refine)
    search.close()
    found = search.compare(list(choices.values()), held)
    rows = {name: row_of(search, types, each) for (name, types), each in zip(choices.items(), found, strict=True)}
    for name in arguments.timed or arguments.equal:
        pair = [choices[each] for each in pairs[name]]
        times = pass_milliseconds(source, pair, importance, n_tokens, device)
        for each, milliseconds in zip(pairs[name], times, strict=True):
            rows[each]["pass_ms"] = milliseconds
    for name, row in rows.items():
        print(f"{name:28} {json.dumps(row)}", file=sys.stderr)
    return {"model": path.name, "measuring_seconds": seconds, "n_tensors": len(subjects), "choices": rows}


def shown(what: str, share: float) -> None:
    print(f"\r{what:60}", end="", file=sys.stderr, flush=True)


def row_of(search: Search, types: Types, distance: Distance) -> dict[str, Any]:
    return {
        "bytes": search.n_bytes(types),
        "kl": distance.divergence,
        "top1_agreement": distance.agreement,
        "predicted_kl": search.predicted(types),
        **{f"products_ms_{n}": 1e3 * search.seconds(types, n) for n in (1, 4, 8)},
        "formats": dict(Counter(type.name for type in types.values())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--held", type=Path, required=True)
    parser.add_argument("--imatrix", type=Path, required=True)
    parser.add_argument("--window", type=int, default=320, help="tokens by which losses are measured")
    parser.add_argument("--rows", type=int, default=200, help="of them that count")
    parser.add_argument("--windows", type=int, default=3, help="of 512 held-out tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--state", type=Path, help="measurements, kept")
    parser.add_argument("--cost", default="verify:4")
    parser.add_argument("--refine", action="store_true", help="measure the closest decisions again")
    parser.add_argument("--timed", nargs="*", default=[], metavar="CHOICE", help="also time whole passes, as of Q4_K_M")
    parser.add_argument("--equal", nargs="*", default=[], metavar="CHOICE", help="see above")
    parser.add_argument("--only-kernels", action="store_true")
    parser.add_argument("--note", default="")
    arguments = parser.parse_args()
    result = bench(arguments.model, arguments)
    print(json.dumps({"benchmark": "auto", "machine": machine(), "note": arguments.note, **result}))


if __name__ == "__main__":
    main()
