"""What a .litertlm file says of its model: begin and end tokens, template, sizes, and the caches of the runtime."""

from __future__ import annotations

from edgeinfer.exporters.litertlm.library import open_messages
from edgeinfer.models import ModelSpec
from edgeinfer.models.tokenizer import Tokenizer

MIN_RUNTIME = "0.18.0"  # of LiteRT-LM, with the releases in which these files were tried

# The kind of model that the runtime has its own reading of tool calls for; generic for all others.
_KINDS = {"qwen2": "qwen2p5", "qwen3": "qwen3", "gemma3": "gemma3"}


def language_section(
    spec: ModelSpec, tokenizer: Tokenizer, template: str | None, n_ctx: int, begins_with: int | None
) -> bytes:
    """LlmMetadata. n_ctx: tokens of prompt and answer.  begins_with: a token that the runtime puts before each text."""
    messages, _ = open_messages()
    made = messages.LlmMetadata(max_num_tokens=n_ctx, min_runtime_version=MIN_RUNTIME)
    if begins_with is not None:
        made.start_token.token_ids.ids.append(begins_with)
    for stop in sorted(tokenizer.stop_ids):
        made.stop_tokens.add().token_ids.ids.append(stop)
    getattr(made.llm_model_type, _KINDS.get(spec.architecture, "generic_model")).SetInParent()
    if template is not None:
        made.jinja_prompt_template = template
    data: bytes = made.SerializeToString(deterministic=True)
    return data


def executor_section(n_layers: int, n_cache: int) -> bytes:
    """ExecutorMetadata: inputs and outputs of each cache, and the axis of its positions."""
    _, messages = open_messages()
    made = messages.ExecutorMetadata()
    executor = made.llm_executor_metadata
    executor.max_history_size = n_cache
    for layer in range(n_layers):
        for kind, type, axis in (("k", "TYPE_GLOBAL_KEY_CACHE", 2), ("v", "TYPE_GLOBAL_VALUE_CACHE", 3)):
            name = f"kv_cache_{kind}_{layer}"
            executor.state_buffers.add(
                prefill_input_name=name,
                prefill_output_name=name,
                decode_input_name=name,
                decode_output_name=name,
                type=messages.StateBuffer.Type.Value(type),
                sequence_axis=axis,
                maximum_sequence_length=n_cache,
            )
    data: bytes = made.SerializeToString(deterministic=True)
    return data
