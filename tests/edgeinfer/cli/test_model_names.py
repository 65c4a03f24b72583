"""Models by name on the command line: -m NAME, -hf USER/REPO, and the list of `edgeinfer models`."""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner
from fake_hub import FakeHub, Repo, hub_variables, quiet_machine, use_hub
from gguf_mutations import mutations
from tiny_models import write_tiny_model

from edgeinfer import cli
from edgeinfer.library import hub as hub_module
from edgeinfer.memory.process import Process
from edgeinfer.profiler import summary

CLI = "from edgeinfer.cli import main; main(prog_name='edgeinfer')"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def home(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("EDGEINFER_")]:
        monkeypatch.delenv(name)
    quiet_machine(monkeypatch, tmp_path)
    monkeypatch.setattr(hub_module, "_PAUSE_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hub(home, tiny, monkeypatch):
    with FakeHub() as served:
        use_hub(monkeypatch, served, home / ".cache/huggingface")
        served.repos["u/r"] = Repo(
            {"m-Q4_K_M.gguf": tiny.read_bytes(), "m-Q8_0.gguf": b"no model", "config.json": b"{}"}
        )
        yield served


def run(*arguments, code=0, text=None):
    result = CliRunner().invoke(cli.main, arguments, input=text, prog_name="edgeinfer")
    assert code is None or result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


# ---- -hf -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("chat", "hello", "-n", "2", "--backend", "reference"),
        ("generate", "hello", "-n", "2", "--backend", "reference"),
        ("inspect",),
        ("profile", "--json", "--backend", "native"),
        ("pack",),
        ("imatrix", "-o", "OUT", "--calibration", "TEXT"),
        ("export", "--to", "gguf", "-o", "OUT", "--type", "Q8_0", "--no-check"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_command_that_takes_a_model_takes_one_of_the_hub(hub, home, arguments):
    (home / "text").write_text("hello world " * 300)
    given = [{"OUT": str(home / "out.gguf"), "TEXT": str(home / "text")}.get(word, word) for word in arguments]
    result = run(*given, "-hf", "u/r:q4_k_m")
    assert "downloading m-Q4_K_M.gguf: " in result.stderr and "(100%)" in result.stderr
    for name in ("u/r:Q4_K_M", "m-Q4_K_M"):
        assert "m-Q4_K_M.gguf" in run("inspect", name).stdout, "and it has a name from now on"


@pytest.mark.parametrize("flag", ["-hf", "-hfr", "--hf-repo"])
def test_the_flag_is_spelt_as_in_llama_cpp(hub, flag):
    assert "m-Q4_K_M.gguf" in run("inspect", flag, "u/r").stdout


@pytest.mark.parametrize("command", ["distill", "evaluate"])
def test_the_model_of_training_may_be_one_of_the_hub(hub, home, command, monkeypatch):
    pytest.importorskip("torch")
    module = importlib.import_module(
        {"distill": "edgeinfer.training.distill"}.get(command, "edgeinfer.training.evaluation")
    )
    seen = []
    monkeypatch.setattr(module, command, lambda *files, **_: seen.extend(files) or exit(0))
    (home / "prompts").write_text("{}")
    (home / "head.gguf").write_bytes(b"no head")
    run(
        command,
        *{"distill": ("--out", "x.gguf"), "evaluate": ("head.gguf",)}[command],
        "-hf",
        "u/r",
        "--prompts",
        "prompts",
    )
    assert seen[0].name == "m-Q4_K_M.gguf" and seen[0].exists()
    assert command == "distill" or seen[1].name == "head.gguf"


def test_the_model_of_a_benchmark_may_be_one_of_the_hub(hub):
    assert "m-Q8_0.gguf: magic at byte 0" in run("bench", "-hf", "u/r:Q8_0", code=3).stderr


def test_a_file_of_the_repository_is_named_with_hff(hub, home):
    hub.repos["u/r"].files["deep/m-Q8_0.gguf"] = hub.repos["u/r"].files["m-Q4_K_M.gguf"]
    assert "deep/m-Q8_0.gguf" in run("inspect", "-hf", "u/r", "-hff", "deep/m-Q8_0.gguf").stdout
    assert "deep/m-Q8_0.gguf" in run("inspect", "-hfr", "u/r:Q4_K_M", "--hf-file", "deep/m-Q8_0.gguf").stdout
    assert "has no file x.gguf: it has m-Q4_K_M.gguf" in run("inspect", "-hf", "u/r", "-hff", "x.gguf", code=3).stderr
    assert "-hff names a file of a repository" in run("inspect", "x.gguf", "-hff", "y.gguf", code=2).stderr


def test_a_draft_model_may_be_one_of_the_hub(hub, home, native):
    hub.repos["u/small"] = Repo({"small-Q4_0.gguf": hub.repos["u/r"].files["m-Q4_K_M.gguf"]})
    result = run("generate", "hello", "-hf", "u/r", "-hfd", "u/small", "-n", "2", "--backend", "reference")
    assert "downloading small-Q4_0.gguf" in result.stderr
    profiled = json.loads(run("profile", "-hf", "u/r", "-hfd", "u/small", "--json").stdout)
    assert "model" in profiled["drafters"]["names"]
    both = run("generate", "hello", "-hf", "u/r", "-md", "x.gguf", "-hfd", "u/r", code=2)
    assert "-md and -hfd both name a draft model" in both.stderr


def test_a_second_run_needs_no_network(hub, home, monkeypatch):
    first = run("generate", "hello", "-hf", "u/r", "-n", "4", "-s", "1", "--backend", "reference").stdout
    use_hub(monkeypatch, None, home / ".cache/huggingface")
    again = run("generate", "hello", "-hf", "u/r", "-n", "4", "-s", "1", "--backend", "reference")
    assert again.stdout == first and "using m-Q4_K_M.gguf, which is in the cache" in again.stderr
    assert run("generate", "hello", "-m", "u/r", "-n", "4", "-s", "1", "--backend", "reference").stdout == first


def test_variables_stand_for_the_flags_and_flags_win(hub, home, tiny, monkeypatch):
    monkeypatch.setenv("EDGEINFER_HF_REPO", "u/r:Q4_K_M")
    asked = ("generate", "hello", "-n", "2", "--json", "--backend", "reference")
    assert "m-Q4_K_M.gguf" in json.loads(run(*asked).stdout)["model"]
    assert json.loads(run(*asked, "-m", str(tiny)).stdout)["model"] == str(tiny)
    assert "both name a model" in run(*asked, "-m", str(tiny), "-hf", "u/r", code=2).stderr
    monkeypatch.setenv("EDGEINFER_MODEL", str(tiny))
    assert "EDGEINFER_MODEL, EDGEINFER_HF_REPO" in run(*asked, code=2).stderr
    monkeypatch.delenv("EDGEINFER_HF_REPO")
    monkeypatch.setenv("EDGEINFER_MODEL_DRAFT", "nowhere.gguf")
    assert run(*asked, "-hfd", "u/r").stderr.count("nowhere") == 0
    assert "EDGEINFER_MODEL_DRAFT: nowhere.gguf: no such file" in run(*asked, "-hf", "u/r", code=3).stderr


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (("inspect", "-hf", "u/none"), 3, "there is no such repository"),
        (("inspect", "-hf", "u/r:Q2_K"), 3, "u/r has no quantisation Q2_K: it has Q4_K_M, Q8_0"),
        (("inspect", "-hf", "nonsense"), 2, "-hf must be USER/REPO or USER/REPO:QUANT"),
        (("inspect", "-hf", "https://huggingface.co/u/r"), 2, "is a URL: -hf u/r fetches it"),
        (
            ("chat", "hi", "-m", "https://huggingface.co/u/r/blob/main/m-Q8_0.gguf"),
            2,
            "-hf u/r -hff m-Q8_0.gguf fetches",
        ),
        (("pack", "https://example.org/m.gguf"), 2, "https://example.org/m.gguf is a URL"),
        (
            ("export", "hf.co/u/r:Q8_0", "--to", "gguf", "-o", "x"),
            2,
            "hf.co/u/r:Q8_0 is a URL: -hf u/r:Q8_0 fetches it",
        ),
        (("chat", "hi", "-md", "https://huggingface.co/u/r"), 2, "-hf u/r fetches it"),
        (("chat", "hi", "-m", "u/r:Q8_0"), 3, "-hf u/r:Q8_0 fetches it from Hugging Face"),
        (("profile", "qwen3:4b"), 3, "qwen3:4b: no such file, and no model of that name is on this machine"),
        (("bench", "x.gguf", "-hf", "u/r"), 2, "-hf names a model, and so does MODEL: leave one out"),
        (("pack",), 2, "Missing argument 'MODEL'"),
        (("evaluate", "--prompts", __file__), 2, "Missing argument 'TARGET'"),
        (("evaluate", "x", "--prompts", __file__), 2, "Missing argument 'HEAD'"),
        (("evaluate", "-hf", "u/r", "--prompts", __file__), 2, "Missing argument 'HEAD'"),
        (("evaluate", "a", "b", "-hf", "u/r", "--prompts", __file__), 2, "leave one out"),
    ],
)
def test_what_cannot_be_is_one_line_that_says_what_to_do(hub, arguments, code, message):
    result = run(*arguments, code=code)
    assert message in result.stderr and "Traceback" not in result.stderr and result.stdout == ""
    assert result.stderr.lower().count("error:") == 1


def test_a_draft_model_of_an_export_has_a_name_too(home, tiny):
    arguments = ("export", str(tiny), "--to", "genai", "-o", "out", "--dry-run", "-md")
    assert "qwen3:4b: no such file, and no model of that name" in run(*arguments, "qwen3:4b", code=3).stderr
    assert "is a URL: -hf u/r fetches it" in run(*arguments, "hf.co/u/r", code=2).stderr


def test_nothing_is_fetched_for_a_command_line_that_is_wrong(hub):
    for wrong in (
        ("hello", "-p", "hello"),
        ("hello", "-md", "x", "-hfd", "u/r"),
        ("hello", "--temp", "-1"),
    ):
        run("generate", *wrong, "-hf", "u/r", code=2)
    run("chat", "-hf", "u/r", text="", code=2)
    assert hub.log == []


def test_a_folder_of_hugging_face_is_a_source_and_no_name(hub, home):
    (home / "checkpoint").mkdir()
    result = run("export", "checkpoint", "--to", "gguf", "-o", "x.gguf", code=None)
    assert result.exit_code in (1, 3) and "checkpoint" in result.stderr and "of that name" not in result.stderr


# ---- In a process of its own -----------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_there_is_and_says_so(home, tmp_path):
    content = random.Random(1).randbytes(3_000_000)
    with FakeHub() as served:
        served.repos["u/r"] = Repo({"m-Q4_K_M.gguf": content})
        served.break_after, served.stalled = 500_000, threading.Event()
        variables = os.environ | hub_variables(served, tmp_path / "hf") | {"HOME": str(home)}
        command = [sys.executable, "-c", CLI, "inspect", "-hf", "u/r"]
        child = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 100
        while not served.ranges_asked() and time.monotonic() < deadline:
            time.sleep(0.05)
        while not any(path.stat().st_size for path in tmp_path.rglob("*.incomplete")) and time.monotonic() < deadline:
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
        assert child.returncode == 130 and "error: interrupted" in errors and "Traceback" not in errors
        assert "what there is of the file is kept: the same command goes on with it" in errors
        size = next(tmp_path.rglob("*.incomplete")).stat().st_size
        assert 0 < size < len(content)
        served.stalled.set()
        served.log.clear()
        served.break_after = None
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
        assert done.returncode == 3 and "magic" in done.stderr, "the file is there now, and no model"
        assert served.ranges_asked() == [f"bytes={size}-"]


def test_offline_is_a_variable(hub, home, tmp_path):
    variables = os.environ | hub_variables(hub, tmp_path / "hf") | {"HOME": str(home), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CLI, "inspect", "-hf", "u/r"], env=variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "HF_HUB_OFFLINE is set, and nothing of it is in the cache" in done.stderr
    assert hub.log == []


def test_the_list_and_the_help_import_nothing_heavy():
    code = (
        "import sys; from edgeinfer.cli import main\n"
        "for command in ('models', 'chat', 'pack'): main([command, '--help'], standalone_mode=False)\n"
        "heavy = {'numpy', 'tokenizers', 'huggingface_hub', 'edgeinfer.library.hub', 'json.decoder', 'httpx'}\n"
        "print('IMPORTED', sorted((heavy - {'json.decoder'}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "IMPORTED []"


# ---- edgeinfer models ------------------------------------------------------------------------------------------------


def ours(home, name, **options):
    folder = home / ".local/share/edgeinfer/models"
    folder.mkdir(parents=True, exist_ok=True)
    return write_tiny_model(folder / name, **options)


def listed():
    return {model["name"]: model for model in json.loads(run("models", "--json").stdout)["models"]}


def test_models_are_listed_with_what_they_are_and_take(home, native, monkeypatch):
    monkeypatch.setattr("edgeinfer.loading.plan.process_of", lambda *_: Process(40 << 20, 0))  # this one grows
    path = ours(home, "tiny.gguf")
    model = listed()["tiny"]
    profile = json.loads(run("profile", "tiny", "--json").stdout)
    assert model["path"] == str(path) and model["n_bytes"] == path.stat().st_size and model["origin"] == "edgeinfer"
    assert (model["architecture"], model["kind"], model["runs_on"]) == ("llama", "model", "native")
    assert model["problem"] is None and model["reason"] is None and model["n_ctx"] == profile["settings"]["n_ctx"]
    assert model["peak_bytes"] == profile["ledger"]["peak"]
    lines = run("models").stdout.splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "ARCHITECTURE", "QUANT", "RUNS", "ON", "MEMORY", "FROM"]
    row = next(line for line in lines if line.startswith("tiny "))
    memory = row.split()[-3:-1]
    assert "llama" in row and "native" in row and row.endswith("edgeinfer")
    assert memory[1] == "MiB" and float(memory[0]) > 40


def test_what_native_does_not_run_is_listed_with_the_reason(home, native):
    ours(home, "other.gguf", metadata={"general.architecture": "t5"})
    model = listed()["other"]
    assert model["architecture"] == "t5" and "t5" in model["reason"] and model["peak_bytes"] is None
    assert model["runs_on"] in (None, "llama.cpp") and model["problem"] is None
    assert "not native: " in run("models").stdout


def test_damaged_files_are_listed_with_the_reason(home, native):
    whole = ours(home, "good.gguf").read_bytes()
    folder = home / ".local/share/edgeinfer/models"
    for name, content in {"cut": whole[:200], "empty": b"", "text": b"hello", "short": whole[:-1000]}.items():
        (folder / f"{name}.gguf").write_bytes(content)
    (folder / "link.gguf").symlink_to("gone.gguf")
    found = listed()
    assert found["good"]["problem"] is None
    assert all(found[name]["problem"] for name in ("cut", "empty", "text", "short", "link"))
    assert "the file is empty" in found["empty"]["problem"] and str(folder) not in found["empty"]["problem"]
    assert run("models").stdout.count("cannot be used: ") == 5


def test_no_damaged_header_stops_the_list(home, native, tiny):
    folder = home / ".local/share/edgeinfer/models"
    folder.mkdir(parents=True)
    for number, mutation in enumerate(mutations(tiny.read_bytes(), 150, seed=44)):
        (folder / f"m{number:03}.gguf").write_bytes(mutation.data)
    found = [model for name, model in listed().items() if name.startswith("m")]
    assert len(found) == 150 and sum(model["problem"] is not None for model in found) > 50
    assert not any("a bug" in (model["problem"] or "") for model in found)


def test_one_file_hides_no_others(home, native, monkeypatch):
    for name in ("a", "b"):
        ours(home, f"{name}.gguf")
    real = summary.summarise

    def fails(path):
        if path.name == "a.gguf":
            raise ZeroDivisionError("oops")
        return real(path)

    monkeypatch.setattr(summary, "summarise", fails)
    found = listed()
    assert "ZeroDivisionError: oops" in found["a"]["problem"] and found["b"]["problem"] is None


def test_projectors_and_adapters_are_counted_and_not_listed(home, native):
    ours(home, "vision.gguf", metadata={"general.architecture": "clip"})
    ours(home, "lora.gguf", metadata={"general.type": "adapter"})
    ours(home, "m.gguf")
    assert "vision" not in listed() and "lora" not in listed() and "m" in listed()
    assert "not listed: an adapter, a projector of images" in run("models").stderr


def test_hostile_names_command_no_terminal(home, native):
    ours(home, "a\x1b[31m\nb\u202e.gguf")
    (home / ".local/share/edgeinfer/models" / "c\x07.gguf").write_bytes(b"x")
    for output in (run("models"), run("models", "--json"), run("inspect", "nothing-like-it", code=3)):
        text = output.stdout + output.stderr
        assert not any(code in text for code in "\x1b\x07\u202e")
    assert run("models").stdout.count("\n") == len(listed()) + 2, "a line each, and one with a reason"


def test_a_machine_without_models_says_how_to_get_one(home, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("models")
    assert result.stdout == "" and "no models here: -hf USER/REPO[:QUANT] fetches one" in result.stderr
    assert "edgeinfer chat -hf " in result.stderr and str(home / ".local/share/edgeinfer/models") in result.stderr
    assert json.loads(run("models", "--json").stdout)["models"] == []
