"""Tiny draft heads as GGUF files, some fitted to what a tiny model writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from late import Late
from tiny_models import Floats, Value, add_bpe, add_keys, add_matrix, written

from edgeinfer.backends.reference import ReferenceBackend, ReferenceSession
from edgeinfer.backends.reference_math import rms_norm, silu
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_spec
from edgeinfer.models.draft_head import fingerprint
from edgeinfer.models.gguf import ModelFile

if TYPE_CHECKING:
    import gguf
else:
    gguf = Late("gguf")

_NOISE = 0.02  # of what the blocks add, against what a random block would


def write_tiny_head(
    path: Path,
    target: Path,
    texts: Sequence[Sequence[int]] = (),
    *,
    tensor_type: str = "F16",
    n_layers: int = 1,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    n_ff: int = 96,
    draft_vocab: Sequence[int] | None = None,
    n_ctx_train: int = 512,
    taps: Sequence[int] = (),
    metadata: Mapping[str, Value | None] | None = None,
    leave_out: str = "",
    seed: int = 0,
) -> Path:
    """Write a head for a tiny model and give back its path.

    texts: token ids on which it is right, as far as their features are no more than the rows that the target has.
    taps: layers that it is fed by, the last of which must be the target's last one where there are texts.
    draft_vocab: None is every second token, and those of the texts.  metadata: other values for keys, None takes one
    away.  leave_out: a tensor that the file lacks.
    """
    of_target = _Target.read(target, with_session=bool(texts))
    n_embd, rng = of_target.n_embd, np.random.default_rng(seed)
    norms = ["gate.token_norm", *(f"blk.{i}.{norm}" for i in range(n_layers) for norm in ("attn_norm", "ffn_norm"))]
    vectors = {norm: (1 + 0.2 * rng.standard_normal(n_embd)).astype(np.float32) for norm in norms}
    draft_vocab = _usual_vocabulary(of_target.n_vocab, texts) if draft_vocab is None else draft_vocab
    matrices = {
        "gate.token": random_matrix(rng, n_embd, n_embd),
        "gate.feature": random_matrix(rng, n_embd, n_embd),
        "gate.mix": random_matrix(rng, n_embd, 2 * n_embd, 0.0 if texts else 1.0),
        "output": of_target.output[list(draft_vocab)],
    }
    if taps:  # what they are combined to is near what the target's output matrix reads
        vectors["combine_norm"] = (1 + 0.2 * rng.standard_normal(len(taps) * n_embd)).astype(np.float32)
        vectors["combine_norm"][-n_embd:] = of_target.output_norm
        matrices["combine"] = random_matrix(rng, n_embd, len(taps) * n_embd, _NOISE if texts else 1.0)
        matrices["combine"][:, -n_embd:] += np.eye(n_embd, dtype=np.float32)
    if of_target.session is not None:
        _fit_gate(matrices, vectors["gate.token_norm"], of_target.embeddings, *_pairs(of_target.session, texts))
    for layer in range(n_layers):
        matrices |= _layer(rng, f"blk.{layer}", n_embd, n_kv_heads * (n_embd // n_heads), n_ff, fitted=bool(texts))
    writer = gguf.GGUFWriter(path, "draft-head")
    keys = _head_keys(of_target, taps, n_layers, n_ff, n_heads, n_kv_heads, n_ctx_train)
    add_keys(writer, keys | dict(metadata or {}))
    if leave_out != "draft_vocab":
        writer.add_tensor("draft_vocab", np.array(draft_vocab, dtype=np.int32))
    return _write(writer, path, vectors, matrices, tensor_type, leave_out)


@dataclass(frozen=True)
class _Target:
    """What a head is made from."""

    architecture: str
    name: str
    fingerprint: str
    n_embd: int
    n_vocab: int
    output: Floats
    output_norm: Floats
    embeddings: Floats
    session: ReferenceSession | None  # None where nothing is to be fitted

    @classmethod
    def read(cls, path: Path, with_session: bool) -> _Target:
        with ModelFile.open(path) as model:
            spec, backend = read_spec(model), ReferenceBackend()
            matrix = (spec.n_vocab, spec.n_embd)
            expected = {spec.output: matrix, spec.token_embd: matrix, spec.output_norm: (spec.n_embd,)}
            found = {name: one.values for name, one in backend.read_weights(model, expected).items()}
            session = None
            if with_session:
                session = backend.load(model, spec, backend.plan(model, spec, LoadSettings(512)), Device(1)).session()
            return cls(
                spec.architecture,
                str(model.metadata["general.name"]),
                fingerprint(model),
                spec.n_embd,
                spec.n_vocab,
                found[spec.output],
                found[spec.output_norm],
                found[spec.token_embd],
                session,
            )


def _usual_vocabulary(n_vocab: int, texts: Sequence[Sequence[int]]) -> list[int]:
    """Every second token, and those of the texts."""
    return sorted({*range(0, n_vocab, 2), *(id for text in texts for id in text)})


def random_matrix(rng: np.random.Generator, n_out: int, n_in: int, factor: float = 1.0) -> Floats:
    """Gaussian weights that keep the size of what they multiply, times a factor."""
    return (factor / np.sqrt(n_in) * rng.standard_normal((n_out, n_in))).astype(np.float32)


def _layer(rng: np.random.Generator, name: str, n_embd: int, n_kv: int, n_ff: int, fitted: bool) -> dict[str, Floats]:
    """The matrices of a llama block; fitted: it adds little to what goes in."""
    shapes = {
        "attn_q": (n_embd, n_embd),
        "attn_k": (n_kv, n_embd),
        "attn_v": (n_kv, n_embd),
        "attn_output": (n_embd, n_embd),
        "ffn_gate": (n_ff, n_embd),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
    }
    last = ("attn_output", "ffn_down") if fitted else ()
    return {
        f"{name}.{role}": random_matrix(rng, *shape, _NOISE if role in last else 1.0) for role, shape in shapes.items()
    }


def _fit_gate(
    matrices: dict[str, Floats],
    token_norm: Floats,
    embeddings: Floats,
    features: Floats,
    ids: list[int],
    nexts: Floats,
) -> None:
    """Make the gate give the features after the given ones; see _pairs."""
    b = silu(rms_norm(embeddings[ids], token_norm, 1e-5) @ matrices["gate.token"].T)
    matrices["gate.feature"] = np.linalg.lstsq(features, 2 * nexts - b, rcond=None)[0].T.astype(np.float32)


def _head_keys(
    target: _Target, taps: Sequence[int], n_layers: int, n_ff: int, n_heads: int, n_kv_heads: int, n_ctx_train: int
) -> dict[str, Value | None]:
    keys: dict[str, Value | None] = {
        "kind": "dgf",
        "target.architecture": target.architecture,
        "target.name": target.name,
        "target.vocab_size": target.n_vocab,
        "target.fingerprint": target.fingerprint,
        "embedding_length": target.n_embd,
        "block_count": n_layers,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "context_length": n_ctx_train,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "target_layers": list(taps) or None,
    }
    return {"general.type": "adapter"} | {f"draft-head.{key}": value for key, value in keys.items()}


def _write(
    writer: gguf.GGUFWriter,
    path: Path,
    vectors: Mapping[str, Floats],
    matrices: Mapping[str, Floats],
    tensor_type: str,
    leave_out: str,
) -> Path:
    """Add the tensors and write the file; gives its path."""
    for name, values in vectors.items():
        if name != leave_out:
            writer.add_tensor(f"{name}.weight", values)
    for name, values in matrices.items():
        if name != leave_out:
            add_matrix(writer, f"{name}.weight", tensor_type, values)
    return written(writer, path)


def _pairs(session: ReferenceSession, texts: Sequence[Sequence[int]]) -> tuple[Floats, list[int], Floats]:
    """Features of positions i, tokens of positions i + 1, and features of these."""
    features, ids, nexts = [], [], []
    for text in texts:
        hidden = session.forward(list(text), hidden=True).hidden
        assert hidden is not None
        features.append(hidden[0, :-1])
        ids.extend(text[1:])
        nexts.append(hidden[0, 1:])
    return np.concatenate(features), ids, np.concatenate(nexts)


def write_tiny_eagle3(
    path: Path,
    target: Path,
    texts: Sequence[Sequence[int]] = (),
    *,
    target_layers: Sequence[int] = (1, 1, 2),
    tensor_type: str = "F16",
    n_embd: int | None = None,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    n_ff: int = 512,
    draft_vocab: Sequence[int] | None = (),
    has_embeddings: bool = False,
    norm_before_fc: bool = False,
    norm_before_residual: bool = False,
    rope_freqs: bool = False,
    metadata: Mapping[str, Value | None] | None = None,
    leave_out: str = "",
    seed: int = 0,
) -> Path:
    """Write an EAGLE-3 head in llama.cpp's form for a tiny model of a BPE vocabulary, and give back its path.

    texts: token ids on which it is mostly right; the last of target_layers must then be what the target ends with.
    n_embd: the target's.  draft_vocab: None is all tokens, without d2t; () is every second token, and those of the
    texts.  has_embeddings: needed for another n_embd than the target's.  metadata, leave_out: see write_tiny_head.
    """
    of_target = _Target.read(target, with_session=bool(texts))
    d, rng = n_embd or of_target.n_embd, np.random.default_rng(seed)
    n_rows, n_ids = 3 * of_target.n_embd, of_target.n_vocab
    ids = list(range(n_ids) if draft_vocab is None else draft_vocab) or _usual_vocabulary(n_ids, texts)
    vectors = _eagle3_norms(rng, d, n_rows if norm_before_fc else 0)
    matrices = _eagle3_matrices(rng, d, n_rows, n_kv_heads * (d // n_heads), n_ff, len(ids), fitted=bool(texts))
    if has_embeddings:
        matrices["token_embd"] = rng.standard_normal((of_target.n_vocab, d)).astype(np.float32)
    if of_target.session is not None:
        codes = partial(_codes, of_target.session, texts, [layer - 1 for layer in target_layers])
        _fit_eagle3(matrices, vectors, of_target, ids, codes)
    writer = gguf.GGUFWriter(path, "eagle3")
    keys: dict[str, Value] = {"norm_before_fc": norm_before_fc, "norm_before_residual": norm_before_residual}
    keys |= {"target_hidden_size": of_target.n_embd, "target_layers": list(target_layers)}
    add_keys(writer, _eagle3_keys(keys, d, n_ff, n_heads, n_kv_heads) | dict(metadata or {}))
    add_bpe(writer, of_target.n_vocab)
    if rope_freqs:
        writer.add_tensor("rope_freqs.weight", np.geomspace(1.0, 8.0, d // n_heads // 2).astype(np.float32))
    if draft_vocab is not None:
        writer.add_tensor("d2t", np.array(ids, dtype=np.int64))
    return _write(writer, path, vectors, matrices, tensor_type, leave_out)


def _eagle3_keys(
    keys: Mapping[str, Value], n_embd: int, n_ff: int, n_heads: int, n_kv_heads: int
) -> dict[str, Value | None]:
    """All keys of a head; keys: its own."""
    sizes: dict[str, Value] = {
        "embedding_length": n_embd,
        "block_count": 1,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": n_embd // n_heads,
        "rope.freq_base": 10000.0,
        "context_length": 512,
    }
    return {"general.name": "tiny eagle3"} | {f"eagle3.{key}": value for key, value in (sizes | dict(keys)).items()}


def _eagle3_norms(rng: np.random.Generator, d: int, n_rows: int) -> dict[str, Floats]:
    norms = {name: d for name in ("blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm", "output_norm")}
    norms |= {"enc.output_norm": n_rows} if n_rows else {}
    return {name: (1 + 0.2 * rng.standard_normal(n)).astype(np.float32) for name, n in norms.items()}


def _eagle3_matrices(
    rng: np.random.Generator, d: int, n_rows: int, n_kv: int, n_ff: int, n_ids: int, fitted: bool
) -> dict[str, Floats]:
    """Random ones. n_rows: numbers of the target's rows side by side."""
    return {
        "fc": random_matrix(rng, d, n_rows),
        "blk.0.attn_q": random_matrix(rng, d, 2 * d),
        "blk.0.attn_k": random_matrix(rng, n_kv, 2 * d),
        "blk.0.attn_v": random_matrix(rng, n_kv, 2 * d),
        "blk.0.attn_output": random_matrix(rng, d, d, _NOISE if fitted else 1.0),
        "blk.0.ffn_gate": random_matrix(rng, n_ff, d),
        "blk.0.ffn_up": random_matrix(rng, n_ff, d),
        "blk.0.ffn_down": random_matrix(rng, d, n_ff),
        "output": random_matrix(rng, n_ids, d),
    }


def _fit_eagle3(
    matrices: dict[str, Floats],
    vectors: dict[str, Floats],
    target: _Target,
    ids: list[int],
    codes: Callable[[Floats], tuple[Floats, Floats]],
) -> None:
    """Make the head right on texts. codes: what fc makes of rows of theirs and of the rows after them."""
    d = len(matrices["fc"])
    matrices["fc"] *= _NOISE
    matrices["fc"][:, -d:] += np.eye(d, dtype=np.float32)
    matrices["output"], vectors["output_norm"] = target.output[ids], target.output_norm
    now, nexts = codes(matrices["fc"])
    h = rms_norm(now, vectors["blk.0.ffn_norm"], 1e-5)
    gated = silu(h @ matrices["blk.0.ffn_gate"].T) * (h @ matrices["blk.0.ffn_up"].T)
    matrices["blk.0.ffn_down"] = np.linalg.lstsq(gated, nexts - now, rcond=1e-3)[0].T.astype(np.float32)


def _codes(
    session: ReferenceSession, texts: Sequence[Sequence[int]], taps: Sequence[int], fc: Floats
) -> tuple[Floats, Floats]:
    """What fc makes of the target's rows of positions i, and of positions i + 1."""
    now, nexts = [], []
    for text in texts:
        features = session.forward(list(text), hidden=taps).features
        assert features is not None
        codes = features @ fc.T
        now.append(codes[:-1])
        nexts.append(codes[1:])
    return np.concatenate(now), np.concatenate(nexts)
