"""Draft heads: a few blocks that go on from the target's own hidden rows and guess what comes next.

A feature is the target's hidden row behind its final norm, what its output matrix reads. At position i a head takes the
feature f of position i and the token of position i + 1, and gives the feature of position i + 1, whose product with the
output matrix is a row of logits for the token of position i + 2 (EAGLE, Li et al., arXiv:2401.15077). Embeddings are
the target's; the output matrix has rows for a part of the tokens only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UnsupportedModel
from edgeinfer.gguf import ModelFile
from edgeinfer.models.reader import Architecture, Reader
from edgeinfer.models.spec import GateTensors, ModelSizes, ModelSpec

ARCHITECTURE = "draft-head"
KINDS = ("dgf",)  # dynamic gating fusion
DRAFT_VOCAB = "draft_vocab"
_GATE = GateTensors("gate.feature.weight", "gate.token_norm.weight", "gate.token.weight", "gate.mix.weight")


@dataclass(frozen=True)
class Target:
    """The model that a head drafts for. fingerprint: see the function."""

    architecture: str
    name: str
    n_vocab: int
    n_embd: int
    fingerprint: str


@dataclass(frozen=True)
class DraftHeadSpec:
    """A head: its decoder, whose `token_embd` is a tensor of the target's file, and its vocabulary.

    draft_vocab: (n_draft,) int32, ascending ids of the target's tokens, one for each row of logits.
    """

    target: Target
    decoder: ModelSpec
    draft_vocab: NDArray[np.int32]


def is_draft_head(file: ModelFile) -> bool:
    """Whether a file says that it is a draft head."""
    return file.metadata.get("general.architecture") == ARCHITECTURE


def read_head(file: ModelFile) -> DraftHeadSpec:
    """Spec of the file of a head. Raises UnsupportedModel if its keys or tensors do not fit."""
    return _HeadReader(Architecture(ARCHITECTURE, "interleaved", optional=frozenset()), file).head()


def fingerprint(file: ModelFile) -> str:
    """Tells models apart by vocabulary and fine-tune: a SHA-256 in hex.

    Of the tokens in UTF-8, joined by zero bytes, and behind them the bytes of output_norm.weight, which quantisation
    leaves as they are. Raises UnsupportedModel for a file without either.
    """
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or "output_norm.weight" not in file.tensors:
        raise UnsupportedModel(f"{file.path}: no vocabulary or no output_norm.weight: no whole language model")
    digest = hashlib.sha256("\0".join(map(str, tokens)).encode())
    digest.update(file.data("output_norm.weight").tobytes())
    return digest.hexdigest()


def check_target(head: DraftHeadSpec, path: object, target: ModelFile, spec: ModelSizes) -> None:
    """Raises UnsupportedModel unless the head at that path is one for this target, naming what both have."""
    wanted = head.target
    own = Target(spec.architecture, str(target.metadata.get("general.name")), spec.n_vocab, spec.n_embd, "")
    if (own.n_vocab, own.n_embd) != (wanted.n_vocab, wanted.n_embd):
        raise UnsupportedModel(
            f"{path} is a draft head for {wanted.name} ({wanted.n_vocab} tokens, rows of {wanted.n_embd}), but "
            f"{target.path} is {own.name} ({own.n_vocab} tokens, rows of {own.n_embd}): use the head of this model"
        )
    found = fingerprint(target)
    if found != wanted.fingerprint:
        raise UnsupportedModel(
            f"{path} is a draft head for {wanted.name} (fingerprint {wanted.fingerprint:.16}), but {target.path} is "
            f"{own.name} (fingerprint {found:.16}): use the head of this model"
        )


class _HeadReader(Reader):
    """Reads a head as a llama model, but for what it lacks and what it has beyond that."""

    def head(self) -> DraftHeadSpec:
        """See read_head."""
        kind = self._text("kind")
        if kind not in KINDS:
            self.refuse("kind", f"must be {' or '.join(KINDS)}: found {kind!r:.80}")
        self._check_keys()
        common = self._common_spec()
        draft_vocab = self._draft_vocab(common.n_vocab)
        decoder = replace(common, output_norm=None, gate=_GATE, n_draft=len(draft_vocab))
        self._check_tensors(decoder, {DRAFT_VOCAB})
        architecture, name, found = (self._text(f"target.{key}") for key in ("architecture", "name", "fingerprint"))
        return DraftHeadSpec(Target(architecture, name, common.n_vocab, common.n_embd, found), decoder, draft_vocab)

    def _n_layers(self) -> int:
        return self.integer("block_count", 0, 4096)

    def _n_vocab(self) -> int:
        return self.integer("target.vocab_size", 1, 1 << 28)

    def _output(self) -> str:
        return "output.weight"

    def _text(self, key: str) -> str:
        value = self.file.metadata.get(self._key(key))
        if not isinstance(value, str):
            self.refuse(key, f"must be a text: found {value!r:.80}")
        return value

    def _draft_vocab(self, n_vocab: int) -> NDArray[np.int32]:
        info = self.file.tensors.get(DRAFT_VOCAB)
        if info is None or info.type.name != "I32" or len(info.shape) != 1:
            found = "none" if info is None else f"{info.type.name} {info.shape}"
            raise UnsupportedModel(f"{self.file.path}: tensor {DRAFT_VOCAB} must be I32 (n_draft,): found {found}")
        ids = np.frombuffer(self.file.data(DRAFT_VOCAB).tobytes(), dtype="<i4").astype(np.int32)
        falls = np.flatnonzero(np.diff(ids) <= 0)
        if falls.size:
            first = int(falls[0])
            raise UnsupportedModel(
                f"{self.file.path}: tensor {DRAFT_VOCAB} must be ascending: found {ids[first + 1]} behind {ids[first]}"
            )
        if ids[0] < 0 or ids[-1] >= n_vocab:
            raise UnsupportedModel(
                f"{self.file.path}: tensor {DRAFT_VOCAB} must be ids in 0..{n_vocab - 1}: found {ids[0]}..{ids[-1]}"
            )
        return ids
