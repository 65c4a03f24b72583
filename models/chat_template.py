"""Chat templates: Jinja source from a model file, that is, a program written by a stranger.

It runs in this process, in jinja2's immutable sandbox, which keeps it away from Python's internals but limits neither
time nor memory. Added here are these limits, so that any thread may render without a signal or another process:

- Operations whose result is longer than their operands (* + ~ % **, join, replace, indent, format) are refused before
  they run if the result would be too long. All memory allocated is counted, also what bodies of loops and macros write.
- Loops, macros, calls, filters, tests and comparisons count as steps and check the clock.
- Values that Python would print, compare, sort or hash in one go are measured first: a list that contains one list many
  times, ten levels deep, is small in memory but endless in print.
- Only the filters, tests and methods named here exist.

Special tokens come from the template's own characters only: see edgeinfer.models.provenance. Its literals are trusted,
texts of messages are not, and each allowed operation either keeps the marks or gives an untrusted text.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from itertools import islice
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn, TypeVar

import jinja2
from jinja2 import filters, nodes, pass_context, pass_environment, pass_eval_context, tests
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.lexer import Token, TokenStream
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from edgeinfer.errors import TemplateError
from edgeinfer.models.gguf import ModelFile
from edgeinfer.models.known_templates import source_of
from edgeinfer.models.provenance import Text, is_trusted, joined, plain, recased, replaced, trusted
from edgeinfer.models.tokenizer import Tokenizer

MAX_SOURCE_BYTES = 256 << 10
MAX_SOURCE_TOKENS = 1 << 14  # the longest of 70 templates in use has 2,500, nested 29 deep
MAX_SOURCE_DEPTH = 100
MAX_SECONDS = 1.5  # of the processor, with what cannot look at the clock for a while 2
MAX_LENGTH = 4 << 20  # characters of the conversation, and of any text on the way
MAX_MEMORY_BYTES = 128 << 20  # of all that is made on the way, kept or not
MAX_STEPS = 1_000_000
STEPS_A_PAIR = 8  # more steps, and time in proportion, for each two messages: some templates compare all with all
MAX_DEPTH = 64  # of lists and mappings in each other, and of macros that call macros
MAX_INT_BITS = 1 << 14

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_T = TypeVar("_T")

# ---- The budget of a rendering --------------------------------------------------------------------------------------


class _Budget:
    """What is left of the limits."""

    def __init__(self, n_messages: int) -> None:
        self.max_steps = self._steps = MAX_STEPS + STEPS_A_PAIR * n_messages * (n_messages - 1)
        self.max_seconds = MAX_SECONDS * self.max_steps / MAX_STEPS
        self._bytes = MAX_MEMORY_BYTES
        self._depth = 0
        self._end = time.thread_time() + self.max_seconds
        self._look = time.monotonic() + self.max_seconds

    def step(self, n_bytes: int = 0) -> None:
        """Count a step that makes n_bytes. Raises TemplateError."""
        self._steps -= 1
        self._bytes -= n_bytes
        if self._bytes < 0:
            raise TemplateError(f"the chat template makes more than {MAX_MEMORY_BYTES >> 20} MiB of texts and lists")
        if self._steps < 0:
            raise TemplateError(f"the chat template takes more than {self.max_steps} steps")
        now = time.monotonic()
        if now > self._look:  # no sooner can the thread have used its time, and this clock is the quicker one to read
            left = self._end - time.thread_time()
            if left < 0:
                raise TemplateError(f"the chat template takes more than {self.max_seconds:.3g} s")
            self._look = now + left

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count what runs inside as one level deeper. Raises TemplateError."""
        if self._depth == MAX_DEPTH:
            raise TemplateError(f"the chat template calls its macros more than {MAX_DEPTH} deep")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


_BUDGET: ContextVar[_Budget] = ContextVar("budget")


def _fits(length: int) -> None:
    """Refuse a text or list of this length before it is made."""
    if length > MAX_LENGTH:
        raise TemplateError(f"the chat template makes a text or list longer than {MAX_LENGTH}")


def _made(value: _T) -> _T:
    """The value, once its memory is taken from the budget."""
    n_bytes = 0
    if isinstance(value, (str, list, tuple, dict)):
        n_bytes = sys.getsizeof(value)
    if isinstance(value, (list, tuple)):
        # New elements as well, if it is the result of a split or a slice of a text.
        n_bytes += (112 if value and isinstance(value[0], Text) else 48) * len(value)
    elif isinstance(value, int) and (n_bits := value.bit_length()) > 64:
        if n_bits > MAX_INT_BITS:
            raise TemplateError(f"the chat template makes an integer of more than {MAX_INT_BITS} bits")
        n_bytes = n_bits // 8
    _BUDGET.get().step(n_bytes)
    return value


def _sliced(value: _T) -> _T:
    """A slice, once its memory is taken from the budget; what it holds is not new."""
    _BUDGET.get().step(sys.getsizeof(value))
    return value


def _listed(value: Any) -> list[Any]:
    """The elements of something that can be looped over."""
    if isinstance(value, str):
        _fits(16 * len(value))
    elements: list[Any] = []
    rest = iter(value)
    while part := _made(list(islice(rest, 4096))):
        elements += part
        _fits(len(elements))
    return elements


def _weighed(value: Any) -> Any:
    """The value, if Python is quick to print, compare, sort or hash it; a list in place of an iterator."""
    if isinstance(value, Iterator) and not isinstance(value, LoopContext):
        value = _listed(value)
    _BUDGET.get().step()
    _weight(value)
    return value


def _weight(value: Any) -> int:
    """Characters and elements of a value, each counted as often as it would be printed. Raises TemplateError."""
    return _tree_weight(value, {}, 0)


def _tree_weight(value: Any, known: dict[int, int], depth: int) -> int:
    if isinstance(value, str):
        return len(value) + 1
    if id(value) in known:
        return known[id(value)]
    parts = _parts(value)
    if parts is None:
        return 1
    if depth == MAX_DEPTH:
        raise TemplateError(f"the chat template nests lists and mappings more than {MAX_DEPTH} deep")
    known[id(value)] = 1 + sum(_tree_weight(part, known, depth + 1) for part in parts)
    _fits(known[id(value)])
    return known[id(value)]


def _parts(value: Any) -> list[Any] | None:
    """What a container holds; None for what is none."""
    if isinstance(value, (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)):
        return list(value)
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    return [*value, *value.values()] if isinstance(value, dict) else None


# ---- Operators ------------------------------------------------------------------------------------------------------


def _check_sum(left: Any, right: Any) -> None:
    if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        _fits(len(left) + len(right))


def _check_product(left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
            _fits(len(sequence) * max(times, 0))


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_INT_BITS:
        raise TemplateError(f"the chat template makes an integer of more than {MAX_INT_BITS} bits")


def _check_difference(left: Any, right: Any) -> None:
    for operand in (left, right):  # of sets of keys: their elements are hashed
        _weighed(operand)


def _check_percent(left: Any, right: Any) -> None:
    """Refuse widths that come from elsewhere or have more than four digits; what is left can be estimated."""
    if isinstance(left, str):
        if re.search(r"%[-#0 +\d.]*\*|[%)][-#0 +]*\d{5}|\.\d{5}", left):
            raise TemplateError("the chat template formats with a width that is too large")
        _fits(len(left) + left.count("%") * (20_000 + _weight(right)))


_OPERATOR_CHECKS: dict[str, Callable[[Any, Any], None]] = {
    "+": _check_sum,
    "*": _check_product,
    "**": _check_power,
    "-": _check_difference,
    "%": _check_percent,
}


def _concat(values: list[Any]) -> str:
    """The ~ operator."""
    texts = [str(_weighed(value)) for value in values]
    _fits(sum(map(len, texts)))
    return _made(joined(texts))


class _Formatter(SandboxedFormatter):
    """str.format: every field counts, and has a small width; whole texts and the pattern's own keep their trust."""

    def vformat(self, format_string: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        self._fields: list[str] = []
        written = super().vformat(format_string, args, kwargs)
        if not is_trusted(format_string):
            return written
        fields = iter(self._fields)
        parts: list[str] = []
        for literal, name, spec, _ in self.parse(format_string):
            parts.append(trusted(literal))
            if name is not None:
                parts.append(next(islice(fields, self._n_fields(spec), None)))  # after those in the spec
        text = joined(parts)
        return text if text == written else written

    def _n_fields(self, spec: str | None) -> int:
        return sum(1 + self._n_fields(inner) for _, name, inner, _ in self.parse(spec or "") if name is not None)

    def format_field(self, value: Any, format_spec: str) -> Any:
        if re.search(r"\d{5}", format_spec):
            raise TemplateError("the chat template formats with a width that is too large")
        self._fields.append(_made(super().format_field(_weighed(value), format_spec)))
        return self._fields[-1]

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return _made(super().convert_field(_weighed(value), conversion))


class _Format:
    """A text's `format` or `format_map`, bound."""

    def __init__(self, environment: _Environment, text: str, takes_mapping: bool) -> None:
        self._format = _Formatter(environment).vformat
        self._text = text
        self._takes_mapping = takes_mapping

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        if self._takes_mapping:
            (kwargs,), args = args, ()
        return _made(self._format(self._text, args, kwargs))


# ---- Methods and functions ------------------------------------------------------------------------------------------

_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        (
            "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
            "isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex "
            "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
        ).split()
    ),
    dict: frozenset("copy get items keys values".split()),
    list: frozenset("copy count index".split()),
    tuple: frozenset("count index".split()),
    LoopContext: frozenset("changed cycle".split()),
    Cycler: frozenset("next reset".split()),
}


def _check_replace(text: str, old: str, new: str) -> None:
    if len(new) > len(old):
        _fits(len(text) + text.count(old) * (len(new) - len(old)))


def _call_method(method: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Raises SecurityError if it is none of those listed."""
    owner, name = method.__self__, method.__name__
    if name not in _METHODS.get(str if isinstance(owner, str) else type(owner), ()):
        raise SecurityError(f"calls {type(owner).__name__}.{name}")
    if name in ("count", "index") and not isinstance(owner, str):
        _weighed(owner)
    elif name in ("strip", "lstrip", "rstrip") and args and len(args[0] or "") > 1000:
        raise TemplateError(f"the chat template strips more than 1000 different characters: {len(args[0])}")
    elif name == "join":
        _fits(_weight(args[0]) + len(owner) * len(args[0]))
        return joined(*args, **{**kwargs, "separator": owner})
    elif name == "replace":
        _check_replace(owner, *args[:2])
        return replaced(owner, *args, **kwargs)
    return method(*args, **kwargs)


def _raise_exception(message: object = "") -> NoReturn:
    raise TemplateError(f"the chat template refuses the messages: {message}"[:1000])


def _strftime_now(format: str) -> str:
    if len(format) > 200:
        raise TemplateError("the chat template asks for a date in a format of more than 200 characters")
    return datetime.datetime.now().strftime(format)


_FUNCTIONS: dict[str, Any] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
    "range": safe_range,
    "dict": dict,
    "namespace": Namespace,
    "cycler": Cycler,
    "joiner": Joiner,
}


# ---- Filters and tests ----------------------------------------------------------------------------------------------


def _counted(function: Any, weighs: bool = False) -> Callable[..., Any]:
    """A filter or test as a step; weighs: it looks into its arguments, and not only at them."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if weighs:
            args = tuple(map(_weighed, args))
            kwargs = {name: _weighed(value) for name, value in kwargs.items()}
        result = function(*args, **kwargs)
        if not isinstance(result, Iterator):
            return _made(result)
        for text in (arg for arg in args if isinstance(arg, str)):
            _fits(16 * len(text))  # as _listed has it: its characters are the elements
        # Generators would run later, unseen, and chains of them crash Python when they are freed.
        return iter(_listed(result))

    return run


@pass_eval_context
def _join(context: EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    elements = _listed(value)
    if attribute is not None:
        elements = list(map(filters.make_attrgetter(context.environment, attribute), elements))
    _fits(_weight(elements) + len(str(d)) * len(elements))
    return joined(map(str, elements), str(d))


@pass_eval_context
def _replace(context: EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    _check_replace(str(s), str(old), str(new))
    return replaced(str(s), str(old), str(new), -1 if count is None else count)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = len(width) if isinstance(width, str) else width
    _fits(len(s) + (len(s.splitlines()) + 1) * (max(margin, 0) + 1))
    space = width if isinstance(width, str) else " " * width
    first_line, *lines = (s + "\n").splitlines()
    indented = [space + line if blank or line else line for line in lines]
    return (space if first else "") + joined([first_line, *indented], "\n")


@pass_environment
def _sort(environment: _Environment, value: Any, *args: Any, **kwargs: Any) -> list[Any]:
    return filters.do_sort(environment, _listed(value), *args, **kwargs)


@pass_environment
def _sum(environment: _Environment, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    elements = _listed(iterable)
    if attribute is not None:
        elements = list(map(filters.make_attrgetter(environment, attribute), elements))
    total = start
    for element in elements:
        total = environment.call_binop(None, "+", total, element)
    return total


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if not -20 <= precision <= 20:
        raise TemplateError(f"the chat template rounds to {precision} digits: -20 to 20 are allowed")
    return filters.do_round(value, precision, method)


def _int(value: Any, default: int = 0, base: int = 10) -> int:
    return default if isinstance(value, str) and len(value) > 4000 else filters.do_int(value, default, base)


def _trim(value: Any, chars: str | None = None) -> str:
    return str(_call_method(str(value).strip, [chars], {}))


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    _check_percent(str(value), kwargs or args)
    return filters.do_format(str(value), *args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: without jinja2's escapes for HTML."""
    widths = [len(indent) if isinstance(indent, str) else indent or 0, *map(len, separators or ())]
    if max(widths) > 16:
        raise TemplateError("the chat template asks for JSON with indents or separators of more than 16 characters")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    return "".join(map(_made, encoder.iterencode(value)))


def _title(value: Any) -> str:
    _fits(16 * len(str(value)))  # it splits the text into words
    return recased(str(value), filters.do_title)


def _safe(value: Any) -> str:
    """The text itself: nothing is escaped here."""
    return str(value)


_DEEP_FILTERS = "capitalize dictsort float lower max min string truncate unique upper".split()
_FLAT_FILTERS = "abs count d default first items last length map reject rejectattr reverse select selectattr".split()
_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "format": _format,
    "indent": _indent,
    "int": _int,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "safe": _safe,
    "sort": _sort,
    "sum": _sum,
    "title": _title,
    "tojson": _tojson,
    "trim": _trim,
}
_FILTERS: dict[str, Any] = {
    **{name: _counted(filters.FILTERS[name], weighs=True) for name in _DEEP_FILTERS},
    **{name: _counted(filters.FILTERS[name]) for name in _FLAT_FILTERS},
    **{name: _counted(function, weighs=True) for name, function in _OWN_FILTERS.items()},
    "list": _counted(_listed),
    # Written into the tree by _Guards; no source can name them.
    "step!": lambda n_bytes: _BUDGET.get().step(n_bytes),
    "own!": trusted,
    "sliced!": _sliced,
    "weighed!": _weighed,
    "listed!": _listed,
    "concat!": _concat,
}
_DEEP_TESTS = "!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper".split()
_FLAT_TESTS = (
    "boolean defined divisibleby even false float integer iterable mapping none number odd sameas sequence string true "
    "undefined"
).split()
_TESTS: dict[str, Any] = {
    **{name: _counted(tests.TESTS[name], weighs=True) for name in _DEEP_TESTS},
    **{name: _counted(tests.TESTS[name]) for name in _FLAT_TESTS},
}


# ---- The environment ------------------------------------------------------------------------------------------------


class _Guards(NodeTransformer):
    """Puts the checks into a parsed template that the sandbox has no hook for."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_step(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_step(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_step(node)

    def _with_step(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._step(sum(map(_written_bytes, node.body))))
        return node  # type: ignore[no-any-return]

    def _step(self, n_bytes: int) -> nodes.ExprStmt:
        return nodes.ExprStmt(self._filter("step!", nodes.Const(n_bytes)))

    def visit_If(self, node: nodes.If) -> nodes.Node:
        self.generic_visit(node)
        for body in (node.body, node.else_):
            if n_bytes := sum(map(_written_bytes, body)):
                body.insert(0, self._step(n_bytes))
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        return self._filter("own!", node) if isinstance(node.value, str) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return self._filter("own!", nodes.Const(node.data))

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = self._filter("listed!", node.dyn_args)
        return node

    visit_Filter = visit_Test = visit_Call

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter("concat!", nodes.List(node.nodes))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        sides: list[Any] = [node, *node.ops]
        for side in sides:
            if not isinstance(side.expr, nodes.Const):
                side.expr = self._filter("weighed!", self.visit(side.expr))
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = self._filter("weighed!", pair.key)  # it will be hashed
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node.node = self.visit(node.node)
        if not isinstance(node.arg, nodes.Const):  # which is looked up and not kept
            node.arg = self.visit(node.arg)
        return self._filter("sliced!", node) if isinstance(node.arg, nodes.Slice) else node

    def _filter(self, name: str, value: nodes.Expr) -> nodes.Filter:
        return nodes.Filter(value, name, [], [], None, None)

    def _refuse(self, node: nodes.Node) -> NoReturn:
        raise jinja2.TemplateSyntaxError(f"{type(node).__name__.lower()} is no part of a chat template", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = visit_Block = _refuse
    visit_EvalContextModifier = visit_ScopedEvalContextModifier = _refuse


def _checked_depth(tree: nodes.Template) -> nodes.Template:
    """The tree, if nothing that walks through it can overflow the stack."""
    level: list[nodes.Node] = [tree]
    for _ in range(MAX_SOURCE_DEPTH):
        level = [child for node in level for child in node.iter_child_nodes()]
    if level:
        raise jinja2.TemplateSyntaxError(f"nested more than {MAX_SOURCE_DEPTH} deep", level[0].lineno)
    return tree


def _written_bytes(node: nodes.Node) -> int:
    """About what running a node once makes without a call; what is in loops, macros and branches counts there."""
    if isinstance(node, (nodes.Macro, nodes.CallBlock)):
        return 1000
    if isinstance(node, nodes.Const):
        return len(node.value) if isinstance(node.value, str) else 0
    own = 0
    if isinstance(node, (nodes.List, nodes.Tuple, nodes.Output)):
        own = 64 + 8 * len(node.items if not isinstance(node, nodes.Output) else node.nodes)
    elif isinstance(node, (nodes.Dict, nodes.Pair, nodes.For)):
        own = 128
    elsewhere = {"For": ("body",), "If": ("body", "else_")}.get(type(node).__name__)
    fields = node.iter_child_nodes(exclude=elsewhere)
    return own + sum(map(_written_bytes, fields))


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
    return _made(value if isinstance(value, str) else str(_weighed(value)))


_DICT_ATTRIBUTES = frozenset(dir(dict))


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(_OPERATOR_CHECKS)
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
        self.filters = _FILTERS
        self.tests = _TESTS
        self.globals = dict(_FUNCTIONS)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Guards().visit(_checked_depth(super()._parse(source, name, filename)))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _OPERATOR_CHECKS[operator](left, right)
        return _made(super().call_binop(context, operator, left, right))

    def getattr(self, obj: Any, attribute: str) -> Any:
        # As below, only quicker: what most templates do most.
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is Namespace and attribute[:1] != "_":
            values = object.__getattribute__(obj, "_Namespace__attrs")
            return values[attribute] if attribute in values else self.undefined(obj=obj, name=attribute)
        value = super().getattr(obj, attribute)
        if isinstance(value, (BuiltinMethodType, MethodType, _Format)):
            _BUDGET.get().step(256)
        return value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        known = (type(obj), attr)  # all that it goes by
        if known not in self._safe:
            if len(self._safe) > 4096:
                self._safe.clear()
            self._safe[known] = super().is_safe_attribute(obj, attr, value)
        return self._safe[known]

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, _weighed(argument) if isinstance(argument, tuple) else argument)

    def wrap_str_format(self, value: Any) -> Any:
        if isinstance(value, BuiltinMethodType) and isinstance(value.__self__, str):
            if value.__name__ in ("format", "format_map"):
                return _Format(self, value.__self__, value.__name__ == "format_map")
        return None

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902
        _BUDGET.get().step(256)
        if isinstance(__obj, (Macro, LoopContext, Undefined)):
            with _BUDGET.get().call():
                return _made(super().call(__context, __obj, *args, **kwargs))
        weighed = list(map(_weighed, args))
        own = ("_loop_vars", "_block_vars")  # jinja2's, for functions that take its context
        kwargs = {name: _weighed(value) for name, value in kwargs.items() if name not in own}
        if isinstance(__obj, (BuiltinMethodType, MethodType)):
            return _made(_call_method(__obj, weighed, kwargs))
        if isinstance(__obj, (_Format, Joiner)) or any(__obj is function for function in _FUNCTIONS.values()):
            return _made(__obj(*weighed, **kwargs))
        raise SecurityError(f"calls {type(__obj).__name__}")


_ENVIRONMENT = _Environment()


# ---- Messages -------------------------------------------------------------------------------------------------------


# Roles that templates build control tokens of ("<|" + role + "|>"). Any other one is a text like the content.
_ROLES = frozenset(
    (
        "assistant available_tools bot context developer document documents environment function gpt human ipython "
        "model observation system thinking tool tool_call tool_response tools user"
    ).split()
)


def _copied(value: Any, depth: int = 0) -> Any:
    """The value in plain lists and dicts, texts as they are but known roles trusted. Raises TemplateError."""
    if isinstance(value, str):
        return value if type(value) is Text else plain(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if depth < MAX_DEPTH // 2:
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            copy = {plain(key): _copied(part, depth + 1) for key, part in value.items()}
            role = copy.get("role")
            if isinstance(role, str) and role in _ROLES:
                copy["role"] = trusted(role)
            return copy
        if isinstance(value, (list, tuple)):
            return [_copied(part, depth + 1) for part in value]
    raise TemplateError(
        f"a message must be made of texts, numbers, lists and mappings by texts: found {type(value).__name__}"
    )


# ---- The template ---------------------------------------------------------------------------------------------------


_PROBE = "probe"  # a message that no template has a reason to change


class ChatTemplate:
    """Turns messages into the prompt that a model was trained on. Any number of threads may use one.

    source: Jinja, with what transformers gives to it: messages, add_generation_prompt, bos_token, eos_token, tools and
    documents (always none), raise_exception, strftime_now, tojson.
    """

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        """Raises TemplateError if the source is too long or no Jinja."""
        if len(source.encode(errors="replace")) > MAX_SOURCE_BYTES:
            raise TemplateError(f"a chat template may have {MAX_SOURCE_BYTES >> 10} KiB: found {len(source) >> 10} KiB")
        self._source = source
        self._tokens = {"bos_token": trusted(bos_token), "eos_token": trusted(eos_token)}
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is broken at line {error.lineno}: {error.message}") from error
        except Exception as error:  # a limit of Python's: of recursion, nested blocks, digits of a number
            raise TemplateError(f"the chat template is broken: {type(error).__name__}: {error!s:.200}") from error

    @classmethod
    def from_file(cls, file: ModelFile, tokenizer: Tokenizer) -> ChatTemplate:
        """The template of a model file; ChatML where it has none but its vocabulary is made for that.

        Raises TemplateError, also for one whose prompts do not have the user's message in them.
        """
        source = source_of(tokenizer.chat_template)
        if source is None:
            if tokenizer.token_id("<|im_start|>") is None:
                raise TemplateError(
                    f"{file.path} has no chat template: complete plain text with it, or use an instruction-tuned model"
                )
            source = CHATML
        ids = (tokenizer.bos_id, tokenizer.eos_id)
        bos, eos = ("" if id is None else tokenizer.token_bytes(id).decode(errors="replace") for id in ids)
        template = cls(source, bos, eos)
        if template._drops_messages():
            raise TemplateError(f"{file.path}: the chat template leaves out what the user says: it is damaged")
        return template

    def _drops_messages(self) -> bool:
        """Whether a message is not in its prompt. A template that wants other messages than one is taken as it is."""
        try:
            return _PROBE not in self.render([{"role": "user", "content": _PROBE}])
        except TemplateError:
            return False

    @property
    def source(self) -> str:
        """The Jinja source."""
        return self._source

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt as text. Raises TemplateError: refused by the template, too slow, too long.

        messages: each with role and content.  add_generation_prompt: the answer of the assistant is begun.
        """
        return plain(self._render(messages, add_generation_prompt))

    def encode(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The prompt as token ids, with special tokens only where the template itself wrote them.

        Equal to tokenizer.encode(render(messages), parse_special=True) where no message has the text of a protected
        token (see Tokenizer.protected); there it stays text, whatever the template does with it. The texts of a message
        may be edgeinfer.models.provenance.Text: those of their characters that are trusted count as the template's own.
        Begins with one begin token if the file wants one. Raises TemplateError.
        """
        ids = tokenizer.encode_rendered(self._render(messages, add_generation_prompt), self._source)
        if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids.insert(0, tokenizer.bos_id)
        return ids

    def _render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        copies = _copied(messages)
        values = {
            "messages": copies,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            **self._tokens,
        }
        before = _BUDGET.set(_Budget(len(copies) if isinstance(copies, list) else 0))
        try:
            return _collected(self._template.generate(values))
        except TemplateError:
            raise
        except SecurityError as error:
            raise TemplateError(f"the chat template does what it must not: {error}") from error
        except Exception as error:
            raise TemplateError(f"the chat template fails: {type(error).__name__}: {error!s:.500}") from error
        finally:
            _BUDGET.reset(before)


def _collected(pieces: Iterator[str]) -> str:
    found: list[str] = []
    length = 0
    for piece in pieces:
        length += len(piece)
        _fits(length)
        found.append(piece)
    return joined(found)
