"""What is read of the file of an assistant of Gemma 4, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_assistants import write_tiny_assistant
from tiny_gemma4 import write_tiny_gemma4
from tiny_models import add_tokens

from edgeinfer.backends.head_weights import read_head_beside
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.models import Attention, attention_of, read_spec
from edgeinfer.models.draft_head import ORDERED_OUTPUT, Clusters, TargetInput, is_draft_head, read_head
from edgeinfer.models.gguf import ModelFile


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma4(tmp_path_factory.mktemp("target") / "t.gguf", "small", "F16")


def other_words(writer: Any, n_vocab: int, special: Any, template: str) -> None:
    """A vocabulary as write_tiny_gemma4 takes it, of other tokens than the usual ones."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [f"<{number}>" for number in range(256)]
    add_tokens(writer, tokens, [1] * 256, n_vocab, special, template)  # type: ignore[list-item]


def key(name: str) -> str:
    return f"gemma4-assistant.{name}"


def test_keys_and_tensors_become_a_spec(target: Path, tmp_path: Path) -> None:
    path = write_tiny_assistant(tmp_path / "a.gguf", target)
    with ModelFile.open(path) as file, ModelFile.open(target) as model:
        assert is_draft_head(file) and not is_draft_head(model)
        head = read_head_beside(file, model, read_spec(model))
    assert head.front == TargetInput(64, 96, "nextn.pre_projection.weight")
    assert (head.n_embd, head.n_rows, head.n_logits, head.decoder.n_embd) == (96, 96, 291, 64)
    assert head.reads_target and not head.keeps_rows and head.taps is True and head.clusters is None
    assert head.decoder.token_embd is None and head.decoder.output == "token_embd.weight"
    assert head.decoder.embedding_scale == np.sqrt(96) and head.decoder.logit_soft_cap is None
    mixers = [attention_of(layer) for layer in head.decoder.layers]
    # The last layers of the target read those of layers 1 and 2.
    assert [(each.kv_of, each.window, each.n_kv_heads, each.head_dim) for each in mixers] == (
        [(1, 9, 2, 32)] * 3 + [(2, None, 2, 64)]
    )
    shapes = head.tensor_shapes()
    assert shapes["nextn.pre_projection.weight"] == (64, 192) and shapes["nextn.post_projection.weight"] == (96, 64)
    assert "blk.0.attn_k.weight" not in shapes and mixers[0].state_bytes(100, "f16") == 0


def test_its_output_matrix_is_put_cluster_by_cluster(target: Path, tmp_path: Path) -> None:
    path = write_tiny_assistant(tmp_path / "a.gguf", target, n_clusters=97, n_used=5)
    with ModelFile.open(path) as file, ModelFile.open(target) as model:
        head = read_head_beside(file, model, read_spec(model))
        rows = file.data("token_embd.weight").reshape(291, -1)
        ordered = file.data(ORDERED_OUTPUT).reshape(291, -1)
        row_bytes = rows.shape[1]
        part = file.data(ORDERED_OUTPUT, 16 * row_bytes, 48 * row_bytes).reshape(32, -1)
    assert head.clusters == Clusters(64, 97, 5, "masked_embd_centroids.weight") and head.n_logits == 15
    assert head.decoder.output == ORDERED_OUTPUT and sorted(head.draft_vocab.tolist()) == list(range(291))
    assert head.draft_vocab.tolist() != list(range(291))
    assert (ordered == rows[head.draft_vocab]).all() and (part == ordered[16:48]).all()


@pytest.mark.parametrize("n_used, expected", [(None, 32), (200, 97)])
def test_as_many_clusters_are_looked_at_as_are_usual_or_there(
    target: Path, tmp_path: Path, n_used: int | None, expected: int
) -> None:
    with ModelFile.open(write_tiny_assistant(tmp_path / "a.gguf", target, n_clusters=97, n_used=n_used)) as file:
        clusters = read_head(file).clusters
        assert clusters is not None and clusters.n_used == expected


def test_a_file_without_a_vocabulary_is_compared_by_sizes_alone(target: Path, tmp_path: Path) -> None:
    other = write_tiny_gemma4(tmp_path / "o.gguf", "small", "F16", vocabulary=other_words)
    for has_tokens in (False, True):
        path = write_tiny_assistant(tmp_path / "a.gguf", target, has_tokens=has_tokens)
        with ModelFile.open(path) as file, ModelFile.open(other) as model:
            if has_tokens:
                with pytest.raises(UnsupportedModel, match="whose tokens are others: use the assistant of this model"):
                    read_head_beside(file, model, read_spec(model))
            else:
                assert read_head_beside(file, model, read_spec(model)).reads_target


def test_a_target_without_a_layer_of_a_kind_is_refused(target: Path, tmp_path: Path) -> None:
    path = write_tiny_assistant(tmp_path / "a.gguf", target)
    whole = write_tiny_gemma4(tmp_path / "o.gguf", "small", "F16", windowed=(False,) * 4, n_shared=0)
    with ModelFile.open(path) as file, ModelFile.open(whole) as model:
        with pytest.raises(UnsupportedModel, match="layer 0 attends to 2 heads of 32 .*, which has none"):
            read_head_beside(file, model, read_spec(model))


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"nextn_predict_layers": 2}, "nextn_predict_layers must be 4, all layers: found 2"),
        ({"attention.shared_kv_layers": 0}, "attention.shared_kv_layers must be 4, all layers: found 0"),
        ({"embedding_length_out": None}, "embedding_length_out must be an integer in 1"),
        ({"embedding_length_per_layer_input": 16}, "assistants have no embeddings of their layers"),
        ({"expert_count": 4}, "experts are not supported in this architecture"),
        ({"attn_logit_softcapping": 50.0}, "Gemma 4 has no cap on its scores"),
        ({"attention.sliding_window": 1}, "attention.sliding_window must be an integer in 2"),
        ({"attention.head_count_kv": [2, 3, 2, 2]}, "attention.head_count_kv must divide 4 heads: found 3"),
        ({"attention.value_length": 32}, "attention.value_length must equal the key length 64"),
        ({"centroid_used_count": 0}, "centroid_used_count must be an integer in 1"),
        ({"rope.scaling.factor": 2.0}, "rope.scaling.factor must be 1.0"),
        ({"embedding_length_out": 80}, r"nextn.pre_projection.weight must have shape \(64, 160\): found \(64, 192\)"),
    ],
)
def test_keys_that_do_not_fit_are_refused(target: Path, tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    metadata = {key(name): value for name, value in metadata.items()}
    path = write_tiny_assistant(tmp_path / "a.gguf", target, n_clusters=97, metadata=metadata)
    with ModelFile.open(path) as file, pytest.raises(UnsupportedModel, match=message):
        read_head(file)


@pytest.mark.parametrize(
    "leave_out, message",
    [
        ("nextn.post_projection.weight", "nextn.post_projection.weight .* is missing"),
        ("blk.2.attn_q_norm.weight", "blk.2.attn_q_norm.weight .* is missing"),
        ("masked_embd_ordering", r"masked_embd_ordering must be I32 or I64 \(291,\): found none"),
        ("masked_embd_centroids.weight", "1 tensors are not part of a gemma4-assistant model .* masked_embd_ordering"),
        ("token_embd.weight", "token_embd.weight is missing: not a whole language model"),
    ],
)
def test_missing_tensors_are_refused(target: Path, tmp_path: Path, leave_out: str, message: str) -> None:
    path = write_tiny_assistant(tmp_path / "a.gguf", target, n_clusters=97, leave_out=leave_out)
    with ModelFile.open(path) as file, pytest.raises(UnsupportedModel, match=message):
        read_head(file)


def test_clusters_that_do_not_divide_the_vocabulary_are_refused(target: Path, tmp_path: Path) -> None:
    path = write_tiny_assistant(tmp_path / "a.gguf", target, n_clusters=97)
    with ModelFile.open(path) as file:
        info = file.tensors["masked_embd_centroids.weight"]
        file.define(info.name, info.type, (96, 64), lambda first, last: np.zeros(last - first, np.uint8))
        with pytest.raises(UnsupportedModel, match=r"whose number divides 291: found \(96, 64\)"):
            read_head(file)


def test_a_scale_of_layers_may_be_missing(target: Path, tmp_path: Path) -> None:
    path = write_tiny_assistant(tmp_path / "a.gguf", target, leave_out="blk.1.layer_output_scale.weight")
    with ModelFile.open(path) as file:
        layers = read_head(file).decoder.layers
    assert [layer.end is None for layer in layers] == [False, True, False, False]
    assert all(isinstance(layer.mixer, Attention) and layer.mixer.kv_of is None for layer in layers)
