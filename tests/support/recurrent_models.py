"""Tiny models with recurrent layers of every kind, by one name each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hybrid_checkpoints import Floats, transformers_logits
from mamba_checkpoints import mamba_logits
from numpy.typing import NDArray
from tiny_hybrids import HYBRID_ARCHITECTURES, write_tiny_hybrid
from tiny_mamba import MAMBA_MODELS, write_tiny_mamba

from edgeinfer.models.gguf import ModelFile

RECURRENT_MODELS: tuple[str, ...] = (*HYBRID_ARCHITECTURES, *MAMBA_MODELS)


def write_recurrent_model(path: Path, model: str, tensor_type: str = "F32", **options: Any) -> Path:
    """Write a model and give back its path; options: of the writer of that model."""
    write: Any = write_tiny_mamba if model in MAMBA_MODELS else write_tiny_hybrid
    written: Path = write(path, model, tensor_type, **options)
    return written


def oracle_logits(file: ModelFile, tokens: NDArray[np.integer]) -> Floats:
    """Logits (n, n_vocab) of transformers with the weights of the file, in float32."""
    is_mamba = any("ssm_in." in name for name in file.tensors)
    return mamba_logits(file, tokens) if is_mamba else transformers_logits(file, tokens)
