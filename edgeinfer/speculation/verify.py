"""Sample, then match: which nodes of a checked tree are the text.

At each node of the path the target's own token is drawn, once, from the logits that the node left, with the noise of
its place in the text (edgeinfer.sampling). The draft is right where a child equals that token. So every token is the
one that decoding one by one would have drawn, whatever was drafted and however well.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import NamedTuple, TypeAlias

from edgeinfer.errors import NumericalError
from edgeinfer.types import Logits

Draw: TypeAlias = Callable[[Logits, list[int]], int]  # logits (n_vocab,) and the text so far: the token that follows


class Verdict(NamedTuple):
    """What a check gives.

    tokens: drawn, at least one; all but the last were drafted.  path: rows of the batch that are part of the text now,
    row 0 first; `tokens[i]` was drawn from the logits of row `path[i]`.
    """

    tokens: list[int]
    path: list[int]


def accept(
    rows: Logits, children: Mapping[tuple[int, int], int], draw: Draw, text: list[int], stop_ids: Container[int]
) -> Verdict:
    """Draw tokens from row 0 on as long as they were drafted, and the one that follows; extends the text by them.

    rows: (n, n_vocab) logits, row 0 of the last token of the text, the others of the nodes.  children: row of the node
    with (row of its parent, token).  Nothing is drawn behind a stop token.
    Raises NumericalError if row 0 is not usable; further down the path just ends, and the next row 0 will raise it.
    """
    row, path = 0, [0]
    tokens: list[int] = []
    while True:
        try:
            token = draw(rows[row], text)
        except NumericalError:
            if not tokens:
                raise
            return Verdict(tokens, path[:-1])
        tokens.append(token)
        text.append(token)
        child = children.get((row, token))
        if child is None or token in stop_ids:
            return Verdict(tokens, path)
        row = child
        path.append(row)
