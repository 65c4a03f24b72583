"""ONNX Runtime or OpenCL against the native engine, with the same draft model and draft heads: which tokens differ.

    python tests/benchmarks/compare_drafts.py MODEL.gguf [--head HEAD.gguf ...] [--backend onnx] [--tokens 2000]

Both read the same text, ten tokens per pass. Per 1,000 tokens: how often the most likely token differs, and how often
the three most likely ones do; how far the native engine's first two are apart where it differs, and elsewhere. One JSON
line on stdout at the end.
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

from edgeinfer.backends.base import Backend
from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.backends.native import NativeBackend, NativeModel, load_head, plan_head
from edgeinfer.backends.onnx import OnnxBackend, OnnxHeadBackend, choose_provider
from edgeinfer.backends.opencl import OpenCLBackend, OpenCLHeadBackend, choose_device
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import ModelSpec, read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

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


def compared(native: Logits, other: Logits) -> dict[str, float]:
    best = np.sort(native, axis=1)
    gaps = best[:, -1] - best[:, -2]
    differs = native.argmax(axis=1) != other.argmax(axis=1)
    threes = [np.sort(np.argpartition(each, -3, axis=1)[:, -3:], axis=1) for each in (native, other)]
    return {
        "tokens": len(native),
        "first_differs_per_1000": round(1000 * float(differs.mean()), 2),
        "first_three_differ_per_1000": round(1000 * float((threes[0] != threes[1]).any(axis=1).mean()), 2),
        "gap_where_it_differs": float(np.median(gaps[differs])) if differs.any() else 0.0,
        "largest_gap_where_it_differs": float(gaps[differs].max()) if differs.any() else 0.0,
        "gap": float(np.median(gaps)),
    }


def compared_heads(
    path: Path, others: Any, file: ModelFile, target: NativeModel, texts: list[NDArray[np.int32]]
) -> dict[str, float]:
    """A head on the native engine and by the backend `others`, on the features that the target gives for the texts."""
    with ModelFile.open(path) as head:
        spec = read_head_beside(head, file, read_spec(file))
        native = load_head(
            head,
            spec,
            target,
            plan_head(head, spec, LoadSettings(N_CTX, n_batch=128, n_threads=DEVICE.n_threads)),
            DEVICE,
        ).session()
        other = others.load(head, spec, others.plan(head, spec, LoadSettings(N_CTX, n_batch=128)), DEVICE).session()
    rows: list[list[Logits]] = [[], []]
    for text in texts:
        hidden = target.session().forward(text, hidden=True).hidden
        assert hidden is not None
        for found, session in zip(rows, (native, other), strict=True):
            found.append(in_steps(session, text[1:], hidden[0, :-1]))
    return compared(*map(np.concatenate, rows))


def backends(name: str, device: str | None, file: ModelFile, spec: ModelSpec) -> tuple[Backend, Any, str]:
    """The backend of models and that of heads on a device, and what it is called."""
    if name == "opencl":
        info = choose_device(None if device is None else int(device))
        return OpenCLBackend(info), OpenCLHeadBackend(info, file, spec), info.name
    provider = choose_provider(device)
    return OnnxBackend(provider), OnnxHeadBackend(provider, file, spec), provider.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--head", type=Path, action="append", default=[])
    parser.add_argument("--backend", choices=("onnx", "opencl"), default="onnx")
    parser.add_argument("--device", help="a provider of ONNX Runtime, or the number of an OpenCL device")
    parser.add_argument("--tokens", type=int, default=2000)
    arguments = parser.parse_args()
    with ModelFile.open(arguments.model) as file:
        spec, native = read_spec(file), NativeBackend()
        others, of_heads, device = backends(arguments.backend, arguments.device, file, spec)
        ids = np.array(Tokenizer.from_file(file).encode(SAMPLE_TEXT)[: arguments.tokens], dtype=np.int32)
        texts = [ids[first : first + N_CTX] for first in range(0, len(ids), N_CTX)]
        target = native.load(file, spec, native.plan(file, spec, LoadSettings(N_CTX)), DEVICE)
        other = others.load(file, spec, others.plan(file, spec, LoadSettings(N_CTX)), DEVICE)
        rows = [[in_steps(model.session(), text) for text in texts] for model in (target, other)]
        other.close()
        report: dict[str, Any] = {"model": compared(*map(np.concatenate, rows))}
        for path in arguments.head:
            report[path.name] = compared_heads(path, of_heads, file, target, texts)
    for name, figures in report.items():
        print(name, figures)
    print(json.dumps({**report, "backend": arguments.backend, "device": device, "machine": machine()}))


if __name__ == "__main__":
    main()
