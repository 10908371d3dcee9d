"""Mutation operators for Python source: each mutation changes one comparison, constant, index, condition or call.

Not mutated: annotations, strings, imports, assertions (and ``strict`` of ``zip``), messages (in ``raise`` and
``require``), decorators and class headers.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Operator = Literal["comparison", "constant", "index", "arithmetic", "condition", "call"]

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SKIPPED = (ast.Import, ast.ImportFrom, ast.Raise, ast.Assert, ast.JoinedStr)


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One change: ``text`` in place of the bytes from ``start`` to ``end`` of the source."""

    operator: Operator
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        """The changed source."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def shown(self, source: str) -> tuple[str, str]:
        """The changed lines, joined into one: before and after."""
        data = source.encode()
        begin = data.rfind(b"\n", 0, self.start) + 1
        stop = data.find(b"\n", self.end) % (len(data) + 1)
        after = data[begin : self.start] + self.text.encode() + data[self.end : stop]
        return " ".join(data[begin:stop].decode().split()), " ".join(after.decode().split())


def mutations(source: str) -> list[Mutation]:
    """All mutations of ``source`` without repeats, in source order."""
    lines = source.encode().split(b"\n")
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line) + 1)
    found: dict[Mutation, None] = {}
    for node in _mutable_nodes(ast.parse(source)):
        for operator, old, new in _changes(node):
            assert isinstance(old, ast.expr | ast.stmt)
            assert old.end_lineno is not None
            assert old.end_col_offset is not None
            change = Mutation(
                operator=operator,
                line=old.lineno,
                start=begins[old.lineno - 1] + old.col_offset,
                end=begins[old.end_lineno - 1] + old.end_col_offset,
                text=new,
            )
            found[change] = None
    return sorted(found, key=lambda change: (change.start, change.end, change.text))


def _mutable_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and its descendants, without skipped ones."""
    yield node
    for child in _children(node):
        if not isinstance(child, _SKIPPED):
            yield from _mutable_nodes(child)


def _children(node: ast.AST) -> list[ast.AST]:
    match node:
        case ast.FunctionDef():
            defaults = [default for default in node.args.kw_defaults if default is not None]
            return [*node.args.defaults, *defaults, *node.body]
        case ast.ClassDef():
            return [*node.body]
        case ast.AnnAssign():
            return [] if node.value is None else [node.target, node.value]
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Subscript(value=ast.Name(id="Literal")):
            return []
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == "__all__" or _is_union(value):
            return []
        case ast.Call(func=ast.Name(id="require"), args=[condition, *_]):
            return [condition]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
            return []  # mutated as one number
        case ast.keyword(arg="strict"):
            return []
        case ast.Subscript():
            parts = [bound for part in _parts(node.slice) for bound in _bounds(part)]
            return [node.value, *(part for part in parts if _number(part) is None)]
    return list(ast.iter_child_nodes(node))


def _is_union(value: ast.expr) -> bool:
    """Whether ``value`` is a type, as in ``A | B``."""
    match value:
        case ast.BinOp(op=ast.BitOr(), right=ast.Name()):
            return True
    return False


def _parts(index: ast.expr) -> list[ast.expr]:
    return index.elts if isinstance(index, ast.Tuple) else [index]


def _bounds(part: ast.expr) -> list[ast.expr]:
    if not isinstance(part, ast.Slice):
        return [part]
    return [bound for bound in (part.lower, part.upper, part.step) if bound is not None]


def _changes(node: ast.AST) -> Iterator[tuple[Operator, ast.AST, str]]:
    """Each operator with the node that it replaces and the new text."""
    match node:
        case ast.Compare():
            for index, comparison in enumerate(node.ops):
                ops = [*node.ops]
                ops[index] = _COMPARISONS[type(comparison)]()
                yield "comparison", node, _unparsed(ast.Compare(node.left, ops, node.comparators))
        case ast.Constant() | ast.UnaryOp(op=ast.USub()) if (new := _next(node)) is not None:
            yield "constant", node, new
        case ast.Subscript(value=ast.Name(id="Literal")):
            pass
        case ast.Subscript():
            for part in _parts(node.slice):
                yield from _index_changes(part)
        case ast.BinOp() | ast.AugAssign() if type(node.op) in _ARITHMETIC and not _is_text(node):
            yield "arithmetic", node, _swapped(node)
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
            yield "arithmetic", node.func, _FUNCTIONS[name]
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "condition", node, _unparsed(ast.BoolOp(other, node.values))
        case ast.UnaryOp(op=ast.Not()):
            yield "condition", node, _unparsed(node.operand)
        case ast.If() | ast.While() | ast.IfExp() if ast.unparse(node.test) != "TYPE_CHECKING":
            yield from _negated(node.test)
        case ast.comprehension():
            for condition in node.ifs:
                yield from _negated(condition)
        case ast.Expr(value=ast.Call()):
            yield "call", node, "pass"


def _unparsed(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _number(node: ast.AST) -> int | float | None:
    """The value of a number literal with its sign; None for other nodes."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number(node.operand)
        return None if value is None else -value
    return node.value if isinstance(node, ast.Constant) and type(node.value) in (int, float) else None


def _next(node: ast.AST) -> str | None:
    """The replacement of a number or a boolean, else None. Away from 0: -1 becomes -2."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return str(not node.value)
    value = _number(node)
    return None if value is None else repr(value - 1 if isinstance(node, ast.UnaryOp) else value + 1)


def _index_changes(part: ast.expr) -> Iterator[tuple[Operator, ast.AST, str]]:
    if not isinstance(part, ast.Slice):
        if (new := _next(part)) is not None:
            yield "index", part, new
        return
    for name in ("lower", "upper"):
        bound = getattr(part, name)
        if bound is not None:
            yield "index", bound, ""
            yield "index", bound, _next(bound) or f"{ast.unparse(bound)} + 1"


def _is_text(node: ast.BinOp | ast.AugAssign) -> bool:
    """Whether it concatenates or formats strings."""
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    texts = (isinstance(getattr(side, "value", None), str | bytes) for side in sides)
    return any(texts) or any(isinstance(side, ast.JoinedStr) for side in sides)


def _swapped(node: ast.BinOp | ast.AugAssign) -> str:
    op = _ARITHMETIC[type(node.op)]()
    if isinstance(node, ast.AugAssign):
        return ast.unparse(ast.AugAssign(node.target, op, node.value))
    return _unparsed(ast.BinOp(node.left, op, node.right))


def _negated(test: ast.expr) -> Iterator[tuple[Operator, ast.AST, str]]:
    """The negation of ``test``, unless a part of it is mutated by itself."""
    if not isinstance(test, ast.Compare | ast.BoolOp) and not (
        isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    ):
        yield "condition", test, _unparsed(ast.UnaryOp(ast.Not(), test))
