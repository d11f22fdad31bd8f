"""The rooms of `pipeline/` and who imports whom, read from the code."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT

PACKAGE = ROOT / "pipeline"
SHARED = "shared"  # the modules that lie in pipeline/ itself

Arrows = Mapping[str, frozenset[str]]


@cache
def arrows() -> Arrows:
    """Of each room, the other rooms whose modules it imports; the shared modules are one."""
    graph: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = _room(path.relative_to(PACKAGE).with_suffix("").parts)
        graph.setdefault(room, set()).update(_imported_rooms(path) - {room})
    return {room: frozenset(others) for room, others in graph.items()}


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
    """The rooms as a Mermaid chart; an arrow that follows from others is left out."""
    graph = arrows()
    lines = ["flowchart TD"]
    for room in _in_order(graph):
        for other in sorted(_reduced(graph, room)):
            lines.append(f"    {room} --> {other}")
    return "\n".join(lines)


def _reduced(graph: Arrows, room: str) -> set[str]:
    beyond = {far for near in graph[room] for far in _reach(graph, near)}
    return set(graph[room] - beyond)


def _reach(graph: Arrows, room: str) -> set[str]:
    """Every room that can be reached; also where rooms import each other."""
    seen: set[str] = set()
    todo = set(graph[room])
    while todo:
        seen |= todo
        todo = {far for near in todo for far in graph[near]} - seen
    return seen


def _in_order(graph: Arrows) -> Iterable[str]:
    return sorted(graph, key=lambda room: (len(_reach(graph, room)), room))


def _room(parts: tuple[str, ...]) -> str:
    # `python -m pipeline` is a second door of the command, so it belongs to it
    return "cli" if parts == ("__main__",) else parts[0] if len(parts) > 1 else SHARED


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _imports(path: Path) -> list[tuple[str, list[str]]]:
    """(module, names) of each import of ours, relative ones made absolute."""
    imports: list[tuple[str, list[str]]] = []
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imports += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            imports.append((module, [alias.name for alias in node.names]))
    return [(module, names) for module, names in imports if module.split(".")[0] == "pipeline"]


def _imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for module, names in _imports(path):
        parts = module.split(".")[1:]
        for name in [parts[0]] if parts else names:
            rooms.add(name if (PACKAGE / name).is_dir() else SHARED)
    return rooms


def _imported_modules(path: Path, known: Iterable[str]) -> set[str]:
    known = set(known)
    named = {f"{module}.{name}" for module, names in _imports(path) for name in names}
    plain = {module for module, names in _imports(path)}
    return {name for name in named | plain if name in known and name != "pipeline"}
