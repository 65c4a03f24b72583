"""Granite 3 and 4 without experts (IBM 2024): Llama with factors on embeddings, branches, attention and logits."""

from dataclasses import replace

from edgeinfer.models.reader import BIASES, ROPE_FREQS, Architecture, Reader, each_attention
from edgeinfer.models.spec import Attention, ModelSpec


def with_factors(reader: Reader, spec: ModelSpec) -> ModelSpec:
    """The spec with the factors of the file, and without rotation where it says so."""
    finetuned = reader.flag("rope.scaling.finetuned", default=True)  # here it switches the rotation

    def change(mixer: Attention) -> Attention:
        scale = reader.scale("attention.scale", mixer.scale)
        return replace(mixer, scale=scale, rope=mixer.rope if finetuned else None)

    return replace(
        each_attention(spec, change),
        embedding_scale=reader.scale("embedding_scale", 1.0),
        residual_scale=reader.scale("residual_scale", 1.0),
        logit_scale=1 / reader.number("logit_scale", 0.0, 1e6),
    )


ARCHITECTURE = Architecture(
    name="granite",
    rope_kind="interleaved",
    optional=BIASES,
    rope_factors=ROPE_FREQS,
    unsupported_keys={"deepstack_mapping": "layers that take image features are not supported"},
    refine=with_factors,
)
