"""Sample, then match: which nodes of a verified draft tree become text.

At each node of the path the target's own token is sampled, once, from the logits of that node, with the noise of its
position in the text (edgeinfer.sampling). A draft token is accepted where it equals the sampled one. So every token is
the one that decoding without drafts would have sampled, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import NamedTuple, TypeAlias

from edgeinfer.common.errors import NumericalError
from edgeinfer.common.types import Logits

Draw: TypeAlias = Callable[[Logits, list[int]], int]  # logits (n_vocab,) and the text so far: the token that follows


class Verdict(NamedTuple):
    """The outcome of a verify pass.

    tokens: sampled, at least one; all but the last are accepted draft tokens.  path: rows of the batch that become
    text, row 0 first; `tokens[i]` was sampled from the logits of row `path[i]`.
    """

    tokens: list[int]
    path: list[int]


def accept(
    rows: Logits, children: Mapping[tuple[int, int], int], draw: Draw, text: list[int], stop_ids: Container[int]
) -> Verdict:
    """The accepted draft tokens, and the token that follows them; extends the text by all of these.

    rows: (n, n_vocab) logits, row 0 of the last token of the text, the others of the nodes.  children: row of the node
    with (row of its parent, token).  Nothing is sampled after a stop token.
    Raises NumericalError if row 0 is unusable; at a later row the path just ends before it, and the next step raises.
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
