"""The environment: jinja2's immutable sandbox, with a budget."""

from __future__ import annotations

from collections.abc import Iterator
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Joiner, Namespace

from edgeinfer.models.provenance import joined
from edgeinfer.models.template_sandbox.budget import (
    BUDGET,
    counted,
    measured,
)
from edgeinfer.models.template_sandbox.filters import FILTERS, TESTS
from edgeinfer.models.template_sandbox.functions import FUNCTIONS, call_method
from edgeinfer.models.template_sandbox.guards import Guards, checked_depth
from edgeinfer.models.template_sandbox.operators import OPERATOR_CHECKS, BoundFormat

MAX_SOURCE_TOKENS = 1 << 14  # the longest of 70 templates in use has 2,500, nested 29 deep


class _Limits(Extension):
    """Refuses a source of too many tokens while it is read."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for n_tokens, token in enumerate(stream):
            if n_tokens == MAX_SOURCE_TOKENS:
                raise jinja2.TemplateSyntaxError(f"more than {MAX_SOURCE_TOKENS} tokens", token.lineno)
            yield token


class _Generation(Extension):
    """{% generation %}, with which some templates mark for training what the assistant says."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(lineno)


@pass_context
def _printed(context: Context, value: Any) -> str:
    """What {{ value }} writes."""
    return counted(value if isinstance(value, str) else str(measured(value)))


_DICT_ATTRIBUTES = frozenset(dir(dict))


class Environment(ImmutableSandboxedEnvironment):
    """Lets templates use what this package lists, and counts what they do."""

    intercepted_binops = frozenset(OPERATOR_CHECKS)
    concat = staticmethod(joined)  # of what a macro, a call or a {% set %} block writes

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _Generation, _Limits],
            optimized=False,  # or expressions of constants would be computed when the template is compiled, untracked
            finalize=_printed,
        )
        self._safe: dict[tuple[type, str], bool] = {}
        self.filters = FILTERS
        self.tests = TESTS
        self.globals = dict(FUNCTIONS)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = Guards().visit(checked_depth(super()._parse(source, name, filename)))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator, once its result is known to be small enough."""
        OPERATOR_CHECKS[operator](left, right)
        return counted(super().call_binop(context, operator, left, right))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """See jinja2."""
        # As below, only quicker: what most templates do most.
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is Namespace and attribute[:1] != "_":
            values = object.__getattribute__(obj, "_Namespace__attrs")
            return values[attribute] if attribute in values else self.undefined(obj=obj, name=attribute)
        value = super().getattr(obj, attribute)
        if isinstance(value, (BuiltinMethodType, MethodType, BoundFormat)):
            BUDGET.get().step(256)
        return value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """See jinja2."""
        known = (type(obj), attr)  # all that it goes by
        if known not in self._safe:
            if len(self._safe) > 4096:
                self._safe.clear()
            self._safe[known] = super().is_safe_attribute(obj, attr, value)
        return self._safe[known]

    def getitem(self, obj: Any, argument: Any) -> Any:
        """See jinja2."""
        return super().getitem(obj, measured(argument) if isinstance(argument, tuple) else argument)

    def wrap_str_format(self, value: Any) -> Any:
        """A format method, bound; None for anything else."""
        if isinstance(value, BuiltinMethodType) and isinstance(value.__self__, str):
            if value.__name__ in ("format", "format_map"):
                return BoundFormat(self, value.__self__, value.__name__ == "format_map")
        return None

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        """Call a method or function that is listed, a macro or a loop. Raises SecurityError for others."""
        BUDGET.get().step(256)
        if isinstance(__obj, (Macro, LoopContext, Undefined)):
            with BUDGET.get().call():
                return counted(super().call(__context, __obj, *args, **kwargs))
        weighed = list(map(measured, args))
        own = ("_loop_vars", "_block_vars")  # jinja2's, for functions that take its context
        kwargs = {name: measured(value) for name, value in kwargs.items() if name not in own}
        if isinstance(__obj, (BuiltinMethodType, MethodType)):
            return counted(call_method(__obj, weighed, kwargs))
        if isinstance(__obj, (BoundFormat, Joiner)) or any(__obj is function for function in FUNCTIONS.values()):
            return counted(__obj(*weighed, **kwargs))
        raise SecurityError(f"calls {type(__obj).__name__}")


ENVIRONMENT = Environment()
