"""Qwen3 with experts (Yang et al., arXiv:2505.09388), 30B-A3B and Qwen3-Coder among them."""

from edgeinfer.models.expert_reader import ExpertRecipe
from edgeinfer.models.reader import QK_NORMS, Architecture

ARCHITECTURE = Architecture(
    name="qwen3moe",
    rope_kind="halves",
    required=QK_NORMS,
    qk_norm="per_head",
    experts=ExpertRecipe(n_ff="own or share", is_normalised=True),
)
