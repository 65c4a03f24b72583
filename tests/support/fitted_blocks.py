"""Tiny hybrids whose own block that drafts is right about what they write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from recurrent_models import write_recurrent_model

from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.backends.reference_math import rms_norm
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import Experts, read_nextn, read_spec
from edgeinfer.models.gguf import ModelFile

_NOISE = 0.02  # of what the layer adds, against what a random one would


def write_fitted_hybrid(
    path: Path, texts: Sequence[Sequence[int]], architecture: str = "qwen35", **options: Any
) -> Path:
    """A model with a block that drafts, which is right on these texts. options: see write_recurrent_model."""
    write_recurrent_model(path, architecture, n_nextn=1, **options)
    with ModelFile.open(path) as file:
        spec, (block,), backend = read_spec(file), read_nextn(file), ReferenceBackend()
        names = (block.token_norm, block.hidden_norm, block.output_norm, spec.token_embd)
        shapes = dict(zip(names, [(spec.n_embd,)] * 3 + [(spec.n_vocab, spec.n_embd)], strict=True))
        weights = {name: each.values for name, each in backend.read_weights(file, shapes).items()}
        ffn = block.layer.ffn
        roles = ("down", "shared_down") if isinstance(ffn, Experts) else ("down",)
        shrunk = backend.read_weights(file, {getattr(ffn, role): ffn.shapes()[role] for role in roles})
        plan = backend.plan(file, spec, LoadSettings(512))
        session = backend.load(file, spec, plan, Device(1)).session()
        inputs, outputs = [], []
        for text in texts:
            hidden = session.forward(list(text), hidden=True).hidden
            assert hidden is not None
            embedded = rms_norm(weights[spec.token_embd][list(text[1:])], weights[block.token_norm], 1e-6)
            before = rms_norm(hidden[0, :-1], weights[block.hidden_norm], 1e-6)
            inputs.append(np.concatenate([embedded, before], axis=1))
            outputs.append(hidden[0, 1:] / weights[block.output_norm])
    fitted = np.linalg.lstsq(np.concatenate(inputs), np.concatenate(outputs), rcond=1e-4)[0].T
    name = f"blk.{block.index}"
    values = {f"{name}.nextn.eh_proj.weight": fitted.astype(np.float32)}
    values |= {tensor: np.float32(_NOISE) * each.values for tensor, each in shrunk.items()}
    options["values"] = values
    write_recurrent_model(path, architecture, n_nextn=1, **options)
    return path
