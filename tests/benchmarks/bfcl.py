"""Questions of the Berkeley Function-Calling Leaderboard, and its own judge.

`folder` is where the wheel bfcl-eval (Apache-2.0) was unpacked: pip download --no-deps bfcl-eval, then unzip.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TYPES = {"dict": "object", "float": "number", "tuple": "array", "hashtable": "object", "long": "integer"}


@dataclass(frozen=True)
class Question:
    """A question with the tools that are there, and the calls that are right."""

    id: str
    messages: list[dict[str, str]]
    functions: list[dict[str, Any]]  # as the file has them
    truth: list[dict[str, Any]]

    @property
    def text(self) -> str:
        """What the user says last."""
        return self.messages[-1]["content"]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The functions as OpenAI declares them."""
        return [tool_of(function) for function in self.functions]


def questions(folder: Path, category: str) -> list[Question]:
    """The questions of a category, such as simple_python."""
    data = folder / "bfcl_eval" / "data"
    name = f"BFCL_v4_{category}.json"
    if not (data / name).exists():
        raise SystemExit(f"{data / name} is missing: unpack the wheel of bfcl-eval in {folder}")
    truths = {each["id"]: each["ground_truth"] for each in _lines(data / "possible_answer" / name)}
    return [
        Question(each["id"], each["question"][0], each["function"], truths[each["id"]])
        for each in _lines(data / name)
        if each["id"] in truths
    ]


def tool_of(function: dict[str, Any]) -> dict[str, Any]:
    """A function as OpenAI declares it, with the types of JSON Schema."""
    parameters = _schema(function["parameters"])
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _schema(given: Any) -> Any:
    """A schema of the data, whose types are those of Python, as JSON Schema."""
    if isinstance(given, list):
        return [_schema(part) for part in given]
    if not isinstance(given, dict):
        return given
    found = {key: _schema(part) for key, part in given.items() if key not in ("default", "optional", "format")}
    kind = found.get("type")
    if isinstance(kind, str):
        if kind == "any":
            del found["type"]
        else:
            found["type"] = _TYPES.get(kind, kind)
    return found


def judged(question: Question, calls: list[dict[str, Any]], category: str) -> str:
    """ "" where the calls are right, else what is wrong, by the AST checker of bfcl-eval."""
    checker = _checker()
    given = [{call["name"]: call["arguments"]} for call in calls]
    language = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON
    kind = category if category != "simple_python" else "simple"
    try:
        found = checker.ast_checker(question.functions, given, question.truth, language, kind, "model")
    except Exception as error:  # it fails for some answers of a wrong form
        return f"{type(error).__name__}: {error}"
    return "" if found["valid"] else str(found.get("error"))[:200]


def open_judge(folder: Path) -> None:
    """Make the judge importable: its table of models would need all their libraries."""
    sys.path.insert(0, str(folder))
    stub: Any = types.ModuleType("bfcl_eval.constants.model_config")
    stub.MODEL_CONFIG_MAPPING = {"model": types.SimpleNamespace(underscore_to_dot=False)}
    sys.modules["bfcl_eval.constants.model_config"] = stub
    for name in ("java", "js"):  # parsers of other languages, which need tree_sitter
        module: Any = types.ModuleType(f"bfcl_eval.eval_checker.ast_eval.type_convertor.{name}_type_converter")
        setattr(module, f"{name}_type_converter", None)
        sys.modules[module.__name__] = module


def _checker() -> Any:
    return importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
