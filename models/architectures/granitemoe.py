"""Granite 3 with experts (IBM 2024), and a shared one in some: Granite's factors, a softmax over the chosen experts."""

from dataclasses import replace

from edgeinfer.models.architectures import granite
from edgeinfer.models.expert_reader import ExpertRecipe

ARCHITECTURE = replace(
    granite.ARCHITECTURE,
    name="granitemoe",
    fixed={"rope.scaling.finetuned": (True,)},  # llama.cpp does not look at it here
    experts=ExpertRecipe(n_ff_shared="length or none", is_normalised=True),
)
