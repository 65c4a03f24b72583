"""The command line: what goes to which stream, exit codes, and a person at a terminal."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click
import psutil
import pytest
from click.testing import CliRunner
from person import MAIN, SAYING_MAIN, SLOW_MAIN, environment, sitting_at
from scripted import Script
from staging import CRASH, Stage
from tiny_experts import write_tiny_experts
from tiny_heads import write_tiny_head
from tiny_models import CHATML, write_tiny_model

import edgeinfer
from edgeinfer import cli
from edgeinfer.cli import terminal
from edgeinfer.cli.answering import stopped_by_ctrl_c
from edgeinfer.cli.terminal import ProgressBar, Writer, visible
from edgeinfer.common.errors import BackendLost, NumericalError, TemplateError, UnsupportedModel
from edgeinfer.common.settings import variable_of
from edgeinfer.loading import backend_choice
from edgeinfer.loading import open as loading
from edgeinfer.sampling import SamplingParams

LATE_CRASH = """
_before = llama_cpp.llama_decode

def crashing_decode(context, batch):
    status = _before(context, batch)
    if len((_folder / "passes").read_text().split()) == 5:
        crash("lost in thought")
    return status

llama_cpp.llama_decode = crashing_decode
"""
EXIT_CODES = {"ok": 0, "failure": 1, "usage": 2, "model": 3, "budget": 4, "lost": 5, "interrupted": 130}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=2048))


@pytest.fixture
def run(model, monkeypatch, tmp_path):
    """Runs a command in this process on the tiny model."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in [name for name in os.environ if name.startswith("EDGEINFER_")]:
        monkeypatch.delenv(name)

    def run(command, *arguments, text=None, code="ok"):
        arguments = [command, *(() if "-m" in arguments else ("-m", model)), "--backend", "reference", *arguments]
        result = CliRunner().invoke(cli.main, arguments, input=text, prog_name="edgeinfer")
        assert result.exit_code == EXIT_CODES[code], (result.stdout, result.stderr, result.exception)
        return result

    return run


# ---- Help, and what it costs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["chat", "--help"], ["generate", "--help"]])
def test_help_imports_none_of_the_heavy_libraries(arguments):
    code = (
        f"import sys; from edgeinfer.cli import main; main({arguments}, standalone_mode=False);"
        "heavy = {'numpy', 'tokenizers', 'rich', 'prompt_toolkit', 'jinja2', 'psutil', 'platformdirs', 'llama_cpp'};"
        "print('IMPORTED', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "IMPORTED []" and len(done.stdout) > 20


def test_help_says_of_a_command_what_the_command_says():
    for name, summary in cli.COMMANDS.items():
        try:
            command = cli.main.get_command(click.Context(cli.main), name)
        except ModuleNotFoundError:
            continue
        assert command.get_short_help_str() == summary


def test_the_defaults_in_the_help_are_those_of_the_parameters():
    command = cli.main.get_command(click.Context(cli.main), "generate")
    default = SamplingParams()
    for parameter in command.params:
        if hasattr(default, parameter.name) and parameter.name not in ("seed", "logit_bias", "dry_sequence_breakers"):
            value = re.escape(str(getattr(default, parameter.name)))
            assert re.search(rf"\[default: (the model's, or )?{value}\]", parameter.help)
    from_files = {"temperature", "top_k", "top_p", "min_p", "repeat_penalty", "penalty_last_n"}
    assert {each.name for each in command.params if "the model's, or" in (each.help or "")} == from_files


def test_the_package_runs_as_the_command_does():
    done = subprocess.run([sys.executable, "-m", "edgeinfer", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"edgeinfer {edgeinfer.__version__}\n"


def test_the_version_is_the_packages():
    result = CliRunner().invoke(cli.main, ["--version"], prog_name="edgeinfer")
    assert result.stdout == f"edgeinfer {edgeinfer.__version__}\n"


# ---- Streams and values --------------------------------------------------------------------------------------------


def completed(model, prompt, **options):
    with edgeinfer.load(model, backend="reference") as engine:
        return engine.generate(prompt, **options)


def answered(model, message, system=None, **options):
    with edgeinfer.load(model, backend="reference") as engine:
        answer = engine.chat(system).send(message, **options)
        list(answer)
        return answer.completion


def test_the_completion_is_on_stdout_and_the_figures_on_stderr(run, model):
    result = run("generate", "-p", "hello", "-n", "20", "-s", "1")
    text = completed(model, "hello", max_tokens=20, seed=1).text
    assert result.stdout == text.removesuffix("\n") + "\n"
    assert re.fullmatch(r"\d+ tokens, \d+\.\d tok/s\n", result.stderr)


def test_flags_reach_the_parameters(run, model):
    flags = (
        "--temp 1.5 --top-k 7 --top-p 0.9 --min-p 0.01 --repeat-penalty 1.1 --frequency-penalty 0.1 "
        "--presence-penalty 0.2 --repeat-last-n 9 -s 5 -n 30"
    )
    params = SamplingParams(1.5, 7, 0.9, 0.01, 1.1, 0.1, 0.2, 9, 5)
    completion = completed(model, "hello", max_tokens=30, params=params)
    assert json.loads(run("generate", "-p", "hello", "--json", *flags.split()).stdout)["text"] == completion.text
    assert completion.text != completed(model, "hello", max_tokens=30, seed=5).text


def test_flags_of_dry_bias_and_guard_reach_the_parameters(run, model):
    flags = (
        "--dry-multiplier 2 --dry-base 1.5 --dry-allowed-length 1 --dry-penalty-last-n 50 --dry-sequence-breaker one "
        "--dry-sequence-breaker two --logit-bias 104+4.5 -l 111-2 -l 260-inf --loop-guard 100 -s 5 -n 30"
    )
    params = SamplingParams(
        seed=5,
        dry_multiplier=2,
        dry_base=1.5,
        dry_allowed_length=1,
        dry_penalty_last_n=50,
        dry_sequence_breakers=("one", "two"),
        logit_bias={104: 4.5, 111: -2, 260: False},
        loop_guard=100,
    )
    completion = completed(model, "hello", max_tokens=30, params=params)
    record = json.loads(run("generate", "-p", "hello", "--json", *flags.split()).stdout)
    assert record["text"] == completion.text and record["params"] == json.loads(json.dumps(params.to_json()))
    assert completion.text != completed(model, "hello", max_tokens=30, seed=5).text
    record = json.loads(run("generate", "-p", "x", "--json", "--dry-sequence-breaker", "none", "-n", "1").stdout)
    assert record["params"]["dry_sequence_breakers"] == []


@pytest.mark.parametrize("bias", ["104", "104+", "+104", "104+x", "104=1", "a+1", "104+inf", "104+nan", "104++1", ""])
def test_a_bias_that_is_none_is_a_usage_error(run, bias):
    assert "ID+BIAS" in run("generate", "-p", "hello", "-l", bias, code="usage").stderr


@pytest.mark.parametrize("flags", [["--loop-guard", "63"], ["--dry-base", "0.5"], ["-l", "1+1e9"], ["-l", "9999999+1"]])
def test_values_out_of_range_are_usage_errors(run, flags):
    run("generate", "-p", "hello", *flags, code="usage")


def test_a_loop_is_ended_and_one_line_says_so(run):
    loop = ("--temp", "0", "-l", "104+1000", "--loop-guard", "64", "-p", "hello")
    for command in ("generate", "chat"):
        result = run(command, *loop)
        assert len(result.stdout) < 80 and len(set(result.stdout.strip())) == 1
        assert len([line for line in result.stderr.splitlines() if "repeated itself" in line]) == 1
        record = json.loads(run(command, *loop, "--json").stdout)
        assert record["finish_reason"] == "repetition" and record["usage"]["completion_tokens"] == 64
        assert "repeated" not in run(command, *loop, "-n", "20").stderr


def test_the_models_own_sampling_is_used_where_no_flag_says_otherwise(run, tmp_path):
    own = {"general.sampling.temp": 0.3, "general.sampling.top_k": 7, "general.sampling.penalty_repeat": "much"}
    path = str(write_tiny_model(tmp_path / "own.gguf", n_ctx_train=512, metadata=own))
    for command in ("generate", "chat"):
        flags = (command, "-m", path, "-p", "hello", "-n", "3", "--json")
        result = run(*flags)
        params = json.loads(result.stdout)["params"]
        assert (params["temperature"], params["top_k"], params["repeat_penalty"]) == (0.3, 7, 1.0)
        assert [line for line in result.stderr.splitlines() if line] != [] and "penalty_repeat" in result.stderr
        params = json.loads(run(*flags, "--temp", "0.9").stdout)["params"]
        assert (params["temperature"], params["top_k"]) == (0.9, 7)


def test_json_is_one_object_with_the_promised_fields(run, model):
    for command in ("generate", "chat"):
        result = run(command, "-p", "hello", "-n", "5", "-s", "1", "--json")
        record = json.loads(result.stdout)
        assert set(record) == {
            *("text", "reasoning", "tool_calls", "finish_reason", "usage", "timings", "model", "seed", "params"),
            "memory",
        }
        planned = {item["purpose"]: item["planned"] for item in record["memory"]["items"]}
        assert min(planned["process"], planned["weights"], planned["KV cache"]) > 0
        assert record["reasoning"] is None and record["tool_calls"] == []
        assert SamplingParams(**record["params"] | {"logit_bias": {}}) == SamplingParams(seed=1)
        assert set(record["usage"]) == {"prompt_tokens", "cached_tokens", "completion_tokens"}
        assert set(record["timings"]) == {
            *("prompt_seconds", "decode_seconds", "prompt_tokens_per_second", "decode_tokens_per_second"),
            *("speculation", "prompt_experts", "decode_experts"),
        }
        assert record["model"] == model and record["seed"] == 1 and record["finish_reason"] in ("stop", "length")
        assert result.stdout.count("\n") == 1 and result.stderr == ""


def test_json_has_log_probabilities_on_request(run, model):
    flags = ("generate", "-p", "hello", "-n", "5", "--temp", "0")
    found = json.loads(run(*flags, "--json", "--logprobs", "2").stdout)["logprobs"]
    with edgeinfer.load(model, backend="reference") as engine:
        expected = engine.generate("hello", max_tokens=5, temperature=0, logprobs=2).logprobs
        text = engine.detokenize([expected[0].token])
    assert [(each["token"], each["logprob"]) for each in found] == [(each.token, each.logprob) for each in expected]
    assert [[(one["token"], one["logprob"]) for one in each["top"]] for each in found] == [
        list(each.top) for each in expected
    ]
    assert found[0]["text"] == text
    assert json.loads(run(*flags, "--json", "--logprobs", "0").stdout)["logprobs"][0]["top"] == []
    assert "--logprobs needs --json" in run(*flags, "--logprobs", "2", code="usage").stderr


def test_drafts_change_no_text_and_can_be_chosen(run, model):
    flags = ("--backend", "native", "-p", "one and one and one and one", "-n", "24", "--temp", "0", "--json")
    texts, counts = set(), {}
    for draft in ((), ("--drafter", "none"), ("--drafter", "suffix"), ("--draft-max", "0"), ("-md", model)):
        record = json.loads(run("generate", *flags, *draft).stdout)
        texts.add(record["text"])
        counts[draft] = record["timings"]["speculation"]
    assert len(texts) == 1
    assert counts["--drafter", "none"] is None and counts["--draft-max", "0"] is None and counts[()]["speedup"] > 0
    refused = run("generate", *flags, "--drafter", "none", "-md", model, code="usage")
    assert "-md names a draft model, but --drafter none" in refused.stderr


def test_a_draft_model_that_is_not_there_is_an_error(run, monkeypatch):
    asked = ("generate", "--backend", "native", "-p", "hello", "-n", "4")
    named = run(*asked, "-md", "suffix", code="model")
    assert "suffix: no such file" in named.stderr and named.stdout == "", "not the drafter of that name"
    result = run(*asked, "-md", "nowhere.gguf", code="model")
    assert "nowhere.gguf: no such file" in result.stderr and result.stdout == ""
    monkeypatch.setenv("EDGEINFER_MODEL_DRAFT", "nowhere.gguf")
    assert "EDGEINFER_MODEL_DRAFT: nowhere.gguf: no such file" in run(*asked, code="model").stderr


@pytest.mark.parametrize("name", ["nowhere.gguf", "no-such-model", "https://example.org/m.gguf"])
def test_an_error_about_a_variable_names_it(run, monkeypatch, name):
    monkeypatch.setenv("EDGEINFER_MODEL", name)
    result = CliRunner().invoke(cli.main, ["generate", "hello"])
    assert result.exit_code in (2, 3) and f"EDGEINFER_MODEL: {name}" in " ".join(result.stderr.split())
    named = CliRunner().invoke(cli.main, ["generate", "hello", "-m", name])
    assert named.exit_code == result.exit_code and "EDGEINFER_MODEL" not in named.stderr


def test_a_draft_device_that_is_not_there_is_a_line_and_the_answer_comes(run, model):
    flags = ("generate", "--backend", "native", "-p", "hello", "-n", "12", "--temp", "0", "-md", model)
    plain = run(*flags, "--draft-device", "cpu")
    result = run(*flags, "--draft-device", "gpu:99")
    assert result.stdout == plain.stdout and "drafting goes on without" not in plain.stderr
    assert result.stderr.count("drafting goes on without gpu:99: there is no such device") == 1
    assert "a draft device is one of auto" in run(*flags, "--draft-device", "gpus", code="usage").stderr


def test_a_draft_head_is_one_for_its_model_and_no_model_itself(run, model, tmp_path):
    head = str(write_tiny_head(tmp_path / "head.gguf", Path(model)))
    other = str(write_tiny_head(tmp_path / "other.gguf", write_tiny_model(tmp_path / "other_model.gguf", seed=1)))
    flags = ("generate", "--backend", "native", "-p", "hello", "-n", "12", "--temp", "0")
    plain = run(*flags, "--drafter", "none")
    assert run(*flags, "-md", head).stdout == run(*flags, "-md", other).stdout == plain.stdout
    assert "drafting goes on without" not in run(*flags, "-md", head).stderr
    assert re.search("drafting goes on without head: .* is a draft head for", run(*flags, "-md", other).stderr)
    assert "name that one, and this with -md" in run(*flags, "-m", head, code="model").stderr


def test_a_seed_of_minus_one_is_a_new_one_each_time(run):
    seeds = {json.loads(run("generate", "-p", "a", "-n", "1", "--json", "-s", "-1").stdout)["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_environment_variables_stand_for_flags_and_flags_win(run, monkeypatch):
    monkeypatch.setenv("EDGEINFER_CTX_SIZE", "99")
    monkeypatch.setenv("EDGEINFER_PREDICT", "2")
    monkeypatch.setenv("EDGEINFER_TEMP", "0")
    monkeypatch.setenv("EDGEINFER_PROMPT", "not from here")
    load, sizes = loading.load, []
    monkeypatch.setattr(
        loading, "load", lambda *given, **options: sizes.append(options["n_ctx"]) or load(*given, **options)
    )
    run("generate", "-p", "hello")
    run("chat", "-p", "hello", "-c", "77")
    assert sizes == [99, 77]
    assert json.loads(run("generate", "-p", "hello", "--json").stdout)["usage"]["completion_tokens"] <= 2
    assert len({run("generate", "-p", "hello").stdout for _ in range(3)}) == 1
    run("generate", text="", code="usage")


def test_no_other_variables_than_those_of_the_help_stand_for_flags(monkeypatch):
    variables = {}
    for name in cli.COMMANDS:
        context = click.Context(cli.main.get_command(click.Context(cli.main), name))
        for option in context.command.params:
            names = [option.name, *(text.lstrip("-") for text in option.opts)]
            for text in {f"EDGEINFER_{text.replace('-', '_').upper()}" for text in names}:
                monkeypatch.setenv(text, "1")
                if option.resolve_envvar_value(context) is not None:
                    variables.setdefault(name, set()).add(text)
                    assert text == variable_of(*option.opts)
                monkeypatch.delenv(text)
    assert set(variables) == {
        *("chat", "generate", "batch", "serve", "profile", "bench", "imatrix", "distill", "evaluate")
    }
    of_templates = {"EDGEINFER_CHAT_TEMPLATE", "EDGEINFER_CHAT_TEMPLATE_FILE", "EDGEINFER_REASONING"}
    assert variables["serve"] - variables["generate"] == {
        *("EDGEINFER_HOST", "EDGEINFER_PORT", "EDGEINFER_API_KEY_FILE"),
        *of_templates,
    }
    assert variables["batch"] - variables["generate"] == of_templates
    assert variables["bench"] == {"EDGEINFER_THREADS", "EDGEINFER_BUDGET"}
    assert variables["distill"] == variables["evaluate"] == variables["imatrix"] == {"EDGEINFER_THREADS"}
    assert variables["chat"] - variables["generate"] == {
        *("EDGEINFER_NO_HISTORY", "EDGEINFER_SHOW_REASONING", "EDGEINFER_PLAIN"),
        *of_templates,
    }
    assert variables["generate"] > {"EDGEINFER_MODEL", "EDGEINFER_TEMP", "EDGEINFER_REPEAT_LAST_N"}
    monkeypatch.setenv("EDGEINFER_TEMP", "hot")
    refused = CliRunner().invoke(cli.main, ["generate", "hello"])
    assert "env var: 'EDGEINFER_TEMP'" in refused.stderr


def test_generate_reads_a_file_or_standard_input(run, model, tmp_path):
    (tmp_path / "prompt.txt").write_text("hello é\n")
    expected = completed(model, "hello é\n", max_tokens=5, temperature=0.0).text
    for arguments, text in ((("-f", str(tmp_path / "prompt.txt")), None), ((), "hello é\n")):
        result = run("generate", *arguments, "-n", "5", "--temp", "0", "--json", text=text)
        assert json.loads(result.stdout)["text"] == expected


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_a_context_without_room_for_an_answer_is_said(json_flag, run):
    n_prompt = json.loads(run("generate", "-p", "hello", "-n", "0", "--json").stdout)["usage"]["prompt_tokens"]
    result = run("generate", "-p", "hello", "-c", str(n_prompt), *json_flag)
    assert f"no answer: the prompt fills the context ({n_prompt} of {n_prompt} tokens); raise -c" in result.stderr
    if json_flag:
        found = json.loads(result.stdout)
        assert (found["text"], found["finish_reason"]) == ("", "length")
    result = run("generate", "-p", "hello", "-c", str(n_prompt + 1), "--loop-guard", "0", "-s", "1", *json_flag)
    assert f"cut: the context is full ({n_prompt} of {n_prompt + 1} tokens are the prompt's)" in result.stderr
    assert "context is full" not in run("generate", "-p", "hello", "-n", "1", *json_flag).stderr


def test_a_chat_of_one_message_says_that_the_context_is_full(run):
    n_prompt = json.loads(run("chat", "-p", "hello", "-n", "0", "--json").stdout)["usage"]["prompt_tokens"]
    result = run("chat", "-p", "hello", "-c", str(n_prompt + 1), "-s", "1")
    assert f"cut: the context is full ({n_prompt} of {n_prompt + 1} tokens" in result.stderr
    result = run("chat", "-p", "hello", "-c", str(n_prompt), code="failure")
    assert f"{n_prompt + 1} tokens do not fit into a context of {n_prompt}" in result.stderr


def test_generate_ends_before_a_stop_string(run, model):
    text = completed(model, "hello", max_tokens=40, seed=1).text
    stop = re.search(r"[a-z ]{2,}", text)[0]
    record = json.loads(run("generate", "-p", "hello", "-n", "40", "-s", "1", "--stop", stop, "--json").stdout)
    assert record["text"] == text[: text.index(stop)] and record["finish_reason"] == "stop"


def test_chat_answers_a_message_with_the_system_message(run, model):
    result = run("chat", "-p", "hello", "-sys", "be brief", "-n", "20", "-s", "1", "--json")
    assert json.loads(result.stdout)["text"] == answered(model, "hello", "be brief", max_tokens=20, seed=1).text


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_text_may_be_given_without_a_flag(run, command):
    flags = ("-n", "9", "--temp", "0", "--json")
    texts = [json.loads(run(command, *text, *flags).stdout)["text"] for text in (["-p", "hello"], ["hello"])]
    assert texts[0] == texts[1] != ""


def test_chat_answers_standard_input_once(run, model):
    result = run("chat", "-n", "20", "-s", "1", "--json", text="hello\n")
    assert json.loads(result.stdout)["text"] == answered(model, "hello", max_tokens=20, seed=1).text


def test_standard_input_comes_before_the_text_of_p(run, model):
    result = run("chat", "-p", "summarise", "-n", "20", "-s", "1", "--json", text="a report\nof two lines\n")
    expected = answered(model, "a report\nof two lines\n\nsummarise", max_tokens=20, seed=1)
    assert json.loads(result.stdout)["text"] == expected.text


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A model whose template knows <think> and <tool_call>, which are ordinary text to it."""
    template = CHATML + "{% if false %}<think></think><tool_call>{% endif %}"
    folder = tmp_path_factory.mktemp("thinker")
    return str(write_tiny_model(folder / "thinker.gguf", template=template, n_ctx_train=2048))


def thinking_of(monkeypatch, output):
    """Makes every engine say this."""
    load = loading.load

    def scripted(*arguments, **options):
        engine = load(*arguments, **options)
        Script(engine, monkeypatch).emit(output)
        return engine

    monkeypatch.setattr(loading, "load", scripted)


def test_reasoning_is_no_part_of_the_answer_and_is_shown_when_asked_for(run, thinker, monkeypatch):
    thinking_of(monkeypatch, "<think>\nhm,\nhm\n</think>\n\nYes.")
    hidden = run("chat", "-m", thinker, "-p", "hello")
    assert hidden.stdout == "Yes.\n" and re.match(r"\d+ tokens", hidden.stderr)
    shown = run("chat", "-m", thinker, "-p", "hello", "--show-reasoning")
    assert shown.stdout == "Yes.\n" and re.match(r"hm,\nhm\n\n\d+ tokens", shown.stderr)
    monkeypatch.setenv("EDGEINFER_SHOW_REASONING", "1")
    assert run("chat", "-m", thinker, "-p", "hello").stderr.startswith("hm,\nhm\n\n")
    raw = run("generate", "-m", thinker, "-p", "hello")
    assert raw.stdout == "<think>\nhm,\nhm\n</think>\n\nYes.\n"


def test_json_has_the_reasoning_and_the_calls(run, thinker, monkeypatch):
    thinking_of(monkeypatch, '<think>hm</think>Yes.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    result = run("chat", "-m", thinker, "-p", "hello", "--json", "--show-reasoning")
    record = json.loads(result.stdout)
    assert (record["text"], record["reasoning"]) == ("Yes.", "hm") and result.stderr == ""
    text = '{"name": "f", "arguments": {"a": 1}}'
    (call,) = record["tool_calls"]
    assert call == {"text": text, "name": "f", "arguments": {"a": 1}, "id": call["id"]} and len(call["id"]) == 9
    assert 'the model asks for a tool, and there is none: f {"a": 1}' in run("chat", "-m", thinker, "-p", "x").stderr


# ---- Exit codes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command, arguments, text, code, message",
    [
        ("generate", ["-p", "hello", "--temp", "-1"], None, "usage", "--temp"),
        ("generate", ["-p", "hello", "-f", __file__], None, "usage", "-f gives a prompt, and so does TEXT or -p"),
        ("generate", ["hello", "-p", "hello"], None, "usage", "TEXT and -p both give a prompt"),
        ("generate", ["hello", "world"], None, "usage", "2 texts are given: put one that has spaces in it in quotes"),
        ("generate", [], "", "usage", "no prompt: give one as TEXT, with -p, with -f or on standard input"),
        ("chat", ["hello", "world"], None, "usage", "2 texts are given"),
        ("chat", ["model.gguf", "hello"], None, "usage", "model.gguf looks like a model: name it with -m"),
        ("generate", ["-p", "hello", "--repeat-penalty", "0"], None, "usage", "repeat_penalty"),
        ("generate", ["-p", "hello", "--no-such-flag"], None, "usage", "no-such-flag"),
        ("generate", ["-p", ""], None, "usage", "the prompt is empty"),
        ("generate", [], "\udcff", "usage", "must be UTF-8"),
        ("chat", [], "", "usage", "the message is empty"),
        ("chat", ["-m", "/nowhere/model.gguf", "-p", "hello"], None, "model", "/nowhere/model.gguf"),
        ("chat", ["-m", __file__, "-p", "hello"], None, "model", "test_cli.py"),
        ("chat", ["-p", "hello", "-c", "1000000000"], None, "budget", "n_ctx"),
        ("chat", ["-p", "hello " * 30, "-c", "20"], None, "failure", "do not fit into a context of 20"),
    ],
)
def test_an_error_is_a_line_on_stderr_and_an_exit_code(run, command, arguments, text, code, message):
    if text == "\udcff":
        text = io.BytesIO(b"\xff\xfe")
    result = run(command, *arguments, text=text, code=code)
    assert message in result.stderr and "Traceback" not in result.stderr and result.stdout == ""
    assert result.stderr.lower().count("error:") == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["chatt"], "No such command 'chatt'. Did you mean chat?"),
        (
            ["run"],
            "No such command 'run'. There are chat, generate, batch, serve, models, cache, inspect, profile, bench, ",
        ),
        (["model.gguf"], "model.gguf is no command: edgeinfer chat -m model.gguf talks with a model"),
        (["bench", "-m", "model.gguf"], "Name the file without it: edgeinfer bench FILE"),
        (["inspect", "--model", "model.gguf"], "Name the file without it: edgeinfer inspect FILE"),
        (["devices", "-m", "model.gguf"], "No such option '-m'"),
        (["--no-such-flag"], "No such option '--no-such-flag'"),
        (["pack"], "Missing argument 'MODEL'"),
    ],
)
def test_a_wrong_command_line_says_what_to_write(arguments, message):
    result = CliRunner().invoke(cli.main, arguments, prog_name="edgeinfer")
    assert result.exit_code == EXIT_CODES["usage"] and message in result.stderr
    assert ("FILE" in result.stderr.splitlines()[-1]) == ("FILE" in message)


@pytest.mark.parametrize(
    "error, code, message",
    [
        (BackendLost("the device is gone"), "lost", "error: the device is gone"),
        (NumericalError("not a number"), "model", "error: not a number"),
        (TemplateError("no system message"), "model", "error: no system message"),
        (KeyboardInterrupt(), "interrupted", "error: interrupted"),
        (MemoryError(), "budget", "no more memory"),
        (PermissionError(13, "Permission denied", "x.gguf"), "failure", "x.gguf"),
        (ZeroDivisionError("oops"), "failure", "ZeroDivisionError: oops (a bug"),
    ],
)
def test_what_goes_wrong_while_loading_has_its_exit_code(run, monkeypatch, error, code, message):
    def load(*args, **options):
        raise error

    monkeypatch.setattr(loading, "load", load)
    result = run("chat", "-p", "hello", code=code)
    assert message in result.stderr and "Traceback" not in result.stderr


def test_the_help_and_the_docs_have_all_exit_codes():
    help_text = " ".join(CliRunner().invoke(cli.main, ["--help"]).stdout.split())
    said = re.search(r"Exit codes: (.*?)\.", help_text)[1]
    assert [int(code) for code in re.findall(r"(?:^|, )(\d+) ", said)] == sorted(EXIT_CODES.values())
    assert said in " ".join((Path(__file__).parents[3] / "docs" / "chat.md").read_text().split())
    kinds = [kind for kind in vars(edgeinfer.common.errors).values() if isinstance(kind, type)]
    errors = [kind for kind in kinds if issubclass(kind, edgeinfer.common.errors.EdgeInferError)]
    assert {error.exit_code for error in errors} <= set(EXIT_CODES.values())


def test_debug_shows_the_traceback_and_keeps_the_exit_code(model):
    result = CliRunner().invoke(cli.main, ["--debug", "generate", "-m", "/nowhere.gguf", "-p", "a"])
    assert result.exit_code == 3 and "Traceback" in result.stderr and "error: /nowhere.gguf" in result.stderr


def test_a_warning_while_loading_is_a_note(run, model, monkeypatch):
    monkeypatch.setitem(backend_choice._BACKENDS, "native", ("edgeinfer.backends.no_such_module", "NativeBackend"))
    result = run("generate", "-p", "hello", "-n", "1", "--backend", "auto")
    assert "far slower" in result.stderr and "warnings.warn" not in result.stderr


def test_a_context_longer_than_the_training_is_noted(run):
    assert "trained with 2048" in run("generate", "-p", "hello", "-n", "1", "-c", "3000").stderr


# ---- Text on a terminal --------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


EVIL = "a\x1b[31mred\x1b]0;title\x07\x9b2J\r\x00\x7f\u202egnp.exe\tok\n"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def test_control_characters_reach_a_terminal_as_pictures_only():
    stream = Terminal()
    Writer(stream).write(EVIL)
    shown = stream.getvalue()
    assert not CONTROL.search(shown)
    assert shown.startswith("a\u241b[31mred") and shown.endswith("gnp.exe\tok\n")


def test_a_pipe_gets_the_text_as_it_is():
    stream = io.StringIO()
    Writer(stream).write(EVIL)
    assert stream.getvalue() == EVIL


@pytest.mark.parametrize("debug", [(), ("--debug",)])
def test_errors_command_no_terminal(model, monkeypatch, debug):
    def load(*args, **options):
        raise UnsupportedModel(EVIL)

    monkeypatch.setattr(loading, "load", load)
    result = CliRunner().invoke(cli.main, [*debug, "generate", "-m", model, "-p", "a"])
    assert result.exit_code == EXIT_CODES["model"] and not CONTROL.search(result.stderr)
    assert "error: a\u241b[31mred" in result.stderr and ("Traceback" in result.stderr) == bool(debug)


def test_the_name_of_a_tensor_commands_no_terminal(tmp_path):
    path = write_tiny_model(tmp_path / "m.gguf", rope_freqs=True)
    path.write_bytes(path.read_bytes().replace(b"rope_freqs.weight", b"\x1b]0;evil\x07 a title"))
    result = CliRunner().invoke(cli.main, ["generate", "-m", str(path), "-p", "a", "--backend", "reference"])
    assert result.exit_code == EXIT_CODES["model"] and not CONTROL.search(result.stderr)
    assert "first \u241b]0;evil\u2407 a title" in result.stderr


def test_a_note_commands_no_terminal_whatever_its_colours(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", Terminal())
    terminal.note(EVIL)
    assert not CONTROL.search(sys.stderr.getvalue())


def test_visible_leaves_text_alone():
    text = "é 漢字 👍🏽 \t\n tab"
    assert visible(text) == text


def test_a_line_is_ended_once():
    stream = io.StringIO()
    writer = Writer(stream)
    writer.end_line()
    writer.write("a")
    writer.end_line()
    writer.end_line()
    writer.write("b\n")
    writer.end_line()
    assert stream.getvalue() == "a\nb\n"


def test_notes_have_colour_on_a_terminal_only_and_never_with_no_color(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for stream, no_color, coloured in ((Terminal(), "", True), (Terminal(), "1", False), (io.StringIO(), "", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setattr(sys, "stderr", stream)
        terminal.note("said")
        assert ("\x1b[" in stream.getvalue()) == coloured and "said" in stream.getvalue()


@pytest.mark.parametrize(
    "stream, seconds, shown", [(Terminal(), 0.0, True), (Terminal(), 1e9, False), (io.StringIO(), 0.0, False)]
)
def test_a_bar_is_shown_on_a_terminal_when_it_takes_long(monkeypatch, stream, seconds, shown):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(terminal, "_BAR_AFTER_SECONDS", seconds)
    monkeypatch.setattr(sys, "stderr", stream)
    bars, show = [], ProgressBar._show
    monkeypatch.setattr(ProgressBar, "_show", lambda bar: bars.append(show(bar)) or bars[-1])
    with ProgressBar("loading") as bar:
        for share in (0.1, 0.5, 1.0):
            bar(share)
    assert ("loading" in stream.getvalue()) == bool(bars) == shown


# ---- Ctrl-C --------------------------------------------------------------------------------------------------------


def test_the_first_ctrl_c_ends_the_request_and_the_second_is_a_keyboard_interrupt(model):
    with edgeinfer.load(model, backend="reference") as engine:
        stream = engine.stream("hello", temperature=0.0)
        next(stream)
        with stopped_by_ctrl_c(engine):
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert next(stream).finish_reason == "interrupted"


def test_without_a_request_ctrl_c_is_a_keyboard_interrupt_and_the_old_handler_comes_back(model):
    before = signal.getsignal(signal.SIGINT)
    with edgeinfer.load(model, backend="reference") as engine:
        with pytest.raises(KeyboardInterrupt), stopped_by_ctrl_c(engine):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture(params=["reference", "llama.cpp"])
def backend(request):
    if request.param == "llama.cpp":
        request.getfixturevalue("llama_cpp")
    return request.param


@pytest.mark.parametrize("flags", [(), ("--json",)])
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_ctrl_c_in_a_one_shot_gives_what_there_is_and_leaves_with_130(model, tmp_path, backend, command, flags):
    arguments = [command, "-m", model, "--backend", backend, "-p", "hello", "-s", "1", *flags]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_MAIN, *arguments],
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
        env=environment(tmp_path, SAY_TWENTY="1"),
    )
    assert process.stderr.readline() == b"TWENTY\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in err and out
    if flags:
        assert json.loads(out)["finish_reason"] == "interrupted"


# ---- Pipes ---------------------------------------------------------------------------------------------------------


def test_nothing_but_the_answer_is_on_stdout_of_a_process_and_no_escape_anywhere(model, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *("chat", "-m", model, "--backend", "reference", "--json", "-n", "5")],
        **{"input": b"hello", "capture_output": True, "timeout": 60},
        env=environment(tmp_path, NO_COLOR=""),
    )
    assert done.returncode == 0 and json.loads(done.stdout)["usage"]["completion_tokens"] <= 5
    assert b"\x1b" not in done.stdout + done.stderr


def test_a_reader_that_goes_away_ends_the_program_without_a_word(model, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_MAIN, *("generate", "-m", model, "--backend", "reference", "-p", "hello")],
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
        env=environment(tmp_path),
    )
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 1 and process.stderr.read() == b""
    process.stderr.close()


# ---- A person at a terminal ----------------------------------------------------------------------------------------


def test_a_conversation_at_a_terminal(model, tmp_path):
    with sitting_at(model, tmp_path, "-n", "5", "-sys", "be brief") as person:
        assert "tiny.gguf | " in person.see("Ctrl-D leaves")
        person.say("hello")
        person.see("tok/s")
        person.say("/stats")
        person.see("seed ")
        person.say("/undo")
        person.see("dropped: hello")
        person.say("/system")
        person.see("be brief")
        person.say("/help")
        person.see("/regen")
        person.say("/nonsense")
        person.see("there is no command /nonsense")
        person.say(f"/save {tmp_path / 'talk.jsonl'}")
        person.say("/regen")
        person.see("error: there is no exchange yet")
        person.see_prompt()
        person.type("\x04")
        assert person.leave() == 0
    assert (tmp_path / "talk.jsonl").read_text() == '{"role": "system", "content": "be brief"}\n'


def test_stats_say_that_a_drafter_was_not_used(native, model, tmp_path):
    head = write_tiny_head(tmp_path / "head.gguf", model, metadata={"draft-head.matches": [0.01]})
    with sitting_at(model, tmp_path, "--backend", "native", "-md", head, "-n", "5") as person:
        person.say("hello")
        person.see("tok/s")
        person.say("/stats")
        person.see("head on the CPU; not used in the last answer")
        person.say("/exit")
        assert person.leave() == 0


def test_stats_tell_the_expert_cache(native, tmp_path):
    experts = write_tiny_experts(tmp_path / "experts.gguf")
    with sitting_at(experts, tmp_path, "--backend", "native", "--expert-cache", "50%", "-n", "5") as person:
        person.say("hello")
        person.see("tok/s")
        person.say("/stats")
        assert "cache of 864.0 KiB, 50% of all experts" in person.see(" hits, ")
        person.see("s waited for the disk")
        person.say("/exit")
        assert person.leave() == 0


def test_a_conversation_through_llama_cpp(llama_cpp, model, tmp_path):
    with sitting_at(model, tmp_path, "--backend", "llama.cpp") as person:
        assert "| llama.cpp, " in person.see("Ctrl-D leaves")
        person.say("hello")
        person.see("TWENTY")
        person.type("\x03")
        person.see("stopped; what there is of the answer is kept")
        person.say("/stats")
        assert "engine   llama.cpp, " in person.see("memory   ")
        person.see("0 cached")
        person.say("/exit")
        assert person.leave() == 0


def llama_cpp_of(person):
    """Process id of the llama.cpp that the program has started."""
    (child,) = psutil.Process(person.process.pid).children()
    return child.pid


def test_a_conversation_outlives_the_process_of_llama_cpp(llama_cpp, model, tmp_path):
    killed = tmp_path / "killed"
    with sitting_at(model, tmp_path, "--backend", "llama.cpp", "-n", "40", WAIT_FOR=str(killed)) as person:
        person.see("Ctrl-D leaves")
        person.say("hello")
        person.see("TWENTY")
        os.kill(llama_cpp_of(person), signal.SIGKILL)  # in the answer, which waits for that
        killed.touch()
        person.see("llama.cpp crashed on a pass of 1 tokens: SIGKILL")
        person.see("trying once more")
        person.see("40 tokens, ")
        person.see_prompt()
        os.kill(llama_cpp_of(person), signal.SIGKILL)  # between two
        person.type("again\r")
        person.see("trying once more")
        person.see("40 tokens, ")
        person.say(f"/save {tmp_path / 'talk.jsonl'}")
        person.say("/exit")
        assert person.leave() == 0
    roles = [json.loads(line)["role"] for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    assert roles == ["user", "assistant"] * 2


def test_what_cannot_be_started_again_leaves_the_conversation_to_be_saved_and_5(llama_cpp, model, tmp_path):
    copy = Path(shutil.copy(model, tmp_path / "copy.gguf"))
    with sitting_at(str(copy), tmp_path, "--backend", "llama.cpp", "-n", "5") as person:
        person.see("Ctrl-D leaves")
        person.say("hello")
        person.see("5 tokens, ")
        person.see_prompt()
        copy.unlink()
        os.kill(llama_cpp_of(person), signal.SIGKILL)
        person.type("again\r")
        person.see("error: llama.cpp crashed")
        person.see("it was started again, and failed:")
        person.see("the conversation is kept without this message: /save FILE writes it")
        person.say("/stats")
        person.see("error: llama.cpp crashed")
        person.say(f"/save {tmp_path / 'talk.jsonl'}")
        person.say("/exit")
        assert person.leave() == EXIT_CODES["lost"]
    contents = [json.loads(line)["content"] for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    assert contents[0] == "hello" and len(contents) == 2


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_crash_in_a_one_shot_leaves_with_5_in_one_line(llama_cpp, model, tmp_path, command, monkeypatch):
    stage = Stage(tmp_path, monkeypatch)
    stage.play(CRASH + LATE_CRASH)
    process = subprocess.run(
        [sys.executable, "-c", MAIN, command, "-m", model, "--backend", "llama.cpp", "-p", "hello", "-s", "1"],
        **{"stdin": subprocess.DEVNULL, "capture_output": True, "text": True},
        env=environment(tmp_path),
    )
    assert process.returncode == EXIT_CODES["lost"]
    assert process.stderr.splitlines()[-1].startswith("error: llama.cpp crashed on a pass of 1 tokens: SIGSEGV")
    assert "its last line: lost in thought" in process.stderr and "Traceback" not in process.stderr


def test_ctrl_c_stops_an_answer_keeps_it_and_the_chat_goes_on(model, tmp_path):
    with sitting_at(model, tmp_path, "-s", "1") as person:
        person.say("hello")
        person.see("TWENTY")
        person.type("\x03")
        person.see("stopped; what there is of the answer is kept")
        person.see("tok/s")
        person.say(f"/save {tmp_path / 'talk.jsonl'}")
        person.say("/exit")
        assert person.leave() == 0
    messages = [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    whole = answered(model, "hello", seed=1, max_tokens=2000)
    assert messages[1]["content"]
    # Ended by Ctrl-C within a character, the text has a U+FFFD there.
    assert whole.text.startswith(messages[1]["content"].rstrip("\ufffd")) or whole.finish_reason == "stop"


def test_ctrl_c_at_the_prompt_does_not_lose_the_chat(model, tmp_path):
    with sitting_at(model, tmp_path, "-n", "3") as person:
        person.say("hello")
        person.see("tok/s")
        person.see_prompt()
        person.type("half a line\x03")
        person.see("Ctrl-D or /exit leaves")
        person.say("/undo")
        person.see("dropped: hello")
        person.say("/exit")
        assert person.leave() == 0


def test_a_message_of_several_lines_is_between_triple_quotes(model, tmp_path):
    with sitting_at(model, tmp_path, "-n", "3") as person:
        person.say('"""one\rtwo\rthree"""')
        person.see("tok/s")
        person.say(f"/save {tmp_path / 'talk.jsonl'}")
        person.say("/exit")
        assert person.leave() == 0
    assert json.loads((tmp_path / "talk.jsonl").read_text().splitlines()[0])["content"] == "one\ntwo\nthree"


def test_a_chat_can_be_loaded_and_regenerated(model, tmp_path):
    (tmp_path / "talk.jsonl").write_text(
        '{"role": "user", "content": "hello"}\n{"role": "assistant", "content": "there"}\n'
    )
    with sitting_at(model, tmp_path, "-n", "3", "-s", "1") as person:
        person.say(f"/load {tmp_path / 'talk.jsonl'}")
        person.see("2 messages, ")
        person.say("/regen")
        person.see("tok/s")
        person.say(f"/save {tmp_path / 'new.jsonl'}")
        person.say("/load")
        person.see("error: name a file")
        person.say("/load /nowhere.jsonl")
        person.see("error: /nowhere.jsonl: No such file or directory")
        person.say("/clear")
        person.say("/exit")
        assert person.leave() == 0
    user, assistant = (json.loads(line) for line in (tmp_path / "new.jsonl").read_text().splitlines())
    # With the next seed: the same one would say the same again.
    assert user["content"] == "hello" and assistant["content"] == answered(model, "hello", seed=2, max_tokens=3).text


def test_typed_lines_are_kept_for_the_next_time_unless_told_not_to(model, tmp_path):
    history = tmp_path / "edgeinfer" / "chat_history"
    with sitting_at(model, tmp_path, "-n", "1", "--no-history") as person:
        person.say("secret")
        person.see("1 token")
    assert not history.exists()
    with sitting_at(model, tmp_path, "-n", "1") as person:
        person.say("remember me")
        person.see("1 token")
        person.see_prompt()
        person.type("\x1b[A")  # up
        person.see("remember me")
        person.type("\x03")
        person.see_prompt()
        person.type("\x04")
        assert person.leave() == 0
    assert "remember me" in history.read_text() and history.stat().st_mode & 0o077 == 0


def test_the_reasoning_at_a_terminal(thinker, tmp_path):
    with sitting_at(
        thinker, tmp_path, "-n", "44", main=SAYING_MAIN, SAYS="<think>hm, hm, hm, hm, hm</think>Yes."
    ) as person:
        person.say("hello")
        assert "hm" not in person.see("thinking ... ")
        assert "hm" not in person.see("thought for ")
        person.see("Yes.")
        person.say("/reasoning")
        person.see("reasoning is shown")
        person.say("again")
        assert "thinking" not in person.see("hm, hm, hm")
        person.see("Yes.")
        person.say("/reasoning")
        person.see("reasoning is hidden")
        person.say("/exit")
        assert person.leave() == 0


def test_ctrl_c_within_the_reasoning_keeps_nothing(thinker, tmp_path):
    with sitting_at(thinker, tmp_path, main=SAYING_MAIN, SAYS="<think>" + "hm, " * 99) as person:
        person.say("hello")
        person.see("TWENTY")
        person.type("\x03")
        assert "thought for " in person.see("stopped; nothing is kept")
        person.say("/undo")
        person.see("error: there is no exchange yet")
        person.say("/exit")
        assert person.leave() == 0


def test_json_at_a_terminal_is_a_usage_error(model, tmp_path):
    with sitting_at(model, tmp_path, "--json") as person:
        person.see("--json is for programs")
        assert person.leave() == 2


@pytest.mark.parametrize("when", ["at the prompt", "during an answer"])
@pytest.mark.parametrize("shell", ['exec "$@"', "trap '' HUP; exec \"$@\""])
def test_a_terminal_that_is_closed_ends_the_chat_and_the_history_is_whole(model, tmp_path, when, shell):
    with sitting_at(model, tmp_path, "-n", "300", shell=shell) as person:
        person.say("hello")
        person.see("TWENTY" if when == "during an answer" else "tok/s")
        if when == "at the prompt":
            person.see_prompt()
        master, person.master = person.master, os.open(os.devnull, os.O_RDONLY)
        os.dup2(person.master, master)  # the terminal's own end is closed with that
        assert person.process.wait(timeout=60) in (1, -signal.SIGHUP)
    lines = (tmp_path / "edgeinfer" / "chat_history").read_text().splitlines()
    assert [line for line in lines if line.startswith("+")] == ["+hello"]


@pytest.mark.parametrize(
    "variables",
    [
        {"TERM": None},
        {"TERM": "dumb"},
        {"TERM": "no-such-terminal"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"XDG_STATE_HOME": "/dev/null"},
        {"XDG_STATE_HOME": None, "HOME": "/proc"},
    ],
    ids=str,
)
def test_a_conversation_at_a_terminal_of_any_kind(model, tmp_path, variables):
    with sitting_at(model, tmp_path, "-n", "3", **variables) as person:
        before = person.see("Ctrl-D leaves")
        assert ("typed messages are not kept: " in before) == ("XDG_STATE_HOME" in variables)
        person.see(">")
        person.type("gr\u00fc\u00dfe \u6f22\r")
        assert "rror" not in person.see("tok/s")
        person.see(">")
        person.type("/exit\r")
        assert person.leave() == 0


@pytest.mark.parametrize("typed", [b"\xff\xfe hello", b"\xc3", b"\xed\xa0\x80"])
def test_bytes_that_are_no_text_end_no_chat(model, tmp_path, typed):
    with sitting_at(model, tmp_path, "-n", "3") as person:
        person.see_prompt()
        os.write(person.master, typed + b"\r")
        person.see("[?2004l")
        person.say("hello")
        person.see("tok/s")
        person.say("/exit")
        assert person.leave() == 0


def test_a_history_that_cannot_be_kept_any_more_stops_nothing(model, tmp_path):
    with sitting_at(model, tmp_path, "-n", "3") as person:
        person.say("hello")
        person.see("tok/s")
        history = tmp_path / "edgeinfer" / "chat_history"
        history.unlink()
        history.mkdir()
        person.say("again")
        assert "xception" not in person.see("tok/s")
        person.say("/exit")
        assert person.leave() == 0


def test_a_chat_whose_answers_cannot_be_written_does_not_begin(model, tmp_path):
    with sitting_at(model, tmp_path, shell='exec "$@" >&-') as person:
        person.see("error: standard output cannot be written: it is closed")
        assert person.leave() == 1


def test_a_chat_without_standard_error_has_its_answers(model, tmp_path):
    with sitting_at(model, tmp_path, "-n", "3", "-s", "1", shell='exec "$@" 2>&-') as person:
        person.type("hello\r")
        person.see(answered(model, "hello", seed=1, max_tokens=3).text.splitlines()[0][:4])
        person.type("/exit\r")
        assert person.leave() == 0


def test_saving_says_what_was_saved_and_a_failure_leaves_nothing(model, tmp_path):
    home = tmp_path / "home"
    (home / "folder").mkdir(parents=True)
    (home / "link").symlink_to("real")
    with sitting_at(model, tmp_path, "-n", "3", HOME=str(home)) as person:
        person.say("hello")
        person.see("tok/s")
        person.say("/save ~/link")
        person.see("saved: 2 messages")
        person.say("/system be brief")
        person.see("the system message is set")
        person.say("/clear")
        person.see("cleared")
        person.say("/save ~/folder")
        person.see(f"error: {home}/folder: This is a folder, expected a file")
        person.say("/save ~/nowhere/x")
        person.see(f"error: {home}/nowhere: There is no such folder")
        person.say("/save /dev/full")
        person.see("error: /dev/full: No space left on device")
        person.say("/save ~no-such-user/x")
        person.see("there is no user 'no-such-user'")
        person.say("/save ./~")
        person.see("saved: 1 message\r")
        person.say("/load ~/link")
        person.see("loaded: 2 messages, ")
        person.say("/exit")
        assert person.leave() == 0
    assert sorted(path.name for path in home.iterdir()) == ["folder", "link", "real"]
    assert (tmp_path / "~").read_text() == '{"role": "system", "content": "be brief"}\n'
    assert (home / "link").is_symlink() and list((home / "folder").iterdir()) == []
