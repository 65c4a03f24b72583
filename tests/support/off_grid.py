"""A Hugging Face folder that computes what a quantised GGUF file does, with weights that lie on no quantisation grid.

    python tests/support/off_grid.py MODEL.gguf FOLDER [--seed 0]

The weights are dequantised. Then the channels of the residual stream and of the feed-forward networks are permuted and
the values of each head are rotated, which changes no logit but for rounding to F16. So the folder stands for an
original checkpoint with real statistics: its text is that of the file, and quantising it loses what it would lose
there. For llama and qwen2 files with a byte-level vocabulary.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.models import read_spec
from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import ModelFile

Floats = NDArray[np.float32]

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5


class _Model:
    """The tensors of a file as Hugging Face names them, transformed."""

    def __init__(self, file: ModelFile, seed: int) -> None:
        self.file, self.spec, self.rng = file, read_spec(file), np.random.default_rng(seed)
        attention = self.spec.layers[0].mixer
        self.n_heads, self.n_kv_heads, self.head_dim = attention.n_heads, attention.n_kv_heads, attention.head_dim
        self.architecture = self.spec.architecture
        self.channels = self.rng.permutation(self.spec.n_embd)
        self.inner = {n: self.rng.permutation(self._n_ff()) for n in range(self.spec.n_layers)}
        self.turns = {n: self._rotations() for n in range(self.spec.n_layers)}

    def names(self) -> dict[str, str]:
        """Names in GGUF, by those of Hugging Face."""
        found = {theirs: ours for ours, theirs in _OUTSIDE.items()}
        for layer in range(self.spec.n_layers):
            found |= {f"model.layers.{layer}.{theirs}": f"blk.{layer}.{ours}" for ours, theirs in _IN_LAYER.items()}
        found = {theirs: ours for theirs, ours in found.items() if ours in self.file.tensors}
        if unknown := self.file.tensors.keys() - found.values():
            raise SystemExit(f"{self.file.path}: tensor {min(unknown)} has no place here")
        return found

    def tensor(self, ours: str) -> Floats:
        """One tensor, as it is to be written."""
        info = self.file.tensors[ours]
        weights = dequantize(info.type, self.file.data(ours), info.shape)
        self.file.release(ours)
        if not ours.startswith("blk."):
            return weights[..., self.channels]
        _, layer, role = ours.split(".", 2)
        return self._in_layer(int(layer), role, weights)

    def _in_layer(self, layer: int, role: str, weights: Floats) -> Floats:
        module, kind = role.split(".")
        if module in ("attn_q", "attn_k"):
            weights = self._unpermuted(weights, self.n_heads if module == "attn_q" else self.n_kv_heads)
        elif module == "attn_v":
            weights = self._rotated(layer, weights)
        elif module == "attn_output":
            weights = self._rotated_back(layer, weights)
        elif module in ("ffn_gate", "ffn_up"):
            weights = weights[self.inner[layer]]
        elif module == "ffn_down":
            weights = weights[:, self.inner[layer]]
        if kind == "bias":
            return weights
        return weights[self.channels] if module in ("attn_output", "ffn_down") else weights[..., self.channels]

    def _unpermuted(self, weights: Floats, n_heads: int) -> Floats:
        """Rotary pairs half a head apart, which in llama files stand side by side."""
        if self.architecture != "llama":
            return weights
        pairs = weights.reshape(n_heads, self.head_dim // 2, 2, -1)
        return pairs.swapaxes(1, 2).reshape(weights.shape)

    def _rotations(self) -> NDArray[np.float64]:
        """(n_kv_heads, head_dim, head_dim), orthogonal."""
        gaussian = self.rng.standard_normal((self.n_kv_heads, self.head_dim, self.head_dim))
        return np.asarray(np.linalg.qr(gaussian).Q)

    def _rotated(self, layer: int, weights: Floats) -> Floats:
        heads = weights.reshape(self.n_kv_heads, self.head_dim, -1)
        return (self.turns[layer] @ heads).astype(np.float32).reshape(weights.shape)

    def _rotated_back(self, layer: int, weights: Floats) -> Floats:
        heads = weights.reshape(len(weights), self.n_heads, self.head_dim)
        turns = np.repeat(self.turns[layer], self.n_heads // self.n_kv_heads, axis=0)
        return np.einsum("nhd,hed->nhe", heads, turns, optimize=True).astype(np.float32).reshape(weights.shape)

    def _n_ff(self) -> int:
        return self.file.tensors["blk.0.ffn_up.weight"].shape[0]

    def config(self) -> dict[str, Any]:
        """What config.json says."""
        keys = self.file.metadata
        return {
            "architectures": [_CLASSES[self.architecture]],
            "model_type": self.architecture,
            "hidden_act": "silu",
            "hidden_size": self.spec.n_embd,
            "intermediate_size": self._n_ff(),
            "num_hidden_layers": self.spec.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "max_position_embeddings": self.spec.n_ctx_train,
            "rms_norm_eps": float(f"{self.spec.norm_epsilon:.6g}"),
            "rope_theta": float(str(keys[f"{self.architecture}.rope.freq_base"])),
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "vocab_size": self.spec.n_vocab,
            "bos_token_id": keys.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": keys.get("tokenizer.ggml.eos_token_id"),
            "torch_dtype": "float16",
        }


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], tensor: Callable[[str], Floats]) -> None:
    """Write tensors as F16, one in memory at a time."""
    entries, at = {}, 0
    for name, shape in shapes.items():
        n_bytes = 2 * int(np.prod(shape))
        entries[name] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name, shape in shapes.items():
            values = tensor(name).astype("<f2")
            if values.shape != shape or not np.isfinite(values).all():
                raise SystemExit(f"tensor {name} must be finite, with shape {shape}: found {values.shape}")
            file.write(np.ascontiguousarray(values).data)


# ---- vocabulary ------------------------------------------------------------------------------------------------------


def tokenizer_json(file: ModelFile) -> dict[str, Any]:
    """tokenizer.json of a byte-level vocabulary."""
    keys = file.metadata
    tokens, types = (list(keys[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type"))
    special = {id: text for id, text in enumerate(tokens) if types[id] in (_CONTROL, _USER_DEFINED)}
    n_plain = 1 + max(id for id, kind in enumerate(types) if kind not in (_CONTROL, _USER_DEFINED, _UNUSED))
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": text, **added, "special": types[id] == _CONTROL} for id, text in special.items()
        ],
        **_cutting(str(keys["tokenizer.ggml.pre"]), byte_level),
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text: id for id, text in enumerate(tokens[:n_plain]) if types[id] != _UNUSED},
            "merges": list(keys["tokenizer.ggml.merges"]),
        },
    }


def _cutting(pre: str, byte_level: dict[str, Any]) -> dict[str, Any]:
    """Normaliser and pre-tokeniser."""
    if pre == "smollm":
        steps = [{"type": "Digits", "individual_digits": True}, {**byte_level, "use_regex": True}]
        return {"normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    if pre == "qwen2":
        split = {"type": "Split", "pattern": {"Regex": _QWEN2}, "behavior": "Isolated", "invert": False}
        steps = [split, {**byte_level, "use_regex": False}]
        return {"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    raise SystemExit(f"pre-tokeniser {pre} is not known here")


def tokenizer_config(file: ModelFile) -> dict[str, Any]:
    """tokenizer_config.json, with the chat template."""
    keys = file.metadata
    tokens = list(keys["tokenizer.ggml.tokens"])
    ids = {name: keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding", "unknown")}
    texts = {name: None if id is None else tokens[int(id)] for name, id in ids.items()}
    return {
        "bos_token": texts["bos"],
        "eos_token": texts["eos"],
        "pad_token": texts["padding"],
        "unk_token": texts["unknown"],
        "add_bos_token": bool(keys.get("tokenizer.ggml.add_bos_token", False)),
        "chat_template": keys.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": keys[f"{keys['general.architecture']}.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def make(model: Path, folder: Path, seed: int = 0) -> None:
    """Write the folder of a GGUF file."""
    folder.mkdir(parents=True, exist_ok=True)
    with ModelFile.open(model) as file:
        made = _Model(file, seed)
        names = made.names()
        config = made.config()
        written = {
            "config.json": config,
            "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id")},
            "tokenizer.json": tokenizer_json(file),
            "tokenizer_config.json": tokenizer_config(file),
        }
        for name, content in written.items():
            (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")
        shapes = {theirs: file.tensors[ours].shape for theirs, ours in names.items()}
        write_safetensors(folder / "model.safetensors", shapes, lambda name: made.tensor(names[name]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.model, arguments.folder, arguments.seed)


if __name__ == "__main__":
    main()
