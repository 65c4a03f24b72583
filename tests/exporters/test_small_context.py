"""Packages with a small context: each target says the least that it takes, before anything is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from parts import is_there, missing
from tiny_models import write_tiny_model

from edgeinfer import cli
from edgeinfer.common.errors import InvalidArgument
from edgeinfer.exporters.checks.runtime import N_TOKENS, answer_tokens, check_prompt
from edgeinfer.exporters.pte import PteTarget
from edgeinfer.exporters.request import Request
from edgeinfer.models.gguf import ModelFile

PARTS = {"genai": "genai", "litertlm": "litert", "onnx": "onnx", "mnn": "onnx"}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def need(to: str) -> None:
    if to in PARTS and not is_there(PARTS[to]):
        missing(PARTS[to], f"--to {to} cannot be written")


def source(to: str, folder: Path) -> Path:
    if to == "fpga":
        types = {"token_embd": "BF16"}
        return write_tiny_model(folder / "a.gguf", "bitnet-b1.58", "I2_S", tied=True, types=types)
    return write_tiny_model(folder / "a.gguf", "qwen3", "F32")


@pytest.mark.parametrize("n_ctx", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("to, options", [("genai", ["--draft", "ngram"]), *((to, []) for to in (*PARTS, "fpga"))])
def test_the_least_context_is_said_and_nothing_is_written(
    to: str, options: list[str], n_ctx: int, tmp_path: Path
) -> None:
    need(to)
    model, out = source(to, tmp_path), tmp_path / "out.litertlm"
    result = run("export", model, "--to", to, "-c", n_ctx, "-o", out, *options, "--dry-run")
    said = " ".join(result.stderr.split())
    if to == "onnx" or (n_ctx >= 4 and to == "fpga"):  # onnx checks as many tokens as there is room for
        assert result.exit_code == 0
        return
    if n_ctx == 64 and result.exit_code == 0:
        return
    found = re.search(rf"do(es)? not fit into {n_ctx} tokens \(-c\): take at least (\d+)", said)
    assert result.exit_code == 2 and found is not None and int(found[2]) > n_ctx, said
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]
    assert run("export", model, "--to", to, "-c", found[2], "-o", out, *options, "--dry-run").exit_code == 0
    less = run("export", model, "--to", to, "-c", int(found[2]) - 1, "-o", out, *options, "--dry-run")
    assert less.exit_code == 2


@pytest.mark.parametrize("to, options", [("genai", []), ("genai", ["--draft", "ngram"]), ("fpga", [])])
def test_the_least_context_is_enough(to: str, options: list[str], tmp_path: Path) -> None:
    need(to)
    model, out = source(to, tmp_path), tmp_path / "out"
    found = re.search(r"take at least (\d+)", run("export", model, "--to", to, "-c", 1, "-o", out, *options).stderr)
    assert found is not None
    result = run("export", model, "--to", to, "-c", found[1], "-o", out, *options)
    assert result.exit_code == 0 and "check: " in result.stderr, result.stderr


def test_an_unchecked_package_may_be_as_small_as_one_likes(tmp_path: Path) -> None:
    need("genai")
    model = source("genai", tmp_path)
    assert run("export", model, "--to", "genai", "-c", 1, "--no-check", "-o", tmp_path / "out").exit_code == 0


def test_the_answer_takes_what_the_prompt_leaves(tmp_path: Path) -> None:
    model = source("pte", tmp_path)
    with ModelFile.open(model) as file:
        n = len(check_prompt(file)[1])
        assert [answer_tokens(file, n + more) for more in (1, 5, N_TOKENS, 1000)] == [1, 5, N_TOKENS, N_TOKENS]
        assert answer_tokens(file, n + 6, spare=5) == 1
        with pytest.raises(
            InvalidArgument, match=f"does not fit into {n + 5} tokens .* at least {n + 6}, or --no-check"
        ):
            answer_tokens(file, n + 5, spare=5)
    for n_ctx in (1, n):
        with pytest.raises(InvalidArgument, match=f"at least {n + 1}, or --no-check"):
            PteTarget().plan(Request(model, tmp_path / "out", n_ctx=n_ctx))
