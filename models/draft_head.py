"""Draft heads: a few blocks that continue from the target's hidden rows and predict the next tokens.

A feature is the target's hidden row after its final norm, the input of its output matrix. At position i a head takes
the feature f of position i and the token of position i + 1, and gives the feature of position i + 1, whose product with
the output matrix is a row of logits for the token of position i + 2 (EAGLE, Li et al., arXiv:2401.15077). Embeddings
are the target's; the output matrix has rows for some of the tokens only. Features of the target may be made of its rows
after several layers instead (arXiv:2503.01840).

EAGLE-3 heads, in the form of llama.cpp's converter, always do that, and may have their own embeddings. Assistants of
Gemma 4 attend to the target's own keys and values, and keep nothing of a text themselves.
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
from edgeinfer.models.gemma4_layers import PERIOD, attention_by_kind, dense_network, scale_of_layer
from edgeinfer.models.gguf import GGMLType, ModelFile
from edgeinfer.models.nextn import NextnBlock
from edgeinfer.models.reader import ROPE_FREQS, Architecture, Reader, each_mixer
from edgeinfer.models.spec import (
    Attention,
    Layer,
    ModelSizes,
    ModelSpec,
    Weight,
    shapes_in_file,
    weights_of,
)

ARCHITECTURE, EAGLE3, ASSISTANT = HEADS = "draft-head", "eagle3", "gemma4-assistant"  # of general.architecture
KINDS = ("dgf",)  # dynamic gating fusion
EAGLE3_VOCAB = "d2t"
_LAST_NORMS = ("output_norm.weight", "token_embd_norm.weight")  # the second is LFM2's
TARGET_LAYERS, MATCHES, OUTPUT_TYPE = "target_layers", "matches", "output_type"
OUTPUT_TYPES = (GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_0)  # that rows of a target are rewritten in
_EAGLE3_LAYERS = 3  # of the target, whose rows a feature is made of
MOST_TAPS = 16
_MOST_DEPTHS = 64  # that matches are known of
NEXTN_OUTPUT = "nextn.draft_output.weight"  # of no file
_TARGET_OF_ASSISTANTS = "gemma4"
# Of an assistant: clusters of tokens, all tokens cluster by cluster, and the number of clusters that are looked at.
CENTROIDS, ORDERING = "masked_embd_centroids.weight", "masked_embd_ordering"
CENTROIDS_USED, _DEFAULT_USED = "centroid_used_count", 32
ORDERED_OUTPUT = "masked_embd_ordered.weight"  # of no file
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
class TargetInput:
    """The front of an assistant of Gemma 4, whose rows have another length than the target's.

    With the feature f that comes with a token of the target's embedding e, both of n_target numbers,
    x = projection @ [e; f].
    """

    n_embd: int
    n_target: int
    projection: str  # (n_embd, 2 n_target)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, by role."""
        return {"projection": (self.n_embd, 2 * self.n_target)}


@dataclass(frozen=True)
class Clusters:
    """Which rows of an output matrix are multiplied with: those of the n_used clusters with the largest centroids @ y.

    y: what the output matrix reads. The rows of a cluster stand side by side, each with as many. The other tokens have
    no logits.
    """

    n_embd: int
    n_clusters: int
    n_used: int
    centroids: str  # (n_clusters, n_embd)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, by role."""
        return {"centroids": (self.n_clusters, self.n_embd)}


@dataclass(frozen=True)
class FeatureProjection:
    """What makes a head's features of the target's hidden rows h, n_rows numbers of several layers side by side.

    f = matrix @ norm(h), once for each row of the target. The norm is over each n_normed numbers of h.

    The same makes the feature that an assistant predicts, of what its output matrix reads.
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

    front: GatedFusion | ConcatenatedInput | ProjectedInput | TargetInput
    decoder: ModelSpec
    features: FeatureProjection | None  # None where they are the target's hidden rows themselves
    target: HeadTarget
    # (n_logits,) int32, ids of the target's tokens, one for each row of the decoder's output matrix; ascending, unless
    # there are clusters: then one cluster after the other
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
    # what makes the predicted feature of that, None where it is it
    prediction: FeatureProjection | None = None
    clusters: Clusters | None = None  # None where all rows of the output matrix give logits

    @property
    def n_embd(self) -> int:
        """Numbers of a feature."""
        return self.decoder.n_embd if self.prediction is None else self.prediction.n_embd

    @property
    def n_rows(self) -> int:
        """Numbers of the target's hidden rows that make one feature."""
        return self.n_embd if self.features is None else self.features.n_rows

    @property
    def reads_target(self) -> bool:
        """Whether it attends to the target's keys and values, of the tokens before the one that it continues."""
        return any(isinstance(layer.mixer, Attention) and layer.mixer.of_target for layer in self.decoder.layers)

    @property
    def keeps_rows(self) -> bool:
        """Whether it has keys and values of its own, of each token of a text."""
        return bool(self.decoder.layers) and not self.reads_target

    @property
    def n_logits(self) -> int:
        """Logits of a row."""
        if self.clusters is None:
            return self.decoder.n_logits
        return self.decoder.n_logits // self.clusters.n_clusters * self.clusters.n_used

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
        """Every tensor beside the embeddings: of the blocks "front", "features", "clusters", and of the decoder.

        "features" are those of the prediction too: no head has both.
        """
        yield from weights_of("front", self.front)
        for projection in (self.features, self.prediction):
            if projection is not None:
                yield from weights_of("features", projection)
        if self.clusters is not None:
            yield from weights_of("clusters", self.clusters)
        yield from self.decoder.weights()

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape that each tensor of the file must have, (n_out, n_in) or (n,)."""
        return shapes_in_file(self.weights()) | self.decoder.tensor_shapes()

    def beside(self, target: ModelSpec) -> HeadSpec:
        """The spec with the scale of the target's embeddings, if the front takes them scaled, and the target's keys."""
        if isinstance(self.front, ConcatenatedInput):
            return self
        decoder = replace(self.decoder, embedding_scale=target.embedding_scale)
        if self.reads_target:
            decoder = each_mixer(decoder, lambda _, mixer: replace(mixer, kv_of=_last_like(mixer, target)))
        return replace(self, decoder=decoder)


def title_of(head: HeadSpec) -> str:
    """What heads of this kind are called, in messages of what does not run them."""
    if isinstance(head.front, GatedFusion):
        return "draft heads" if head.features is None else "draft heads that are fed by several layers"
    if isinstance(head.front, ConcatenatedInput):
        return "EAGLE-3 heads"
    if isinstance(head.front, ProjectedInput):
        return "blocks of a model's own file"
    return "assistants that attend to their target's keys and values"


def is_draft_head(file: ModelFile) -> bool:
    """Whether a file says that it is a draft head."""
    return file.metadata.get("general.architecture") in HEADS


def read_head(file: ModelFile) -> HeadSpec:
    """Spec of the file of a head. Raises UnsupportedModel if its keys or tensors do not fit."""
    architecture = file.metadata.get("general.architecture")
    if architecture == ASSISTANT:
        return _AssistantReader(_ASSISTANT, file).head()
    if architecture == EAGLE3:
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
    if isinstance(head.front, TargetInput):
        return _check_target_of_assistant(head, path, target, spec)
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


def _last_like(mixer: Attention, target: ModelSpec) -> int | None:
    """The layer whose keys and values the last layer of the target with the same kind of window has."""
    for index in reversed(range(target.n_layers)):
        other = target.layers[index].mixer
        if isinstance(other, Attention) and (other.window is None) == (mixer.window is None):
            return index if other.kv_of is None else other.kv_of
    return None


def _check_target_of_assistant(head: HeadSpec, path: object, target: ModelFile, spec: ModelSizes) -> None:
    """See check_target. head: as HeadSpec.beside gives it."""
    needed, name = head.target, str(target.metadata.get("general.name"))
    front = f"{path} is an assistant of a Gemma 4 ({needed.n_vocab} tokens, rows of {needed.n_embd})"
    end = "use the assistant of this model"
    if spec.architecture != needed.architecture or not isinstance(spec, ModelSpec):
        raise UnsupportedModel(
            f"{front}, but {target.path} is {name}, of the architecture {spec.architecture}: it drafts for Gemma 4 only"
        )
    if (spec.n_vocab, spec.n_embd) != (needed.n_vocab, needed.n_embd):
        raise UnsupportedModel(
            f"{front}, but {target.path} is {name} ({spec.n_vocab} tokens, rows of {spec.n_embd}): {end}"
        )
    for index, layer in enumerate(head.decoder.layers):
        own = layer.mixer
        assert isinstance(own, Attention)
        other = None if own.kv_of is None else spec.layers[own.kv_of].mixer
        found = _keys_of(other) if isinstance(other, Attention) else "none"
        if found == _keys_of(own) and isinstance(other, Attention) and other.rope != own.rope:
            found += " with another rotation"
        if found != _keys_of(own):
            raise UnsupportedModel(
                f"{front} whose layer {index} attends to {_keys_of(own)}, but {target.path} is {name}, which has "
                f"{found}: {end}"
            )
    if needed.fingerprint and fingerprint(target, by_tokens=True) != needed.fingerprint:
        raise UnsupportedModel(f"{front}, but {target.path} is {name}, whose tokens are others: {end}")


def _keys_of(mixer: Attention) -> str:
    """The keys and values that a layer attends to, for messages."""
    seen = "everything" if mixer.window is None else f"a window of {mixer.window}"
    return f"{mixer.n_kv_heads} heads of {mixer.head_dim} numbers in layers that see {seen}"


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


_ASSISTANT = Architecture(
    ASSISTANT,
    "halves",
    output="tied",
    skips_nextn=True,  # so that the key may be there; its layers are those of the key
    rope_factors=ROPE_FREQS,
    fixed={"rope.scaling.type": ("none", "linear"), "rope.scaling.factor": (1.0,), "rope.scaling.attn_factor": (1.0,)},
    unsupported_keys={
        "attn_logit_softcapping": "Gemma 4 has no cap on its scores",
        "embedding_length_per_layer_input": "assistants have no embeddings of their layers",
    },
    layers=lambda reader: _layers_of_assistant(reader),
)


def _layers_of_assistant(reader: Reader) -> tuple[Layer, ...]:
    """Queries of its own, and the keys and values of a target that is not known yet."""
    n_layers, n_embd = reader.integer("block_count", 1, 4096), reader.integer("embedding_length", 1, 1 << 20)
    for key in ("nextn_predict_layers", "attention.shared_kv_layers"):
        if (n := reader.integer(key, 0, 4096, default=n_layers)) != n_layers:
            reader.refuse(key, f"must be {n_layers}, all layers: found {n}")
    reader.integer("attention.sliding_window", 2, 1 << 30)  # of the target's positions one less
    windowed, kinds = reader.windowed(PERIOD), attention_by_kind(reader, n_embd)
    n_kv_heads = reader.of_layers("attention.head_count_kv", 1, 1 << 14)
    n_ff = reader.of_layers("feed_forward_length", 1, 1 << 20)
    layers = []
    for index in range(n_layers):
        common, front = kinds[windowed[index]], f"blk.{index}."
        if common.n_heads % n_kv_heads[index]:
            reader.refuse("attention.head_count_kv", f"must divide {common.n_heads} heads: found {n_kv_heads[index]}")
        mixer = replace(
            common,
            n_kv_heads=n_kv_heads[index],
            q=f"{front}attn_q.weight",
            output=f"{front}attn_output.weight",
            norm=f"{front}attn_norm.weight",
            post_norm=f"{front}post_attention_norm.weight",
            q_norm=f"{front}attn_q_norm.weight",
            normed_values=False,
            of_target=True,
        )
        network = dense_network(index, n_embd, n_ff[index])
        layers.append(Layer(mixer, network, scale_of_layer(reader, index, n_embd)))
    return tuple(layers)


class _AssistantReader(Reader):
    """Reads an assistant of Gemma 4 as llama.cpp stores it, and with the clusters of its tokens."""

    def head(self) -> HeadSpec:
        """See read_head."""
        self._check_keys()
        common = self._common_spec()
        n_embd, n_target = common.n_embd, self.integer("embedding_length_out", 1, 1 << 20)
        has_tokens = "tokenizer.ggml.tokens" in self.file.metadata
        clusters, ordering = self._clusters(common)
        head = HeadSpec(
            front=TargetInput(n_embd, n_target, "nextn.pre_projection.weight"),
            decoder=replace(common, token_embd=None),
            features=None,
            target=HeadTarget(
                _TARGET_OF_ASSISTANTS,
                f"the target of {self.file.metadata.get('general.name')}",
                common.n_vocab,
                n_target,
                fingerprint(self.file, by_tokens=True) if has_tokens else "",
                by_tokens=True,
            ),
            draft_vocab=ordering,
            normed_feature=True,
            prediction=FeatureProjection(n_target, n_embd, n_embd, "nextn.post_projection.weight", None),
            clusters=clusters,
        )
        self._check_tensors(head.tensor_shapes(), {ORDERING} if clusters is not None else frozenset())
        return head if clusters is None else replace(head, decoder=replace(head.decoder, output=ORDERED_OUTPUT))

    def _n_skipped(self) -> int:
        return 0

    def _clusters(self, common: ModelSpec) -> tuple[Clusters | None, NDArray[np.int32]]:
        """The clusters of the output matrix, and the tokens in the order of its rows."""
        n_vocab, n_embd = common.n_vocab, common.n_embd
        info = self.file.tensors.get(CENTROIDS)
        if info is None:
            return None, np.arange(n_vocab, dtype=np.int32)
        if len(info.shape) != 2 or info.shape[1] != n_embd or n_vocab % info.shape[0]:
            self.refuse_tensor(
                CENTROIDS, f"must have rows of {n_embd} numbers, whose number divides {n_vocab}: found {info.shape}"
            )
        n_used = min(info.shape[0], self.integer(CENTROIDS_USED, 1, 1 << 20, default=_DEFAULT_USED))
        return Clusters(n_embd, info.shape[0], n_used, CENTROIDS), self._ordering(n_vocab)

    def _ordering(self, n_vocab: int) -> NDArray[np.int32]:
        """All tokens, cluster by cluster."""
        info = self.file.tensors.get(ORDERING)
        if info is None or info.type.name not in ("I32", "I64") or info.shape != (n_vocab,):
            found = "none" if info is None else f"{info.type.name} {info.shape}"
            self.refuse_tensor(ORDERING, f"must be I32 or I64 ({n_vocab},): found {found}")
        data = self.file.data(ORDERING).tobytes()
        ids = np.frombuffer(data, dtype="<i4" if info.type.name == "I32" else "<i8")
        if not np.array_equal(np.sort(ids), np.arange(n_vocab)):
            self.refuse_tensor(ORDERING, f"must have each of the {n_vocab} tokens once: found others, or some twice")
        return ids.astype(np.int32)
