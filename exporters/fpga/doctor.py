"""The check of a folder for a board: by itself, and against the model that it was made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.common.errors import BadBoardFolder
from edgeinfer.exporters.fpga.content import Content, Product
from edgeinfer.exporters.fpga.stages import stage_faults
from edgeinfer.hls.files.folder import BoardFolder
from edgeinfer.hls.files.integrity import faults_of


def faults_in(path: Path) -> Iterator[str]:
    """Everything that is wrong with a folder, a sentence each. Where it cannot be opened, that is the one fault."""
    try:
        folder = BoardFolder.open(path)
    except BadBoardFolder as error:
        yield str(error)
        return
    faults = list(faults_of(folder))
    of_model = _readable(folder, _phase_faults)
    faults += of_model or _readable(folder, _array_faults)
    yield from faults
    if not faults:
        yield from _readable(folder, stage_faults)


def _readable(folder: BoardFolder, faults: Callable[[BoardFolder], Iterator[str]]) -> list[str]:
    """The faults, or that the facts they follow from are not there or of another kind."""
    try:
        return list(faults(folder))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        return [
            f"{folder.path}: manifest.json: `model` and the arrays must be those of a model: found {error!r:.120}; the "
            "manifest was changed: export the model again"
        ]


def summary(path: Path) -> str:
    """What a whole folder holds, for the user."""
    folder = BoardFolder.open(path)
    n_vectors = sum(golden.n for golden in folder.manifest.golden)
    return (
        f"{len(folder.manifest.files)} files whole, {len(folder.tensors)} matrices readable, {n_vectors} golden "
        f"vectors of {len(folder.manifest.golden)} matrices equal to the products of the weights"
    )


def check_against(path: Path, content: Content) -> str:
    """What was compared, a sentence, for a folder that was written just now. Raises BadBoardFolder for a fault.

    The trits and scales of three layers are unpacked and compared with the source.
    """
    fault = next(faults_in(path), None)
    if fault is not None:
        raise BadBoardFolder(f"what was written is not whole: {fault}; nothing was written")
    folder, n = BoardFolder.open(path), content.spec.n_layers
    sample = [each for each in content.products if each.layer in {0, n // 2, n - 1}]
    for each in sample:
        _compare(folder, each)
    return f"{summary(path)}; {len(sample)} matrices unpack to the trits and scales of the source"


def _compare(folder: BoardFolder, of: Product) -> None:
    trits, scales = of.read()
    for what, wanted, found in (
        ("trits", trits, folder.trits(of.name)),
        ("scales", scales, folder.scales(of.name)),
    ):
        if not np.array_equal(wanted, found):
            raise BadBoardFolder(f"{of.name}: {what} must be those of the source: found others; nothing was written")


def _phase_faults(folder: BoardFolder) -> Iterator[str]:
    """Matrices whose shape is not that of the architecture, and phases that a layer lacks."""
    facts = folder.manifest.facts.get("model", {})
    if "n_layers" not in facts:  # matrices without a model
        return
    n_embd, head_dim = facts["n_embd"], facts["head_dim"]
    n_q, n_kv = facts["n_heads"] * head_dim, facts["n_kv_heads"] * head_dim
    shapes = {
        "qkv": (n_q + 2 * n_kv, n_embd),
        "o": (n_embd, n_q),
        "gate_up": (2 * facts["n_ff"], n_embd),
        "down": (n_embd, facts["n_ff"]),
    }
    phases = ((layer, *each) for layer in range(facts["n_layers"]) for each in shapes.items())
    for layer, phase, shape in phases:
        tensor = folder.tensors.get(f"layers.{layer}.{phase}")
        found = None if tensor is None else (tensor.n_out, tensor.n_in)
        if found != shape:
            yield (
                f"{folder.path}: layers.{layer}.{phase} must have shape {shape}, by the facts of the model: found "
                f"{found}; manifest.json was changed"
            )
            if tensor is None:
                return  # the layers behind it would be told one by one
    others = [
        each.name for each in folder.manifest.tensors if each.layer is not None and each.layer >= facts["n_layers"]
    ]
    if others:
        yield f"{folder.path}: {others[0]} is of no layer of the model, which has {facts['n_layers']}"


def _array_faults(folder: BoardFolder) -> Iterator[str]:
    """Norms and tables that a model needs, and the folder lacks or has in another shape."""
    facts = folder.manifest.facts
    if "n_layers" not in facts.get("model", {}):
        return
    for name, shape in _arrays_of(facts).items():
        array = folder.arrays.get(name)
        found = None if array is None else array.shape
        if found != shape:
            yield (
                f"{folder.path}: array {name} must have shape {shape}, by the facts of the model: found {found}; "
                "manifest.json was changed"
            )


def _arrays_of(facts: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of a model."""
    model, head = facts["model"], facts["head"]
    n_embd, head_dim, is_whole = model["n_embd"], model["head_dim"], model["qk_norm"] == "whole"
    n_q, n_kv = model["n_heads"] * head_dim, model["n_kv_heads"] * head_dim
    sizes = {"attn_sub_norm": n_q, "ffn_sub_norm": model["n_ff"]}
    sizes |= {"q_norm": n_q if is_whole else head_dim, "k_norm": n_kv if is_whole else head_dim}
    found: dict[str, tuple[int, ...]] = {f"layers.{layer}.{name}": (sizes.get(name, n_embd),)
             for layer in range(model["n_layers"]) for name in model["norms"]}  # fmt: skip
    found |= {"output_norm": (n_embd,), "rope": (2, model["n_ctx"], model["rope"]["n_dims"] // 2)}
    found |= {facts["embeddings"]["array"]: (model["n_vocab"], n_embd), head["scales"]: (model["n_logits"],)}
    if facts["embeddings"]["type"] == "int8":
        found[f"{facts['embeddings']['array']}_scales"] = (model["n_vocab"],)
    return found | {head["array"]: (model["n_logits"], n_embd)}
