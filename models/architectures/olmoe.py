"""OLMoE (Muennighoff et al., arXiv:2409.02060): norms on whole queries and keys, weights that need not add up to 1."""

from edgeinfer.models.expert_reader import ExpertRecipe
from edgeinfer.models.reader import QK_NORMS, Architecture

ARCHITECTURE = Architecture(
    name="olmoe",
    rope_kind="halves",
    required=QK_NORMS,
    output="required",
    qk_norm="whole",
    experts=ExpertRecipe(),
)
