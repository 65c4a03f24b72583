"""Draft heads: a few blocks that continue from the target's hidden rows and predict the next tokens.

A feature is the target's hidden row after its final norm, the input of its output matrix. At position i a head takes
the feature f of position i and the token of position i + 1, and gives the feature of position i + 1, whose product with
the output matrix is a row of logits for the token of position i + 2 (EAGLE, Li et al., arXiv:2401.15077). Embeddings
are the target's; the output matrix has rows for some of the tokens only. Features of the target may be made of its rows
after several layers instead (arXiv:2503.01840).

EAGLE-3 heads, in the form of llama.cpp's converter, always do that, and may have their own embeddings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models.arrays import Array, Strings
from edgeinfer.models.draft_vocab import DRAFT_VOCAB, read_draft_vocab
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.models.nextn import NextnBlock
from edgeinfer.models.reader import ROPE_FREQS, Architecture, Reader, each_mixer
from edgeinfer.models.spec import ModelSizes, ModelSpec, Weight, shapes_in_file, weights_of

ARCHITECTURE, EAGLE3 = HEADS = "draft-head", "eagle3"  # values of general.architecture
KINDS = ("dgf",)  # dynamic gating fusion
EAGLE3_VOCAB = "d2t"
_LAST_NORMS = ("output_norm.weight", "token_embd_norm.weight")  # the second is LFM2's
TARGET_LAYERS, MATCHES, OUTPUT_TYPE = "target_layers", "matches", "output_type"
OUTPUT_TYPES = (GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_0)  # that rows of a target are rewritten in
_EAGLE3_LAYERS = 3  # of the target, whose rows a feature is made of
MOST_TAPS = 16
_MOST_DEPTHS = 64  # that matches are known of
NEXTN_OUTPUT = "nextn.draft_output.weight"  # of no file
_LANES = 16  # parts of rows that have norms of their own begin at whole vectors


@dataclass(frozen=True)
class HeadTarget:
    """The model that a head drafts for."""

    architecture: str
    name: str
    n_vocab: int
    n_embd: int  # of its hidden rows
    fingerprint: str  # see the function; of the tokens alone where by_tokens is set
    by_tokens: bool = False


@dataclass(frozen=True)
class GatedFusion:
    """The front of a head by Dovetail's dynamic gating fusion (Zhang et al., arXiv:2412.18934).

    With the feature f that comes with a token of embedding e, its decoder begins with
    x = s a + (1 - s) b; a = feature @ f, b = silu(token @ norm(e, token_norm)), s = sigmoid(mix @ [a; b]).
    """

    n_embd: int
    feature: str  # (n_embd, n_embd)
    token_norm: str  # (n_embd,)
    token: str  # (n_embd, n_embd)
    mix: str  # (n_embd, 2 n_embd)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, by role."""
        square = (self.n_embd, self.n_embd)
        return {
            "feature": square,
            "token_norm": (self.n_embd,),
            "token": square,
            "mix": (self.n_embd, 2 * self.n_embd),
        }


@dataclass(frozen=True)
class ConcatenatedInput:
    """The front of an EAGLE-3 head (Li et al., arXiv:2503.01840): what its one layer attends from.

    With the feature f that comes with a token of embedding e, queries, keys and values are products with
    [norm(e, token_norm); norm(f, feature_norm)], and what the layer adds to is x = f, or norm(f, feature_norm) where
    normed_residual is set.
    """

    n_embd: int
    token_norm: str  # (n_embd,)
    feature_norm: str  # (n_embd,)
    normed_residual: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, by role."""
        return {"token_norm": (self.n_embd,), "feature_norm": (self.n_embd,)}


@dataclass(frozen=True)
class ProjectedInput:
    """The front of a model's own block that drafts (NextnBlock): what its decoder begins with.

    With the feature f that comes with a token of embedding e, x = projection @ [norm(e, token_norm);
    norm(f, feature_norm)] (DeepSeek-V3, arXiv:2412.19437).
    """

    n_embd: int
    token_norm: str  # (n_embd,)
    feature_norm: str  # (n_embd,)
    projection: str  # (n_embd, 2 n_embd)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, by role."""
        return {
            "token_norm": (self.n_embd,),
            "feature_norm": (self.n_embd,),
            "projection": (self.n_embd, 2 * self.n_embd),
        }


@dataclass(frozen=True)
class FeatureProjection:
    """What makes a head's features of the target's hidden rows h, n_rows numbers of several layers side by side.

    f = matrix @ norm(h), once for each row of the target. The norm is over each n_normed numbers of h.
    """

    n_embd: int
    n_rows: int
    n_normed: int
    matrix: str  # (n_embd, n_rows)
    norm: str | None  # (n_rows,)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor that there may be, by role."""
        return {"matrix": (self.n_embd, self.n_rows), "norm": (self.n_rows,)}


@dataclass(frozen=True)
class HeadSpec:
    """A draft head: a front that joins tokens with features, a decoder after it, and what makes the features."""

    front: GatedFusion | ConcatenatedInput | ProjectedInput
    decoder: ModelSpec
    features: FeatureProjection | None  # None where they are the target's hidden rows themselves
    target: HeadTarget
    # (n_logits,) int32, ascending ids of the target's tokens, one for each row of the decoder's output matrix
    draft_vocab: NDArray[np.int32]
    # the target's rows that features are made of, as Session.forward is asked for them with `hidden`
    taps: bool | tuple[int, ...] = True
    # by depth, how often a drafted token was right where those before it were, on text that was not trained on; empty
    # where that is not known
    matches: tuple[float, ...] = ()
    # what the target's rows for draft_vocab are rewritten in, where the file leaves them out
    output_type: GGMLType | None = None
    # whether the feature that it predicts is behind the norm of its output, rather than in front of it
    normed_feature: bool = False

    @property
    def n_embd(self) -> int:
        """Numbers of a feature."""
        return self.decoder.n_embd

    @property
    def n_rows(self) -> int:
        """Numbers of the target's hidden rows that make one feature."""
        return self.decoder.n_embd if self.features is None else self.features.n_rows

    @property
    def feature_tap(self) -> int:
        """Layer after which the predicted feature stands, n_layers behind the norm of the output matrix."""
        is_behind = self.decoder.output_norm is None or self.normed_feature
        return self.decoder.n_layers if is_behind else self.decoder.n_layers - 1

    @property
    def acceptance_rate(self) -> float | None:
        """Share of drafted tokens that are right, in chains that end with the first wrong one; None if not known."""
        right, n_drafted, reached = 0.0, 0.0, 1.0
        for match in self.matches:
            n_drafted += reached
            reached *= match
            right += reached
        return right / n_drafted if n_drafted else None

    def weights(self) -> Iterator[Weight]:
        """Every tensor beside the embeddings: those of the blocks "front" and "features", and the decoder's."""
        yield from weights_of("front", self.front)
        if self.features is not None:
            yield from weights_of("features", self.features)
        yield from self.decoder.weights()

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape that each tensor of the file must have, (n_out, n_in) or (n,)."""
        return shapes_in_file(self.weights()) | self.decoder.tensor_shapes()

    def beside(self, target: ModelSpec) -> HeadSpec:
        """The spec with the scale of the target's embeddings, if the front takes them scaled."""
        if isinstance(self.front, ConcatenatedInput):
            return self
        return replace(self, decoder=replace(self.decoder, embedding_scale=target.embedding_scale))


def is_draft_head(file: ModelFile) -> bool:
    """Whether a file says that it is a draft head."""
    return file.metadata.get("general.architecture") in HEADS


def read_head(file: ModelFile) -> HeadSpec:
    """Spec of the file of a head. Raises UnsupportedModel if its keys or tensors do not fit."""
    if file.metadata.get("general.architecture") == EAGLE3:
        without, factors = frozenset({"mixer.norm"}), ROPE_FREQS
        eagle3 = Architecture(EAGLE3, "interleaved", optional=frozenset(), without=without, rope_factors=factors)
        return _Eagle3Reader(eagle3, file).head()
    return _HeadReader(Architecture(ARCHITECTURE, "interleaved", optional=frozenset()), file).head()


def head_of_nextn(file: ModelFile, spec: ModelSpec, block: NextnBlock, draft_vocab: NDArray[np.int32]) -> HeadSpec:
    """A model's own block that drafts, as a head for that model. Its tensors are those of the model's file.

    draft_vocab: (n,) ascending ids of the tokens that it drafts. Where those are not all, the decoder's output matrix
    is to be made of the model's rows for them, under the name NEXTN_OUTPUT.
    """
    is_cut = len(draft_vocab) < spec.n_vocab
    own_output = None if block.output == spec.output else block.output
    decoder = replace(
        spec,
        n_layers=1,
        layers=(block.layer,),
        token_embd=None if block.token_embd == spec.token_embd else block.token_embd,
        output_norm=block.output_norm,
        centred_output=block.centred_output,
        output=NEXTN_OUTPUT if is_cut else own_output,
        n_logits=len(draft_vocab),
    )
    return HeadSpec(
        front=ProjectedInput(spec.n_embd, block.token_norm, block.hidden_norm, block.projection),
        decoder=decoder,
        features=None,
        target=HeadTarget(spec.architecture, str(file.metadata.get("general.name")), spec.n_vocab, spec.n_embd, ""),
        draft_vocab=draft_vocab,
        output_type=GGMLType.Q4_0 if is_cut else None,
        normed_feature=True,
    )


def fingerprint(file: ModelFile, by_tokens: bool = False) -> str:
    """Tells models apart by vocabulary and fine-tune: a SHA-256 in hex.

    Of the tokens in UTF-8, joined by zero bytes, and after them, unless they alone are needed, the bytes of
    the last norm, which quantisation leaves as they are. Raises UnsupportedModel for a file without either.
    """
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    norm = next((name for name in _LAST_NORMS if name in file.tensors), None)
    if not isinstance(tokens, (Array, list)) or norm is None:
        raise UnsupportedModel(f"{file.path}: no vocabulary or no output_norm.weight: no whole language model")
    joined = tokens.joined_by("\0") if isinstance(tokens, Strings) else "\0".join(map(str, tokens)).encode()
    digest = hashlib.sha256(joined)
    if not by_tokens:
        digest.update(file.data(norm).tobytes())
    return digest.hexdigest()


def check_target(head: HeadSpec, path: object, target: ModelFile, spec: ModelSizes) -> None:
    """Raises UnsupportedModel unless the head at that path is one for this target, naming what both have."""
    expected = head.target
    own = HeadTarget(spec.architecture, str(target.metadata.get("general.name")), spec.n_vocab, spec.n_embd, "")
    if (own.n_vocab, own.n_embd) != (expected.n_vocab, expected.n_embd):
        raise UnsupportedModel(
            f"{path} is a draft head for {expected.name} ({expected.n_vocab} tokens, rows of {expected.n_embd}), but "
            f"{target.path} is {own.name} ({own.n_vocab} tokens, rows of {own.n_embd}): use the head of this model"
        )
    if not isinstance(head.taps, bool) and max(head.taps) >= spec.n_layers:
        raise UnsupportedModel(
            f"{path} is a draft head for {expected.name} that goes on from layer {max(head.taps)}, but {target.path} "
            f"is {own.name} (layers 0..{spec.n_layers - 1}): use the head of this model"
        )
    found = fingerprint(target, expected.by_tokens)
    if found != expected.fingerprint:
        raise UnsupportedModel(
            f"{path} is a draft head for {expected.name} (fingerprint {expected.fingerprint:.16}), but {target.path} "
            f"is {own.name} (fingerprint {found:.16}): use the head of this model"
        )


class _HeadReader(Reader):
    """Reads a head as a llama model, but for what it lacks and what it has beyond that."""

    def head(self) -> HeadSpec:
        """See read_head."""
        kind = self._text("kind")
        if kind not in KINDS:
            self.refuse("kind", f"must be {' or '.join(KINDS)}: found {kind!r:.80}")
        self._check_keys()
        common = self._common_spec()
        n_embd, taps = common.n_embd, self._taps()
        draft_vocab = read_draft_vocab(self.file, DRAFT_VOCAB, "I32", common.n_vocab)
        architecture, name, found = (self._text(f"target.{key}") for key in ("architecture", "name", "fingerprint"))
        head = HeadSpec(
            front=GatedFusion(
                n_embd, "gate.feature.weight", "gate.token_norm.weight", "gate.token.weight", "gate.mix.weight"
            ),
            decoder=replace(common, output_norm=None, token_embd=None, n_logits=len(draft_vocab)),
            features=None if isinstance(taps, bool) else self._features(taps, n_embd),
            target=HeadTarget(architecture, name, common.n_vocab, n_embd, found),
            draft_vocab=draft_vocab,
            taps=taps,
            matches=self._matches(),
            output_type=self._output_type(n_embd),
        )
        in_file = head
        if head.output_type is not None:
            in_file = replace(head, decoder=replace(head.decoder, output=None))
        self._check_tensors(in_file.tensor_shapes(), {DRAFT_VOCAB})
        return head

    def _features(self, taps: Sequence[int], n_embd: int) -> FeatureProjection:
        if n_embd % _LANES:
            self.refuse("embedding_length", f"must be a multiple of {_LANES} with {TARGET_LAYERS}: found {n_embd}")
        return FeatureProjection(n_embd, len(taps) * n_embd, n_embd, "combine.weight", "combine_norm.weight")

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


class _Eagle3Reader(_HeadReader):
    """Reads an EAGLE-3 head as llama.cpp stores it."""

    def head(self) -> HeadSpec:
        """See read_head."""
        self._check_keys()
        common = self._common_spec()
        n_rows = self.integer("target_hidden_size", 1, 1 << 20)
        draft_vocab = np.arange(common.n_vocab, dtype=np.int32)
        if EAGLE3_VOCAB in self.file.tensors:
            draft_vocab = read_draft_vocab(self.file, EAGLE3_VOCAB, "I64", common.n_vocab)
        name = f"the target of {self.file.metadata.get('general.name')}"
        mark = fingerprint(self.file, by_tokens=True)
        norm = "enc.output_norm.weight" if self.flag("norm_before_fc", False) else None
        n_features = _EAGLE3_LAYERS * n_rows
        head = HeadSpec(
            front=ConcatenatedInput(
                common.n_embd,
                token_norm="blk.0.attn_norm.weight",
                feature_norm="blk.0.attn_norm_2.weight",
                normed_residual=self.flag("norm_before_residual", False),
            ),
            decoder=self._decoder(common, n_rows, len(draft_vocab)),
            features=FeatureProjection(common.n_embd, n_features, n_features, "fc.weight", norm),
            target=HeadTarget("", name, common.n_vocab, n_rows, mark, by_tokens=True),
            draft_vocab=draft_vocab,
            taps=self._taps(),
        )
        self._check_tensors(head.tensor_shapes(), {EAGLE3_VOCAB})
        return head

    def _decoder(self, common: ModelSpec, n_rows: int, n_logits: int) -> ModelSpec:
        """The one layer, which attends from embedding and feature, with matrices of its own or the target's."""
        has_embeddings, has_output = (f"{name}.weight" in self.file.tensors for name in ("token_embd", "output"))
        if not (has_embeddings and has_output) and n_rows != common.n_embd:
            lacking = "embedding matrix" if has_output else "output matrix"
            self.refuse("target_hidden_size", f"must be {common.n_embd}, as there is no {lacking}: found {n_rows}")
        if not has_output and n_logits < common.n_vocab:
            raise UnsupportedModel(f"{self.file.path}: tensor output.weight is missing, and {EAGLE3_VOCAB} has no use")
        decoder = each_mixer(common, lambda _, mixer: replace(mixer, n_in=2 * common.n_embd))
        return replace(
            decoder,
            token_embd=common.token_embd if has_embeddings else None,
            output="output.weight" if has_output else None,
            n_logits=n_logits,
        )

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
