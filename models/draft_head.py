"""Draft heads: a few blocks that go on from the target's own hidden rows and guess what comes next.

A feature is the target's hidden row behind its final norm, what its output matrix reads. At position i a head takes the
feature f of position i and the token of position i + 1, and gives the feature of position i + 1, whose product with the
output matrix is a row of logits for the token of position i + 2 (EAGLE, Li et al., arXiv:2401.15077). Embeddings are
the target's; the output matrix has rows for a part of the tokens only. The features that come from the target may be
made of its rows behind several layers instead (arXiv:2503.01840).

EAGLE-3 heads, in the form that llama.cpp gives them, always do that, and embeddings may be their own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import UnsupportedModel
from edgeinfer.models.arrays import Array, Strings
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.models.reader import ROPE_FREQS, Architecture, Reader
from edgeinfer.models.spec import CombineTensors, GateTensors, ModelSizes, ModelSpec, PairTensors

ARCHITECTURE, EAGLE3 = "draft-head", "eagle3"
KINDS = ("dgf",)  # dynamic gating fusion
DRAFT_VOCAB, EAGLE3_VOCAB = "draft_vocab", "d2t"
TARGET_LAYERS, MATCHES, OUTPUT_TYPE = "target_layers", "matches", "output_type"
OUTPUT_TYPES = (GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_0)  # that rows of a target are rewritten in
_EAGLE3_LAYERS = 3  # of the target, whose rows a feature is made of
MOST_TAPS = 16
_MOST_DEPTHS = 64  # that matches are known of
_LANES = 16  # parts of rows that have norms of their own begin at whole vectors
_GATE = GateTensors("gate.feature.weight", "gate.token_norm.weight", "gate.token.weight", "gate.mix.weight")


@dataclass(frozen=True)
class Target:
    """The model that a head drafts for.

    n_embd: of its hidden rows.  fingerprint: see the function; of the tokens alone where by_tokens is set.
    """

    architecture: str
    name: str
    n_vocab: int
    n_embd: int
    fingerprint: str
    by_tokens: bool = False


@dataclass(frozen=True)
class DraftHeadSpec:
    """A head: its decoder and its vocabulary.

    draft_vocab: (n_draft,) int32, ascending ids of the target's tokens, one for each row of logits.  taps: the target's
    rows that features are made of, as Session.forward is asked for them with `hidden`.  matches: by depth, how often a
    drafted token was right where those before it were, on text that was not trained on; empty where that is not known.
    output_type: what the target's rows for draft_vocab are to be rewritten in, where the file leaves them out.
    """

    target: Target
    decoder: ModelSpec
    draft_vocab: NDArray[np.int32]
    taps: bool | tuple[int, ...] = True
    matches: tuple[float, ...] = ()
    output_type: GGMLType | None = None

    @property
    def acceptance_rate(self) -> float | None:
        """Of the tokens of chains that end with the first wrong one: how many are right, if that is known."""
        right, n_drafted, reached = 0.0, 0.0, 1.0
        for match in self.matches:
            n_drafted += reached
            reached *= match
            right += reached
        return right / n_drafted if n_drafted else None


def is_draft_head(file: ModelFile) -> bool:
    """Whether a file says that it is a draft head."""
    return file.metadata.get("general.architecture") in (ARCHITECTURE, EAGLE3)


def read_head(file: ModelFile) -> DraftHeadSpec:
    """Spec of the file of a head. Raises UnsupportedModel if its keys or tensors do not fit."""
    if file.metadata.get("general.architecture") == EAGLE3:
        without, factors = frozenset({"attn_norm"}), ROPE_FREQS
        eagle3 = Architecture(EAGLE3, "interleaved", optional=frozenset(), without=without, rope_factors=factors)
        return _Eagle3Reader(eagle3, file).head()
    return _HeadReader(Architecture(ARCHITECTURE, "interleaved", optional=frozenset()), file).head()


def fingerprint(file: ModelFile, by_tokens: bool = False) -> str:
    """Tells models apart by vocabulary and fine-tune: a SHA-256 in hex.

    Of the tokens in UTF-8, joined by zero bytes, and behind them, unless they alone are wanted, the bytes of
    output_norm.weight, which quantisation leaves as they are. Raises UnsupportedModel for a file without either.
    """
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, (Array, list)) or "output_norm.weight" not in file.tensors:
        raise UnsupportedModel(f"{file.path}: no vocabulary or no output_norm.weight: no whole language model")
    joined = tokens.joined_by("\0") if isinstance(tokens, Strings) else "\0".join(map(str, tokens)).encode()
    digest = hashlib.sha256(joined)
    if not by_tokens:
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
    if not isinstance(head.taps, bool) and max(head.taps) >= spec.n_layers:
        raise UnsupportedModel(
            f"{path} is a draft head for {wanted.name} that goes on from layer {max(head.taps)}, but {target.path} is "
            f"{own.name} (layers 0..{spec.n_layers - 1}): use the head of this model"
        )
    found = fingerprint(target, wanted.by_tokens)
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
        draft_vocab = self._draft_vocab(DRAFT_VOCAB, "I32", common.n_vocab)
        taps = self._taps()
        decoder = replace(common, output_norm=None, gate=_GATE, own_embeddings=False, n_draft=len(draft_vocab))
        if not isinstance(taps, bool):
            n_embd = common.n_embd
            if n_embd % _LANES:
                self.refuse("embedding_length", f"must be a multiple of {_LANES} with {TARGET_LAYERS}: found {n_embd}")
            combine = CombineTensors("combine.weight", "combine_norm.weight", len(taps) * n_embd, n_normed=n_embd)
            decoder = replace(decoder, combine=combine)
        output_type = self._output_type(common.n_embd)
        self._check_tensors(replace(decoder, own_output=output_type is None), {DRAFT_VOCAB})
        architecture, name, found = (self._text(f"target.{key}") for key in ("architecture", "name", "fingerprint"))
        target = Target(architecture, name, common.n_vocab, common.n_embd, found)
        return DraftHeadSpec(target, decoder, draft_vocab, taps, self._matches(), output_type)

    def _output_type(self, n_embd: int) -> GGMLType | None:
        """What the rows are made in that the file leaves out, None for a file that has them, or was given them."""
        found = self.file.metadata.get(self._key(OUTPUT_TYPE))
        if found is None or self._output() in self.file.tensors:
            return None
        types = {each.name: each for each in OUTPUT_TYPES}
        if not isinstance(found, str) or found not in types:
            self.refuse(OUTPUT_TYPE, f"must be {', '.join(types)}: found {found!r:.80}")
        if n_embd % (n_in := types[found].block_elements):
            self.refuse("embedding_length", f"must be a multiple of {n_in} for rows of {found}: found {n_embd}")
        return types[found]

    def _matches(self) -> tuple[float, ...]:
        found = self.file.metadata.get(self._key(MATCHES), [])
        depths = found if isinstance(found, (Array, list)) else [None]
        matches = tuple(one for one in depths if isinstance(one, float) and 0.0 <= one <= 1.0)
        if not len(depths) == len(matches) <= _MOST_DEPTHS:
            self.refuse(MATCHES, f"must be up to {_MOST_DEPTHS} shares from 0.0 to 1.0: found {found!r:.80}")
        return matches

    def _taps(self) -> bool | tuple[int, ...]:
        found = self.file.metadata.get(self._key(TARGET_LAYERS))
        if found is None:
            return True
        layers = found if isinstance(found, (Array, list)) else []
        taps = tuple(layer for layer in layers if isinstance(layer, int) and 0 <= layer < 4096)
        if not 1 <= len(layers) == len(taps) <= MOST_TAPS:
            self.refuse(TARGET_LAYERS, f"must be 1 to {MOST_TAPS} layers from 0 on: found {found!r:.80}")
        return taps

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

    def _draft_vocab(self, name: str, kind: str, n_vocab: int) -> NDArray[np.int32]:
        """The ids in that tensor of that type."""
        info = self.file.tensors.get(name)
        if info is None or info.type.name != kind or len(info.shape) != 1:
            found = "none" if info is None else f"{info.type.name} {info.shape}"
            raise UnsupportedModel(f"{self.file.path}: tensor {name} must be {kind} (n_draft,): found {found}")
        ids = np.frombuffer(self.file.data(name).tobytes(), dtype="<i4" if kind == "I32" else "<i8")
        falls = np.flatnonzero(np.diff(ids) <= 0)
        if falls.size:
            first = int(falls[0])
            raise UnsupportedModel(
                f"{self.file.path}: tensor {name} must be ascending: found {ids[first + 1]} behind {ids[first]}"
            )
        if ids[0] < 0 or ids[-1] >= n_vocab:
            raise UnsupportedModel(
                f"{self.file.path}: tensor {name} must be ids in 0..{n_vocab - 1}: found {ids[0]}..{ids[-1]}"
            )
        return ids.astype(np.int32)


class _Eagle3Reader(_HeadReader):
    """Reads an EAGLE-3 head as llama.cpp stores it."""

    def head(self) -> DraftHeadSpec:
        """See read_head."""
        self._check_keys()
        common = self._common_spec()
        n_rows = self.integer("target_hidden_size", 1, 1 << 20)
        own_embeddings, own_output = (f"{name}.weight" in self.file.tensors for name in ("token_embd", "output"))
        if not (own_embeddings and own_output) and n_rows != common.n_embd:
            lacking = "embedding matrix" if own_output else "output matrix"
            self.refuse("target_hidden_size", f"must be {common.n_embd}, as there is no {lacking}: found {n_rows}")
        pair = PairTensors(
            token_norm="blk.0.attn_norm.weight",
            feature_norm="blk.0.attn_norm_2.weight",
            normed_residual=self.flag("norm_before_residual", False),
        )
        n_combined = _EAGLE3_LAYERS * n_rows
        norm = "enc.output_norm.weight" if self.flag("norm_before_fc", False) else None
        combine = CombineTensors("fc.weight", norm, n_combined, n_normed=n_combined)
        draft_vocab = np.arange(common.n_vocab, dtype=np.int32)
        if EAGLE3_VOCAB in self.file.tensors:
            draft_vocab = self._draft_vocab(EAGLE3_VOCAB, "I64", common.n_vocab)
        if not own_output and len(draft_vocab) < common.n_vocab:
            raise UnsupportedModel(f"{self.file.path}: tensor output.weight is missing, and {EAGLE3_VOCAB} has no use")
        decoder = replace(
            common,
            pair=pair,
            combine=combine,
            own_embeddings=own_embeddings,
            own_output=own_output,
            n_draft=len(draft_vocab),
        )
        self._check_tensors(decoder, {EAGLE3_VOCAB})
        name = f"the target of {self.file.metadata.get('general.name')}"
        mark = fingerprint(self.file, by_tokens=True)
        target = Target("", name, common.n_vocab, n_rows, mark, by_tokens=True)
        return DraftHeadSpec(target, decoder, draft_vocab, self._taps())

    def _n_layers(self) -> int:
        return self.integer("block_count", 1, 1)

    def _n_vocab(self) -> int:
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, (Array, list)) or not tokens:
            raise UnsupportedModel(f"{self.file.path}: no vocabulary, which a target could be compared with")
        return len(tokens)

    def _taps(self) -> tuple[int, ...]:
        """llama.cpp counts what goes into a layer, Session.forward what comes out of one."""
        found = self.file.metadata.get(self._key(TARGET_LAYERS))
        layers = found if isinstance(found, (Array, list)) else []
        taps = tuple(layer - 1 for layer in layers if isinstance(layer, int) and 1 <= layer <= 4096)
        if not len(layers) == len(taps) == _EAGLE3_LAYERS:
            self.refuse(TARGET_LAYERS, f"must be {_EAGLE3_LAYERS} layers from 1 on: found {found!r:.80}")
        return taps
