"""From tools and the options of a request to the constraint under which a model may call them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from edgeinfer.common.errors import InvalidArgument, InvalidConstraint, warn
from edgeinfer.constraints.options import Wanted, split_options, wanted_of
from edgeinfer.models.call_formats import CallFormat
from edgeinfer.models.tokenizer import Tokenizer
from edgeinfer.tools.grammar import Marks, tool_grammar
from edgeinfer.tools.options import Tool, ToolUse


class Reads(Protocol):
    """What reads constraints: an Engine."""

    tokenizer: Tokenizer

    def check_constraint(self, wanted: Wanted) -> None:
        """Read a constraint. Raises InvalidConstraint, BackendUnavailable."""
        ...


def asked_for(
    engine: Reads, format: CallFormat, use: ToolUse, opened: bool, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Options of a request with the constraint of the tools.

    use: with at least one tool.  opened: whether the prompt has begun the reasoning.  options: may have schema or json,
    of an answer that is no call. Raises InvalidArgument for another constraint beside tools, InvalidConstraint for
    parameters that are no JSON Schema.
    """
    given, others = split_options(options)
    answer = wanted_of(given)
    if answer is not None and answer.form != "schema":
        raise InvalidArgument(f"beside tools, an answer may have a schema: found {answer.name}")
    tokenizer = engine.tokenizer
    marks = Marks(dict(zip(tokenizer.special_texts, tokenizer.special_ids, strict=True)), frozenset(tokenizer.stop_ids))

    def wanted(use: ToolUse, lenient: frozenset[str] = frozenset()) -> Wanted:
        schema = None if answer is None else answer.source
        source = tool_grammar(format, use, marks, opened=opened, schema=schema, lenient=lenient)
        made = Wanted("tools", "lark", source, includes_reasoning=format.has_channels)
        return made if answer is None else replace(made, model=answer.model, is_json_answer=True)

    constraint = wanted(use)
    try:
        engine.check_constraint(constraint)
    except InvalidConstraint:
        lenient = frozenset(tool.name for tool in use.callable_tools if _is_refused(engine, wanted, tool))
        if not lenient:
            raise
        constraint = wanted(use, lenient)
        engine.check_constraint(constraint)
    return {**others, "grammar": constraint}


def _is_refused(engine: Reads, wanted: Any, tool: Tool) -> bool:
    """Whether the parameters of a tool have keywords that cannot be enforced. Raises InvalidConstraint if all fails."""
    alone = ToolUse((tool,), "required", False)
    try:
        engine.check_constraint(wanted(alone))
        return False
    except InvalidConstraint as refused:
        try:
            engine.check_constraint(wanted(alone, frozenset((tool.name,))))
        except InvalidConstraint as error:
            raise InvalidConstraint(f"the parameters of the tool {tool.name} cannot be used: {error}") from None
        warn(f"the parameters of the tool {tool.name} are not enforced in full: {refused}")
        return True
