"""`edgeinfer serve` as a process: where it listens, what it refuses, how it ends."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from tiny_models import write_tiny_model

SECONDS = 120.0  # for a process to do anything


@pytest.fixture
def start(model):
    """Starts servers, and ends them after the test."""
    started = []

    def start(*arguments, **variables):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EDGEINFER_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "edgeinfer", "serve", "-m", str(model), "--drafter", "none", *arguments],
            env=environment | {"RES_OPTIONS": "timeout:1 attempts:1"} | variables,  # where no network resolves names
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=SECONDS)


def port_of(process):
    """Where it listens, once it does."""
    for line in process.stderr:
        if found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line):
            return int(found[1])
    raise AssertionError("it did not listen")


def request(port, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def test_the_plan_counts_its_threads(start):
    port = port_of(start("--port", "0", "-t", "1", "-np", "3"))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    found = re.search(r'memory_planned_bytes\{model="[^"]*",purpose="threads"\} (\d+)', text)
    assert found and int(found[1]) == (3 + 64 + 9) * (64 << 10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_and_ends_on_a_signal(start, number):
    process = start("--port", "0", "-a", "my-model", "-a", "other")
    port = port_of(process)
    assert request(port, "GET", "/health")[0] == 200
    assert request(port, "GET", "/v1/models")[1]["data"][0]["id"] == "my-model"
    for name in ("my-model", "other", "tiny", "tiny.gguf"):
        assert request(port, "POST", "/v1/chat/completions", CHAT | {"model": name})[0] == 200
    assert request(port, "POST", "/v1/chat/completions", CHAT | {"model": "none"})[0] == 404
    process.send_signal(number)
    out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0 and out == ""
    assert "POST /v1/chat/completions 200" in errors and "Traceback" not in errors


def test_a_key_is_read_from_a_file_or_a_variable(start, tmp_path):
    (tmp_path / "keys").write_text("# of the house\nsecret-one\n")
    for arguments, variables in (
        (("--api-key-file", str(tmp_path / "keys")), {}),
        ((), {"EDGEINFER_API_KEY": "secret-one"}),
    ):
        process = start("--port", "0", "-q", *arguments, **variables)
        port = port_of(process)
        assert request(port, "POST", "/v1/chat/completions", CHAT)[0] == 401
        assert request(port, "POST", "/v1/chat/completions", CHAT, authorization="Bearer secret-one")[0] == 200
        process.terminate()
        assert "secret" not in process.communicate(timeout=SECONDS)[1] and process.returncode == 0


def test_requests_that_say_nothing_have_the_sampling_of_the_command(start):
    port = port_of(start("--port", "0", "--temp", "0.5", "--top-k", "7", "-s", "11", "-n", "3", "-v"))
    said = [request(port, "POST", "/completion", {"prompt": "hello"})[1] for _ in range(2)]
    settings = said[0]["generation_settings"]
    assert (settings["temperature"], settings["top_k"], settings["seed"]) == (0.5, 7, 11)
    assert said[0]["content"] == said[1]["content"] and said[0]["tokens_predicted"] <= 3
    own = request(port, "POST", "/completion", {"prompt": "hello", "temperature": 0, "seed": 1})[1]
    assert own["generation_settings"]["temperature"] == 0 and own["generation_settings"]["seed"] == 1
    assert request(port, "GET", "/props")[1]["default_generation_settings"]["params"]["seed"] == 11
    assert "hello" in request(port, "POST", "/v1/chat/completions", CHAT)[1]["__verbose"]["prompt"]


def test_templates_tags_and_what_is_hidden(start, tmp_path):
    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}{{ enable_thinking }}"
    (tmp_path / "t.jinja").write_text(source)
    hides = ("--no-ui", "--no-slots", "--tags", "chat, small")
    port = port_of(start("--port", "0", "--chat-template-file", str(tmp_path / "t.jinja"), "-rea", "off", *hides))
    assert request(port, "POST", "/apply-template", {"messages": CHAT["messages"]})[1]["prompt"] == "<hello>False"
    assert request(port, "GET", "/props")[1]["chat_template"] == source
    assert request(port, "GET", "/")[0] == 404 and request(port, "GET", "/slots")[0] == 501
    assert request(port, "GET", "/v1/models")[1]["data"][0]["tags"] == ["chat", "small"]


def test_it_listens_on_several_addresses(start):
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    process = start("--port", "0", "--host", "127.0.0.1, ::1")
    line = next(line for line in process.stderr if "listening on" in line)
    port = int(re.search(r"http://127\.0\.0\.1:(\d+), http://\[::1\]:\1$", line.strip())[1])
    assert request(port, "GET", "/health")[0] == 200
    connection = http.client.HTTPConnection("::1", port, timeout=SECONDS)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["--host", "127.0.0.1,0.0.0.0"], 2, "--api-key-file FILE, or --no-auth"),
        (["--host", " ,"], 2, "--host names no address"),
        (["--temp", "-1"], 2, "--temp"),
        (["--chat-template", "{% if %}"], 3, "the chat template is broken"),
        (["--chat-template", "nothing"], 3, "must be Jinja, or the name of a known one"),
        (["--chat-template", "chatml", "--chat-template-file", "/dev/null"], 2, "both give a template"),
        (["--host", "0.0.0.0"], 2, "--api-key-file FILE, or --no-auth"),
        (["--host", "no.such.host.invalid"], 2, "--no-auth"),
        (["--host", "no.such.host.invalid", "--no-auth"], 1, "cannot listen on no.such.host.invalid"),
        (["--api-key-file", "/no/such/file"], 2, "/no/such/file"),
    ],
)
def test_what_it_cannot_do_it_says_before_a_model_is_loaded(start, arguments, code, said):
    process = start("--port", "0", *arguments)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == code and said in " ".join(errors.split()), errors


def test_a_port_that_is_taken(start):
    process = start("--port", "0")
    port = port_of(process)
    other = start("--port", str(port))
    assert other.wait(SECONDS) == 1 and "cannot listen" in other.stderr.read()


def test_several_models_of_a_folder(start, model, tmp_path):
    write_tiny_model(tmp_path / "other.gguf", seed=5)
    process = start("--port", "0", "--models", str(tmp_path), "--budget", "1GiB")
    port = port_of(process)
    assert [each["id"] for each in request(port, "GET", "/v1/models")[1]["data"]] == ["tiny", "other"]
    for name in ("other", "tiny"):
        assert request(port, "POST", "/v1/chat/completions", CHAT | {"model": name})[0] == 200
    process.terminate()
    assert "Traceback" not in process.communicate(timeout=SECONDS)[1] and process.returncode == 0
