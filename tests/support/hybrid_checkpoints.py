"""A tiny model file with recurrent layers as the model of transformers that has the same weights: the oracle's view."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
from numpy.typing import NDArray
from parts import missing

from edgeinfer.models.formats import dequantize
from edgeinfer.models.gguf import ModelFile

Floats = NDArray[np.float32]
_CLASSES = {
    "qwen35": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig"),
    "qwen3next": ("Qwen3NextForCausalLM", "Qwen3NextConfig"),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config"),
    "lfm2moe": ("Lfm2MoeForCausalLM", "Lfm2MoeConfig"),
}


def transformers_logits(file: ModelFile, tokens: NDArray[np.integer]) -> Floats:
    """Logits (n, n_vocab) of transformers with the weights of the file, in float32."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        missing("transformers", "transformers and torch are not installed: pip install torch transformers")
    import torch
    import transformers

    torch.set_num_threads(1)
    architecture = str(file.metadata["general.architecture"])
    model_class, config_class = _CLASSES[architecture]
    is_lfm2 = architecture.startswith("lfm2")
    checkpoint = _Lfm2(file) if is_lfm2 else _Qwen(file)
    config = getattr(transformers, config_class)(attn_implementation="eager", **checkpoint.config())
    model = getattr(transformers, model_class)(config).float().eval()
    weights = {name: torch.tensor(np.ascontiguousarray(each)) for name, each in checkpoint.weights().items()}
    tied = {"lm_head.weight"} - set(weights)
    found = model.load_state_dict(weights, strict=False)
    assert set(found.missing_keys) <= tied and not found.unexpected_keys, found
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        return np.asarray(model(torch.tensor(tokens[None].astype(np.int64)), use_cache=False).logits[0])


class Checkpoint:
    """What the file says, by GGUF names."""

    def __init__(self, file: ModelFile) -> None:
        self.file = file
        self.architecture = str(file.metadata["general.architecture"])
        self.n_layers = int(self.key("block_count"))

    def key(self, name: str) -> Any:
        value = self.file.metadata[f"{self.architecture}.{name}"]
        return value if isinstance(value, (int, float)) else list(value)

    def tensor(self, name: str) -> Floats:
        info = self.file.tensors[name]
        return dequantize(info.type, self.file.data(name), info.shape)

    def has(self, name: str) -> bool:
        return name in self.file.tensors

    def sizes(self) -> dict[str, Any]:
        return {
            "vocab_size": self.file.tensors["token_embd.weight"].shape[0],
            "hidden_size": self.key("embedding_length"),
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.key("attention.head_count"),
            "intermediate_size": self.key("feed_forward_length"),
            "max_position_embeddings": self.key("context_length"),
            "tie_word_embeddings": not self.has("output.weight"),
        }

    def experts(self) -> dict[str, Any]:
        if f"{self.architecture}.expert_count" not in self.file.metadata:
            return {}
        return {
            "num_experts": self.key("expert_count"),
            "num_experts_per_tok": self.key("expert_used_count"),
            "moe_intermediate_size": self.key("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }

    def routed(self, layer: int, module: str) -> dict[str, Floats]:
        prefix = f"blk.{layer}.ffn_"
        both = [self.tensor(f"{prefix}{role}_exps.weight") for role in ("gate", "up")]
        return {
            f"{module}.gate.weight": self.tensor(f"{prefix}gate_inp.weight"),
            f"{module}.experts.gate_up_proj": np.concatenate(both, axis=1),
            f"{module}.experts.down_proj": self.tensor(f"{prefix}down_exps.weight"),
        }


class _Qwen(Checkpoint):
    """Norms are held as their distance from one, and value heads of a key head are neighbours."""

    def config(self) -> dict[str, Any]:
        n_rotated, head_dim = self.key("rope.dimension_count"), self.key("attention.key_length")
        kinds = self.key("attention.recurrent_layers")
        return {
            **self.sizes(),
            **self.experts(),
            "num_key_value_heads": self.key("attention.head_count_kv"),
            "head_dim": head_dim,
            "rms_norm_eps": self.key("attention.layer_norm_rms_epsilon"),
            "layer_types": ["linear_attention" if kind else "full_attention" for kind in kinds],
            "linear_num_key_heads": self.key("ssm.group_count"),
            "linear_num_value_heads": self.key("ssm.time_step_rank"),
            "linear_key_head_dim": self.key("ssm.state_size"),
            "linear_value_head_dim": self.key("ssm.state_size"),
            "linear_conv_kernel_dim": self.key("ssm.conv_kernel"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.key("rope.freq_base"),
                "partial_rotary_factor": n_rotated / head_dim,
                "mrope_section": [n_rotated // 2 - 2, 1, 1],
                "mrope_interleaved": True,
            },
        }

    def experts(self) -> dict[str, Any]:
        found = super().experts()
        if found:
            found["shared_expert_intermediate_size"] = self.key("expert_shared_feed_forward_length")
        return found

    def weights(self) -> dict[str, Floats]:
        found = {
            "model.embed_tokens.weight": self.tensor("token_embd.weight"),
            "model.norm.weight": self.tensor("output_norm.weight") - 1,
        }
        if self.has("output.weight"):
            found["lm_head.weight"] = self.tensor("output.weight")
        for layer, is_recurrent in enumerate(self.key("attention.recurrent_layers")):
            prefix = f"blk.{layer}."
            of_layer = {
                "input_layernorm.weight": self.tensor(f"{prefix}attn_norm.weight") - 1,
                "post_attention_layernorm.weight": self.tensor(f"{prefix}post_attention_norm.weight") - 1,
                **(self._recurrence(prefix) if is_recurrent else self._attention(prefix)),
                **(self._experts_of(layer) if self.experts() else self._network(f"{prefix}ffn_", "mlp", "")),
            }
            found |= {f"model.layers.{layer}.{name}": values for name, values in of_layer.items()}
        return found

    def _attention(self, prefix: str) -> dict[str, Floats]:
        names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
        found = {f"self_attn.{name}.weight": self.tensor(f"{prefix}{role}.weight") for name, role in names.items()}
        for name in ("q_norm", "k_norm"):
            found[f"self_attn.{name}.weight"] = self.tensor(f"{prefix}attn_{name}.weight") - 1
        return found

    def _recurrence(self, prefix: str) -> dict[str, Floats]:
        qkv, z = (self.tensor(f"{prefix}{name}.weight") for name in ("attn_qkv", "attn_gate"))
        conv, output = (self.tensor(f"{prefix}ssm_{name}.weight") for name in ("conv1d", "out"))
        n_k = (len(qkv) - len(z)) // 2
        parts = {
            "conv1d.weight": np.concatenate([conv[: 2 * n_k], self._grouped(conv[2 * n_k :])])[:, None],
            "A_log": np.log(-self._grouped(self.tensor(f"{prefix}ssm_a"))),
            "dt_bias": self._grouped(self.tensor(f"{prefix}ssm_dt.bias")),
            "norm.weight": self.tensor(f"{prefix}ssm_norm.weight"),
            "out_proj.weight": self._grouped(output.T).T,
        }
        if self.architecture == "qwen3next":
            n_heads, n_state = self.key("ssm.group_count"), self.key("ssm.state_size")
            q, k, v = qkv[:n_k], qkv[n_k : 2 * n_k], qkv[2 * n_k :]
            by_head = [each.reshape(n_heads, -1, each.shape[1]) for each in (q, k, v, z)]
            assert by_head[0].shape[1] == n_state
            parts["in_proj_qkvz.weight"] = np.concatenate(by_head, axis=1).reshape(-1, qkv.shape[1])
            parts["in_proj_ba.weight"] = self.tensor(f"{prefix}ssm_ba.weight")
        else:
            parts["in_proj_qkv.weight"] = np.concatenate([qkv[: 2 * n_k], self._grouped(qkv[2 * n_k :])])
            parts["in_proj_z.weight"] = self._grouped(z)
            parts["in_proj_b.weight"] = self._grouped(self.tensor(f"{prefix}ssm_beta.weight"))
            parts["in_proj_a.weight"] = self._grouped(self.tensor(f"{prefix}ssm_alpha.weight"))
        return {f"linear_attn.{name}": values for name, values in parts.items()}

    def _grouped(self, rows: Floats) -> Floats:
        """Rows by value head in the order of the checkpoint."""
        if self.architecture == "qwen3next":
            return rows
        n_key_heads, n_value_heads = self.key("ssm.group_count"), self.key("ssm.time_step_rank")
        n_each, rest = n_value_heads // n_key_heads, rows.shape[1:]
        by_head = rows.reshape(n_each, n_key_heads, len(rows) // n_value_heads, *rest)
        return by_head.swapaxes(0, 1).reshape(rows.shape)

    def _experts_of(self, layer: int) -> dict[str, Floats]:
        prefix = f"blk.{layer}.ffn_"
        return {
            **self.routed(layer, "mlp"),
            **self._network(prefix, "mlp.shared_expert", "_shexp"),
            "mlp.shared_expert_gate.weight": self.tensor(f"{prefix}gate_inp_shexp.weight").reshape(1, -1),
        }

    def _network(self, prefix: str, module: str, ending: str) -> dict[str, Floats]:
        roles = ("gate", "up", "down")
        return {f"{module}.{role}_proj.weight": self.tensor(f"{prefix}{role}{ending}.weight") for role in roles}


class _Lfm2(Checkpoint):
    def config(self) -> dict[str, Any]:
        counts = self.key("attention.head_count_kv")
        config = {
            **self.sizes(),
            **self.experts(),
            "num_key_value_heads": max(counts),
            "norm_eps": self.key("attention.layer_norm_rms_epsilon"),
            "layer_types": ["full_attention" if count else "conv" for count in counts],
            "conv_L_cache": self.key("shortconv.l_cache"),
            "rope_parameters": {"rope_type": "default", "rope_theta": self.key("rope.freq_base")},
        }
        if self.experts():
            return config | {"num_dense_layers": self.key("leading_dense_block_count"), "routed_scaling_factor": 1.0}
        return config | {"block_auto_adjust_ff_dim": False}

    def weights(self) -> dict[str, Floats]:
        found = {
            "model.embed_tokens.weight": self.tensor("token_embd.weight"),
            "model.embedding_norm.weight": self.tensor("token_embd_norm.weight"),
        }
        for layer, n_kv_heads in enumerate(self.key("attention.head_count_kv")):
            prefix = f"blk.{layer}."
            of_layer = {
                "operator_norm.weight": self.tensor(f"{prefix}attn_norm.weight"),
                "ffn_norm.weight": self.tensor(f"{prefix}ffn_norm.weight"),
                **(self._attention(prefix) if n_kv_heads else self._short_conv(prefix)),
                **self._network(layer),
            }
            found |= {f"model.layers.{layer}.{name}": values for name, values in of_layer.items()}
        return found

    def _attention(self, prefix: str) -> dict[str, Floats]:
        names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "output"}
        names |= {"q_layernorm": "q_norm", "k_layernorm": "k_norm"}
        return {f"self_attn.{name}.weight": self.tensor(f"{prefix}attn_{role}.weight") for name, role in names.items()}

    def _short_conv(self, prefix: str) -> dict[str, Floats]:
        found = {
            f"conv.{name}.weight": self.tensor(f"{prefix}shortconv.{name}.weight") for name in ("in_proj", "out_proj")
        }
        return found | {"conv.conv.weight": self.tensor(f"{prefix}shortconv.conv.weight")[:, None]}

    def _network(self, layer: int) -> dict[str, Floats]:
        prefix = f"blk.{layer}."
        if self.has(f"{prefix}ffn_gate_inp.weight"):
            bias = {"feed_forward.expert_bias": self.tensor(f"{prefix}exp_probs_b.bias")}
            return self.routed(layer, "feed_forward") | bias
        names = {"w1": "gate", "w2": "down", "w3": "up"}
        return {
            f"feed_forward.{name}.weight": self.tensor(f"{prefix}ffn_{role}.weight") for name, role in names.items()
        }
