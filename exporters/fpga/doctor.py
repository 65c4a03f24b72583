"""The check of a folder for a board: by itself, and against the model that it was made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edgeinfer.errors import BadBoardFolder
from edgeinfer.exporters.fpga.content import Content, Product
from edgeinfer.exporters.fpga.stages import stage_faults
from edgeinfer.hls.folder import BoardFolder
from edgeinfer.hls.integrity import faults_of


def faults_in(path: Path) -> Iterator[str]:
    """Everything that is wrong with a folder, a sentence each. Where it cannot be opened, that is the one fault."""
    try:
        folder = BoardFolder.open(path)
    except BadBoardFolder as error:
        yield str(error)
        return
    faults = list(faults_of(folder))
    faults += _phase_faults(folder)
    yield from faults
    if not faults:
        yield from stage_faults(folder)


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
    sample = [product for product in content.products if product.layer in {0, n // 2, n - 1}]
    for product in sample:
        _compare(folder, product)
    return f"{summary(path)}; {len(sample)} matrices unpack to the trits and scales of the source"


def _compare(folder: BoardFolder, product: Product) -> None:
    trits, scales = product.read()
    for what, wanted, found in (
        ("trits", trits, folder.trits(product.name)),
        ("scales", scales, folder.scales(product.name)),
    ):
        if not np.array_equal(wanted, found):
            raise BadBoardFolder(
                f"{product.name}: {what} must be those of the source: found others; nothing was written"
            )


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
    for layer in range(facts["n_layers"]):
        for phase, shape in shapes.items():
            tensor = folder.tensors.get(f"layers.{layer}.{phase}")
            found = None if tensor is None else (tensor.n_out, tensor.n_in)
            if found != shape:
                yield (
                    f"{folder.path}: layers.{layer}.{phase} must have shape {shape}, by the facts of the model: found "
                    f"{found}; manifest.json was changed"
                )
