"""A function that a case names is gone: where it is now, and since which version.

Where it is now is read from the engine's own code. Since when is asked of the index: the wheels of
earlier versions are looked into where they lie, by their directories, until the last one that has
the function and the first one that has not stand side by side.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version
from pydantic import ValidationError

from pipeline.errors import Interrupted, PipelineError
from pipeline.files import write_bytes
from pipeline.gate.smem.cases import Case
from pipeline.gate.smem.engine import EngineTree
from pipeline.gate.smem.results import CaseResult
from pipeline.model import Frozen, canonical_json, sha256_of

if TYPE_CHECKING:
    from pipeline.gate.smem.image_gate import ImageGate
    from pipeline.gate.smem.wheels import WheelFinder

_MOST_PLACES = 3


class Move(Frozen):
    """Between which two versions a function left its place; none where no version had it."""

    last: str | None = None
    first_without: str | None = None


@cache
def places_now(
    folder: Path, package: str, names: tuple[str, ...], kernels: tuple[str, ...]
) -> list[str]:
    """Modules that define one of these functions, those that also hold the kernels first."""
    wanted = re.compile(rf"^\s*def ({'|'.join(map(re.escape, names))})\b", re.M)
    found = []
    for path in sorted((folder / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if not wanted.search(text):
            continue
        defined = functions_of(text)
        if defined & set(names):
            module = ".".join(path.relative_to(folder).with_suffix("").parts)
            found.append((-len(defined & set(kernels)), module.removesuffix(".__init__")))
    best = min((rank for rank, _ in found), default=0)
    return sorted(module for rank, module in found if rank == best)


def functions_of(text: str) -> set[str]:
    """Names of the functions that a module defines, also inside `if` and `try`."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return set()
    found: set[str] = set()
    below: list[ast.AST] = [tree]
    while below:
        for node in ast.iter_child_nodes(below.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif not isinstance(node, ast.ClassDef | ast.expr):
                below.append(node)
    return found


def imports_of(text: str) -> set[str]:
    """Names that a module takes from others and so offers too."""
    try:
        found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)]
    except SyntaxError:
        return set()
    return {alias.asname or alias.name for node in found for alias in node.names}


def first_without(versions: Sequence[str], has: Callable[[str], bool]) -> Move:
    """The last version that has something and the first after it that has not.

    `versions` are in order, and the last of them has it not. Steps back grow, so that few
    versions are asked: something that moved lately is found in two or three.
    """
    gone, step = len(versions) - 1, 1
    while True:
        at = max(0, gone - step)
        if at == gone:
            return Move()
        if has(versions[at]):
            break
        gone, step = at, step * 2
    while gone - at > 1:
        middle = (at + gone) // 2
        at, gone = (middle, gone) if has(versions[middle]) else (at, middle)
    return Move(last=versions[at], first_without=versions[gone])


def explained(gate: ImageGate, tree: EngineTree, case: Case, result: CaseResult) -> CaseResult:
    """The result of a case whose functions are gone, with where and since when."""
    names = tuple(name.partition(":")[2] for name in case.function)
    places = places_now(tree.folder, tree.package, names, tuple(case.kernels))
    shown = ", ".join(places[:_MOST_PLACES]) + (" …" if len(places) > _MOST_PLACES else "")
    where = f"now in {shown}" if places else "no function of that name anywhere in it"
    since = _since(gate, tree, case.function)
    return result.model_copy(update={"words": f"{result.words}; {where}; {since}"})


def _since(gate: ImageGate, tree: EngineTree, functions: Sequence[str]) -> str:
    """In words: since which version, or why that is not known."""
    for function in functions:
        try:
            move = _move(gate, tree, function)
        except Interrupted:
            raise
        except PipelineError as error:
            return f"which version moved it could not be looked up ({error})"
        if move is None:
            return "which version moved it was not looked up (--offline)"
        if move.first_without:
            which = "it" if len(functions) == 1 else function
            return f"{which} is gone since {move.first_without}, {move.last} has it"
    return "no earlier version on the index has it"


def move_key(tree: EngineTree, function: str) -> str:
    """Under which an answer about a function is kept."""
    asked = canonical_json([tree.project, tree.version, function])
    return sha256_of(asked).removeprefix("sha256:")


def _move(gate: ImageGate, tree: EngineTree, function: str) -> Move | None:
    """From what was found before, else from the index; published versions never change."""
    path = gate.context.store.root / "gate" / "moved" / f"{move_key(tree, function)}.json"
    try:
        return Move.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        if gate.context.offline:
            return None
    move = _looked_up(gate, gate.context.make_finder(), tree, function)
    write_bytes(path, move.model_dump_json().encode())
    return move


def _looked_up(gate: ImageGate, finder: WheelFinder, tree: EngineTree, function: str) -> Move:
    current = Version(tree.version)
    known = [v for v in finder.versions(tree.project) if not v.is_prerelease and v < current]
    module, _, name = function.partition(":")
    python, platform = gate.plan.venv.version, gate.plan.platform

    def has(version: str) -> bool:
        for ending in (".py", "/__init__.py"):
            path = module.replace(".", "/") + ending
            data = finder.read_member(tree.project, version, python, platform, path)
            if data is not None:
                text = data.decode(errors="replace")
                return name in functions_of(text) | imports_of(text)
        return False

    return first_without([*map(str, known), tree.version], has)
