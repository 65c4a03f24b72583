"""ERNIE 4.5 with experts (Baidu 2025): a dense layer first, and biases that count for the choice of experts only."""

from edgeinfer.models.expert_reader import ExpertRecipe
from edgeinfer.models.reader import Architecture

ARCHITECTURE = Architecture(
    name="ernie4_5-moe",
    rope_kind="interleaved",
    experts=ExpertRecipe(
        n_ff="own",
        n_ff_shared="length or none",
        is_normalised=True,
        optional=frozenset({"selection_bias"}),
        reads=frozenset({"leading_dense_block_count", "interleave_moe_layer_step"}),
    ),
)
