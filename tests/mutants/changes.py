"""Small wrong changes to one function each, made on the syntax tree."""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NESTED = (*_FUNCTIONS, ast.ClassDef)
_BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
# asserts are for the type checker, and what a person reads is not judged to the letter
_LEFT_ALONE = (ast.Assert, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom)

# zip's own assert, and a name that is the default on every machine this runs on
_GUARDS = ("strict", "encoding")

Apply = Callable[[], Callable[[], None]]


@dataclass(frozen=True)
class Mutant:
    """A function with one thing changed; `before` and `after` are the statement's own text."""

    file: str
    line: int
    function: str
    kind: str
    before: str
    after: str
    nth: int  # of all changes to its module

    @property
    def name(self) -> tuple[str, str, str, str]:
        """What it is whatever stands around it: no line number."""
        return name_of(self.file, self.function, self.before, self.after)


def name_of(file: str, function: str, before: str, after: str) -> tuple[str, str, str, str]:
    """A mutant's name: one for all versions of Python, which quote f-strings differently."""
    return file, function, before.replace("'", '"'), after.replace("'", '"')


@dataclass(frozen=True)
class _Change:
    """One edit of the tree that knows how to undo itself."""

    kind: str
    make: Apply


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Every change we know how to make to the functions of a module."""
    found: dict[tuple[str, str, str, str, int], Mutant] = {}
    for nth, (function, statement, change) in enumerate(_all_changes(ast.parse(source))):
        before = _headline(statement)
        undo = change.make()
        after = _headline(statement)
        undo()
        if after != before:
            mutant = Mutant(file, _line(statement), function, change.kind, before, after, nth)
            found.setdefault((*mutant.name, mutant.line), mutant)
    return list(found.values())


def changed_source(source: str, mutant: Mutant) -> str:
    """The module with the mutant in it, without comments, as Python writes it."""
    tree = ast.parse(source)
    _, _, change = next(itertools.islice(_all_changes(tree), mutant.nth, None))
    change.make()
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _all_changes(tree: ast.Module) -> Iterator[tuple[str, ast.AST, _Change]]:
    for function, statement in _statements(tree.body, ""):
        for change in _changes(statement):
            yield function, statement, change


def _statements(body: list[ast.stmt], within: str) -> Iterator[tuple[str, ast.AST]]:
    """Each statement of each function with the function's qualified name, handlers too."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _statements(node.body, f"{within}{node.name}.")
        elif isinstance(node, _FUNCTIONS):
            name = f"{within}{node.name}"
            for statement in _own_statements(node):
                yield name, statement
            yield from _statements(_inner(node), f"{name}.<locals>.")
        elif isinstance(node, _BLOCKS):
            yield from _statements(_inner(node), within)


def _inner(node: ast.AST) -> list[ast.stmt]:
    """The definitions that stand in a function, at any depth of blocks."""
    inner: list[ast.stmt] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _NESTED):
            inner.append(child)
        else:
            inner.extend(_inner(child))
    return inner


def _own_statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _NESTED):
            continue
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            if not isinstance(child, _LEFT_ALONE) and not _is_docstring(child):
                yield child
            yield from _own_statements(child)


def _line(node: ast.AST) -> int:
    return node.pattern.lineno if isinstance(node, ast.match_case) else getattr(node, "lineno", 0)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _headline(node: ast.AST) -> str:
    """A statement's text; of one with a block, only what stands before the colon."""
    blocks: tuple[str, ...] = ("body", "orelse", "finalbody", "handlers", "cases")
    if isinstance(node, ast.ExceptHandler) and isinstance(node.body[0], ast.Raise):
        blocks = ()
    short = copy.copy(node)
    for field in blocks:
        if isinstance(getattr(node, field, None), list):
            setattr(short, field, [ast.Pass()] if field == "body" else [])
    if isinstance(node, ast.Try):
        short = ast.Try(body=[ast.Pass()], handlers=[], orelse=[], finalbody=[ast.Pass()])
    text = ast.unparse(ast.fix_missing_locations(short)).strip()
    if isinstance(node, ast.ExceptHandler):
        text = " ".join(text.split())
    return text.removesuffix("pass").rstrip() if "body" in blocks and text != "pass" else text


def _changes(statement: ast.AST) -> Iterator[_Change]:
    """The changes of a statement's own expressions, then of the statement itself."""
    if _speaks_to_people(statement):
        return
    if not isinstance(statement, ast.Raise):
        for parent, field, index, node in _expressions(statement):
            for kind, new in _replacements(node, parent):
                yield _Change(kind, _putting(parent, field, index, new))
            yield from _inside(node)
    yield from _of_statement(statement)


def _speaks_to_people(statement: ast.AST) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func).startswith(("log.", "print"))


def _expressions(
    node: ast.AST,
) -> Iterator[tuple[ast.AST, str, int | None, ast.expr]]:
    """Every expression of one statement with its place, blocks and annotations left out."""
    for field, value in ast.iter_fields(node):
        if field in ("body", "orelse", "finalbody", "handlers", "cases") and isinstance(
            value, list
        ):
            continue
        if field in ("annotation", "type_comment"):
            continue
        many = value if isinstance(value, list) else [value]
        for index, child in enumerate(many):
            if not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.expr):
                yield node, field, index if isinstance(value, list) else None, child
            yield from _expressions(child)


def _putting(parent: ast.AST, field: str, index: int | None, new: ast.AST) -> Apply:
    def make() -> Callable[[], None]:
        if index is None:
            old = getattr(parent, field)
            setattr(parent, field, new)
            return lambda: setattr(parent, field, old)
        many = getattr(parent, field)
        old = many[index]
        many[index] = new
        return lambda: many.__setitem__(index, old)

    return make


def _replacements(node: ast.expr, parent: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """What may stand in an expression's place."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node.operand
    elif isinstance(node, ast.Constant) and getattr(parent, "arg", None) not in _GUARDS:
        yield from (("constant", ast.Constant(new)) for new in _other_constants(node.value))
    elif isinstance(node, ast.BoolOp):
        yield from (("operand", _without(node, at)) for at in range(len(node.values)))
    elif _is_condition(node, parent):
        yield "not", ast.UnaryOp(ast.Not(), node)


def _other_constants(value: object) -> tuple[int, ...]:
    if isinstance(value, bool):
        return (not value,)
    return (value + 1, value - 1) if isinstance(value, int) else ()


def _without(node: ast.BoolOp, at: int) -> ast.expr:
    rest = node.values[:at] + node.values[at + 1 :]
    return rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)


def _is_condition(node: ast.expr, parent: ast.AST) -> bool:
    """A plain condition; comparisons and operators have changes of their own."""
    if isinstance(node, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
        return False
    asked = getattr(parent, "test", None) is node
    return asked or (isinstance(parent, ast.comprehension) and node in parent.ifs)


def _inside(node: ast.expr) -> Iterator[_Change]:
    """Changes that keep the expression and turn one part of it."""
    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            for other in _COMPARISONS[type(op)]:
                yield _Change("comparison", _putting(node, "ops", at, other()))
    elif isinstance(node, ast.BoolOp):
        other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield _Change("and/or", _putting(node, "op", None, other_op))
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not _joins_text(node):
        yield _Change("arithmetic", _putting(node, "op", None, _ARITHMETIC[type(node.op)]()))
    elif isinstance(node, ast.Call):
        yield from _of_call(node)
    elif isinstance(node, ast.Slice):
        for bound in ("lower", "upper"):
            if getattr(node, bound) is not None:
                yield _Change("slice", _setting(node, bound, None))


def _joins_text(node: ast.BinOp) -> bool:
    """Paths and strings: any other operator fails at once, which proves nothing about a test."""
    sides = (node.left, node.right)
    text = (ast.JoinedStr, ast.BinOp) if isinstance(node.op, ast.Div) else (ast.JoinedStr,)
    return any(
        isinstance(side, text)
        or (isinstance(side, ast.Constant) and isinstance(side.value, (str, bytes)))
        for side in sides
    )


def _alike(first: ast.expr, second: ast.expr) -> bool:
    """Two arguments that somebody could confuse."""
    if isinstance(first, ast.Constant) and isinstance(second, ast.Constant):
        return type(first.value) is type(second.value)
    names = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)
    return isinstance(first, names) and isinstance(second, names)


def _of_call(node: ast.Call) -> Iterator[_Change]:
    for at, keyword in enumerate(node.keywords):
        if keyword.arg not in (None, *_GUARDS):
            rest = node.keywords[:at] + node.keywords[at + 1 :]
            yield _Change("keyword", _setting(node, "keywords", rest))
    checks_type = isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass")
    if len(node.args) > 1 and _alike(*node.args[:2]) and not checks_type:
        swapped = [node.args[1], node.args[0], *node.args[2:]]
        yield _Change("swapped", _setting(node, "args", swapped))
    if isinstance(node.func, ast.Name) and node.func.id in _TWINS:
        yield _Change("twin", _putting(node, "func", None, ast.Name(_TWINS[node.func.id])))


def _setting(node: ast.AST, field: str, value: object) -> Apply:
    def make() -> Callable[[], None]:
        old = getattr(node, field)
        setattr(node, field, value)
        return lambda: setattr(node, field, old)

    return make


def _of_statement(node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, (ast.Raise, ast.AugAssign, ast.Delete)) or _is_effect(node):
        yield _Change("dropped", _becoming(node, ast.Pass()))
    elif isinstance(node, ast.Return) and node.value is not None:
        if not isinstance(node.value, ast.Constant):
            yield _Change("return", _setting(node, "value", None))
    elif isinstance(node, ast.Continue):
        yield _Change("loop", _becoming(node, ast.Break()))
    elif isinstance(node, ast.Break):
        yield _Change("loop", _becoming(node, ast.Continue()))
    elif isinstance(node, ast.ExceptHandler) and not isinstance(node.body[0], ast.Raise):
        yield _Change("handler", _setting(node, "body", [ast.Raise()]))


def _is_effect(node: ast.AST) -> bool:
    """A call for its effect, or a value put into an object."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    places = (ast.Attribute, ast.Subscript)
    return isinstance(node, ast.Assign) and all(isinstance(t, places) for t in node.targets)


def _becoming(node: ast.AST, other: ast.AST) -> Apply:
    """Turn a statement into another where it stands."""

    def make() -> Callable[[], None]:
        was, fields = node.__class__, dict(node.__dict__)
        node.__class__ = other.__class__

        def undo() -> None:
            node.__class__ = was
            node.__dict__.update(fields)

        return undo

    return make
