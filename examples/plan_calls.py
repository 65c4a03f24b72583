"""Plan several calls at once, then run independent ones together, after LLMCompiler (Kim et al., arXiv:2312.04511).

The model writes a plan, a JSON list of calls; "$1" in an argument stands for the result of the first call. The grammar
of the plan is a JSON Schema made of the tools, so that every plan can run. A call starts when the results that it needs
are there.

Run: python examples/plan_calls.py [MODEL] ["a task"]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import edgeinfer
from edgeinfer.tools.options import Tool, tool_of

_REFERENCE = re.compile(r"\$(\d+)")
MOST_CALLS = 6


@dataclass(frozen=True)
class Step:
    """A call of a plan."""

    tool: str
    arguments: dict[str, Any]

    @property
    def needs(self) -> frozenset[int]:
        """Numbers, from 1 on, of the calls whose results it uses."""
        return frozenset(int(number) for number in _REFERENCE.findall(json.dumps(self.arguments)))


def plan_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """The JSON Schema of a plan: each argument is of its own type, or a reference to a result."""
    calls = [
        {
            "type": "object",
            "properties": {"tool": {"const": tool.name}, "arguments": _with_references(tool.parameters)},
            "required": ["tool", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": MOST_CALLS}


def _with_references(parameters: Any) -> dict[str, Any]:
    reference = {"type": "string", "pattern": r"^\$[1-9]$"}
    properties = {name: {"anyOf": [part, reference]} for name, part in parameters.get("properties", {}).items()}
    return {**parameters, "properties": properties, "additionalProperties": False}


def read_plan(value: Sequence[dict[str, Any]]) -> list[Step]:
    """The steps of a plan. Raises ValueError where one needs a result that comes later, or its own."""
    steps = [Step(call["tool"], call["arguments"]) for call in value]
    for number, step in enumerate(steps, start=1):
        if any(not 1 <= needed < number for needed in step.needs):
            raise ValueError(f"call {number} needs results that are not there before it: {sorted(step.needs)}")
    return steps


def run_plan(steps: Sequence[Step], functions: dict[str, Callable[..., Any]]) -> list[Any]:
    """The results of the steps, in their order. Steps that need nothing of each other run at the same time."""
    futures: list[Future[Any]] = []
    with ThreadPoolExecutor(max(1, len(steps))) as threads:
        for step in steps:  # each waits only for what comes before it, so one thread a step is enough
            futures.append(threads.submit(_run, step, functions[step.tool], tuple(futures)))
        return [future.result() for future in futures]


def _run(step: Step, function: Callable[..., Any], before: Sequence[Future[Any]]) -> Any:
    results = {number: before[number - 1].result() for number in step.needs}
    return function(**_filled(step.arguments, results))


def _filled(value: Any, results: dict[int, Any]) -> Any:
    """Arguments with results in the place of references; a whole argument keeps the type of the result."""
    if isinstance(value, dict):
        return {name: _filled(part, results) for name, part in value.items()}
    if isinstance(value, list):
        return [_filled(part, results) for part in value]
    if not isinstance(value, str):
        return value
    if whole := _REFERENCE.fullmatch(value):
        return results[int(whole[1])]
    return _REFERENCE.sub(lambda found: str(results[int(found[1])]), value)


def plan(engine: edgeinfer.Engine, task: str, tools: Sequence[Tool], **options: Any) -> list[Step]:
    """The plan of a model for a task. Raises ValueError where it has none."""
    described = "\n".join(json.dumps(tool.declaration["function"]) for tool in tools)
    message = (
        f"Plan calls of these functions:\n{described}\n\nAnswer with a JSON list of calls, such as "
        '[{"tool": "f", "arguments": {"x": 1}}, {"tool": "g", "arguments": {"y": "$1"}}], where "$1" stands for the '
        f"result of the first call. Use as few calls as the task needs.\n\nTask: {task}"
    )
    answer = engine.chat().send(message, schema=plan_schema(tools), **options)
    for _ in answer:
        pass
    if answer.parsed is None:
        raise ValueError(f"there is no plan: {answer.completion.parse_error}")
    return read_plan(answer.parsed)


# ---- An example ------------------------------------------------------------------------------------------------------


def population(city: str) -> int:
    """Give the number of people of a city."""
    return {"Paris": 2_103_000, "Rome": 2_755_000}.get(city, 100_000)


def difference(first: int, second: int) -> int:
    """Subtract the second number from the first."""
    return first - second


def main() -> None:
    """Plan, and run the plan."""
    model = sys.argv[1] if len(sys.argv) > 1 else None
    task = sys.argv[2] if len(sys.argv) > 2 else "How many more people live in Rome than in Paris?"
    functions = [population, difference]
    with edgeinfer.load(model) as engine:
        try:
            steps = plan(engine, task, [tool_of(each) for each in functions], max_tokens=300, temperature=0)
        except ValueError as error:
            raise SystemExit(str(error)) from None
    for number, step in enumerate(steps, start=1):
        print(f"{number}. {step.tool}({step.arguments})")
    print(run_plan(steps, {each.__name__: each for each in functions}))


if __name__ == "__main__":
    main()
