"""Llama 1 to 3 and what copies them, Mistral 7B and SmolLM2 among them (Touvron et al., arXiv:2302.13971).

With experts it is Mixtral (Jiang et al., arXiv:2401.04088).
"""

from edgeinfer.models.expert_reader import ExpertRecipe
from edgeinfer.models.reader import BIASES, ROPE_FREQS, Architecture

ARCHITECTURE = Architecture(
    name="llama",
    rope_kind="interleaved",
    optional=BIASES,
    rope_factors=ROPE_FREQS,
    experts=ExpertRecipe(is_required=False, is_normalised=True),
)
