"""Draft models with logits for some of their tokens only: what is written, and that they draft and change no text."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from drafting import FixedCosts
from numpy.testing import assert_array_equal
from other_vocabulary import write_reordered
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer import cli
from edgeinfer.backends.native import NativeBackend
from edgeinfer.common.errors import UnsupportedModel
from edgeinfer.common.settings import LoadSettings
from edgeinfer.common.types import Device
from edgeinfer.models import read_draft_spec, read_spec
from edgeinfer.models.draft_vocab import draft_vocab_of
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("native")


def run(source: Path, *arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, ["export", str(source), "--to", "gguf", *map(str, arguments)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "m.gguf", "llama", "F16", tied=True, n_ctx_train=256)


@pytest.fixture(scope="module")
def cut(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cut") / "cut.gguf"
    result = run(model, "--draft-vocab", "120", "-o", out)
    assert result.exit_code == 0, result.output
    assert "check: KL 0.0000 nats a token against the source, 100.0% the same" in result.stderr
    assert "it has logits for 120 of 291 tokens (built in), so it can only draft (-md)" in result.stderr
    return out


def test_the_frequent_tokens_of_a_text_are_kept_and_those_that_end_an_answer(model: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "cut.gguf"
    text.write_text("zebra zebra")
    result = run(model, "--draft-vocab", f"40:{text}", "-o", out, "--no-check")
    assert result.exit_code == 0, result.output
    with ModelFile.open(model) as whole, ModelFile.open(out) as file:
        tokenizer = Tokenizer.from_file(whole)
        found = draft_vocab_of(file, 291)
        assert found is not None
        first = {*tokenizer.encode("zebra zebra"), *tokenizer.stop_ids}
        others = [id for id in range(291) if id not in first][: 40 - len(first)]
        assert_array_equal(found, sorted([*first, *others]))
        matrix = whole.data("token_embd.weight").reshape(291, -1)
        assert_array_equal(file.data("output.weight").reshape(40, -1), matrix[found])
        assert file.data("token_embd.weight").tobytes() == matrix.tobytes()
    said = json.loads((tmp_path / "cut.gguf.manifest.json").read_text())
    assert said["options"]["draft_text"] == said["draft_text"]["name"] == "text" and str(tmp_path) not in str(said)


def test_the_text_that_is_counted_is_not_written_over(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("zebra zebra")
    for out in (text, tmp_path / "link"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(text)
        result = run(model, "--draft-vocab", f"40:{text}", "-o", out, "--no-check")
        assert result.exit_code == 2 and f"would overwrite {text}" in "".join(result.stderr.splitlines()), result.output
    assert text.read_text() == "zebra zebra"


def test_its_logits_are_those_of_the_whole_model_and_it_answers_nobody(model: Path, cut: Path) -> None:
    logits = []
    for path in (model, cut):
        with ModelFile.open(path) as file:
            spec, backend = read_draft_spec(file), NativeBackend(tuned=False)
            session = backend.load(file, spec, backend.plan(file, spec, LoadSettings(64)), Device(1)).session()
            logits.append(session.forward([1, 7, 250, 3], logits="all").logits)
            ids = draft_vocab_of(file, spec.n_vocab)
    assert_array_equal(logits[1], logits[0][:, ids])
    with ModelFile.open(cut) as file, pytest.raises(UnsupportedModel, match="has logits for 120 of its tokens only"):
        read_spec(file)
    with pytest.raises(UnsupportedModel, match=r"it can draft for another model \(-md\)"):
        edgeinfer.load(cut)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 1}], ids=str)
@pytest.mark.parametrize("vocabulary", ["same", "another"])
def test_its_drafts_change_no_text(
    model: Path, cut: Path, tmp_path: Path, sampling: dict[str, float], vocabulary: str
) -> None:
    order = [1, 0, *range(2, 291)]
    target = model if vocabulary == "same" else write_reordered(tmp_path / "other.gguf", model, order)
    texts, engines = [], ({"draft": "none"}, {"draft": [str(cut)]})
    for options in engines:
        with edgeinfer.load(target, **options) as engine:
            engine.tokenizer.stop_ids = frozenset()
            if engine.speculator is not None:
                engine.speculator.costs = FixedCosts()
            completion = engine.generate("some text of words", max_tokens=48, **sampling)
            texts.append(completion.tokens)
    assert texts[0] == texts[1]
    speculation = completion.timings.speculation
    assert speculation.dropped == {}
    drafted = speculation.by_drafter["model"]
    assert drafted.drafted > 0
    if vocabulary == "same":
        assert drafted.accepted > 5


@pytest.mark.parametrize("wanted", ["0", "291", "many", "40:"])
def test_wrong_numbers_are_refused(model: Path, tmp_path: Path, wanted: str) -> None:
    result = run(model, "--draft-vocab", wanted, "-o", tmp_path / "o.gguf")
    if wanted == "40:":
        assert result.exit_code == 0
    else:
        assert "--draft-vocab must be a number of tokens in 16..290" in result.output


def test_a_cut_model_is_not_cut_again_and_runs_on_the_cpu(model: Path, cut: Path, tmp_path: Path) -> None:
    result = run(cut, "--draft-vocab", "40", "-o", tmp_path / "o.gguf")
    assert "must be a whole language model for --draft-vocab" in result.output
    with pytest.warns(RuntimeWarning, match="which runs on the CPU, not on onnx:0"):
        edgeinfer.load(model, draft=[str(cut)], draft_device="onnx:0").close()
