"""A format for each tensor, by what it costs in measured loss, bytes and time (`--type auto`).

sensitivity.py measures what rounding one tensor does to the logits of the native engine (trial.py, divergence.py);
speed.py what a weight of each format costs in a pass; allocation.py takes the formats with the least loss that fit, and
search.py measures the closest of these decisions again where they were taken. For drafters draft_search.py takes the
formats with the most accepted tokens a millisecond (chains.py, front.py).
"""

from edgeinfer.exporters.auto.choice import choose_types
from edgeinfer.exporters.auto.draft_choice import choose_draft_types

__all__ = ["choose_draft_types", "choose_types"]
