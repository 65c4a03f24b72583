"""The models in the folders of a machine, and the names that find them."""

import hashlib
import json
import os
import shutil

import pytest
from fake_hub import quiet_machine
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer.common.errors import InvalidArgument, ModelFileError, ModelNotFound
from edgeinfer.library import local
from edgeinfer.library.local import local_models
from edgeinfer.library.names import find_model

HASH = "ab" * 32
COMMIT = "12" * 20
MODEL_LAYER = "application/vnd.ollama.image.model"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def home(monkeypatch, tmp_path):
    """The home folder of a user who has no models at all; the default one is not installed."""
    quiet_machine(monkeypatch, tmp_path)
    monkeypatch.setattr(local, "default_model", lambda: (_ for _ in ()).throw(ModelNotFound("none")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(path, content=b"GGUF"):
    """A file, of some bytes or a copy of another; in folders that are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        shutil.copy(content, path)
    return path


def in_ollama(home, name, content=b"GGUF", layers=None, hash=HASH, root=".ollama/models", host="registry.ollama.ai"):
    """A model of ollama. layers: of the manifest, None for those that it has."""
    folder = home / root
    config = {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": f"sha256:{'0' * 64}"}
    if layers is None:
        layers = [
            {"mediaType": MODEL_LAYER, "digest": f"sha256:{hash}", "size": 4},
            {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'1' * 64}", "size": 4},
        ]
    manifest = {"schemaVersion": 2, "config": config, "layers": layers}
    put(folder / "manifests" / host / name, json.dumps(manifest).encode())
    return put(folder / "blobs" / f"sha256-{hash}", content)


def in_hub_cache(home, repo, file, content=b"GGUF", commit=COMMIT):
    """A file of a repository, linked from its snapshot as huggingface_hub does."""
    folder = home / ".cache/huggingface/hub" / f"models--{repo.replace('/', '--')}"
    blob = put(folder / "blobs" / hashlib.sha256(f"{file} {content!r}".encode()).hexdigest(), content)
    put(folder / "refs/main", commit.encode())
    path = folder / "snapshots" / commit / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(blob, path.parent))
    return path


def named():
    """Names and folders' owners of all models."""
    return {model.name: model.origin for model in local_models().models}


# ---- Each folder -----------------------------------------------------------------------------------------------------


def test_an_empty_machine_has_no_models(home):
    found = local_models()
    assert found.models == [] and found.skipped == []
    assert [origin for origin, _ in found.folders] == [
        *("edgeinfer", "Hugging Face", "ollama", "ollama", "LM Studio", "LM Studio", "llama.cpp"),
    ]


def test_models_are_found_in_the_folders_of_all_programs(home):
    put(home / ".local/share/edgeinfer/models/mine.gguf")
    in_hub_cache(home, "u/r-GGUF", "r-Q4_K_M.gguf")
    in_ollama(home, "library/qwen3/4b")
    in_ollama(home, "library/smol/latest", hash="cd" * 32)
    in_ollama(home, "user/model/tag", hash="ef" * 32, root="service")
    in_ollama(home, "u/r/Q8_0", hash="aa" * 32, host="hf.co")
    put(home / ".lmstudio/models/publisher/repo/m-Q8_0.gguf")
    put(home / ".cache/lm-studio/models/publisher/old/m.gguf")
    put(home / ".cache/llama.cpp/ggml-org_r_r-Q4_0.gguf")
    assert named() == {
        "mine": "edgeinfer",
        "u/r-GGUF:Q4_K_M": "Hugging Face",
        "qwen3:4b": "ollama",
        "smol:latest": "ollama",
        "user/model:tag": "ollama",
        "hf.co/u/r:Q8_0": "ollama",
        "publisher/repo:Q8_0": "LM Studio",
        "publisher/old/m": "LM Studio",
        "ggml-org_r_r-Q4_0": "llama.cpp",
    }


def test_variables_name_the_folders(home, monkeypatch):
    put(home / "mine/a.gguf")
    put(home / "cache/b.gguf")
    in_ollama(home, "library/c/latest", root="stores")
    put(home / ".local/share/edgeinfer/models/not.gguf")
    put(home / ".cache/llama.cpp/not.gguf")
    in_ollama(home, "library/not/latest")
    monkeypatch.setenv("EDGEINFER_MODELS", "~/mine")
    monkeypatch.setenv("LLAMA_CACHE", str(home / "cache"))
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "stores"))
    assert named() == {"a": "edgeinfer", "b": "llama.cpp", "c:latest": "ollama"}


def test_a_file_that_several_programs_have_is_one_model_with_all_names(home, tiny):
    path = in_hub_cache(home, "u/r", "m-Q8_0.gguf", tiny)
    link = home / ".lmstudio/models/u/other/m-Q8_0.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to(path)
    in_ollama(home, "library/m/latest", tiny)
    in_ollama(home, "library/m/8b", tiny)
    assert {model.names for model in local_models().models} == {
        ("u/r:Q8_0", "u/r/m-Q8_0.gguf", "u/other:Q8_0", "u/other/m-Q8_0"),
        ("m:8b", "m:latest", "m"),
    }


def test_a_split_model_counts_once_with_all_its_bytes(home):
    for number in (1, 2, 3):
        put(home / f".lmstudio/models/u/r/m-Q4_0-0000{number}-of-00003.gguf", b"GGUF" * number)
    (model,) = local_models().models
    assert (model.name, model.n_bytes, len(model.files), model.problem) == ("u/r:Q4_0", 24, 3, None)
    model.files[1].unlink()
    (model,) = local_models().models
    assert model.problem == "part 2 of the split model is missing"


def test_projectors_and_importance_matrices_are_no_models(home):
    for name in (
        "mmproj-F16.gguf",
        "m-mmproj-f16.gguf",
        "imatrix.gguf",
        "m.gguf.incomplete",
        "readme.md",
        "m.gguf.packed",
    ):
        put(home / f".lmstudio/models/u/r/{name}")
    assert named() == {}


def test_the_files_of_older_commits_count_where_the_newest_lacks_them(home):
    in_hub_cache(home, "u/r", "m-Q8_0.gguf", b"old", "0" * 40)
    in_hub_cache(home, "u/r", "m-Q4_0.gguf", b"old too", "0" * 40)
    newest = in_hub_cache(home, "u/r", "m-Q8_0.gguf", b"new", "f" * 40)
    assert set(named()) == {"u/r:Q8_0", "u/r:Q4_0"}
    assert find_model("u/r:Q8_0") == newest


def test_files_of_one_quantisation_are_told_apart_by_their_names(home):
    in_hub_cache(home, "u/r", "7b-Q8_0.gguf", b"7")
    in_hub_cache(home, "u/r", "13b-Q8_0.gguf", b"13")
    put(home / ".lmstudio/models/u/s/7b-Q8_0.gguf")
    put(home / ".lmstudio/models/u/s/13b-Q8_0.gguf", b"other")
    assert set(named()) == {"u/r/7b-Q8_0.gguf", "u/r/13b-Q8_0.gguf", "u/s/7b-Q8_0", "u/s/13b-Q8_0"}


# ---- What is wrong with folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "manifest, problem",
    [
        (b"", "the manifest is no JSON"),
        (b"\xff\xfe\x00", "the manifest is no JSON"),
        (b"{" * 100_000, "the manifest is no JSON"),
        (b"[" * 100_000, "the manifest is no JSON"),
        (b"[]", "the manifest has no list of layers"),
        (b'{"layers": {}}', "the manifest has no list of layers"),
        (b'{"layers": [1, null]}', "the manifest has no list of layers"),
        (b'{"layers": []}', "has no GGUF file"),
        (b" " * (2 << 20), "the manifest has 2097152 bytes, more than 1048576"),
    ],
)
def test_a_manifest_that_is_none_is_listed_with_the_reason(home, manifest, problem):
    in_ollama(home, "library/good/latest")
    put(home / ".ollama/models/manifests/registry.ollama.ai/library/bad/latest", manifest)
    problems = {model.name: model.problem for model in local_models().models}
    assert problems == {"good:latest": None, "bad:latest": problem}
    with pytest.raises(ModelFileError, match=f"bad:latest .*: {problem}"):
        find_model("bad")


@pytest.mark.parametrize(
    "digest",
    ["sha256:../../../secret", "../../../secret", "sha256:", "sha256:" + "g" * 64, "md5:" + "a" * 64, 7, None]
    + ["sha256:" + "a" * 64 + "/../../x", "sha256:" + "a" * 65, "sha256:/etc/passwd", ["sha256:" + "a" * 64]],
)
def test_a_manifest_reaches_no_file_but_blobs(home, digest):
    put(home / "secret", b"GGUF")
    in_ollama(home, "library/evil/latest", layers=[{"mediaType": MODEL_LAYER, "digest": digest}])
    (model,) = local_models().models
    assert model.problem.startswith("the manifest must name a file as sha256:HASH, it names ")
    assert model.path.name == "latest"


def test_layers_that_are_no_model_or_several_are_said(home):
    adapter = [{"mediaType": "application/vnd.ollama.image.adapter", "digest": f"sha256:{HASH}"}]
    in_ollama(home, "library/cloud/latest", layers=adapter)
    in_ollama(home, "library/split/latest", layers=[{"mediaType": MODEL_LAYER, "digest": f"sha256:{HASH}"}] * 2)
    problems = {model.name: model.problem for model in local_models().models}
    assert problems["cloud:latest"] == "has no GGUF file"
    assert problems["split:latest"] == "is in 2 files, which ollama alone reads"


def test_links_pipes_and_files_that_are_gone_are_listed_with_the_reason(home):
    folder = home / ".lmstudio/models/u/r"
    folder.mkdir(parents=True)
    (folder / "broken.gguf").symlink_to("nowhere.gguf")
    (folder / "loop.gguf").symlink_to("loop.gguf")
    os.mkfifo(folder / "pipe.gguf")
    (folder / "folder.gguf").mkdir()
    os.mkfifo(put(home / ".ollama/models/manifests/registry.ollama.ai/library/p/x").with_name("pipe"))
    in_ollama(home, "library/gone/latest").unlink()
    problems = {model.name: model.problem for model in local_models().models}
    assert problems == {
        "u/r/broken": "is a link to nowhere.gguf, which does not exist",
        "u/r/loop": "Too many levels of symbolic links",
        "u/r/pipe": "is not a regular file",
        "p:x": "the manifest is no JSON",
        "p:pipe": "the manifest is not a regular file",
        "gone:latest": "there is no file",
    }


def test_a_circle_of_folders_ends_and_linked_folders_are_read(home):
    put(home / "disk/m.gguf")
    folder = home / ".lmstudio/models"
    folder.mkdir(parents=True)
    (folder / "circle").symlink_to(folder)
    (folder / "disk").symlink_to(home / "disk")
    assert named() == {"disk/m": "LM Studio"}


def test_a_folder_that_cannot_be_read_is_left_out_with_a_note(home, monkeypatch):
    put(home / ".lmstudio/models/a/secret/m.gguf")
    put(home / ".lmstudio/models/b/open/m.gguf")
    listed = type(home).iterdir

    def refuse(path):
        if path.name == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(type(home), "iterdir", refuse)  # root may read everything
    found = local_models()
    assert [model.name for model in found.models] == ["b/open/m"]
    assert found.skipped == [(home / ".lmstudio/models/a/secret", "Permission denied")]


def test_folders_that_are_files_and_variables_that_are_nonsense_stop_nothing(home, monkeypatch):
    put(home / ".ollama/models/manifests", b"")
    put(home / ".cache/huggingface/hub/models--u--r/snapshots", b"")
    put(home / ".cache/huggingface/hub/models--u--empty/refs/main", b"\xff")
    put(home / ".lmstudio/models", b"")
    put(home / "ok/m.gguf")
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.setenv(name, "~no-such-user/x")
    monkeypatch.setenv("EDGEINFER_MODELS", str(home / "ok"))
    found = local_models()
    assert [model.name for model in found.models] == ["m"]
    assert [path.name for path, _ in found.skipped] == ["models--u--r"]


def test_names_that_are_no_text_are_found(home):
    folder = home / ".lmstudio/models/u/r"
    folder.mkdir(parents=True)
    for name in (b"odd\xff.gguf", b"a\x1b[31m.gguf", b"new\nline.gguf"):
        put(folder / os.fsdecode(name))
    found = local_models().models
    assert [os.fsencode(model.name) for model in found] == [b"u/r/a\x1b[31m", b"u/r/new\nline", b"u/r/odd\xff"]
    assert find_model(os.fsdecode(b"odd\xff")) == folder / os.fsdecode(b"odd\xff.gguf")


# ---- Names -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def full(home):
    """A machine with some models."""
    in_ollama(home, "library/qwen3/4b")
    in_ollama(home, "library/qwen3/0.6b", hash="cd" * 32)
    in_ollama(home, "library/llama3.2/latest", hash="ef" * 32)
    in_ollama(home, "u/m/latest", hash="aa" * 32)
    in_hub_cache(home, "unsloth/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf", b"8B")
    in_hub_cache(home, "bartowski/SmolLM2-GGUF", "SmolLM2-Q4_K_M.gguf", b"smol 4")
    in_hub_cache(home, "bartowski/SmolLM2-GGUF", "SmolLM2-Q8_0.gguf", b"smol 8")
    put(home / ".local/share/edgeinfer/models/mine.gguf")
    return home


@pytest.mark.parametrize(
    "name, file",
    [
        ("qwen3:4b", f"sha256-{HASH}"),
        ("Qwen3:4B", f"sha256-{HASH}"),
        ("qwen3:4", f"sha256-{HASH}"),
        ("llama3.2", f"sha256-{'ef' * 32}"),
        ("llama3.2:latest", f"sha256-{'ef' * 32}"),
        ("llama", f"sha256-{'ef' * 32}"),
        ("u/m", f"sha256-{'aa' * 32}"),
        ("unsloth/Qwen3-8B-GGUF:Q4_K_M", "Qwen3-8B-Q4_K_M.gguf"),
        ("unsloth/qwen3-8b-gguf:q4_k_m", "Qwen3-8B-Q4_K_M.gguf"),
        ("unsloth/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf"),
        ("Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf"),
        ("Qwen3-8B-Q4_K_M", "Qwen3-8B-Q4_K_M.gguf"),
        ("Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-Q4_K_M.gguf"),
        ("bartowski/SmolLM2-GGUF:Q8_0", "SmolLM2-Q8_0.gguf"),
        ("bartowski/SmolLM2-GGUF/SmolLM2-Q8_0.gguf", "SmolLM2-Q8_0.gguf"),
        ("mine", "mine.gguf"),
        ("mine.gguf", "mine.gguf"),
    ],
)
def test_a_name_finds_its_model(full, name, file):
    assert find_model(name).name == file


@pytest.mark.parametrize(
    "name, candidates",
    [
        ("qwen3:", ["qwen3:0.6b", "qwen3:4b"]),
        ("bartowski/SmolLM2-GGUF", ["bartowski/SmolLM2-GGUF:Q4_K_M", "bartowski/SmolLM2-GGUF:Q8_0"]),
        ("smol", ["bartowski/SmolLM2-GGUF:Q4_K_M", "bartowski/SmolLM2-GGUF:Q8_0"]),
    ],
)
def test_a_name_of_several_models_lists_them(full, name, candidates):
    with pytest.raises(InvalidArgument, match="may be several models") as raised:
        find_model(name)
    assert all(candidate in str(raised.value) for candidate in candidates)


def test_two_models_of_one_name_are_told_apart_by_their_files(home):
    one = in_hub_cache(home, "u/r", "m-Q8_0.gguf", b"one")
    two = put(home / ".lmstudio/models/u/r/m-Q8_0.gguf", b"two")
    with pytest.raises(InvalidArgument, match=f"may be several models, .*: {one}, {two}"):
        find_model("u/r:Q8_0")
    assert find_model(str(two)) == two


@pytest.mark.parametrize(
    "name, said",
    [
        ("qwen3:8b", "no model of that name is on this machine; near are qwen3:4b"),
        ("llama3.1", "near are llama3.2"),
        ("SmolLM3-Q8_0", "near are "),
        ("zzz", "`edgeinfer models` lists those here, and -hf USER/REPO[:QUANT] fetches one from Hugging Face"),
        ("other/Model-GGUF:Q4_0", ". -hf other/Model-GGUF:Q4_0 fetches it from Hugging Face"),
        ("hf.co/other/m:Q4_0", "hf.co/other/m:Q4_0 is a URL: -hf other/m:Q4_0 fetches it"),
    ],
)
def test_an_unknown_name_says_what_there_is_and_how_to_fetch(full, name, said):
    with pytest.raises((ModelNotFound, InvalidArgument)) as raised:
        edgeinfer.load(name)
    assert said in str(raised.value)


def test_a_file_wins_over_a_name_and_a_folder_where_one_may_be_named(full, tiny):
    there = put(full / "qwen3:4b", tiny)
    assert find_model("qwen3:4b").resolve() == there
    there.unlink()
    assert find_model("qwen3:4b") != there
    (full / "llama3.2").mkdir()
    assert find_model("llama3.2").name.startswith("sha256-")
    assert find_model("llama3.2", may_be_folder=True).resolve() == full / "llama3.2"
    (full / "mine").symlink_to("nowhere")
    with pytest.raises(ModelNotFound, match="mine: is a link to nowhere, which does not exist"):
        edgeinfer.load("mine")


@pytest.mark.parametrize(
    "name, said",
    [
        (
            "nope.gguf",
            "nope.gguf: no such file; its folder has no .gguf files. `edgeinfer models` lists .* and -hf USER",
        ),
        ("{home}/none/mine.gguf", "no such file: there is no folder {home}/none"),
        ("./mine", "mine: no such file; its folder has"),
        ("~/mine", "mine: no such file; its folder has"),
        ("sub/mine", "sub/mine: no such file; its folder has no .gguf files"),
        ("sub", "sub: is a folder with no .gguf files"),
    ],
)
def test_what_can_be_a_file_alone_is_none_that_a_name_finds(full, name, said):
    (full / "sub").mkdir()
    name, said = (text.replace("{home}", str(full)) for text in (name, said))
    with pytest.raises(ModelNotFound, match=said):
        edgeinfer.load(name)


def test_models_of_other_programs_are_loaded_by_name(home, tiny):
    in_ollama(home, "library/tiny/latest", tiny)
    in_hub_cache(home, "u/r", "tiny-F32.gguf", put(home / "copy", tiny))
    for name in ("tiny", "u/r:F32"):
        with edgeinfer.load(name, backend="reference", draft="none") as engine:
            assert engine.generate("hello", max_tokens=2, seed=1).usage.completion_tokens == 2


def test_names_are_found_without_opening_a_model(home, tiny, monkeypatch):
    for number in range(100):
        in_ollama(home, f"library/m{number}/latest", tiny, hash=f"{number:064x}")
    monkeypatch.setattr("edgeinfer.models.gguf_reader.parts.open_file", None)
    assert len(local_models().models) == 100 and find_model("m99").name == f"sha256-{99:064x}"
