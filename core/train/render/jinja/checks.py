# ruff: noqa: N802, N815 -- the names of visitors are those of jinja2's nodes
"""A template rewritten so that the sandbox is asked on the way: around what is looped over, joined, compared, cut and
used as a key, in every iteration, and for constant text as for any other."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from core.train.render.jinja.bounds import TooMuch


class Checks(NodeTransformer):
    """The filters whose names hold a space are the sandbox's own."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _through("each item", node.iter)
        tick = nodes.Filter(nodes.Const(None), "as value", [], [], None, None, lineno=node.lineno)
        node.body = [nodes.ExprStmt(tick, lineno=node.lineno), *node.body]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "as one text", [], [], None, None, lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _through("as value", node.expr)
        for operand in node.ops:
            operand.expr = _through("as value", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return nodes.Filter(node, "as new", [], [], None, None, lineno=node.lineno)
        node.arg = _through("as value", node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        node.key = _through("as value", node.key)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        raise TooMuch("it switches escaping on, which chat templates do not have")

    visit_EvalContextModifier = visit_ScopedEvalContextModifier


def _through(name: str, node: Any) -> Any:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
