"""Targets that take GGUF files get one of any source, in the types that are wanted."""

from pathlib import Path

import pytest
from checkpoints import byte_level
from tiny_checkpoints import write
from tiny_models import write_tiny_model

from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.exporters.from_gguf import FromGguf
from edgeinfer.exporters.request import Plan, Request, Result
from edgeinfer.models import read_spec
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.spec import ModelSpec


class _Recorder:
    """A target that writes the types of its source."""

    def __init__(self) -> None:
        self.sources: list[Path] = []
        self.specs: list[ModelSpec] = []

    def plan(self, request: Request) -> Plan:
        self.sources.append(request.source)
        assert (request.type, request.imatrix, request.size) == (None, None, None)
        with ModelFile.open(request.source) as file:
            self.specs.append(read_spec(file))
        return Plan((), {request.out: len(_types(request.source))}, 7, 11, ["of the target"])

    def write(self, request: Request, progress) -> Result:
        self.sources.append(request.source)
        request.out.write_text(_types(request.source))
        progress(1.0)
        return Result([request.out], "run", {"n_ctx": request.n_ctx})


def _types(path: Path) -> str:
    with ModelFile.open(path) as file:
        return " ".join(sorted({info.type.name for info in file.tensors.values()}))


def test_a_target_gets_a_file_in_the_types_that_are_wanted(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "F16")
    recorder, shares = _Recorder(), []
    request = Request(source, tmp_path / "out", type="Q4_0", n_ctx=64)
    plan = FromGguf(recorder).plan(request)
    assert list(plan.files.values()) == [len("F32 Q4_0 Q8_0")] and plan.disk_bytes > 11 + 50_000
    assert plan.notes[-1] == "of the target" and "made in a work folder" in plan.notes[-2]
    result = FromGguf(recorder).write(request, shares.append)
    assert (tmp_path / "out").read_text() == "F32 Q4_0 Q8_0"
    assert result.facts["n_ctx"] == 64 and shares[-1] == 1.0 and shares == sorted(shares)
    assert {path.name for path in recorder.sources} == {"a.gguf"} and source not in recorder.sources
    assert {path.name for path in tmp_path.iterdir()} == {"a.gguf", "out"}


def test_a_file_that_is_taken_as_it_is_goes_to_the_target_itself(tmp_path: Path) -> None:
    source, recorder = write_tiny_model(tmp_path / "a.gguf", "llama", "Q4_0"), _Recorder()
    request = Request(source, tmp_path / "out")
    FromGguf(recorder).plan(request)
    FromGguf(recorder).write(request, lambda share: None)
    assert recorder.sources == [source, source]


def test_a_plan_knows_the_frequencies_of_a_rotation(tmp_path: Path) -> None:
    source, recorder = write_tiny_model(tmp_path / "a.gguf", "llama", "F16", rope_freqs=True), _Recorder()
    FromGguf(recorder).plan(Request(source, tmp_path / "out", type="Q8_0"))
    with ModelFile.open(source) as file:
        assert "rope_freqs.weight" in file.tensors
        assert recorder.specs == [read_spec(file)]


@pytest.mark.parametrize("resume", [False, True])
def test_a_package_is_planned_over_an_older_one(resume: bool, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "F16")
    (tmp_path / "out").mkdir()
    plan = FromGguf(_Recorder()).plan(Request(source, tmp_path / "out", type="Q4_0", resume=resume))
    assert plan.disk_bytes > 11 + 50_000


class _Refusing(_Recorder):
    """A target that refuses what it is given, in its plan or when it writes."""

    def __init__(self, plans: bool) -> None:
        super().__init__()
        self.plans = plans

    def plan(self, request: Request) -> Plan:
        return super().plan(request) if self.plans else self.refuse(request)

    def write(self, request: Request, progress) -> Result:
        return self.refuse(request)

    def refuse(self, request: Request):
        raise UnsupportedModel(f"{request.source}: tensor x is not for us; {request.source} is")


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("is_folder", [False, True])
def test_an_error_names_what_the_user_named(is_folder: bool, plans: bool, tmp_path: Path) -> None:
    if is_folder:
        source = tmp_path / "a model"
        write(source, "qwen3", {"vocab_size": 640})
        byte_level(source)
    else:
        source = write_tiny_model(tmp_path / "a.gguf", "llama", "F16")
    request, target = Request(source, tmp_path / "out", type="Q8_0"), FromGguf(_Refusing(plans))
    with pytest.raises(UnsupportedModel) as told:
        target.plan(request)
        target.write(request, lambda share: None)
    assert str(told.value) == f"{source}: tensor x is not for us; {source} is"


@pytest.mark.parametrize("has_type", [False, True])
def test_a_broken_template_is_a_note_of_the_plan(has_type: bool, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "a.gguf", "llama", "F16", template="{% if %}")
    request = Request(source, tmp_path / "out", type="Q8_0" if has_type else None)
    notes = FromGguf(_Recorder()).plan(request).notes
    assert sum(note.startswith("tokenizer.chat_template: the chat template is broken") for note in notes) == 1
