"""Chat templates as LiteRT-LM wants them: for contents that are lists of parts, and in the dialect of minijinja.

The source is parsed as transformers would, and written again: white space that tags take away is gone, each text is a
literal, and what minijinja lacks is said in other words (`x.get(k)`, `x is none`). In front stands what makes one text
of the parts of each message. What has no other words is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import Environment, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser

from edgeinfer.common.errors import TemplateError
from edgeinfer.exporters.litertlm.template_names import DEFAULTS, FILTERS, METHODS, TESTS
from edgeinfer.models.chat_template import MAX_SOURCE_BYTES
from edgeinfer.models.template_sandbox.errors import is_of_template

# A text of each message's parts; bos_token and eos_token, which the runtime leaves empty.
_BEFORE = (
    "{%- set flat = namespace(messages=[], text='') -%}"
    "{%- for message in messages -%}"
    "{%- if message.content is defined and message.content is not string and message.content is sequence -%}"
    "{%- set flat.text = '' -%}"
    "{%- for part in message.content -%}"
    "{%- if part is string -%}{%- set flat.text = flat.text ~ part -%}"
    "{%- elif part.type == 'text' -%}{%- set flat.text = flat.text ~ part.text -%}"
    "{%- else -%}{{ raise_exception('this model takes text only') }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- set flat.messages = flat.messages + [dict(message, content=flat.text)] -%}"
    "{%- else -%}{%- set flat.messages = flat.messages + [message] -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- set messages = flat.messages | select | list -%}"  # for a sum of lists has no index from behind
    "{%- set tools = tools if tools is defined else none -%}"
    "{%- set documents = documents if documents is defined else none -%}"
)
_OPERATORS = {"Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "FloorDiv": "//", "Mod": "%", "Pow": "**"}
_TRUTHS = (nodes.Compare, nodes.Not, nodes.Test)
_COMPARISONS = {
    **{"eq": "==", "ne": "!=", "lt": "<", "lteq": "<=", "gt": ">", "gteq": ">="},
    **{"in": "in", "notin": "not in"},
}


class _Generation(Extension):
    """{% generation %}, which only training looks at."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """The statements within."""
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(lineno)


def rewritten_template(source: str, bos_token: str, eos_token: str) -> str:
    """The template for LiteRT-LM.

    source: Jinja, as edgeinfer.models.chat_template takes it.  bos_token: what the template writes for it; "" where the
    runtime begins each text with that token.  Raises TemplateError for what minijinja has no words for.
    """
    if len(source.encode(errors="replace")) > MAX_SOURCE_BYTES:
        raise TemplateError(f"a chat template may have {MAX_SOURCE_BYTES >> 10} KiB: found {len(source) >> 10} KiB")
    try:  # nothing of the template runs
        tree = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation]).parse(
            source
        )
    except Exception as error:  # of the syntax, or a limit of Python's
        if not is_of_template(error):
            raise
        raise TemplateError(f"the chat template is broken: {type(error).__name__}: {error!s:.200}") from error
    tokens = "".join(
        f"{{%- set {name} = {_quoted(text)} -%}}" for name, text in (("bos_token", bos_token), ("eos_token", eos_token))
    )
    return _BEFORE + tokens + _Writer().body(tree.body)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _lacks(what: str) -> TemplateError:
    return TemplateError(f"the chat template has {what}, which templates of LiteRT-LM lack: write it in other words")


class _Writer:
    """Writes nodes of Jinja as source of minijinja. Methods are named after the nodes."""

    def body(self, statements: Sequence[nodes.Node]) -> str:
        """Statements one behind the other."""
        return "".join(self._written(statement) for statement in statements)

    def _written(self, node: nodes.Node) -> str:
        method: Callable[[Any], str] | None = getattr(self, f"_{type(node).__name__}", None)
        if method is None:
            raise _lacks(f"{{% {type(node).__name__.lower()} %}}")
        return method(node)

    # ---- statements --------------------------------------------------------------------------------------------------

    def _Output(self, node: nodes.Output) -> str:
        return "".join(f"{{{{- {self._printed(part)} -}}}}" for part in node.nodes)

    def _printed(self, node: nodes.Node) -> str:
        """A value as Python prints it, True and not true, where it is known to be one of these."""
        written = self._written(node)
        return f'("True" if {written} else "False")' if isinstance(node, _TRUTHS) else written

    def _TemplateData(self, node: nodes.TemplateData) -> str:
        return _quoted(node.data)

    def _If(self, node: nodes.If) -> str:
        branches = [("if", node), *(("elif", branch) for branch in node.elif_)]
        text = "".join(f"{{%- {tag} {self._written(b.test)} -%}}{self.body(b.body)}" for tag, b in branches)
        otherwise = f"{{%- else -%}}{self.body(node.else_)}" if node.else_ else ""
        return f"{text}{otherwise}{{%- endif -%}}"

    def _For(self, node: nodes.For) -> str:
        if node.recursive:
            raise _lacks("a recursive loop")
        test = f" if {self._written(node.test)}" if node.test is not None else ""
        otherwise = f"{{%- else -%}}{self.body(node.else_)}" if node.else_ else ""
        head = f"for {self._target(node.target)} in {self._written(node.iter)}{test}"
        return f"{{%- {head} -%}}{self.body(node.body)}{otherwise}{{%- endfor -%}}"

    def _Assign(self, node: nodes.Assign) -> str:
        return f"{{%- set {self._target(node.target)} = {self._written(node.node)} -%}}"

    def _AssignBlock(self, node: nodes.AssignBlock) -> str:
        filtered = f" | {self._chain(node.filter)}" if node.filter is not None else ""
        return f"{{%- set {self._target(node.target)}{filtered} -%}}{self.body(node.body)}{{%- endset -%}}"

    def _FilterBlock(self, node: nodes.FilterBlock) -> str:
        return f"{{%- filter {self._chain(node.filter)} -%}}{self.body(node.body)}{{%- endfilter -%}}"

    def _Macro(self, node: nodes.Macro) -> str:
        n_plain = len(node.args) - len(node.defaults)
        defaults = ["" for _ in range(n_plain)] + [f"={self._written(value)}" for value in node.defaults]
        parameters = ", ".join(f"{arg.name}{value}" for arg, value in zip(node.args, defaults, strict=True))
        return f"{{%- macro {node.name}({parameters}) -%}}{self.body(node.body)}{{%- endmacro -%}}"

    def _Scope(self, node: nodes.Scope) -> str:
        return f"{{%- with -%}}{self.body(node.body)}{{%- endwith -%}}"

    def _With(self, node: nodes.With) -> str:
        pairs = zip(node.targets, node.values, strict=True)
        names = ", ".join(f"{self._target(target)} = {self._written(value)}" for target, value in pairs)
        return f"{{%- with {names} -%}}{self.body(node.body)}{{%- endwith -%}}"

    def _target(self, node: nodes.Node) -> str:
        if isinstance(node, nodes.Tuple):
            return ", ".join(self._target(item) for item in node.items)
        return self._written(node)

    # ---- values ------------------------------------------------------------------------------------------------------

    def _Name(self, node: nodes.Name) -> str:
        return node.name

    def _NSRef(self, node: nodes.NSRef) -> str:
        return f"{node.name}.{node.attr}"

    def _Const(self, node: nodes.Const) -> str:
        if isinstance(node.value, str):
            return _quoted(node.value)
        return repr(node.value).lower()  # none, true, false; a number as it is

    def _List(self, node: nodes.List | nodes.Tuple) -> str:
        return f"[{', '.join(self._written(item) for item in node.items)}]"

    _Tuple = _List

    def _Dict(self, node: nodes.Dict) -> str:
        return f"{{{', '.join(f'{self._written(p.key)}: {self._written(p.value)}' for p in node.items)}}}"

    def _Getattr(self, node: nodes.Getattr) -> str:
        return f"{self._written(node.node)}.{node.attr}"

    def _Getitem(self, node: nodes.Getitem) -> str:
        return f"{self._written(node.node)}[{self._written(node.arg)}]"

    def _Slice(self, node: nodes.Slice) -> str:
        start, stop = ("" if part is None else self._written(part) for part in (node.start, node.stop))
        return f"{start}:{stop}" + ("" if node.step is None else f":{self._written(node.step)}")

    def _CondExpr(self, node: nodes.CondExpr) -> str:
        otherwise = '""' if node.expr2 is None else self._written(node.expr2)
        return f"({self._written(node.expr1)} if {self._written(node.test)} else {otherwise})"

    # ---- operators ---------------------------------------------------------------------------------------------------

    def _binary(self, node: nodes.BinExpr) -> str:
        return f"({self._written(node.left)} {_OPERATORS[type(node).__name__]} {self._written(node.right)})"

    _Add = _Sub = _Mul = _Div = _FloorDiv = _Pow = _binary

    def _Mod(self, node: nodes.Mod) -> str:
        if not isinstance(node.left, nodes.Const) or not isinstance(node.left.value, str):
            return self._binary(node)
        values = node.right.items if isinstance(node.right, nodes.Tuple) else [node.right]
        return f"({self._written(node.left)} | format({', '.join(map(self._written, values))}))"

    def _And(self, node: nodes.And) -> str:
        return f"({self._written(node.left)} and {self._written(node.right)})"

    def _Or(self, node: nodes.Or) -> str:
        return f"({self._written(node.left)} or {self._written(node.right)})"

    def _Not(self, node: nodes.Not) -> str:
        return f"(not {self._written(node.node)})"

    def _Neg(self, node: nodes.Neg) -> str:
        number = self._written(node.node)  # an index must be a literal, without brackets
        return f"-{number}" if isinstance(node.node, nodes.Const) else f"(-{number})"

    def _Pos(self, node: nodes.Pos) -> str:
        return self._written(node.node)

    def _Concat(self, node: nodes.Concat) -> str:
        return f"({' ~ '.join(self._written(part) for part in node.nodes)})"

    def _Compare(self, node: nodes.Compare) -> str:
        rest = "".join(f" {_COMPARISONS[each.op]} {self._written(each.expr)}" for each in node.ops)
        return f"({self._written(node.expr)}{rest})"

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _arguments(self, node: Any) -> str:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _lacks("* or ** before an argument")
        plain = [self._written(arg) for arg in node.args]
        return ", ".join([*plain, *(f"{pair.key}={self._written(pair.value)}" for pair in node.kwargs)])

    def _Call(self, node: nodes.Call) -> str:
        if isinstance(node.node, nodes.Getattr) and not self._is_of_loop(node.node):
            name = node.node.attr
            if name not in METHODS:
                raise _lacks(f".{name}()")
            args = [self._written(arg) for arg in node.args]
            return METHODS[name](self._written(node.node.node), *args)
        return f"{self._written(node.node)}({self._arguments(node)})"

    @staticmethod
    def _is_of_loop(node: nodes.Getattr) -> bool:
        return isinstance(node.node, nodes.Name) and node.node.name == "loop"

    def _Filter(self, node: nodes.Filter) -> str:
        return f"({self._chain(node)})"

    def _chain(self, node: nodes.Filter) -> str:
        """A filter behind what it filters; of a block there is nothing before the first."""
        if node.name not in FILTERS:
            raise _lacks(f"the filter {node.name}")
        arguments = self._arguments(node) or DEFAULTS.get(node.name, "")
        call = f"{node.name}({arguments})" if arguments else node.name
        if node.node is None:
            return call
        before = self._chain(node.node) if isinstance(node.node, nodes.Filter) else self._written(node.node)
        return f"{before} | {call}"

    def _Test(self, node: nodes.Test) -> str:
        if node.name == "none":  # which is true there for what is not defined, and false for none
            return f"({self._written(node.node)} == none)"
        if node.name not in TESTS:
            raise _lacks(f"the test {node.name}")
        arguments = self._arguments(node)
        return f"({self._written(node.node)} is {node.name}{f'({arguments})' if arguments else ''})"
