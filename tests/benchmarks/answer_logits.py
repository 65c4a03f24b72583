"""Logits of a model along a text that is given."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.backends.base import Session, run_text
from edgeinfer.common.types import Logits


def logits_from(session: Session, tokens: Sequence[int], first: int) -> Logits:
    """Logits (len(tokens) - first, n_vocab) behind the tokens from number `first` on; the session holds all afterwards.

    Whatever it held before is dropped.
    """
    session.truncate(0)
    if first:
        run_text(session, tokens[:first], logits="none")
    return run_text(session, tokens[first:], logits="all").logits
