"""Tiny assistants of Gemma 4 as GGUF files, in the form of llama.cpp's converter; some are right about their target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from late import Late
from tiny_models import Floats, Value, add_bpe, add_keys, add_matrix, named_writer, normal, written

from edgeinfer.backends.reference import ReferenceBackend
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import Attention, ModelSpec, read_spec
from edgeinfer.models.gguf import ModelFile

if TYPE_CHECKING:
    import gguf
else:
    gguf = Late("gguf")

_NOISE = 0.02  # of what the layers of a fitted one add, against what random ones would
_COPIED = ("rope.freq_base", "rope.freq_base_swa", "context_length", "attention.layer_norm_rms_epsilon")
_ROOT_OF_CLUSTERS = 3.0  # deviation of centroids: some lead clearly


def write_tiny_assistant(
    path: Path,
    target: Path,
    texts: Sequence[Sequence[int]] = (),
    *,
    tensor_type: str = "F16",
    n_embd: int = 64,
    windowed: Sequence[bool] = (True, True, True, False),
    n_heads: int = 4,
    n_ff: int = 96,
    n_clusters: int = 0,
    n_used: int | None = None,
    has_tokens: bool = True,
    metadata: Mapping[str, Value | None] | None = None,
    leave_out: str = "",
    seed: int = 0,
) -> Path:
    """Write an assistant of a tiny Gemma 4 and give back its path.

    texts: token ids on which it is mostly right.  windowed: of each layer.  n_clusters: of tokens, 0 for none; they
    must divide the vocabulary.  n_used: those that are looked at, None for no key.  metadata: other values for whole
    keys, None takes one away.  leave_out: a tensor that the file lacks.
    """
    of = _Target.read(target)
    sizes = _Sizes(of, n_embd, tuple(windowed), n_heads, n_ff)
    values = {name: _random(name, shape, seed, bool(texts)) for name, shape in _shapes(sizes).items()}
    if texts:
        values |= _fitted(of, texts, values["token_embd.weight"], values["output_norm.weight"])
    writer = named_writer(path, "gemma4-assistant", tensor_type)
    keys = {f"gemma4-assistant.{key}": value for key, value in _keys(sizes, n_used).items()}
    add_keys(writer, keys | dict(metadata or {}))
    if has_tokens:
        add_bpe(writer, of.spec.n_vocab)
    if n_clusters:
        values["masked_embd_centroids.weight"] = _ROOT_OF_CLUSTERS * normal(seed, "centroids", (n_clusters, n_embd))
        order = np.random.default_rng(seed).permutation(of.spec.n_vocab).astype(np.int32)
        if leave_out != "masked_embd_ordering":
            writer.add_tensor("masked_embd_ordering", order)
        if texts:  # a cluster's centroid is the mean of its tokens, so that the best token is in one of the best
            rows = values["token_embd.weight"][order].reshape(n_clusters, -1, n_embd)
            values["masked_embd_centroids.weight"] = rows.mean(axis=1)
    values["rope_freqs.weight"] = of.factors
    for name, value in values.items():
        if name == leave_out:
            continue
        if value.ndim == 1:
            writer.add_tensor(name, value.astype(np.float32))
        else:
            add_matrix(writer, name, tensor_type, value.astype(np.float32))
    return written(writer, path)


@dataclass(frozen=True)
class _Target:
    """What an assistant is made from."""

    path: Path
    spec: ModelSpec
    keys: dict[str, Value]
    factors: Floats

    @classmethod
    def read(cls, path: Path) -> _Target:
        with ModelFile.open(path) as model:
            keys = {key: model.metadata[f"gemma4.{key}"] for key in _COPIED}
            factors = model.data("rope_freqs.weight").view("<f4").copy()
            return cls(path, read_spec(model), keys, factors)  # type: ignore[arg-type]

    def last(self, is_windowed: bool) -> Attention:
        """The last layer of a kind."""
        mixers = [layer.mixer for layer in self.spec.layers if isinstance(layer.mixer, Attention)]
        return next(each for each in reversed(mixers) if (each.window is not None) == is_windowed)


@dataclass(frozen=True)
class _Sizes:
    target: _Target
    n_embd: int
    windowed: tuple[bool, ...]
    n_heads: int
    n_ff: int


def _keys(sizes: _Sizes, n_used: int | None) -> dict[str, Value | None]:
    of, n_layers = sizes.target, len(sizes.windowed)
    keys: dict[str, Value | None] = {
        **of.keys,
        "block_count": n_layers,
        "embedding_length": sizes.n_embd,
        "embedding_length_out": of.spec.n_embd,
        "nextn_predict_layers": n_layers,
        "feed_forward_length": sizes.n_ff,
        "attention.head_count": sizes.n_heads,
        "attention.head_count_kv": [of.last(windowed).n_kv_heads for windowed in sizes.windowed],
        "attention.sliding_window": of.last(True).window,
        "attention.sliding_window_pattern": list(sizes.windowed),
        "attention.shared_kv_layers": n_layers,
        "embedding_length_per_layer_input": 0,
        "centroid_used_count": n_used,
    }
    for ending, windowed in (("_swa", True), ("", False)):
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            keys[key + ending] = of.last(windowed).head_dim
    return keys


def _shapes(sizes: _Sizes) -> dict[str, tuple[int, ...]]:
    n, n_target = sizes.n_embd, sizes.target.spec.n_embd
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (sizes.target.spec.n_vocab, n),
        "output_norm.weight": (n,),
        "nextn.pre_projection.weight": (n, 2 * n_target),
        "nextn.post_projection.weight": (n_target, n),
    }
    for layer, windowed in enumerate(sizes.windowed):
        head_dim = sizes.target.last(windowed).head_dim
        of_layer = {
            **{f"{name}.weight": (n,) for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")},
            "attn_q.weight": (sizes.n_heads * head_dim, n),
            "attn_q_norm.weight": (head_dim,),
            "attn_output.weight": (n, sizes.n_heads * head_dim),
            "ffn_gate.weight": (sizes.n_ff, n),
            "ffn_up.weight": (sizes.n_ff, n),
            "ffn_down.weight": (n, sizes.n_ff),
            "layer_output_scale.weight": (1,),
        }
        found |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    return found


def _random(name: str, shape: tuple[int, ...], seed: int, is_fitted: bool) -> Floats:
    """Numbers that fit a tensor's role: no default hides them."""
    x = normal(seed, name, shape)
    if shape == (1,):
        return np.float32(1) + np.float32(0.15) * np.tanh(x)
    if len(shape) == 1:
        norm = np.float32(1) + np.float32(0.2) * x
        is_small = is_fitted and name.endswith(("post_attention_norm.weight", "post_ffw_norm.weight"))
        return norm * np.float32(_NOISE) if is_small else norm
    return x * np.float32((3.0 if name == "token_embd.weight" else 1.0) / np.sqrt(shape[1]))


def _fitted(of: _Target, texts: Sequence[Sequence[int]], output: Floats, norm: Floats) -> dict[str, Floats]:
    """Projections with which y is the row of the next token, also where the feature is one that was predicted."""
    with ModelFile.open(of.path) as file:
        backend, spec = ReferenceBackend(), of.spec
        assert spec.token_embd is not None
        table = backend.read_weights(file, {spec.token_embd: (spec.n_vocab, spec.n_embd)})[spec.token_embd].values
        plan = backend.plan(file, spec, LoadSettings(512))
        session = backend.load(file, spec, plan, Device(1)).session()
        e, h, after, wanted = [], [], [], []
        for text in texts:
            hidden = session.forward(list(text), hidden=True).hidden
            assert hidden is not None
            e.append(table[list(text[1:-1])] * np.float32(spec.embedding_scale))
            h.append(hidden[0, :-2])
            after.append(hidden[0, 1:-1])
            wanted.append(output[list(text[2:])])
    embedded, before, nexts, y = (np.concatenate(each) for each in (e, h, after, wanted))
    y = y / np.sqrt(np.mean(y * y, axis=1, keepdims=True))
    post = np.linalg.lstsq(y * norm, nexts, rcond=1e-4)[0].T
    guessed = np.concatenate([before[:1], (y * norm)[:-1] @ post.T])
    inputs = np.concatenate([np.hstack([embedded, before]), np.hstack([embedded, guessed])])
    pre = np.linalg.lstsq(inputs, np.concatenate([y, y]), rcond=1e-4)[0].T
    return {"nextn.pre_projection.weight": pre, "nextn.post_projection.weight": post}
