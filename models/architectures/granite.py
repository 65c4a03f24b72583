"""Granite 3 and 4 without experts (IBM 2024): Llama with factors on embeddings, branches, attention and logits."""

from dataclasses import replace

from edgeinfer.models.reader import QKV_BIASES, ROPE_FREQS, Architecture, Reader
from edgeinfer.models.spec import AttentionSpec, ModelSpec


def _refine(reader: Reader, spec: ModelSpec) -> ModelSpec:
    finetuned = reader.flag("rope.scaling.finetuned", default=True)  # here it switches the rotation
    return replace(
        spec,
        attention=spec.attention if finetuned else (AttentionSpec(None),) * spec.n_layers,
        embedding_scale=reader.scale("embedding_scale", 1.0),
        residual_scale=reader.scale("residual_scale", 1.0),
        attention_scale=reader.scale("attention.scale", spec.attention_scale),
        logit_scale=1 / reader.number("logit_scale", 0.0, 1e6),
    )


ARCHITECTURE = Architecture(
    name="granite",
    rope_kind="interleaved",
    optional=QKV_BIASES | {"attn_output_bias"},
    rope_factors=ROPE_FREQS,
    unsupported_keys={"deepstack_mapping": "layers that take image features are not supported"},
    refine=_refine,
)
