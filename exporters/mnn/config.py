"""config.json and llm_config.json: how MNN runs a model, and what the model is."""

from __future__ import annotations

from typing import Any

from edgeinfer.exporters.mnn.graph import window_of
from edgeinfer.exporters.mnn.weights import Placed
from edgeinfer.models import ModelSpec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.sampling_defaults import default_params

_BY_BLOCK = 2  # activations are rounded to 8 bits by run of weights, as here, and not by token


def engine_config(file: ModelFile, n_ctx: int) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "llm_model": "llm.mnn",
        "llm_weight": "llm.mnn.weight",
        "tokenizer_file": "tokenizer.mtok",
        "backend_type": "cpu",
        "thread_num": 4,
        "precision": "low",
        "memory": "low",
        "dynamic_option": _BY_BLOCK,
        "max_all_tokens": n_ctx,
        **_sampling(file),
    }


def model_config(file: ModelFile, spec: ModelSpec, embeddings: Placed) -> dict[str, Any]:
    """The content of llm_config.json. embeddings: where the weights file has them."""
    tokenizer, window = Tokenizer.from_file(file), window_of(file, spec)
    config: dict[str, Any] = {
        "model_type": spec.architecture,
        "hidden_size": spec.n_embd,
        "layer_nums": spec.n_layers,
        "attention_mask": "float",
        "attention_type": "full" if window is None else "mix",
        "tie_embeddings": embeddings.as_embeddings,
    }
    if window is not None:
        config["sliding_window"] = window
    if tokenizer.chat_template is not None:
        ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
        names = {role: tokenizer.name(id) for role, id in ids.items() if id is not None}
        config["jinja"] = {"chat_template": tokenizer.chat_template, **names}
    return config


def _sampling(file: ModelFile) -> dict[str, Any]:
    params, _ = default_params(file)
    if params.temperature == 0:
        return {"sampler_type": "greedy"}
    steps = {
        "penalty": params.repeat_penalty != 1,
        "topK": params.top_k > 0,
        "topP": params.top_p < 1,
        "min_p": params.min_p > 0,
        "temperature": True,
    }
    return {
        "sampler_type": "mixed",
        "mixed_samplers": [name for name, is_used in steps.items() if is_used],
        "temperature": params.temperature,
        "topK": params.top_k,
        "topP": params.top_p,
        "minP": params.min_p,
        "penalty": params.repeat_penalty,
    }
