"""What a .litertlm file says of its model: begin and end tokens, template, sizes; how the runtime carries its caches."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.exporters.litertlm.library import open_messages
from edgeinfer.models import ModelSpec
from edgeinfer.models.tokenizer import Tokenizer

MIN_RUNTIME = "0.18.0"  # of LiteRT-LM, with the releases in which these files were tried

# The kind of model that the runtime has its own reading of tool calls for; generic for all others.
_KINDS = {"qwen2": "qwen2p5", "qwen3": "qwen3", "gemma3": "gemma3"}


def language_section(spec: ModelSpec, tokenizer: Tokenizer, template: str | None, n_ctx: int) -> bytes:
    """LlmMetadata. n_ctx: tokens of prompt and answer."""
    messages, _ = open_messages()
    made = messages.LlmMetadata(max_num_tokens=n_ctx, min_runtime_version=MIN_RUNTIME)
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        made.start_token.token_ids.ids.append(tokenizer.bos_id)
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


def prefill_lengths(n_ctx: int, wanted: Sequence[int] = (32, 128, 512)) -> list[int]:
    """Lengths of the signatures for prompts that a context has room for; at least one."""
    return [n for n in wanted if n <= n_ctx // 2] or [max(1, n_ctx // 2)]
