"""Which Triton kernels an engine has, found by reading its code without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeline.gate.results import Coverage, Kernel

_DECORATORS = {"jit"}
_MENTIONS_JIT = re.compile(r"^\s*@(\w+\.)*jit\b", re.M)


def find_kernels(folder: Path, package: str) -> list[Kernel]:
    """Every function under @triton.jit that is launched, not only called by other kernels."""
    kernels: list[Kernel] = []
    helpers: set[str] = set()
    launched: set[str] = set()
    for path in sorted((folder / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if not _MENTIONS_JIT.search(text):
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        module = ".".join(path.relative_to(folder).with_suffix("").parts)
        found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and _is_jit(n)]
        for function in found:
            helpers |= set(_called(function))
        launchers = dict(_launchers(tree))
        launched |= set(launchers)
        kernels += [
            Kernel(
                module=module,
                name=f.name,
                line=f.lineno,
                launched_by=sorted(launchers.get(f.name, ())),
            )
            for f in found
        ]
    return [k for k in kernels if k.name in launched or k.name not in helpers]


def _is_jit(function: ast.FunctionDef) -> bool:
    return any(_last_name(d) in _DECORATORS for d in function.decorator_list)


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _called(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield _last_name(node.func)


def _launchers(tree: ast.Module) -> dict[str, set[str]]:
    """Kernel → the functions that say `kernel[grid](...)`."""
    found: dict[str, set[str]] = {}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or _is_jit(function):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = _last_name(node.func.value)
                found.setdefault(name, set()).add(function.name)
    return found


def coverage(kernels: Iterable[Kernel], reached: set[tuple[str, str]]) -> Coverage:
    """How many of the kernels some case compiled, and which ones none did."""
    all_kernels = list(kernels)
    rest = [k for k in all_kernels if (k.module, k.name) not in reached]
    return Coverage(kernels=len(all_kernels), reached=len(all_kernels) - len(rest), rest=rest)
