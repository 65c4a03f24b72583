"""Drafts with a smaller model of another vocabulary, through text in both directions (after Timor et al.,
arXiv:2502.05202).

The target's tokens are decoded and encoded for the draft model, and its draft tokens back (see cross_vocabulary_text).
Where the two tokenizers split a word differently, the draft is rejected; the output is unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.backends.base import DraftingSession, Rows, Session
from edgeinfer.backends.native import top_k
from edgeinfer.common.errors import NumericalError
from edgeinfer.common.overriding import override
from edgeinfer.common.types import Output
from edgeinfer.models.arrays import Array
from edgeinfer.models.draft_vocab import draft_vocab_of
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.speculation.cost import CostModel
from edgeinfer.speculation.drafters.base import Context, Drafting
from edgeinfer.speculation.drafters.candidates import class_of
from edgeinfer.speculation.drafters.cross_vocabulary_text import CrossVocabularyText
from edgeinfer.speculation.drafters.device_drafting import DeviceDrafting
from edgeinfer.speculation.drafters.model import ModelDrafter
from edgeinfer.speculation.tree import DraftTree, no_draft

# Buckets: the class of the probability; the same for a last word, which may continue, and for sampled requests.
_LAST, _SAMPLED = 10, 20


class CrossVocabularyDrafter(ModelDrafter):
    """A draft model whose tokens are not the target's."""

    def __init__(
        self,
        session: Session,
        target: Tokenizer,
        own: Tokenizer,
        costs: CostModel,
        draft_vocab: NDArray[np.int32] | None = None,
    ) -> None:
        super().__init__(session, own.n_vocab, costs, draft_vocab=draft_vocab)
        self._target, self._own = target, own
        self._converted = CrossVocabularyText(target, own)

    @override
    def cost(self, context: Context) -> tuple[float, float]:
        """See ModelBasedDrafter. Assumes as many draft-model tokens per target token as in the text so far."""
        return self.joint_cost(context, 1)

    @override
    def joint_cost(self, context: Context, n_texts: int) -> tuple[float, float]:
        text, _ = self._text(context)
        if not 0 < len(text) < self.session.n_ctx:
            return math.inf, 0.0
        token_ms, prefill_ms = super().joint_cost(context, n_texts)
        return token_ms * len(text) / max(1, len(context.tokens)), prefill_ms

    @override
    def drafting(self, context: Context, limit: int, is_alone: bool = True) -> Drafting:
        """A chain of the best expected length."""
        self._is_alone = is_alone
        text, n_unverified = self._text(context)
        if not text or not self._converted.is_complete:
            return no_draft()
        unseen = text[self._align(text, n_unverified) :]
        drafted: list[int] = []
        p: list[float] = []
        path_probabilities: list[float] = []
        n_max = min(limit, self.session.n_ctx - len(text))
        while len(drafted) < n_max and context.acceptance.should_extend(path_probabilities):
            token, of_token = yield from self._most_probable(unseen)
            drafted.append(token)
            p.append(of_token)
            bucket = class_of(of_token) + (0 if context.is_greedy else _SAMPLED)
            probability = context.acceptance.probability(bucket, len(path_probabilities), of_token)
            path_probabilities.append((path_probabilities[-1] if path_probabilities else 1.0) * probability)
            unseen = [token]
            if self._own.is_control(token):
                break
        return self._converted_tree(drafted, p, limit, context.is_greedy)

    @override
    def _with_session(self, session: Session) -> CrossVocabularyDrafter:
        return CrossVocabularyDrafter(session, self._target, self._own, self._costs, self._draft_vocab)

    def _text(self, context: Context) -> tuple[list[int], int]:
        """See ModelDrafter. Unverified tokens that are rejected are found by the comparison with the next text."""
        n_same = self._converted.update(context.tokens)
        self._n_agreed = min(self._n_agreed, n_same)
        return self._converted.tokens, 0

    def _most_probable(self, tokens: Sequence[int]) -> Generator[Rows, Output, tuple[int, float]]:
        """Run and commit tokens; returns the most probable next token and its probability."""
        row = yield from self._forward(tokens)
        ((index, p),) = top_k(row, 1)
        if not math.isfinite(p):
            raise NumericalError("the draft model's logits must be numbers: found others")
        return self._token(index), p

    def _converted_tree(self, drafted: Sequence[int], p: Sequence[float], limit: int, is_greedy: bool) -> DraftTree:
        """The draft tokens as a chain of the target's."""
        nodes = self._converted.to_target(drafted)[:limit]
        is_open = bool(drafted) and not self._own.is_control(drafted[-1])
        probabilities = [math.prod(p[i] for i in begun) for _, begun in nodes]
        buckets = [class_of(probability) + (0 if is_greedy else _SAMPLED) for probability in probabilities]
        if nodes and is_open:
            buckets[-1] += _LAST
        return DraftTree([id for id, _ in nodes], list(range(-1, len(nodes) - 1)), probabilities, buckets)


def model_drafter(
    session: Session,
    draft: ModelFile,
    target: ModelFile,
    n_vocab: int,
    costs: CostModel,
    device_drafting: DeviceDrafting[DraftingSession] | None = None,
) -> ModelDrafter:
    """The drafter for the session of a draft model, by its vocabulary. n_vocab: tokens that the target has.

    device_drafting: see ModelDrafter; not used across vocabularies.
    """
    draft_vocab = draft_vocab_of(draft, session.spec.n_vocab)
    if has_vocabulary_of(draft, target, n_vocab):
        return ModelDrafter(session, n_vocab, costs, device_drafting, draft_vocab)
    tokenizers = Tokenizer.from_file(target), Tokenizer.from_file(draft)
    return CrossVocabularyDrafter(session, *tokenizers, costs, draft_vocab)


def check_vocabulary(draft: ModelFile, target: ModelFile, n_vocab: int) -> None:
    """Raises UnsupportedModel or TokenizerError if the draft model has another vocabulary that cannot be read."""
    if not has_vocabulary_of(draft, target, n_vocab):
        Tokenizer.from_file(draft)


def has_vocabulary_of(draft: ModelFile, target: ModelFile, n_vocab: int) -> bool:
    """Whether a draft model has the same tokens as the target's n_vocab, except padding at the end."""
    own, expected = (file.metadata.get("tokenizer.ggml.tokens") for file in (draft, target))
    if not isinstance(own, (Array, list)) or not isinstance(expected, (Array, list)):
        return False
    n = min(len(own), n_vocab)
    return own[:n] == expected[:n] and all(str(token).startswith("[PAD") for token in expected[n:n_vocab])
