"""Which files of a folder are read, and that no others are."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_safetensors

from edgeinfer.common.errors import ModelFileError, ModelNotFound, UnsupportedModel
from edgeinfer.exporters.checkpoint import Checkpoint
from edgeinfer.exporters.checkpoint.adapters import adapter_files
from edgeinfer.exporters.checkpoint.folder import Folder

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With tensors a and b in two files."""
    home = tmp_path / "model"
    home.mkdir()
    (home / "config.json").write_text("{}")
    write_safetensors(home / A, {"a": ("F32", np.ones((1, 2)))})
    write_safetensors(home / B, {"b": ("F32", np.full((1, 2), 2.0))})
    return home


def indexed(folder: Path, where: object) -> Checkpoint:
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return Checkpoint.open(folder)


def test_the_index_says_where_tensors_are(folder: Path) -> None:
    checkpoint = indexed(folder, {"a": A, "b": B})
    assert [checkpoint.floats(name)[0, 0] for name in ("a", "b")] == [1, 2]
    assert [path.name for path in checkpoint.files] == ["config.json", INDEX, A, B]
    write_safetensors(folder / "consolidated.safetensors", {"other": ("F32", np.ones(1))})
    assert indexed(folder, {"a": A, "b": B}).names == ["a", "b"]
    write_safetensors(folder / "model.safetensors", {"c": ("F32", np.ones(1))})
    assert Checkpoint.open(folder).names == ["c"]


def test_without_an_index_all_numbered_files_must_be_there(folder: Path) -> None:
    assert sorted(Checkpoint.open(folder).names) == ["a", "b"]
    (folder / A).rename(folder / "keep")
    with pytest.raises(ModelFileError, match="must have 2 .safetensors files: number 1 is missing"):
        Checkpoint.open(folder)
    (folder / "keep").rename(folder / "other.safetensors")
    with pytest.raises(ModelFileError, match="must have model.safetensors, or .*index.json that says which"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "where, words",
    [
        ({"a": A}, None),
        ({"a": A, "b": A}, f"tensor b is to be in {A}: it is in none of the files"),
        ({"a": B, "b": A}, f"tensor a is to be in {B}: it is in {A}"),
        ({"a": A, "b": B, "c": B}, "tensor c is to be in .*: it is in none"),
        (
            {"a": A, "b": "model-3.safetensors"},
            "model-3.safetensors .named by model.safetensors.index.json.: No such file",
        ),
        ({"a": A, "b": "b.bin"}, "must name .safetensors files: found 'b.bin'"),
        ({"a": A, "b": f"../model/{B}"}, "must be the name of a file in this folder"),
        ({"a": A, "b": f"/tmp/{B}"}, "must be the name of a file in this folder"),
        ({"a": A, "b": f"C:\\{B}"}, "must be the name of a file in this folder"),
        ({"a": A, "b": f"\0{B}"}, "must be the name of a file in this folder"),
        ({"a": A, "b": f"\ud800{B}"}, "no JSON: .* surrogates not allowed"),
        ({"a": A, "b": 3}, "weight_map must be an object of file names"),
        ([A, B], "weight_map must be an object"),
        (None, "weight_map must be an object"),
    ],
)
def test_an_index_that_does_not_fit_the_files_is_refused(where: object, words: str | None, folder: Path) -> None:
    if words is None:
        assert indexed(folder, where).names == ["a"]
        return
    with pytest.raises(ModelFileError, match=words):
        indexed(folder, where)


def test_tensors_that_the_index_lacks_are_refused(folder: Path) -> None:
    write_safetensors(folder / A, {"a": ("F32", np.ones(1)), "more": ("F32", np.ones(1))})
    with pytest.raises(ModelFileError, match="tensor more of .* must be in the index: it is not"):
        indexed(folder, {"a": A, "b": B})
    write_safetensors(folder / A, {"b": ("F32", np.ones(1))})
    with pytest.raises(ModelFileError, match=f"tensor b is in {A} too"):
        Checkpoint.open(folder)


def test_links_are_followed_inside_of_the_folder_only(folder: Path, tmp_path: Path) -> None:
    (folder / A).rename(folder / "data")
    os.symlink("data", folder / A)
    assert Checkpoint.open(folder).names == ["a", "b"]
    (folder / "data").rename(tmp_path / "data")
    os.unlink(folder / A)
    os.symlink(tmp_path / "data", folder / A)
    with pytest.raises(ModelFileError, match="leads out of the folder, to .*data, and is not read"):
        Checkpoint.open(folder)
    os.unlink(tmp_path / "data")
    with pytest.raises(ModelNotFound, match="is a link to .*data: No such file"):
        Checkpoint.open(folder)
    os.unlink(folder / A)
    os.mkfifo(folder / A)
    with pytest.raises(ModelFileError, match="must be a regular file"):
        Checkpoint.open(folder)


def test_the_cache_of_the_hub_links_to_its_blobs(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--who--what"
    (repository / "blobs").mkdir(parents=True)
    revision = repository / "snapshots" / "0123"
    (revision / "additional_chat_templates").mkdir(parents=True)
    for name in ("config.json", A, B):
        (folder / name).rename(repository / "blobs" / f"hash-{name}")
        os.symlink(f"../../blobs/hash-{name}", revision / name)
    (repository / "blobs" / "hash-jinja").write_text("{{ x }}")
    os.symlink("../../../blobs/hash-jinja", revision / "additional_chat_templates" / "tool.jinja")
    assert Checkpoint.open(revision).names == ["a", "b"]
    inner = Folder(revision).inner("additional_chat_templates")
    assert inner is not None and inner.text("tool.jinja") == b"{{ x }}"
    assert Folder(revision).inner("other") is None


def test_what_is_no_model_is_refused_with_what_to_do(folder: Path) -> None:
    for name in (A, B):
        (folder / name).unlink()
    with pytest.raises(ModelNotFound, match="needs config.json and .safetensors files: found config.json"):
        Checkpoint.open(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="pytorch_model.bin is a pickle, which runs code .*save_pretrained"):
        Checkpoint.open(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="is an adapter"):
        Checkpoint.open(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ModelNotFound, match="is a file; name the folder"):
        Checkpoint.open(folder / "config.json")
    with pytest.raises(ModelNotFound, match="there is no such folder"):
        Checkpoint.open(folder / "nothing")
    (folder / "config.json").write_bytes(b" " * ((16 << 20) + 1))
    with pytest.raises(ModelFileError, match="config.json: must be at most 16.0 MiB: found more"):
        Checkpoint.open(folder)


ADAPTER = {"base_model_name_or_path": "someone/model-7b", "peft_type": "LORA"}


@pytest.mark.parametrize("has_config", [False, True])
@pytest.mark.parametrize("settings", [json.dumps(ADAPTER), "{", None])
def test_an_adapter_alone_is_no_model(settings: str | None, has_config: bool, tmp_path: Path) -> None:
    if has_config:
        (tmp_path / "config.json").write_text("{}")
    if settings is not None:
        (tmp_path / "adapter_config.json").write_text(settings)
    write_safetensors(tmp_path / "adapter_model.safetensors", {"base_model.model.a": ("F32", np.ones((1, 2)))})
    with pytest.raises(
        UnsupportedModel, match=r"no model: merge it first: .*merge_and_unload\(\).save_pretrained"
    ) as told:
        Checkpoint.open(tmp_path)
    assert ("someone/model-7b" in str(told.value)) == (settings == json.dumps(ADAPTER))
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="is an adapter"):
        Checkpoint.open(tmp_path)


def test_an_adapter_beside_a_model_is_left_out(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    write_safetensors(folder / "adapter_model.safetensors", {"base_model.model.a": ("F32", np.ones((1, 2)))})
    assert sorted(Checkpoint.open(folder).names) == ["a", "b"]
    (folder / "other").mkdir()
    (folder / "other" / "adapter_config.json").write_text("{}")
    wanted = ["adapter_config.json", "adapter_model.safetensors", "other/adapter_config.json"]
    assert adapter_files(Folder(folder)) == wanted


@pytest.mark.parametrize("name", ["a.lora_A.weight", "a.lora_B.default.weight", "a.base_layer.weight"])
def test_a_model_with_an_adapter_that_is_not_merged_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_safetensors(tmp_path / "model.safetensors", {f"model.layers.0.{name}": ("F32", np.ones((1, 2)))})
    with pytest.raises(UnsupportedModel, match="is of an adapter .PEFT. that is not merged: merge it first"):
        Checkpoint.open(tmp_path)


def test_the_language_model_has_plain_names(tmp_path: Path) -> None:
    plain = ["model.embed_tokens.weight", "model.layers.0.mlp.up.weight", "model.norm.weight"]
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 1, "text_config": {"hidden_size": 7}}))
    others = ["vision_tower.layers.0.w", "model.vision_tower.norm.weight", "multi_modal_projector.weight"]
    for front in ("", "model.", "language_model.model.", "model.language_model.", "model.language_model.model."):
        head = "language_model.lm_head.weight" if front.startswith("language_model") else "lm_head.weight"
        names = [front + name.removeprefix("model.") for name in plain] + [head, *others]
        tensors = {name: ("F32", np.full(1, number)) for number, name in enumerate(names)}
        write_safetensors(tmp_path / "model.safetensors", tensors)
        found = Checkpoint.open(tmp_path).language()
        assert found.names == [*plain, "lm_head.weight"] and found.config.integer("hidden_size") == 7
        assert [found.floats(name)[0] for name in found.names] == [0, 1, 2, 3]
