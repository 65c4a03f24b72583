"""genai_config.json: what ONNX Runtime GenAI must know of the graph, and how it searches without other orders."""

from __future__ import annotations

from typing import Any

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import ModelSpec, attention_of
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenization.metadata import TokenizerMetadata
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.sampling_defaults import default_params

CHUNK = 128  # tokens of a prompt in one pass: bounds what activations and logits take
NGRAM_SIZE, MAX_DRAFT_TOKENS = 3, 4
_CACHES = {"past_key_names": "past_key.%d", "past_value_names": "past_value.%d"}
_PRESENTS = {"present_key_names": "present_key.%d", "present_value_names": "present_value.%d"}


def genai_config(
    file: ModelFile, spec: ModelSpec, n_ctx: int, *, ngrams: bool = False, draft: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The content of genai_config.json. draft: the decoder of a draft model. Raises UnsupportedModel."""
    tokenizer = Tokenizer.from_file(file)
    stops = sorted(tokenizer.stop_ids)
    if not stops:
        raise UnsupportedModel(f"{file.path}: the vocabulary has no token that ends an answer, which GenAI must know")
    padding = TokenizerMetadata(file).token_id("padding", tokenizer.n_vocab)
    end = tokenizer.eos_id if tokenizer.eos_id is not None else stops[0]
    model: dict[str, Any] = {
        "type": "decoder",
        "context_length": n_ctx,
        "vocab_size": spec.n_logits,
        "bos_token_id": end if tokenizer.bos_id is None else tokenizer.bos_id,
        "eos_token_id": stops,
        "pad_token_id": end if padding is None else padding,
        "decoder": decoder_config(spec, "model.onnx"),
    }
    config: dict[str, Any] = {"model": model, "search": _search(file, n_ctx)}
    if draft is not None:
        model["draft"] = draft
        config["speculative"] = {"max_draft_tokens": MAX_DRAFT_TOKENS}
    elif ngrams:
        config["speculative"] = {"ngram_size": NGRAM_SIZE, "max_draft_tokens": MAX_DRAFT_TOKENS}
    return config


def decoder_config(spec: ModelSpec, name: str) -> dict[str, Any]:
    """A decoder whose graph is in the file of this name; see genai_graph."""
    attention = attention_of(spec.layers[0])
    return {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": name,
        "head_size": attention.head_dim,
        "hidden_size": spec.n_embd,
        "inputs": {name: name for name in ("input_ids", "attention_mask", "position_ids")} | _CACHES,
        "outputs": {"logits": "logits"} | _PRESENTS,
        "num_attention_heads": attention.n_heads,
        "num_hidden_layers": spec.n_layers,
        "num_key_value_heads": attention.n_kv_heads,
    }


def search_notes(file: ModelFile) -> list[str]:
    """Sampling parameters of the file that GenAI does not have, a sentence each."""
    params, ignored = default_params(file)
    notes = [f"{reason}: it is not used" for reason in ignored]
    if params.temperature > 0 and params.min_p:
        notes.append(f"min_p {params.min_p} of the sampling is left out: ONNX Runtime GenAI has no such step")
    return notes


def _search(file: ModelFile, n_ctx: int) -> dict[str, Any]:
    params, _ = default_params(file)
    is_greedy = params.temperature == 0
    return {
        "do_sample": not is_greedy,
        "temperature": 1.0 if is_greedy else params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "repetition_penalty": params.repeat_penalty,
        "max_length": n_ctx,
        "min_length": 0,
        "num_beams": 1,
        "num_return_sequences": 1,
        "early_stopping": True,
        "past_present_share_buffer": True,
        "chunk_size": CHUNK,
    }
