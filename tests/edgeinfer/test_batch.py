"""Batches of requests: what lines mean, what is written, and how a run goes on with another's output."""

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from parts import missing
from tiny_models import write_tiny_model

import edgeinfer
from edgeinfer import cli
from edgeinfer.batch import lines as batch_lines
from edgeinfer.batch.lines import Line, name_of, parse_line, read_lines, read_request
from edgeinfer.batch.output import Keys, Output
from edgeinfer.batch.run import Progress, Run, survey
from edgeinfer.common.errors import BackendLost, InvalidArgument

OWN = {"prompt": "hello", "max_tokens": 4, "seed": 1}
CHAT = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "seed": 1},
}
TEXT = {
    "custom_id": "b",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "m", "prompt": "hello", "max_tokens": 4, "seed": 1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx_train=256)


@pytest.fixture(scope="module", params=["native", "reference"])
def engine(request, model):
    with edgeinfer.load(model, backend=request.param, draft="none", parallel=4) as engine:
        engine.tokenizer.stop_ids = frozenset()  # a random model draws them at random
        yield engine


@pytest.fixture(scope="module")
def ending(model):
    """An engine whose texts end as the model says, with what reads constraints."""
    if importlib.util.find_spec("llguidance") is None:
        missing("grammar", "llguidance is not installed")
    with edgeinfer.load(model, draft="none") as engine:
        yield engine


@pytest.fixture
def run(model, monkeypatch, tmp_path):
    """Runs `edgeinfer batch` in this process on the tiny model."""
    for name in [name for name in os.environ if name.startswith("EDGEINFER_")]:
        monkeypatch.delenv(name)

    def run(*arguments, code=0, text=None):
        arguments = ["batch", "-m", str(model), "--drafter", "none", *map(str, arguments)]
        result = CliRunner().invoke(cli.main, arguments, input=text, prog_name="edgeinfer")
        assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
        return result

    return run


def written(path, records):
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def found_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def request_of(content):
    return read_request(content, name_of(content, 1, "1-0").form)


def answers(engine, records):
    """What a run writes for records, by the order of their lines; the progress."""
    file, found, progress = io.BytesIO(), [], Progress()
    for each in records:
        file.write(each if isinstance(each, bytes) else json.dumps(each).encode() + b"\n")
    file.seek(0)
    write = lambda line: found.append(json.loads(line))  # noqa: E731
    Run(engine, {}, write, progress, lambda: None).answer(read_lines(file), Keys({}), None)
    key = lambda each: each.get("request") or each["id"].removeprefix("batch_req_")  # noqa: E731
    return sorted(found, key=lambda each: int(key(each).partition("-")[0])), progress


# ---- Answers ---------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_the_engine(engine):
    own = [OWN | {"prompt": prompt, "id": f"p {prompt}"} for prompt in ("hello", "world", "there", "one", "more", "is")]
    found, progress = answers(engine, [*own, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}])
    for asked, each in zip(own, found, strict=False):
        expected = engine.generate(asked["prompt"], max_tokens=4, seed=1)
        assert (each["id"], each["text"], each["seed"]) == (asked["id"], expected.text, 1)
        assert each["finish_reason"] == "length" and each["usage"]["completion_tokens"] == 4
    last, chat = found[-1], engine.chat()
    answer = chat.send("hello", max_tokens=4, seed=last["seed"])
    list(answer)
    assert (last["id"], last["text"]) == (7, answer.completion.text)
    assert (progress.n_answered, progress.n_errors, progress.n_tokens) == (7, 0, 28)


def test_requests_of_openais_files_have_openais_results(engine):
    (chat, text), _ = answers(engine, [CHAT, TEXT])
    assert set(chat) == set(text) == {"id", "custom_id", "response", "error"}
    assert (chat["custom_id"], text["custom_id"]) == ("a", "b") and chat["error"] is text["error"] is None
    assert chat["response"]["status_code"] == 200 and chat["response"]["request_id"]
    body = chat["response"]["body"]
    answer = engine.chat().send("hello", max_tokens=4, seed=1)
    list(answer)
    message = {"role": "assistant", "content": answer.completion.text, "refusal": None}
    assert body["object"] == "chat.completion" and body["model"] == engine.name
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 4
    body = text["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == engine.generate("hello", max_tokens=4, seed=1).text


def test_templates_of_chats_are_told_what_a_line_says(model):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is false %}no{% endif %}"
    off, wrong = {"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"messages": []}}
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    with edgeinfer.load(model, draft="none", chat_template=template) as engine:
        records = [chat, chat | off, chat | {"chat_template_kwargs": None}, chat | wrong, OWN | off]
        records.append(CHAT | {"body": CHAT["body"] | off})
        found, progress = answers(engine, records)
        n_on, n_off = (len(engine.tokenize(text)) for text in ("hello", "hellono"))
    n_prompts = [each["usage"]["prompt_tokens"] for each in found[:3]]
    assert n_prompts == [n_on, n_off, n_on] and progress.n_errors == 2
    assert "gets no value named" in found[3]["error"]["message"]
    assert "chat_template_kwargs" in found[4]["error"]["message"]
    assert found[5]["response"]["body"]["usage"]["prompt_tokens"] == n_off


def test_a_bad_line_is_an_error_on_that_line(engine):
    bad = CHAT | {"custom_id": "bad", "body": CHAT["body"] | {"n": 2}}
    records = [OWN, b"{no json\n", bad, {"prompt": "x " * 4000}, b"\xff\xfe\n", OWN | {"seed": 2, "id": "last"}]
    found, progress = answers(engine, records)
    assert [each.get("error", {"code": None})["code"] if each.get("error") else None for each in found] == [
        None,
        "InvalidArgument",
        "InvalidArgument",
        "ContextOverflow",
        "InvalidArgument",
        None,
    ]
    assert found[2]["custom_id"] == "bad" and found[2]["response"] is None and "n 2" in found[2]["error"]["message"]
    assert found[1]["id"] == 2 and found[-1]["id"] == "last"
    assert (progress.n_answered, progress.n_errors) == (6, 4)


def test_an_error_that_is_of_no_line_ends_the_run(engine, monkeypatch):
    def lost(*arguments, **options):
        raise BackendLost("gone")

    monkeypatch.setattr(engine.session, "forward", lost)
    with pytest.raises(BackendLost):
        answers(engine, [OWN])
    assert not engine.scheduler.texts


def test_an_engine_that_is_interrupted_ends_the_run_and_writes_no_torn_answer(engine):
    found = []

    def write(line):
        found.append(line)
        engine.interrupt()

    lines = [Line(i, json.dumps(OWN | {"max_tokens": 2 + 100 * (i > 1)}).encode()) for i in range(1, 5)]
    with pytest.raises(KeyboardInterrupt):
        Run(engine, {}, write, Progress(), lambda: None).answer(lines, Keys({}), None)
    assert len(found) == 1 and not engine.scheduler.texts


def test_lines_are_read_as_they_are_needed(engine):
    n_read, n_most = 0, 0

    def lines():
        nonlocal n_read
        for i in range(1, 60):
            n_read += 1
            yield Line(i, json.dumps(OWN | {"max_tokens": 1}).encode())

    progress = Progress()

    def tell():
        nonlocal n_most
        n_most = max(n_most, n_read - progress.n_answered)

    Run(engine, {}, lambda line: None, progress, tell).answer(lines(), Keys({}), None)
    assert progress.n_answered == 59 and n_most <= 2 * engine.scheduler.n_parallel


@pytest.mark.parametrize(
    "constraint",
    [
        {"choices": ["yes", "no"]},
        {"schema": {"enum": ["yes", "no"]}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}},
    ],
)
def test_a_line_says_what_its_answer_may_be(ending, constraint):
    (own, chat), progress = answers(
        ending, [OWN | {"max_tokens": 9} | constraint, CHAT | {"body": CHAT["body"] | {"max_tokens": 9} | constraint}]
    )
    assert progress.n_errors == 0
    assert own["text"].strip('"') in ("yes", "no") and own["finish_reason"] == "stop"
    assert chat["response"]["body"]["choices"][0]["message"]["content"].strip('"') in ("yes", "no")


def test_the_constraint_of_a_line_takes_the_place_of_the_runs(ending):
    lines = [OWN | {"max_tokens": 9}, OWN | {"max_tokens": 9, "regex": "[ab]"}, OWN | {"schema": {"type": 3}}]
    file, found = io.BytesIO(b"".join(json.dumps(each).encode() + b"\n" for each in lines)), {}
    write = lambda line: found.update({json.loads(line)["id"]: json.loads(line)})  # noqa: E731
    Run(ending, {"choices": ["yes"]}, write, Progress(), lambda: None).answer(read_lines(file), Keys({}), None)
    assert (found[1]["text"], found[2]["text"] in "ab", found[3]["error"]["code"]) == ("yes", True, "InvalidConstraint")


# ---- Lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"temperature": 0, "top_p": 0.5, "min_p": None}, {"temperature": 0, "top_p": 0.5}),
        ({"max_tokens": 5, "max_completion_tokens": 3}, {"max_tokens": 3}),
        ({"stop": ["a", "b"], "seed": 3}, {"stop": ["a", "b"], "seed": 3}),
        ({"logit_bias": {"3": -100}, "presence_penalty": 1.0}, {"logit_bias": {"3": -100}, "presence_penalty": 1.0}),
        ({"n": 1, "user": "me", "metadata": {}, "model": "m", "stream": True, "logprobs": False}, {}),
        ({"response_format": {"type": "json_object"}}, {"json": True}),
        ({"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"}, {}),
    ],
)
def test_options_have_their_usual_names(given, expected):
    assert request_of({"prompt": "a", **given}).options == expected
    assert request_of(TEXT | {"body": {"prompt": "a", **given}}).options == expected


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({}, "a prompt or messages"),
        ({"prompt": "a", "messages": []}, "a prompt or messages"),
        ({"prompt": ["a", "b"]}, "one text"),
        ({"prompt": None}, "one text"),
        ({"messages": []}, "at least one message"),
        ({"messages": "a"}, "at least one message"),
        ({"messages": [{"role": "user"}]}, "message 1 must be"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "role must be"),
        ({"messages": [{"role": [], "content": "a"}]}, "role must be"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "must be a text"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "last message"),
        ({"prompt": "a", "n": 2}, "n 2 is not supported"),
        ({"prompt": "a", "n": True}, "n True is not supported"),
        ({"prompt": "a", "tools": [1]}, "tools .* is not supported"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format must be"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format must be"),
        ({"prompt": "a", "response_format": []}, "response_format must be"),
        ({"prompt": "a", "logprobs": 3}, "logprobs 3 is not supported"),
        ({"prompt": "a", "temprature": 1}, "temperature is what it is called"),
        ({"prompt": "a", "repetition_penalty": 1}, "repeat_penalty is what it is called"),
        ({"prompt": "a", "id": []}, "id must be"),
        (TEXT | {"url": "/v1/embeddings"}, "url must be"),
        (TEXT | {"url": []}, "url must be"),
        (TEXT | {"method": "GET"}, "method must be POST"),
        (TEXT | {"custom_id": 3}, "custom_id must be"),
        (TEXT | {"body": []}, "body must be"),
        (TEXT | {"body": {}}, "no prompt"),
        (CHAT | {"body": {"prompt": "a"}}, "no messages"),
        (TEXT | {"more": 1}, "more"),
    ],
)
def test_a_request_that_is_none_is_refused(wrong, message):
    with pytest.raises(InvalidArgument, match=message):
        request_of(wrong)


@pytest.mark.parametrize("data", [b"[]", b"3", b"{", b"\xff", b"[" * 100000, b'"text"'])
def test_a_line_that_is_no_object_is_refused(data):
    with pytest.raises(InvalidArgument, match="the line"):
        parse_line(Line(1, data))


def test_content_in_parts_is_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = request_of({"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]})
    assert asked.messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "a\nb"}]


def test_lines_without_content_are_left_out_and_long_ones_are_marked(monkeypatch):
    monkeypatch.setattr(batch_lines, "MOST_BYTES", 8)
    data = b"\xef\xbb\xbfab\n\n  \r\n" + b"x" * 20 + b"\n1234567\n12345678\ncd\n" + b"y" * 9
    assert list(read_lines(io.BytesIO(data))) == [
        Line(1, b"ab"),
        Line(4, None),
        Line(5, b"1234567"),
        Line(6, None),
        Line(7, b"cd"),
        Line(8, None),
    ]
    with pytest.raises(InvalidArgument, match="more than 8 bytes"):
        parse_line(Line(4, None))


# ---- Another run -----------------------------------------------------------------------------------------------------


def test_a_run_goes_on_with_the_output_of_another(run, tmp_path):
    source = written(tmp_path / "in.jsonl", [OWN | {"seed": i} for i in range(6)])
    out = tmp_path / "out.jsonl"
    run(source, "-o", out)
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:3]) + lines[3][:-7])  # killed while it wrote
    assert "3 answered, 3 before" in run(source, "-o", out).stderr
    again = out.read_bytes().splitlines(keepends=True)
    assert again[:3] == lines[:3] and len(again) == 6
    texts = {each["request"]: each["text"] for each in map(json.loads, again)}
    assert texts == {each["request"]: each["text"] for each in map(json.loads, lines)}
    assert "0 answered, 6 before" in run(source, "-o", out).stderr
    written(source, [OWN | {"seed": i} for i in range(7)])
    assert "1 answered, 6 before" in run(source, "-o", out).stderr


@pytest.mark.parametrize(
    "change",
    ["input", "shorter", "flags", "template", "reasoning", "other file", "other text", "twice"],
    ids=lambda name: name,
)
def test_an_output_of_something_else_is_refused_and_left_as_it_is(run, tmp_path, change):
    source = written(tmp_path / "in.jsonl", [OWN | {"seed": i} for i in range(3)])
    out, flags = tmp_path / "out.jsonl", []
    run(source, "-o", out)
    if change == "input":
        written(source, [OWN | {"seed": 10 + i} for i in range(3)])
    elif change == "shorter":
        written(source, [OWN])
    elif change == "flags":
        flags = ["--temp", "0.5"]
    elif change == "template":
        flags = ["--chat-template", "llama3"]
    elif change == "reasoning":
        flags = ["-rea", "off"]
    elif change == "other file":
        written(out, [{"a": 1}])
    elif change == "other text":
        out.write_text("my notes")
    else:
        out.write_bytes(out.read_bytes() + out.read_bytes())
    before = out.read_bytes()
    assert "answers of another batch" in run(source, "-o", out, *flags, code=2).stderr
    assert out.read_bytes() == before
    run(source, "-o", out, "--overwrite", *flags)
    assert len(found_in(out)) == len(source.read_text().splitlines())


def test_errors_of_an_earlier_run_count_and_are_not_tried_again(run, tmp_path):
    source, out = written(tmp_path / "in.jsonl", [OWN, {"prompt": 3}]), tmp_path / "out.jsonl"
    for _ in range(2):
        assert "1 errors" in run(source, "-o", out, code=1).stderr
    assert len(found_in(out)) == 2


def test_two_processes_do_not_write_one_output(run, tmp_path):
    source, out = written(tmp_path / "in.jsonl", [OWN]), tmp_path / "out.jsonl"
    with Output(out):
        assert "another process writes" in run(source, "-o", out, code=2).stderr


def test_a_survey_counts_requests(tmp_path):
    file = io.BytesIO(b'{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert survey(file, Keys({}), None) == 2


def test_time_left_is_of_the_lines_that_this_run_answers(monkeypatch):
    monkeypatch.setattr("edgeinfer.batch.run.time", SimpleNamespace(monotonic=lambda: 102.0))
    progress = Progress(n_lines=10, n_before=4, n_answered=2, n_tokens=8, started=100.0)
    assert (progress.seconds, progress.seconds_left, progress.tokens_per_second) == (2.0, 4.0, 4.0)
    assert Progress(n_lines=10).seconds_left is None


# ---- The command -----------------------------------------------------------------------------------------------------


def test_flags_hold_for_lines_that_do_not_say_otherwise(run, tmp_path, model):
    source = written(tmp_path / "in.jsonl", [{"prompt": "hello"}, {"prompt": "hello", "max_tokens": 2, "seed": 4}])
    out = tmp_path / "out.jsonl"
    run(source, "-o", out, "-n", 5, "-s", 3, "--parallel", 2, "-q")
    found = sorted(found_in(out), key=lambda each: each["id"])
    assert [each["seed"] for each in found] == [3, 4]
    assert found[0]["usage"]["completion_tokens"] <= 5 and found[1]["usage"]["completion_tokens"] <= 2


def test_standard_input_and_output(run):
    result = run("-", "-o", "-", text=json.dumps(OWN) + "\n" + json.dumps(OWN | {"id": "x"}) + "\n")
    assert sorted(str(json.loads(line)["id"]) for line in result.stdout.splitlines()) == ["1", "x"]
    assert "2 answered" in result.stderr


@pytest.mark.parametrize("wrong", [["-o", "out"], ["m.gguf", "-o", "out"], ["in"], ["none.jsonl", "-o", "out"]])
def test_a_wrong_command_line_is_refused(run, wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(*wrong, code=1 if wrong[0] == "none.jsonl" else 2)
    assert not os.path.exists("out")


def test_the_input_is_no_output(run, tmp_path):
    source = written(tmp_path / "in.jsonl", [OWN])
    run(source, "-o", source, code=2)
    assert found_in(source) == [OWN]


def test_a_line_that_is_written_when_ctrl_c_comes_counts(run, tmp_path, monkeypatch):
    source, out, write = written(tmp_path / "in.jsonl", [OWN] * 5), tmp_path / "out.jsonl", Output.write

    def interrupted(output, line):
        write(output, line)
        if out.read_bytes().count(b"\n") in (2, 4):
            raise KeyboardInterrupt

    monkeypatch.setattr(Output, "write", interrupted)
    assert "2 lines are answered" in run(source, "-o", out, code=130).stderr
    assert "4 lines are answered" in run(source, "-o", out, code=130).stderr
    assert "1 answered, 4 before" in run(source, "-o", out).stderr


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX")
@pytest.mark.parametrize("kind", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_run_that_is_ended_goes_on(model, tmp_path, kind):
    source = written(tmp_path / "in.jsonl", [{"prompt": f"hello {i}", "max_tokens": 60, "seed": i} for i in range(150)])
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "edgeinfer", "batch", "-o", out, "-m", model, "--drafter", "none"]
    reader, writer = os.pipe()  # whose end does not come: however fast the run is, it is not over
    os.write(writer, b"".join(source.read_bytes().splitlines(keepends=True)[:-1]))
    process = subprocess.Popen([*command, "-"], stdin=reader, stderr=subprocess.PIPE, text=True)
    os.close(reader)
    deadline = time.monotonic() + 100
    while not (out.exists() and out.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(getattr(signal, kind))
    said = process.communicate(timeout=60)[1]
    os.close(writer)
    number = getattr(signal, kind)
    assert process.returncode == (-number if kind == "SIGKILL" else 128 + number), said
    n_before = out.read_bytes().count(b"\n")
    if kind != "SIGKILL":
        assert f"{n_before} lines are answered" in said and n_before < 150
    again = subprocess.run([*command, source], stderr=subprocess.PIPE, text=True, check=True, timeout=100)
    assert f"{150 - n_before} answered, {n_before} before" in again.stderr
    found = found_in(out)
    assert sorted(each["id"] for each in found) == list(range(1, 151))
