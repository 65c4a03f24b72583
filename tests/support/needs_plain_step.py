"""The property of Payoff that conftest.py replaces, as it is: timings decide no other test."""

from edgeinfer.speculation.payoff import Payoff

NEEDS_PLAIN_STEP = Payoff.needs_plain_step
