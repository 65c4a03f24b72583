"""A tiny model file of Gemma 4 as the model of transformers that has the same weights: the oracle's view."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
from hybrid_checkpoints import Checkpoint, Floats
from numpy.typing import NDArray
from parts import missing

from edgeinfer.models.draft_head import CENTROIDS, CENTROIDS_USED, ORDERING
from edgeinfer.models.gguf import ModelFile

# Modules of a layer by the names that GGUF has for them.
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate.weight": "per_layer_input_gate.weight",
    "proj.weight": "per_layer_projection.weight",
    "post_norm.weight": "post_per_layer_input_norm.weight",
}
_MODEL = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "per_layer_token_embd.weight": "embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "per_layer_projection_norm.weight",
}


def gemma4_logits(file: ModelFile, tokens: NDArray[np.integer]) -> Floats:
    """Logits (n, n_vocab) of transformers with the weights of the file, in float32."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        missing("transformers", "transformers and torch are not installed: pip install torch transformers")
    import torch
    import transformers

    torch.set_num_threads(1)
    checkpoint = Gemma4Checkpoint(file)
    config = transformers.Gemma4TextConfig(attn_implementation="eager", **checkpoint.config())
    model = transformers.Gemma4ForCausalLM(config).float().eval()
    weights = {name: torch.tensor(np.ascontiguousarray(each)) for name, each in checkpoint.weights().items()}
    found = model.load_state_dict(weights, strict=False)
    assert set(found.missing_keys) <= {"lm_head.weight"} and not found.unexpected_keys, found
    model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        return np.asarray(model(torch.tensor(tokens[None].astype(np.int64)), use_cache=False).logits[0])


class Gemma4Checkpoint(Checkpoint):
    """The configuration and the tensors of the checkpoint that a file could have been made of."""

    def config(self) -> dict[str, Any]:
        """Arguments of Gemma4TextConfig."""
        windowed, counts = self.key("attention.sliding_window_pattern"), self.key("attention.head_count_kv")
        by_kind = {kind: counts[windowed.index(kind)] for kind in {*windowed}}
        widths = self.key("feed_forward_length")
        is_double = not isinstance(widths, int)
        keys_are_values = f"blk.{windowed.index(False)}.attn_v.weight" not in self.file.tensors
        factors = self.tensor("rope_freqs.weight")
        n_inputs = self.key("embedding_length_per_layer_input")
        return {
            **self.sizes(),
            **self.experts(),
            "intermediate_size": widths[0] if is_double else widths,
            "use_double_wide_mlp": is_double,
            "num_key_value_heads": by_kind[True],
            "num_global_key_value_heads": by_kind[False] if keys_are_values else None,
            "attention_k_eq_v": keys_are_values,
            "head_dim": self.key("attention.key_length_swa"),
            "global_head_dim": self.key("attention.key_length"),
            "rms_norm_eps": self.key("attention.layer_norm_rms_epsilon"),
            "layer_types": ["sliding_attention" if kind else "full_attention" for kind in windowed],
            "sliding_window": self.key("attention.sliding_window"),
            "num_kv_shared_layers": self.key("attention.shared_kv_layers"),
            "hidden_size_per_layer_input": n_inputs,
            "vocab_size_per_layer_input": self.file.tensors["token_embd.weight"].shape[0],
            "final_logit_softcapping": self.key("final_logit_softcapping"),
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": self.key("rope.freq_base_swa")},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": self.key("rope.freq_base"),
                    "partial_rotary_factor": float((factors == 1).mean()),
                },
            },
        }

    def experts(self) -> dict[str, Any]:
        found = super().experts()
        if not found:
            return {}
        return {
            "enable_moe_block": True,
            "num_experts": found["num_experts"],
            "top_k_experts": found["num_experts_per_tok"],
            "moe_intermediate_size": found["moe_intermediate_size"],
        }

    def weights(self) -> dict[str, Floats]:
        """Tensors of Gemma4ForCausalLM, by name."""
        found = {f"model.{name}": self.tensor(of) for of, name in _MODEL.items() if self.has(of)}
        for layer in range(self.n_layers):
            prefix = f"blk.{layer}."
            found |= {
                f"model.layers.{layer}.{name}": self.tensor(prefix + of)
                for of, name in _LAYER.items()
                if self.has(prefix + of)
            }
        return found


def assistant_outputs(
    file: ModelFile, inputs: Floats, position: int, keys_values: dict[bool, tuple[Floats, Floats]]
) -> tuple[Floats, Floats]:
    """Logits (n_vocab,) and the next hidden state of transformers with the weights of an assistant's file.

    inputs: (2 n_target,), the embedding of a token and the hidden state that comes with it.  keys_values: (n, heads,
    numbers) each of the target, by whether a layer has a window.
    """
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        missing("transformers", "transformers and torch are not installed: pip install torch transformers")
    import torch
    import transformers

    torch.set_num_threads(1)
    checkpoint = AssistantCheckpoint(file)
    text = transformers.Gemma4TextConfig(attn_implementation="eager", **checkpoint.config())
    config = transformers.Gemma4AssistantConfig(
        text_config=text, attn_implementation="eager", **checkpoint.config_of_assistant()
    )
    model = transformers.Gemma4AssistantForCausalLM(config).float().eval()
    weights = {name: torch.tensor(np.ascontiguousarray(each)) for name, each in checkpoint.weights().items()}
    found = model.load_state_dict(weights, strict=False)
    assert set(found.missing_keys) <= {"lm_head.weight"} and not found.unexpected_keys, found
    model.lm_head.weight = model.model.embed_tokens.weight
    states = {
        "sliding_attention" if windowed else "full_attention": tuple(
            torch.tensor(each.transpose(1, 0, 2)[None].astype(np.float32)) for each in both
        )
        for windowed, both in keys_values.items()
    }
    with torch.no_grad():
        out = model(
            inputs_embeds=torch.tensor(inputs[None, None]),
            position_ids=torch.tensor([[position]]),
            shared_kv_states=states,
            attention_mask=torch.ones(1, position + 1, dtype=torch.long),
        )
    return np.asarray(out.logits[0, 0]), np.asarray(out.last_hidden_state[0, 0])


class AssistantCheckpoint(Gemma4Checkpoint):
    """The same of an assistant."""

    def config(self) -> dict[str, Any]:
        """Arguments of Gemma4TextConfig."""
        windowed, counts = self.key("attention.sliding_window_pattern"), self.key("attention.head_count_kv")
        of_full = counts[windowed.index(False)]
        return super().config() | {
            "attention_k_eq_v": True,  # so that it looks at the heads of layers that see everything
            "num_global_key_value_heads": of_full,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "final_logit_softcapping": None,
        }

    def key(self, name: str) -> Any:
        return None if name == "final_logit_softcapping" else super().key(name)

    def config_of_assistant(self) -> dict[str, Any]:
        """Arguments of Gemma4AssistantConfig beside that."""
        found: dict[str, Any] = {"backbone_hidden_size": self.key("embedding_length_out")}
        if self.has(CENTROIDS):
            n_used = self.key(CENTROIDS_USED) if f"{self.architecture}.{CENTROIDS_USED}" in self.file.metadata else 32
            n_clusters = self.file.tensors[CENTROIDS].shape[0]
            found |= {"use_ordered_embeddings": True, "num_centroids": n_clusters}
            found["centroid_intermediate_top_k"] = n_used
        return found

    def weights(self) -> dict[str, Any]:
        """Tensors of Gemma4AssistantForCausalLM, by name."""
        found: dict[str, Any] = dict(super().weights())
        for name in ("pre_projection", "post_projection"):
            found[f"{name}.weight"] = self.tensor(f"nextn.{name}.weight")
        if self.has(CENTROIDS):
            found["masked_embedding.centroids.weight"] = self.tensor(CENTROIDS)
            found["masked_embedding.token_ordering"] = self.file.data(ORDERING).view("<i4").astype(np.int64)
        return found
