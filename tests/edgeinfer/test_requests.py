"""What is known of a request before it runs."""

from typing import Any

import pytest

from edgeinfer.sampling import SamplingParams
from edgeinfer.scheduling.request import Request


@pytest.mark.parametrize(
    "options, is_plain",
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.8}, False),
        ({"temperature": 0.0, "repeat_penalty": 1.2}, False),
        ({"temperature": 0.0, "logit_bias": {3: -5.0}}, False),
        ({"temperature": 0.8, "repeat_penalty": 1.2}, False),
    ],
    ids=str,
)
def test_the_largest_logit_is_taken_as_it_is(options: dict[str, Any], is_plain: bool) -> None:
    request = Request([1], 1, lambda logits, text: 0, SamplingParams(**options))
    assert request.is_plain is is_plain
