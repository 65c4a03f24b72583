"""LFM2 with experts, 8B-A1B among them (Liquid AI, arXiv:2511.23404): some dense layers first, then sigmoid routers."""

from dataclasses import replace

from edgeinfer.models.architectures import lfm2
from edgeinfer.models.expert_reader import ExpertRecipe

ARCHITECTURE = replace(
    lfm2.ARCHITECTURE,
    name="lfm2moe",
    experts=ExpertRecipe(
        n_ff="own",
        router_function="sigmoid",
        is_normalised=True,
        required=frozenset({"selection_bias"}),
        reads=frozenset({"leading_dense_block_count", "expert_gating_func"}),
    ),
)
