"""Tiny draft heads as GGUF files, some fitted to what a tiny model writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from tiny_models import Floats, Value, add_bpe, add_keys, add_matrix

from edgeinfer.backends.reference import ReferenceBackend, ReferenceSession
from edgeinfer.backends.reference_math import rms_norm, silu
from edgeinfer.models import read_spec
from edgeinfer.models.draft_head import fingerprint
from edgeinfer.models.gguf import ModelFile
from edgeinfer.types import Device

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
    with ModelFile.open(target) as model:
        spec = read_spec(model)
        backend = ReferenceBackend()
        session = backend.load(model, spec, backend.plan(model, spec, 512), Device(1)).session() if texts else None
        matrix = backend.read_weights(model, {spec.output: (spec.n_vocab, spec.n_embd)})[spec.output].values
        rows = backend.read_weights(model, {spec.token_embd: (spec.n_vocab, spec.n_embd)})[spec.token_embd].values
        last_norm = backend.read_weights(model, {"output_norm.weight": (spec.n_embd,)})["output_norm.weight"].values
        mark, name = fingerprint(model), str(model.metadata["general.name"])
    n_embd, n_kv = spec.n_embd, n_kv_heads * (spec.n_embd // n_heads)
    rng = np.random.default_rng(seed)

    def random(n_out: int, n_in: int, factor: float = 1.0) -> Floats:
        return (factor / np.sqrt(n_in) * rng.standard_normal((n_out, n_in))).astype(np.float32)

    norms = ["gate.token_norm", *(f"blk.{i}.{norm}" for i in range(n_layers) for norm in ("attn_norm", "ffn_norm"))]
    vectors = {norm: (1 + 0.2 * rng.standard_normal(n_embd)).astype(np.float32) for norm in norms}
    token = random(n_embd, n_embd)
    if draft_vocab is None:
        draft_vocab = sorted({*range(0, spec.n_vocab, 2), *(id for text in texts for id in text)})
    matrices = {
        "gate.feature": random(n_embd, n_embd),
        "gate.token": token,
        "gate.mix": random(n_embd, 2 * n_embd, 0.0 if texts else 1.0),
        "output": matrix[list(draft_vocab)],
    }
    if taps:  # what they are combined to is near what the target's output matrix reads
        vectors["combine_norm"] = (1 + 0.2 * rng.standard_normal(len(taps) * n_embd)).astype(np.float32)
        vectors["combine_norm"][-n_embd:] = last_norm
        matrices["combine"] = random(n_embd, len(taps) * n_embd, _NOISE if texts else 1.0)
        matrices["combine"][:, -n_embd:] += np.eye(n_embd, dtype=np.float32)
    if session is not None:
        features, ids, nexts = _pairs(session, texts)
        b = silu(rms_norm(rows[ids], vectors["gate.token_norm"], 1e-5) @ token.T)
        matrices["gate.feature"] = np.linalg.lstsq(features, 2 * nexts - b, rcond=None)[0].T.astype(np.float32)
    for layer in range(n_layers):
        for role, n_out, n_in in [
            ("attn_q", n_embd, n_embd),
            ("attn_k", n_kv, n_embd),
            ("attn_v", n_kv, n_embd),
            ("attn_output", n_embd, n_embd),
            ("ffn_gate", n_ff, n_embd),
            ("ffn_up", n_ff, n_embd),
            ("ffn_down", n_embd, n_ff),
        ]:
            is_last = texts and role in ("attn_output", "ffn_down")
            matrices[f"blk.{layer}.{role}"] = random(n_out, n_in, _NOISE if is_last else 1.0)
    writer = gguf.GGUFWriter(path, "draft-head")
    keys: dict[str, Value | None] = {
        "general.type": "adapter",
        "draft-head.kind": "dgf",
        "draft-head.target.architecture": spec.architecture,
        "draft-head.target.name": name,
        "draft-head.target.vocab_size": spec.n_vocab,
        "draft-head.target.fingerprint": mark,
        "draft-head.embedding_length": n_embd,
        "draft-head.block_count": n_layers,
        "draft-head.feed_forward_length": n_ff,
        "draft-head.attention.head_count": n_heads,
        "draft-head.attention.head_count_kv": n_kv_heads,
        "draft-head.attention.layer_norm_rms_epsilon": 1e-5,
        "draft-head.rope.freq_base": 10000.0,
        "draft-head.context_length": n_ctx_train,
        "draft-head.target_layers": list(taps) or None,
    }
    add_keys(writer, keys | dict(metadata or {}))
    if leave_out != "draft_vocab":
        writer.add_tensor("draft_vocab", np.array(draft_vocab, dtype=np.int32))
    return _write(writer, path, vectors, matrices, tensor_type, leave_out)


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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
    own_embeddings: bool = False,
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
    texts.  own_embeddings: needed for another n_embd than the target's.  metadata, leave_out: see write_tiny_head.
    """
    with ModelFile.open(target) as model:
        spec = read_spec(model)
        backend = ReferenceBackend()
        read = {spec.output: (spec.n_vocab, spec.n_embd), "output_norm.weight": (spec.n_embd,)}
        of_target = {name: one.values for name, one in backend.read_weights(model, read).items()}
        session = backend.load(model, spec, backend.plan(model, spec, 512), Device(1)).session() if texts else None
    d = n_embd or spec.n_embd
    n_q, n_kv = d, n_kv_heads * (d // n_heads)
    rng = np.random.default_rng(seed)

    def random(n_out: int, n_in: int, factor: float = 1.0) -> Floats:
        return (factor / np.sqrt(n_in) * rng.standard_normal((n_out, n_in))).astype(np.float32)

    ids = range(spec.n_vocab) if draft_vocab is None else draft_vocab
    if draft_vocab == ():
        ids = sorted({*range(0, spec.n_vocab, 2), *(id for text in texts for id in text)})
    norms = {name: d for name in ("blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm", "output_norm")}
    norms |= {"enc.output_norm": 3 * spec.n_embd} if norm_before_fc else {}
    vectors = {name: (1 + 0.2 * rng.standard_normal(n)).astype(np.float32) for name, n in norms.items()}
    matrices = {
        "fc": random(d, 3 * spec.n_embd),
        "blk.0.attn_q": random(n_q, 2 * d),
        "blk.0.attn_k": random(n_kv, 2 * d),
        "blk.0.attn_v": random(n_kv, 2 * d),
        "blk.0.attn_output": random(d, n_q, _NOISE if texts else 1.0),
        "blk.0.ffn_gate": random(n_ff, d),
        "blk.0.ffn_up": random(n_ff, d),
        "blk.0.ffn_down": random(d, n_ff),
        "output": random(len(ids), d),
    }
    if own_embeddings:
        matrices["token_embd"] = rng.standard_normal((spec.n_vocab, d)).astype(np.float32)
    if session is not None:
        matrices["fc"] *= _NOISE
        matrices["fc"][:, -d:] += np.eye(d, dtype=np.float32)
        matrices["output"], vectors["output_norm"] = of_target[spec.output][list(ids)], of_target["output_norm.weight"]
        now, nexts = _codes(session, texts, [layer - 1 for layer in target_layers], matrices["fc"])
        h = rms_norm(now, vectors["blk.0.ffn_norm"], 1e-5)
        gated = silu(h @ matrices["blk.0.ffn_gate"].T) * (h @ matrices["blk.0.ffn_up"].T)
        matrices["blk.0.ffn_down"] = np.linalg.lstsq(gated, nexts - now, rcond=1e-3)[0].T.astype(np.float32)
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_name("tiny eagle3")
    keys: dict[str, Value | None] = {
        "target_hidden_size": spec.n_embd,
        "norm_before_fc": norm_before_fc,
        "norm_before_residual": norm_before_residual,
        "embedding_length": d,
        "block_count": 1,
        "feed_forward_length": n_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": d // n_heads,
        "rope.freq_base": 10000.0,
        "context_length": 512,
        "target_layers": list(target_layers),
    }
    add_keys(writer, {f"eagle3.{key}": value for key, value in keys.items()} | dict(metadata or {}))
    add_bpe(writer, spec.n_vocab)
    if rope_freqs:
        writer.add_tensor("rope_freqs.weight", np.geomspace(1.0, 8.0, d // n_heads // 2).astype(np.float32))
    if draft_vocab is not None:
        writer.add_tensor("d2t", np.array(ids, dtype=np.int64))
    return _write(writer, path, vectors, matrices, tensor_type, leave_out)


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
