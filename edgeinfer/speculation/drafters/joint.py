"""Drafts of several texts in the same passes of one draft model or head.

A drafter that can do this makes a draft as a generator: it yields the rows of each pass that it wants, and is sent
their output. So the drafts of several texts go on in step, and what all of them want next is one pass. Which texts are
in it changes no bit of any row.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter

from edgeinfer.backends.base import Rows
from edgeinfer.common.errors import CacheFull
from edgeinfer.common.types import Output
from edgeinfer.speculation.drafters.base import Drafting
from edgeinfer.speculation.tree import DraftTree, no_draft


@dataclass(slots=True)
class Running:
    """A draft that is being made beside others.

    guard: around what it does; see DrafterState.guarded. It stops the draft by swallowing what it raised.
    """

    drafting: Drafting
    guard: AbstractContextManager[object]
    rows: Rows | None = None  # that it waits for, None where it is made or has failed
    tree: DraftTree | None = None  # None where it failed

    def go_on(self, out: Output | None) -> None:
        """Run it up to its next pass. out: of the last one, None at the beginning."""
        self.rows = None
        with self.guard:
            try:
                self.rows = next(self.drafting) if out is None else self.drafting.send(out)
            except StopIteration as ended:
                self.tree = ended.value

    def fail(self, error: Exception) -> None:
        """Its pass failed."""
        self.rows = None
        with self.guard:
            self.drafting.throw(error)


def draft_alone(drafting: Drafting) -> DraftTree:
    """Make the draft of one text. Where the memory that texts share is short there is none."""
    try:
        rows = next(drafting)
        while True:
            try:
                out = _forward(rows)
            except CacheFull:
                drafting.close()
                return no_draft()
            except BaseException as error:
                rows = drafting.throw(error)
            else:
                rows = drafting.send(out)
    except StopIteration as ended:
        tree: DraftTree = ended.value
        return tree


def _forward(rows: Rows) -> Output:
    """A pass of one text, of a draft model or of a head."""
    out: Output
    if rows.features is None:
        out = rows.session.forward(rows.tokens, logits=rows.logits)
    else:
        out = rows.session.forward(
            rows.tokens, rows.features, rows.parents, n_pending=rows.n_pending, logits=rows.logits
        )
    return out


def draft_together(drafts: Sequence[Running]) -> float:
    """Make the drafts of several texts, whose passes have the same model; gives the seconds of its passes.

    Where the memory that they share is short, those that are not made yet are given up for this step.
    """
    seconds = 0.0
    for draft in drafts:
        draft.go_on(None)
    while waiting := [draft for draft in drafts if draft.rows is not None]:
        wanted = [draft.rows for draft in waiting if draft.rows is not None]
        started = perf_counter()
        try:
            outputs = wanted[0].session.model.forward(wanted)
        except CacheFull:
            for draft in waiting:
                draft.drafting.close()
                draft.rows, draft.tree = None, no_draft()
            break
        except Exception as error:  # of the model: each drafter fails in its own way, as if it were alone
            for draft in waiting:
                draft.fail(error)
            break
        seconds += perf_counter() - started
        for draft, out in zip(waiting, outputs, strict=True):
            draft.go_on(out)
    return seconds
