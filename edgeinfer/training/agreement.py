"""Comparison of the target in torch with the native engine, before training starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edgeinfer.backends.base import Session, run_sequence
from edgeinfer.common.errors import NumericalError
from edgeinfer.common.types import TokenIds
from edgeinfer.training.target import TorchTarget

# Largest deviation of the median position, in units of the standard deviation of its logits. Both engines round
# activations to 8 bits alike, but sum in another order. So a number now and then rounds to the next code, a step of
# 1/127 of its block's largest, and each layer hands that on. Between the native engine and its own reference the
# deviation is 0.02 to 0.1 on SmolLM2-135M, whose activations have outliers. A wrong tensor, rope or norm gives more
# than 0.3.
BOUND = 0.15


@dataclass(frozen=True)
class Agreement:
    """How close the logits are."""

    deviation: float  # RMS difference of a position's logits, in standard deviations; median over the positions
    same_token: float  # share of positions with the same most likely token, 0..1
    n_tokens: int  # positions compared


def compare(target: TorchTarget, session: Session, texts: Sequence[TokenIds]) -> Agreement:
    """Compare the logits on some texts. The session is empty afterwards."""
    deviations, same = zip(*(_compare(target, session, tokens) for tokens in texts), strict=True)
    every = np.concatenate(same)
    return Agreement(float(np.median(np.concatenate(deviations))), float(every.mean()), len(every))


def _compare(target: TorchTarget, session: Session, tokens: TokenIds) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The deviation at each position of a text, and whether the most likely token is the same."""
    session.truncate(0)
    native = run_sequence(session, tokens, logits="all").logits
    session.truncate(0)
    ours = target.logits(target.text_features([tokens])[0]).float().cpu().numpy()
    deviations = np.sqrt(np.mean((ours - native) ** 2, axis=1)) / native.std(axis=1)
    return deviations, ours.argmax(axis=1) == native.argmax(axis=1)


def check(target: TorchTarget, session: Session, texts: Sequence[TokenIds]) -> Agreement:
    """Compare, and raise NumericalError if the deviation is more than BOUND."""
    found = compare(target, session, texts)
    if not found.deviation <= BOUND:
        raise NumericalError(
            f"the target in torch must give the native engine's logits to within {BOUND} of their standard deviation: "
            f"found {found.deviation:.3f}, and {found.same_token:.1%} of {found.n_tokens} tokens the same; nothing was "
            "trained, as the head would draft for another model"
        )
    return found


def precise_products() -> None:
    """Keep a GPU from rounding factors to TensorFloat-32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
