"""Models that the native engine lacks: llama.cpp runs them, says so, and gives what it gives by itself."""

import csv
import io
import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
from click.testing import CliRunner, Result
from other_models import write_experts, write_gpt2, write_mamba
from peer import clear_choices, llama_cpp_logits
from tiny_models import quantize, write_tiny_model

import edgeinfer
from edgeinfer.backends.llama_cpp import backend as backend_module
from edgeinfer.cli import main
from edgeinfer.common.errors import BackendUnavailable, BudgetExceeded, ContextOverflow, InvalidGGUF, UnsupportedModel
from edgeinfer.loading import plan as load_plan
from edgeinfer.memory.process import Process

PROMPT = "hello world, there is the one"


def write_iq4_nl(path: Path) -> Path:
    return write_tiny_model(path, "llama", "Q8_0", types={"ffn_down": "IQ4_NL"})


LACKING: dict[str, tuple[Callable[[Path], Path], str]] = {  # with what is said of them
    "gpt2": (write_gpt2, "architecture 'gpt2' is not supported"),
    "mamba": (write_mamba, "architecture 'mamba' is not supported"),
    "experts": (write_experts, "granite.expert_count is set"),
    "IQ4_NL": (write_iq4_nl, "tensor blk.0.ffn_down.weight (96, 288) has type IQ4_NL, which the native engine lacks"),
}


@pytest.fixture(params=LACKING)
def lacking(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    write, reason = LACKING[request.param]
    return write(tmp_path / "m.gguf"), reason


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    return write_gpt2(tmp_path / "gpt2.gguf")


@pytest.fixture
def without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where llama-cpp-python is not installed."""
    monkeypatch.setitem(sys.modules, "llama_cpp", None)


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="edgeinfer")
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def test_what_is_quantised_here_is_what_gguf_reads(rng: np.random.Generator) -> None:
    weights = rng.standard_normal((4, 512), dtype=np.float32)
    read = gguf.dequantize(quantize("IQ4_NL", weights), gguf.GGMLQuantizationType.IQ4_NL)
    assert np.sqrt(np.mean((read - weights) ** 2)) < 0.15


# ---- the engine --------------------------------------------------------------------------------------------------


def test_auto_runs_it_through_llama_cpp_with_one_warning_and_the_text_is_llama_cpp_s(
    llama_cpp: ModuleType, lacking: tuple[Path, str]
) -> None:
    path, reason = lacking
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = edgeinfer.load(path)
    (warning,) = (each for each in caught if each.category is not ResourceWarning)  # of what other tests left
    assert warning.category is RuntimeWarning and warning.filename == __file__
    assert str(warning.message).startswith(f"{path}: {reason}")
    assert "using llama.cpp instead, which does not keep the promise of the same bits" in str(warning.message)
    with engine:
        assert engine.backend == "llama.cpp"
        engine.tokenizer.stop_ids = frozenset()
        prompt = engine.tokenize(PROMPT)
        completion = engine.generate(prompt, max_tokens=60, temperature=0.0)
    theirs = llama_cpp_logits(llama_cpp, path, [*prompt, *completion.tokens[:-1]])[len(prompt) - 1 :]
    clear = clear_choices(theirs)
    assert len(completion.tokens) == 60 and clear.mean() > 0.3
    assert np.array_equal(np.array(completion.tokens)[clear], theirs.argmax(axis=1)[clear])


def test_by_name_nothing_is_chosen_instead(llama_cpp: ModuleType, lacking: tuple[Path, str], tmp_path: Path) -> None:
    path, reason = lacking
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UnsupportedModel, match=re.escape(reason)):
            edgeinfer.load(path, backend="native")
        with edgeinfer.load(path, backend="llama.cpp") as engine:
            assert engine.backend == "llama.cpp"
        with edgeinfer.load(write_tiny_model(tmp_path / "known.gguf")) as engine:
            assert engine.backend == "native"


def test_without_llama_cpp_the_error_is_the_native_one_and_what_to_install(
    without_llama_cpp: None, lacking: tuple[Path, str]
) -> None:
    path, reason = lacking
    with pytest.raises(UnsupportedModel) as caught:
        edgeinfer.load(path)
    assert str(caught.value).startswith(f"{path}: {reason}")
    assert str(caught.value).endswith("pip install 'edgeinfer[llama]'")
    assert caught.value.exit_code == 3
    with pytest.raises(BackendUnavailable, match="pip install 'edgeinfer"):
        edgeinfer.load(path, backend="llama.cpp")
    assert "edgeinfer[llama]" in run("generate", "-m", path, "-p", "a", code=3).stderr


def test_a_model_that_llama_cpp_refuses_too_is_refused_with_both_reasons(llama_cpp: ModuleType, tmp_path: Path) -> None:
    path = write_mamba(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"mamba", b"bamba"))
    with pytest.raises(UnsupportedModel, match="architecture 'bamba' is not supported.*unknown model architecture"):
        edgeinfer.load(path)


def test_nobody_is_told_to_install_llama_cpp_for_a_vocabulary_that_is_refused_anyway(
    without_llama_cpp: None, gpt2: Path
) -> None:
    gpt2.write_bytes(gpt2.read_bytes().replace(b"gpt-2", b"gpt-0"))
    with pytest.raises(UnsupportedModel, match="tokenizer.ggml.pre must be one of") as caught:
        edgeinfer.load(gpt2)
    assert "edgeinfer[llama]" not in str(caught.value)


def test_a_file_that_is_not_sound_never_reaches_llama_cpp(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "Process", lambda: pytest.fail("started"))
    gpt2.write_bytes(gpt2.read_bytes()[:-1000])
    with pytest.raises(InvalidGGUF):
        edgeinfer.load(gpt2)


def test_the_memory_plan_is_kept_to(llama_cpp: ModuleType, gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "process_of", lambda *_: Process(0, 0))
    with edgeinfer.load(gpt2, backend="llama.cpp", n_ctx=100) as engine:
        assert engine.n_ctx == engine.memory_plan.n_ctx == 100
        assert engine.session.memory() == engine.memory_plan.use
        assert engine.session.spec.n_ctx_train == 256
        budget = engine.memory.peak
    with pytest.raises(BudgetExceeded, match="weights .* KV cache"):  # and no smaller batch, which changes the text
        edgeinfer.load(gpt2, backend="llama.cpp", n_ctx=256, budget=budget)


def test_the_context_is_as_long_as_it_is(llama_cpp: ModuleType, gpt2: Path) -> None:
    with edgeinfer.load(gpt2, backend="llama.cpp", n_ctx=30) as engine:
        engine.tokenizer.stop_ids = frozenset()
        with pytest.raises(ContextOverflow, match="31 tokens do not fit into a context of 30"):
            engine.stream([1] * 31)
        completion = engine.generate([1] * 25, temperature=0.0)
        assert completion.finish_reason == "length" and len(completion.tokens) == 5


# ---- the command line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_note_says_what_runs_instead(llama_cpp: ModuleType, gpt2: Path, command: str) -> None:
    result = run(command, "-m", gpt2, "-p", "hello", "-n", "8", "--temp", "0")
    assert result.stderr.count("architecture 'gpt2' is not supported") == 1
    assert result.stderr.count("using llama.cpp instead") == 1 and "warn" not in result.stderr
    named = run(command, "-m", gpt2, "-p", "hello", "-n", "8", "--temp", "0", "--backend", "llama.cpp")
    assert named.stdout == result.stdout and "instead" not in named.stderr


def test_inspect_shows_it(lacking: tuple[Path, str]) -> None:
    assert json.loads(run("inspect", lacking[0], "--json").stdout)["n_tensors"] > 10


def test_pack_refuses_with_the_reason(lacking: tuple[Path, str]) -> None:
    path, reason = lacking
    said = run("pack", path, code=3).stderr
    assert reason in said and "only the native engine reads packed weights" in said
    assert list(path.parent.iterdir()) == [path]


def test_bench_measures_llama_cpp_itself(llama_cpp: ModuleType, tmp_path: Path) -> None:
    path = write_iq4_nl(tmp_path / "m.gguf")
    result = run("bench", path, "--rounds", "2", "-t", "1", "--json")
    report = json.loads(result.stdout)
    assert report["engines"] == ["llama.cpp"] and report["cost"]["llama.cpp"]["1"] == 1.0
    assert report["weight_bytes"] is None and report["bandwidth_share"] is None and report["int8_share"] is None
    assert result.stderr.count("using llama.cpp instead") == 1
    rows = csv.DictReader(io.StringIO(run("bench", path, "--rounds", "2", "--csv").stdout))
    assert {row["engine"] for row in rows} == {"llama.cpp"}
    table = run("bench", path, "--rounds", "2").stdout
    assert "llama.cpp ms" in table and "the machine has" in table and "% of" not in table
    assert "nothing to compare" in run("bench", path, "--against", "llama.cpp", code=2).stderr
