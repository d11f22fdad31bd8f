"""The packages of `pipeline/` and who imports whom, read from the code."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT

PACKAGE = ROOT / "pipeline"
# Parts whose folders are packages of their own; hosts, weights, app and cli are one each.
PARTS = ("core", "artifacts", "images", "serving", "evidence")
BOOTSTRAP = "bootstrap"  # a module of its own, for a machine that has only Python

Arrows = Mapping[str, frozenset[str]]


@cache
def arrows() -> Arrows:
    """Of each package, the other packages whose modules it imports."""
    graph: dict[str, set[str]] = {}
    for name, others in modules().items():
        package = package_of(name)
        graph.setdefault(package, set()).update({package_of(other) for other in others} - {package})
    # a part is no package of its own, but for core, which has modules
    left_out = {"", BOOTSTRAP, *PARTS} - {"core"}
    return {
        package: frozenset(others - left_out)
        for package, others in graph.items()
        if package not in left_out
    }


def parts() -> Arrows:
    """The same for the parts: artifacts, images, serving and so on."""
    graph: dict[str, set[str]] = {}
    for package, others in arrows().items():
        part = package.split("/")[0]
        graph.setdefault(part, set()).update({other.split("/")[0] for other in others} - {part})
    return {part: frozenset(others) for part, others in graph.items()}


@cache
def modules() -> Arrows:
    """Of each module, the other modules of ours that it imports."""
    paths = {_dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {
        name: frozenset(_imported_modules(path, paths.keys()) - {name})
        for name, path in paths.items()
    }


def circle(graph: Arrows) -> list[str]:
    """One circle of a graph, or nothing."""
    done: set[str] = set()

    def walk(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if closed := walk(other, [*way, node]):
                return closed
        done.add(node)
        return []

    return next((closed for node in graph if (closed := walk(node, []))), [])


def drawing() -> str:
    """The parts as a Mermaid chart; an arrow that follows from others is left out."""
    graph = parts()
    lines = ["flowchart TD"]
    for package in _in_order(graph):
        for other in sorted(_reduced(graph, package)):
            lines.append(f"    {package} --> {other}")
    return "\n".join(lines)


def _reduced(graph: Arrows, package: str) -> set[str]:
    beyond = {far for near in graph[package] for far in _reach(graph, near)}
    return set(graph[package] - beyond)


def _reach(graph: Arrows, package: str) -> set[str]:
    """Every package that can be reached; also where packages import each other."""
    seen: set[str] = set()
    todo = set(graph[package])
    while todo:
        seen |= todo
        todo = {far for near in todo for far in graph[near]} - seen
    return seen


def _in_order(graph: Arrows) -> Iterable[str]:
    return sorted(graph, key=lambda package: (len(_reach(graph, package)), package))


def package_of(module: str) -> str:
    """The package of a module: `artifacts/oci`, or `hosts`; "" for pipeline itself."""
    names = module.split(".")[1:]
    if names == ["__main__"]:
        return "cli"  # `python -m pipeline` is another way to call the command
    deep = names[:1] in [[part] for part in PARTS] and (PACKAGE / "/".join(names[:2])).is_dir()
    return "/".join(names[: 2 if deep else 1])


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(path: Path) -> Iterator[ast.stmt]:
    """All statements of a file, also inside others; what they are made of is left out."""
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.stmt):
            yield node
        # branches of `try` and `match` hold statements and are none
        todo += [
            inner
            for name in ("body", "orelse", "finalbody", "handlers", "cases")
            if isinstance(held := getattr(node, name, None), list)
            for inner in held
        ]


@cache
def _imports(path: Path) -> list[tuple[str, list[str]]]:
    """(module, names) of each import of ours, relative ones made absolute."""
    imports: list[tuple[str, list[str]]] = []
    package = path.relative_to(ROOT).parts[:-1]
    for node in statements(path):
        if isinstance(node, ast.Import):
            imports += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            imports.append((module, [alias.name for alias in node.names]))
    return [(module, names) for module, names in imports if module.split(".")[0] == "pipeline"]


def _imported_modules(path: Path, known: Iterable[str]) -> set[str]:
    known = set(known)
    named = {f"{module}.{name}" for module, names in _imports(path) for name in names}
    plain = {module for module, names in _imports(path)}
    return {name for name in named | plain if name in known and name != "pipeline"}
