"""GLM-4 of 2025 (Zeng et al., arXiv:2406.12793): norms before and after attention and network, fused gate and up.

Queries and keys are turned in a part of each head. Position sections for images (GLM-4.1V) are not supported.
"""

from edgeinfer.models.reader import POST_NORMS, Architecture

ARCHITECTURE = Architecture(
    name="glm4",
    rope_kind="interleaved",
    required=POST_NORMS,
    fused_ffn=True,
    unsupported_keys={"rope.dimension_sections": "rotations by several positions are not supported"},
)
