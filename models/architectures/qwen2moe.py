"""Qwen1.5-MoE and Qwen2-57B-A14B (arXiv:2407.10671): Qwen2 with experts, and a shared one whose share is routed."""

from edgeinfer.models.expert_reader import ExpertRecipe
from edgeinfer.models.reader import Architecture

ARCHITECTURE = Architecture(
    name="qwen2moe",
    rope_kind="halves",
    output="required",
    experts=ExpertRecipe(n_ff="own or share", n_ff_shared="length or whole", shared_router=True),
)
