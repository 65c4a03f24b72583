"""Qwen3.5 and 3.6 with experts, 35B-A3B among them: qwen35 with a shared network whose share is routed."""

from dataclasses import replace

from edgeinfer.models.architectures import qwen35
from edgeinfer.models.expert_reader import ExpertRecipe

ARCHITECTURE = replace(
    qwen35.ARCHITECTURE,
    name="qwen35moe",
    experts=ExpertRecipe(n_ff="own or share", n_ff_shared="length or whole", shared_router=True, is_normalised=True),
)
