"""GLM-4.5 and 4.6 (Zeng et al., arXiv:2508.06471): a sigmoid for each expert, a bias on the choice, a shared network.

The last layers of its files (`nextn_predict_layers`) draft tokens, which the model's own text does not depend on. They
are not read: edgeinfer does not draft with them yet. Position sections for images (GLM-4.5V) are not supported.
"""

from edgeinfer.models.expert_reader import ExpertRecipe
from edgeinfer.models.reader import QK_NORMS, QKV_BIASES, Architecture

ARCHITECTURE = Architecture(
    name="glm4moe",
    rope_kind="halves",
    optional=QKV_BIASES | QK_NORMS,
    renamed={"ffn.norm": "post_attention_norm.weight"},
    qk_norm="per_head",
    experts=ExpertRecipe(
        n_ff="own",
        n_ff_shared="count",
        router_function="sigmoid",
        required=frozenset({"selection_bias"}),
        reads=frozenset(
            {"leading_dense_block_count", "expert_gating_func", "expert_weights_norm", "expert_weights_scale"}
        ),
    ),
    skips_nextn=True,
    unsupported_keys={"rope.dimension_sections": "rotations by several positions are not supported"},
)
