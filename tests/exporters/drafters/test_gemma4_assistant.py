"""Assistants of Gemma 4 of Hugging Face: as llama.cpp's converter writes them, and drafting beside a target.

assistant_hashes.json has what the converter made of the same checkpoints; tests/support/assistant_hashes.py writes it.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import gemma4_vocabulary
from click.testing import CliRunner, Result
from converter_hashes import APART, described
from drafting import FixedCosts
from gemma4_checkpoints import AssistantCheckpoint
from numpy.testing import assert_allclose, assert_array_equal
from tiny_assistant_checkpoints import CASES, N_TARGET, N_VOCAB, write_assistant
from tiny_assistants import write_tiny_assistant
from tiny_checkpoints import stored_pieces
from tiny_gemma4 import write_tiny_gemma4
from tiny_models import add_keys

import edgeinfer
from edgeinfer import cli
from edgeinfer.common.errors import ModelFileError, UnsupportedModel
from edgeinfer.exporters.checkpoint import Checkpoint
from edgeinfer.exporters.drafters.gemma4_assistant import assistant_source, is_assistant
from edgeinfer.exporters.huggingface import HuggingFaceSource
from edgeinfer.models.draft_head import CENTROIDS, ORDERING, read_head
from edgeinfer.models.gguf import GGMLType, ModelFile

THEIRS = json.loads((Path(__file__).parent / "assistant_hashes.json").read_text())


def run(source: Path, *arguments: str | Path, to: str = "gguf") -> Result:
    return CliRunner().invoke(cli.main, ["export", str(source), "--to", to, *map(str, arguments)])


def converted(folder: Path) -> HuggingFaceSource:
    return assistant_source(Checkpoint.open(folder), vocabulary=False)


def with_vocabulary(folder: Path, case: str) -> tuple[Path, int]:
    """A checkpoint with a vocabulary, and the number of its tokens, which the clusters divide."""
    folder.mkdir()
    n_tokens = gemma4_vocabulary(folder).get_vocab_size()
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    n_clusters = {"num_centroids": next(n for n in range(20, n_tokens) if n_tokens % n == 0)} if case != "whole" else {}
    return write_assistant(folder, case, {"vocab_size": n_tokens, "bos_token_id": 2}, **n_clusters), n_tokens


def add_words(words: dict[str, Any], writer: Any, *_: object) -> None:
    """A vocabulary as write_tiny_gemma4 takes it."""
    add_keys(writer, words)


@pytest.mark.parametrize("case", CASES)
def test_keys_and_tensors_are_those_of_the_converter(case: str, tmp_path: Path) -> None:
    """But for the clusters of tokens, which it leaves out."""
    ours = converted(write_assistant(tmp_path / "model", case))
    keys = {key: value for key, value in ours.metadata.items() if not key.startswith(APART)}
    found = {key: float(np.float32(value)) if isinstance(value, float) else value for key, value in keys.items()}
    also = {"gemma4-assistant.vocab_size": N_VOCAB}
    also |= {"gemma4-assistant.centroid_used_count": 5} if case == "clusters" else {}
    assert found == {**THEIRS[case]["keys"], **also}
    tensors = {}
    for each in ours.tensors:
        data = b"".join(piece.tobytes() for piece in stored_pieces(each))
        tensors[each.name] = described(each.type.name, each.shape, data)
        if each.name == "rope_freqs.weight":  # theirs are computed in float32, ours are rounded once
            assert_allclose(each.rows(0, 1)[0], THEIRS[case]["factors"][each.name], rtol=1e-6)
            tensors[each.name] = THEIRS[case]["tensors"][each.name]
    clusters = {tensors.pop(name, None) for name in (CENTROIDS, ORDERING)}
    assert tensors == THEIRS[case]["tensors"] and (None in clusters) == (case == "whole")


@pytest.mark.parametrize("case", CASES)
def test_an_exported_assistant_has_the_weights_of_its_checkpoint(case: str, tmp_path: Path) -> None:
    folder, n_tokens = with_vocabulary(tmp_path / "model", case)
    result = run(folder, "-o", tmp_path / "a.gguf", "--type", "f32")
    assert result.exit_code == 0, result.output
    assert "not run: --target names the model that the head is for" in result.output
    stored = Checkpoint.open(folder)
    with ModelFile.open(tmp_path / "a.gguf") as file:
        head = read_head(file)
        theirs = AssistantCheckpoint(file).weights()
        for name in stored.names:
            expected = stored.integers(name) if name.endswith("ordering") else stored.floats(name)
            assert_array_equal(theirs[name], expected)
        assert theirs.keys() == set(stored.names)
        assert len(head.draft_vocab) == n_tokens and (head.clusters is None) == (case == "whole")
        assert head.clusters is None or head.clusters.n_used == 5
        assert file.metadata["tokenizer.ggml.model"] == "gemma4"


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("case", CASES)
def test_an_exported_assistant_drafts_beside_its_target(case: str, tmp_path: Path) -> None:
    folder, n_tokens = with_vocabulary(tmp_path / "model", case)
    # The target's vocabulary is that of the exported file.
    assert run(folder, "-o", tmp_path / "f.gguf", "--type", "f32").exit_code == 0
    with ModelFile.open(tmp_path / "f.gguf") as file:
        words = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    plain = {key: list(value) if not isinstance(value, (str, int, bool)) else value for key, value in words.items()}
    target = write_tiny_gemma4(
        *(tmp_path / "t.gguf", "dense", "Q8_0"),
        n_vocab=n_tokens,
        n_embd=N_TARGET,
        windowed=(True, True, False),
        vocabulary=partial(add_words, plain),
    )
    result = run(folder, "-o", tmp_path / "a.gguf", "--type", "q8_0", "--target", target)
    assert result.exit_code == 0, result.output
    assert "of its tokens are the target's, of the source's" in result.output
    requests: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 2}]
    texts = []
    for draft in ("none", [str(tmp_path / "a.gguf")]):
        with edgeinfer.load(target, draft=draft, n_ctx=128) as engine:
            engine.tokenizer.stop_ids = frozenset()
            if engine.speculator is not None:
                engine.speculator.costs = FixedCosts()
                assert [drafter.name for drafter in engine.speculator.drafters] == ["head"]
            texts.append([engine.generate("the lazy", max_tokens=24, **request).tokens for request in requests])
    assert texts[0] == texts[1]


def test_its_kind_is_known_by_class_and_by_type(tmp_path: Path) -> None:
    folder = write_assistant(tmp_path / "a", "whole")
    assert is_assistant(Checkpoint.open(folder))
    assert is_assistant(Checkpoint.open(write_assistant(tmp_path / "b", "whole", architectures=["Other"])))
    other = write_assistant(tmp_path / "c", "whole", architectures=["Other"], model_type="gemma4_text")
    assert not is_assistant(Checkpoint.open(other))


def test_clusters_that_config_does_not_name_are_left_out(tmp_path: Path) -> None:
    extra = {
        "masked_embedding.centroids.weight": ("F32", np.ones((24, 64))),
        "masked_embedding.token_ordering": ("I64", np.arange(N_VOCAB)),
    }
    found = converted(write_assistant(tmp_path / "a", "whole", tensors=extra))
    plain = converted(write_assistant(tmp_path / "b", "whole"))
    assert [each.name for each in found.tensors] == [each.name for each in plain.tensors]


def test_clusters_of_rows_that_are_no_tokens_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    n_tokens = gemma4_vocabulary(folder).get_vocab_size()
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    write_assistant(folder, "clusters", {"vocab_size": n_tokens + 2, "bos_token_id": 2}, num_centroids=n_tokens + 2)
    source = assistant_source(Checkpoint.open(folder))
    names = {each.name: each.shape for each in source.tensors}
    assert names["token_embd.weight"][0] == n_tokens and not names.keys() & {CENTROIDS, ORDERING}
    assert any("clusters of tokens are left out" in note for note in source.notes)
    assert "gemma4-assistant.centroid_used_count" not in source.metadata


def test_integers_keep_their_type_in_every_file(tmp_path: Path) -> None:
    folder, _ = with_vocabulary(tmp_path / "model", "clusters")
    assert run(folder, "-o", tmp_path / "a.gguf", "--type", "q4_k_m", "--no-check").exit_code == 0
    assert run(tmp_path / "a.gguf", "-o", tmp_path / "b.gguf", "--type", "q8_0", "--no-check").exit_code == 0
    with ModelFile.open(tmp_path / "b.gguf") as file:
        assert file.tensors[ORDERING].type == GGMLType.I32 and read_head(file).clusters is not None


@pytest.mark.parametrize(
    "text, more, message",
    [
        ({"num_kv_shared_layers": 2}, {}, "num_kv_shared_layers must be all 3 layers in an assistant: found 2"),
        ({"hidden_size_per_layer_input": 8}, {}, "hidden_size_per_layer_input must be 0 in gemma4-assistant: found 8"),
        ({"enable_moe_block": True}, {}, "enable_moe_block must be absent or false in gemma4-assistant: found true"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, {}, "layer_types must be full_attention"),
        ({}, {"centroid_intermediate_top_k": 0}, "centroid_intermediate_top_k must be an integer in 1"),
    ],
)
def test_what_a_file_cannot_say_is_refused(
    text: dict[str, Any], more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((UnsupportedModel, ModelFileError), match=message):
        converted(write_assistant(tmp_path / "model", "clusters", text, **more))


@pytest.mark.parametrize(
    "name, values, message",
    [
        ("masked_embedding.token_ordering", ("I64", np.zeros(N_VOCAB)), "must have each of the 96 tokens once"),
        ("masked_embedding.token_ordering", ("I64", np.arange(95)), r"must be I32 or I64 \(96,\): found I32 \(95,\)"),
        ("masked_embedding.centroids.weight", ("F32", np.ones((24, 32))), r"must be \(24, 64\): found \(24, 32\)"),
        ("pre_projection.weight", ("F32", np.ones((64, 100))), r"nextn.pre_projection.weight must have shape"),
        ("model.layers.0.other", ("F32", np.ones(3)), "1 tensors have no place in a gemma4-assistant model"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    name: str, values: tuple[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    with pytest.raises((UnsupportedModel, ModelFileError), match=message):
        converted(write_assistant(tmp_path / "model", "clusters", tensors={name: values}))


def test_types_are_not_measured_and_other_targets_refuse_by_name(tmp_path: Path) -> None:
    target = write_tiny_gemma4(tmp_path / "t.gguf", "dense", "F16")
    path = write_tiny_assistant(tmp_path / "a.gguf", target)
    for arguments, message in [
        (("--type", "auto", "--target", target), "is an assistant of a Gemma 4, for which --type auto has no"),
        (("--type", "q8_0", "--imatrix", "auto"), "measures whole models, not draft heads"),
    ]:
        result = run(path, "-o", tmp_path / "b.gguf", *arguments)
        assert result.exit_code != 0 and message in result.output
