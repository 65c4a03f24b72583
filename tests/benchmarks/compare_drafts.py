"""ONNX Runtime against the native engine on the same draft model, and on the same draft head: who chooses what.

    python tests/benchmarks/compare_drafts.py MODEL.gguf [--head HEAD.gguf] [--provider CPU] [--tokens 2000]

Both go through the same text, ten tokens in a pass. For each 1,000 tokens: how often the likeliest one differs, and how
often the likeliest three are others; how far the native engine's first two are apart where it differs, against their
distance elsewhere. One JSON line on stdout at the end.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine
from numpy.typing import NDArray
from text import SAMPLE_TEXT

from edgeinfer.backends.native import NativeBackend, NativeHead, plan_head
from edgeinfer.backends.onnx import OnnxBackend, OnnxHead, choose_provider, plan_onnx_head
from edgeinfer.gguf import ModelFile
from edgeinfer.models import read_spec
from edgeinfer.models.draft_head import read_head
from edgeinfer.tokenizer import Tokenizer
from edgeinfer.types import Device

N_CTX, STEP, DEVICE = 512, 10, Device(2)
Logits = NDArray[np.float32]


def in_steps(session: Any, *rows: NDArray[Any]) -> Logits:
    """(n, n_logits) of a text from the beginning, a few tokens a pass."""
    session.truncate(0)
    found = []
    for first in range(0, len(rows[0]), STEP):
        part = [each[first : first + STEP] for each in rows]
        found.append(session.forward(*part, logits="all").logits)
        session.commit(range(len(part[0])))
    return np.concatenate(found)


def compared(native: Logits, onnx: Logits) -> dict[str, float]:
    best = np.sort(native, axis=1)
    gaps = best[:, -1] - best[:, -2]
    differs = native.argmax(axis=1) != onnx.argmax(axis=1)
    threes = [np.sort(np.argpartition(each, -3, axis=1)[:, -3:], axis=1) for each in (native, onnx)]
    return {
        "tokens": len(native),
        "first_differs_per_1000": round(1000 * float(differs.mean()), 2),
        "first_three_differ_per_1000": round(1000 * float((threes[0] != threes[1]).any(axis=1).mean()), 2),
        "gap_where_it_differs": float(np.median(gaps[differs])) if differs.any() else 0.0,
        "largest_gap_where_it_differs": float(gaps[differs].max()) if differs.any() else 0.0,
        "gap": float(np.median(gaps)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--provider")
    parser.add_argument("--tokens", type=int, default=2000)
    arguments = parser.parse_args()
    info = choose_provider(arguments.provider)
    with ModelFile.open(arguments.model) as file:
        spec, native, onnx = read_spec(file), NativeBackend(), OnnxBackend(info)
        ids = np.array(Tokenizer.from_file(file).encode(SAMPLE_TEXT)[: arguments.tokens], dtype=np.int32)
        texts = [ids[first : first + N_CTX] for first in range(0, len(ids), N_CTX)]
        target, other = (
            backend.load(file, spec, backend.plan(file, spec, N_CTX), DEVICE) for backend in (native, onnx)
        )
        rows = [[in_steps(session, text) for text in texts] for session in (target, other)]
        report: dict[str, Any] = {"model": compared(*map(np.concatenate, rows))}
        if arguments.head is not None:
            with ModelFile.open(arguments.head) as head:
                decoder = read_head(head).decoder
                plan = plan_head(head, decoder, N_CTX, 128, DEVICE.n_threads)
                on_native = NativeHead(head, decoder, target, plan, DEVICE)
                plan = plan_onnx_head(head, decoder, file, spec, N_CTX, 128, info)
                on_onnx = OnnxHead(head, decoder, file, spec, plan, DEVICE, info)
                rows = [[], []]
                for text in texts:
                    target.truncate(0)
                    hidden = target.forward(text, hidden=True).hidden
                    assert hidden is not None
                    for found, session in zip(rows, (on_native, on_onnx), strict=True):
                        found.append(in_steps(session, text[1:], hidden[0, :-1]))
                report["head"] = compared(*map(np.concatenate, rows))
    for name, figures in report.items():
        print(name, figures)
    print(json.dumps({**report, "provider": info.name, "machine": machine()}))


if __name__ == "__main__":
    main()
