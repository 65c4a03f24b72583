"""A format for each tensor, by what it costs in measured loss, bytes and time (`--type auto`).

candidates.py says which tensors get one, and which they may have; trial.py runs a source with tensors rounded;
sensitivity.py measures with it what rounding one tensor does to the logits; speed.py what a weight of each format costs
in a pass; allocation.py takes the formats with the least loss that fit, and search.py measures the closest of these
decisions again where they were taken. For drafters (drafters.py) draft_search.py takes the formats with the most
accepted tokens a millisecond beside their target (target.py, chains.py).
"""

from edgeinfer.exporters.auto.choice import choose_types
from edgeinfer.exporters.auto.draft_choice import choose_draft_types

__all__ = ["choose_draft_types", "choose_types"]
