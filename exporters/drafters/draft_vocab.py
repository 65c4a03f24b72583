"""`--draft-vocab`: a draft model that has logits for its most frequent tokens only, so that a draft token costs less.

The output matrix is a large part of a small model, and most of its rows are of rare tokens (FR-Spec, Zhao et al.,
arXiv:2502.14856). Embeddings stay whole, as any token may stand in the text. models/draft_vocab.py reads the ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import InvalidArgument, UnsupportedModel
from edgeinfer.common.overriding import override
from edgeinfer.common.user_text import sample_of
from edgeinfer.exporters.calibration.prompts import PROMPTS
from edgeinfer.exporters.conversion import rows
from edgeinfer.exporters.gguf.writer import Metadata
from edgeinfer.exporters.source import Source, SourceTensor
from edgeinfer.exporters.virtual_file import model_file_of
from edgeinfer.models.draft_vocab import DRAFT_VOCAB
from edgeinfer.models.gguf import GGMLType
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.speculation.calibration_text import TEXT

_OUTPUT, _EMBEDDINGS = "output.weight", "token_embd.weight"
LEAST_TOKENS = 16


def draft_vocab_source(source: Source, number: str, text: Path | None = None) -> Source:
    """A model with the output rows of some tokens alone. number: of these.  text: whose tokens are counted.

    Raises InvalidArgument, UnsupportedModel for a source that is no whole model, OSError for the text.
    """
    tensors = {tensor.name: tensor for tensor in source.tensors}
    if _EMBEDDINGS not in tensors or DRAFT_VOCAB in tensors or "d2t" in tensors:
        raise UnsupportedModel(f"{source.path}: must be a whole language model for --draft-vocab")
    output = tensors.get(_OUTPUT, tensors[_EMBEDDINGS])
    n_vocab = output.shape[0]
    if not number.isdecimal() or not LEAST_TOKENS <= int(number) < n_vocab:
        raise InvalidArgument(
            f"--draft-vocab must be a number of tokens in {LEAST_TOKENS}..{n_vocab - 1}, such as 32000, or 32000:FILE "
            f"with a text: found {number:.80}"
        )
    words = "\n".join((*PROMPTS, TEXT)) if text is None else sample_of(text)
    name = "built in" if text is None else text.name
    return DraftVocabSource(source, output, frequent_tokens(source, int(number), n_vocab, words), name)


def frequent_tokens(source: Source, n_tokens: int, n_vocab: int, text: str) -> NDArray[np.int32]:
    """(n_tokens,) ascending: tokens that end an answer, those of the text by frequency, and then the first ones.

    Byte-pair encodings number their tokens by the frequency in what they were trained on.
    """
    with model_file_of(source) as file:
        tokenizer = Tokenizer.from_file(file)
        counts = np.bincount(tokenizer.encode(text), minlength=n_vocab)[:n_vocab]
        ends = [id for id in tokenizer.stop_ids if id < n_vocab]
    counts[ends] = counts.max() + 1
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[:n_tokens]).astype(np.int32)


class DraftVocabSource(Source):
    """A source with fewer rows of its output matrix, see Source.

    whole: what it is made of.  digest: SHA-256 of the tokens of the rows.
    """

    def __init__(self, source: Source, output: SourceTensor, ids: NDArray[np.int32], text: str) -> None:
        self.whole, self._output = source, output.name
        self.digest = hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
        self.path = source.path
        self.metadata: Metadata = source.metadata
        some = rows.arranged(output, (len(ids), output.n_in), lambda wanted: ids[wanted].astype(np.int64))
        others = [tensor for tensor in source.tensors if tensor.name != _OUTPUT]
        self.tensors: Sequence[SourceTensor] = [*others, replace(some, name=_OUTPUT), _integers(ids)]
        self.notes: Sequence[str] = [
            *source.notes,
            f"it has logits for {len(ids)} of {output.shape[0]} tokens ({text}), so it can only draft (-md)",
        ]

    @property
    @override
    def files(self) -> Sequence[Path]:
        return self.whole.files

    @override
    def release(self, name: str) -> None:
        if name != DRAFT_VOCAB:
            self.whole.release(self._output if name == _OUTPUT else name)


def _integers(ids: NDArray[np.int32]) -> SourceTensor:
    data: NDArray[Any] = ids.astype("<i4").view(np.uint8)
    floats = ids.astype(np.float32)[None]
    return SourceTensor(
        DRAFT_VOCAB, ids.shape, GGMLType.I32, lambda first, last: floats[first:last], lambda first, last: data
    )
