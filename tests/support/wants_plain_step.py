"""The property of Payoff that conftest.py replaces, as it is: timings decide no other test."""

from edgeinfer.speculation.payoff import Payoff

WANTS_PLAIN_STEP = Payoff.wants_plain_step
