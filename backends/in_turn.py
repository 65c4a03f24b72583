"""Forward passes of several texts on a backend that runs one text after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgeinfer.backends.base import Rows
from edgeinfer.backends.checks import check_sessions
from edgeinfer.common.errors import EdgeInferError, InvalidArgument
from edgeinfer.common.types import Output


def forward_in_turn(model: object, batch: Sequence[Rows]) -> list[Output]:
    """See Model.forward. Raises InvalidArgument for rows that only other sessions take."""
    for rows in batch:
        if rows.n_pending or rows.features is not None:
            raise InvalidArgument(
                f"sessions of this model take no n_pending and no features: found n_pending {rows.n_pending}, "
                f"features {'none' if rows.features is None else 'given'}"
            )
    return _in_turn(
        model,
        batch,
        lambda rows: rows.session.forward(rows.tokens, rows.parents, logits=rows.logits, hidden=rows.hidden),
    )


def heads_in_turn(model: object, batch: Sequence[Rows]) -> list[Output]:
    """See HeadModel.forward. Raises InvalidArgument for rows with `hidden`, which heads always give."""
    if any(rows.hidden is not False for rows in batch):
        raise InvalidArgument("a draft head has no layers to choose from: leave `hidden` out, its feature always comes")

    def run(rows: Rows) -> Output:
        tokens, features, parents = rows.tokens, rows.features, rows.parents
        out: Output = rows.session.forward(tokens, features, parents, n_pending=rows.n_pending, logits=rows.logits)
        return out

    return _in_turn(model, batch, run)


def _in_turn(model: object, batch: Sequence[Rows], run: Callable[[Rows], Output]) -> list[Output]:
    """One Output a text.

    The rows of a text are checked just before they run, so a pass has begun when the first text is checked: if any
    text fails, none has pending rows.
    """
    check_sessions(model, batch)
    try:
        return [run(rows) for rows in batch]
    except BaseException:
        for rows in batch:
            _drop_pending(rows)
        raise


def _drop_pending(rows: Rows) -> None:
    try:
        rows.session.truncate(rows.session.n_past)
    except EdgeInferError:  # it is closed
        pass
