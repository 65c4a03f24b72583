"""Drafts of a constraint: the tokens that it forces or that are likely where few may follow, and what it leaves of the
drafts of others.
"""

from __future__ import annotations

from bisect import bisect_left

from edgeinfer.common.errors import ConstraintError
from edgeinfer.speculation.drafters.base import AcceptanceModel, Context
from edgeinfer.speculation.tree import DraftTree, no_draft, part_of

NAME = "constraint"  # in statistics
_BOUNDS = (1, 2, 4, 16, 64)  # buckets: by the number of tokens that may stand in a place
_P = (1.0, 0.9, 0.8, 0.7, 0.5, 0.4)  # estimates of them, read off answers of the default model


def forced_draft(context: Context, acceptance: AcceptanceModel, limit: int) -> DraftTree:
    """The tokens that must follow or probably will, at most limit. Never an end."""
    if context.constraint is None:
        return no_draft()
    tokens: list[int] = []
    buckets: list[int] = []
    path_probability = 1.0
    try:
        for token, n_allowed in context.constraint.likely(context.tokens):
            bucket = bisect_left(_BOUNDS, n_allowed)
            path_probability *= acceptance.probability(bucket, len(tokens), _P[bucket])
            if len(tokens) == limit or path_probability < acceptance.min_probability:
                break
            tokens.append(token)
            buckets.append(bucket)
    except ConstraintError:  # which the draw raises too, if the text gets there
        pass
    return DraftTree(tokens, range(-1, len(tokens) - 1), [_P[bucket] for bucket in buckets], buckets)


def allowed_part(context: Context, tree: DraftTree) -> DraftTree:
    """The nodes that may follow: a pass has no rows for the others. Raises ConstraintError as the draw does."""
    if context.constraint is None or not tree.tokens:
        return tree
    return part_of(tree, context.constraint.kept(context.tokens, tree.tokens, tree.parents))
