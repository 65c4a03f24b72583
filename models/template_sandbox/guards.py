"""Checks that are put into a parsed template."""

from __future__ import annotations

from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

MAX_SOURCE_DEPTH = 100


class Guards(NodeTransformer):
    """Puts the checks into a parsed template that the sandbox has no hook for."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """A step for each round."""
        return self._with_step(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        """A step for each call."""
        return self._with_step(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        """A step for each call."""
        return self._with_step(node)

    def _with_step(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._step(sum(map(_written_bytes, node.body))))
        return node  # type: ignore[no-any-return]

    def _step(self, n_bytes: int) -> nodes.ExprStmt:
        return nodes.ExprStmt(self._filter("step!", nodes.Const(n_bytes)))

    def visit_If(self, node: nodes.If) -> nodes.Node:
        """A step for each branch that writes something."""
        self.generic_visit(node)
        for body in (node.body, node.else_):
            if n_bytes := sum(map(_written_bytes, body)):
                body.insert(0, self._step(n_bytes))
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        """Texts of the template are trusted."""
        return self._filter("own!", node) if isinstance(node.value, str) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        """Texts of the template are trusted."""
        return self._filter("own!", nodes.Const(node.data))

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        """Arguments after a * are counted."""
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = self._filter("listed!", node.dyn_args)
        return node

    visit_Filter = visit_Test = visit_Call

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """The ~ operator is ours."""
        self.generic_visit(node)
        return self._filter("concat!", nodes.List(node.nodes))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Both sides are measured."""
        sides: list[Any] = [node, *node.ops]
        for side in sides:
            if not isinstance(side.expr, nodes.Const):
                side.expr = self._filter("weighed!", self.visit(side.expr))
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        """Keys are measured."""
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = self._filter("weighed!", pair.key)  # it will be hashed
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Slices are counted."""
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


def checked_depth(tree: nodes.Template) -> nodes.Template:
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
