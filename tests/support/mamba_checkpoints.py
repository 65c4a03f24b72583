"""A tiny model file with Mamba2 as the model of transformers that has the same weights: the oracle's view."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
from hybrid_checkpoints import Checkpoint, Floats
from numpy.typing import NDArray
from parts import missing

from edgeinfer.models.gguf import ModelFile

_CLASSES = {
    "granitehybrid": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig"),
    "nemotron_h": ("NemotronHForCausalLM", "NemotronHConfig"),
    "nemotron_h_moe": ("NemotronHForCausalLM", "NemotronHConfig"),
    "falcon-h1": ("FalconH1ForCausalLM", "FalconH1Config"),
}
_MIXERS = {"recurrent": "linear_attention", "attention": "full_attention"}


def mamba_logits(file: ModelFile, tokens: NDArray[np.integer]) -> Floats:
    """Logits (n, n_vocab) of transformers with the weights of the file, in float32."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        missing("transformers", "transformers and torch are not installed: pip install torch transformers")
    import torch
    import transformers

    torch.set_num_threads(1)
    architecture = str(file.metadata["general.architecture"])
    model_class, config_class = _CLASSES[architecture]
    checkpoint = {"granitehybrid": _Granite, "falcon-h1": _Falcon}.get(architecture, _Nemotron)(file)
    config = getattr(transformers, config_class)(attn_implementation="eager", **checkpoint.config())
    model = getattr(transformers, model_class)(config).float().eval()
    weights = {name: torch.tensor(np.ascontiguousarray(each)) for name, each in checkpoint.weights().items()}
    found = model.load_state_dict(weights, strict=False)
    assert not found.missing_keys and not found.unexpected_keys, found
    with torch.no_grad():
        return np.asarray(model(torch.tensor(tokens[None].astype(np.int64)), use_cache=False).logits[0])


class _Mamba(Checkpoint):
    """What all of these have."""

    mixer = "mamba"

    def common(self) -> dict[str, Any]:
        return {
            **self.sizes(),
            "num_key_value_heads": self.n_kv_heads(),
            "head_dim": self.key("attention.key_length"),
        }

    def n_kv_heads(self) -> int:
        found = self.key("attention.head_count_kv")
        return max(found) if isinstance(found, list) else int(found)

    def mamba(self, block: int) -> dict[str, Floats]:
        prefix, module = f"blk.{block}.ssm_", self.mixer
        found = {
            f"{module}.in_proj.weight": self.tensor(f"{prefix}in.weight"),
            f"{module}.conv1d.weight": self.tensor(f"{prefix}conv1d.weight")[:, None],
            f"{module}.conv1d.bias": self.tensor(f"{prefix}conv1d.bias"),
            f"{module}.dt_bias": self.tensor(f"{prefix}dt.bias"),
            f"{module}.A_log": np.log(-self.tensor(f"{prefix}a").reshape(-1)),
            f"{module}.D": self.tensor(f"{prefix}d").reshape(-1),
            f"{module}.out_proj.weight": self.tensor(f"{prefix}out.weight"),
        }
        if self.has(f"{prefix}norm.weight"):
            found[f"{module}.norm.weight"] = self.tensor(f"{prefix}norm.weight").reshape(-1)
        return found

    def attention(self, block: int, module: str) -> dict[str, Floats]:
        names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "output"}
        return {
            f"{module}.{name}.weight": self.tensor(f"blk.{block}.attn_{role}.weight") for name, role in names.items()
        }

    def whole(self, norm: str, of_block: Any) -> dict[str, Floats]:
        found = {
            "model.embed_tokens.weight": self.tensor("token_embd.weight"),
            f"model.{norm}.weight": self.tensor("output_norm.weight"),
            "lm_head.weight": self.tensor("output.weight"),
        }
        for block in range(self.n_layers):
            found |= {f"model.layers.{block}.{name}": values for name, values in of_block(block).items()}
        return found


class _Granite(_Mamba):
    def config(self) -> dict[str, Any]:
        kinds = ["attention" if n else "recurrent" for n in self.key("attention.head_count_kv")]
        has_experts = f"{self.architecture}.expert_count" in self.file.metadata
        width = self.key("feed_forward_length")
        return {
            **{key: value for key, value in self.common().items() if key != "head_dim"},
            "intermediate_size": width,
            "shared_intermediate_size": self.key("expert_shared_feed_forward_length") if has_experts else width,
            "num_local_experts": self.key("expert_count") if has_experts else 0,
            "num_experts_per_tok": self.key("expert_used_count") if has_experts else 0,
            "layer_types": [_MIXERS[kind] for kind in kinds],
            "rms_norm_eps": self.key("attention.layer_norm_rms_epsilon"),
            "mamba_n_heads": self.key("ssm.time_step_rank"),
            "mamba_d_head": self.key("ssm.inner_size") // self.key("ssm.time_step_rank"),
            "mamba_n_groups": self.key("ssm.group_count"),
            "mamba_d_state": self.key("ssm.state_size"),
            "mamba_chunk_size": 16,
            "embedding_multiplier": self.key("embedding_scale"),
            "attention_multiplier": self.key("attention.scale"),
            "residual_multiplier": self.key("residual_scale"),
            "logits_scaling": self.key("logit_scale"),
            "position_embedding_type": "nope",
        }

    def weights(self) -> dict[str, Floats]:
        return self.whole("norm", self._block)

    def _block(self, block: int) -> dict[str, Floats]:
        prefix = f"blk.{block}."
        found = {
            "input_layernorm.weight": self.tensor(f"{prefix}attn_norm.weight"),
            "post_attention_layernorm.weight": self.tensor(f"{prefix}ffn_norm.weight"),
        }
        is_recurrent = self.has(f"{prefix}ssm_in.weight")
        found |= self.mamba(block) if is_recurrent else self.attention(block, "self_attn")
        has_experts = self.has(f"{prefix}ffn_gate_inp.weight")
        ending = "_shexp" if has_experts else ""
        both = [self.tensor(f"{prefix}ffn_{role}{ending}.weight") for role in ("gate", "up")]
        found["shared_mlp.input_linear.weight"] = np.concatenate(both)
        found["shared_mlp.output_linear.weight"] = self.tensor(f"{prefix}ffn_down{ending}.weight")
        if has_experts:
            module = "block_sparse_moe"
            routed = self.routed(block, module)
            found[f"{module}.router.weight"] = routed.pop(f"{module}.gate.weight")
            found |= routed
        return found


class _Nemotron(_Mamba):
    mixer = "mixer"

    def _kinds(self) -> list[str]:
        network = "moe" if self.architecture == "nemotron_h_moe" else "mlp"
        widths, heads = self.key("feed_forward_length"), self.key("attention.head_count_kv")
        return [
            network if width else _MIXERS["attention" if n else "recurrent"]
            for width, n in zip(widths, heads, strict=True)
        ]

    def config(self) -> dict[str, Any]:
        widths = self.key("feed_forward_length")
        config = {
            **{key: value for key, value in self.common().items() if key != "num_hidden_layers"},
            "intermediate_size": max(widths),
            "layers_block_type": self._kinds(),
            "layer_norm_epsilon": self.key("attention.layer_norm_rms_epsilon"),
            "mamba_num_heads": self.key("ssm.time_step_rank"),
            "mamba_head_dim": self.key("ssm.inner_size") // self.key("ssm.time_step_rank"),
            "n_groups": self.key("ssm.group_count"),
            "ssm_state_size": self.key("ssm.state_size"),
            "chunk_size": 16,
            "time_step_min": 1e-9,  # transformers clamps steps there in some passes, which no other engine does
        }
        if self.architecture == "nemotron_h_moe":
            config |= {
                "n_routed_experts": self.key("expert_count"),
                "num_experts_per_tok": self.key("expert_used_count"),
                "moe_intermediate_size": self.key("expert_feed_forward_length"),
                "moe_shared_expert_intermediate_size": self.key("expert_shared_feed_forward_length"),
                "routed_scaling_factor": self.key("expert_weights_scale"),
            }
            if f"{self.architecture}.moe_latent_size" in self.file.metadata:
                config["moe_latent_size"] = self.key("moe_latent_size")
        return config

    def weights(self) -> dict[str, Floats]:
        found = self.whole("norm_f", self._block)
        return {name.replace("embed_tokens", "embeddings"): values for name, values in found.items()}

    def _block(self, block: int) -> dict[str, Floats]:
        prefix, kind = f"blk.{block}.", self._kinds()[block]
        found = {"norm.weight": self.tensor(f"{prefix}attn_norm.weight")}
        if kind == "linear_attention":
            return found | self.mamba(block)
        if kind == "full_attention":
            return found | self.attention(block, "mixer")
        if kind == "mlp":
            names = {f"mixer.{role}_proj.weight": f"ffn_{role}.weight" for role in ("up", "down")}
        else:
            names = {f"mixer.shared_experts.{role}_proj.weight": f"ffn_{role}_shexp.weight" for role in ("up", "down")}
            names |= {f"mixer.experts.{role}_proj": f"ffn_{role}_exps.weight" for role in ("up", "down")}
            names |= {
                "mixer.gate.weight": "ffn_gate_inp.weight",
                "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
            }
            if self.has(f"{prefix}ffn_latent_up.weight"):
                names |= {"mixer.fc1_latent_proj.weight": "ffn_latent_down.weight"}
                names |= {"mixer.fc2_latent_proj.weight": "ffn_latent_up.weight"}
        return found | {name: self.tensor(prefix + ours) for name, ours in names.items()}


class _Falcon(_Mamba):
    """All factors are 1: those of a file are in its weights."""

    def config(self) -> dict[str, Any]:
        return {
            **self.common(),
            "rms_norm_eps": self.key("attention.layer_norm_rms_epsilon"),
            "mamba_d_ssm": self.key("ssm.inner_size"),
            "mamba_n_heads": self.key("ssm.time_step_rank"),
            "mamba_d_head": self.key("ssm.inner_size") // self.key("ssm.time_step_rank"),
            "mamba_n_groups": self.key("ssm.group_count"),
            "mamba_d_state": self.key("ssm.state_size"),
            "mamba_chunk_size": 16,
            "mamba_rms_norm": self.has("blk.0.ssm_norm.weight"),
            "mamba_norm_before_gate": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }

    def weights(self) -> dict[str, Floats]:
        return self.whole("final_layernorm", self._block)

    def _block(self, block: int) -> dict[str, Floats]:
        prefix = f"blk.{block}."
        found = {
            "input_layernorm.weight": self.tensor(f"{prefix}attn_norm.weight"),
            "pre_ff_layernorm.weight": self.tensor(f"{prefix}ffn_norm"),
            **self.mamba(block),
            **self.attention(block, "self_attn"),
        }
        roles = ("gate", "up", "down")
        return found | {f"feed_forward.{role}_proj.weight": self.tensor(f"{prefix}ffn_{role}.weight") for role in roles}
