"""Which Triton kernels an engine has, by reading its code without running it.

A function under @triton.jit is a kernel where host code launches it or hands it on, a helper where
only other kernels call it, and idle where the package does neither. `jit` of other compilers (CuTe,
Numba) does not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from pipeline.artifacts.store.store import Store
from pipeline.core.files import write_bytes
from pipeline.core.model import Frozen, canonical_json, sha256_of
from pipeline.images.gate.smem.engine import EngineTree, mark_used
from pipeline.images.gate.smem.results import Coverage, KernelFunction

# Parsing takes far longer than searching: only files that can matter are parsed.
_MENTIONS_JIT = re.compile(r"^\s*@(\w+\.)*jit\b", re.M)
_COMPILERS = ("triton", "gluon")
_MOST_IMPORTS = 5  # of a name through modules that pass it on
# Modules for other makers' cards, and the engine's own tests, by a word of their name.
_ELSEWHERE = re.compile(
    r"(^|[._])(amd|rocm|hip|aiter|xpu|npu|musa|ascend|tpu|gfx\d+\w*|tests?)([._]|$)"
)

Place = tuple[str, str]  # a module and a name in it


@dataclass
class _Module:
    """What one file defines, takes from others, and calls."""

    name: str
    is_package: bool
    jits: dict[str, ast.FunctionDef] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    # name as written here → functions of the host that launch it or hand it on
    hosts: dict[str, set[str]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)  # by jit functions


class EngineKernels(Frozen):
    """An engine's Triton functions by what they are for."""

    kernels: list[KernelFunction]
    elsewhere: list[Place]  # kernels for other makers' cards, and of tests
    helpers: list[Place]
    idle: list[Place]


def engine_kernels(store: Store, tree: EngineTree) -> EngineKernels:
    """Finds every Triton function of an engine; the store keeps them by its code and our own."""
    reader = sha256_of(Path(__file__).read_bytes())
    key = sha256_of(canonical_json([reader, tree.digest])).removeprefix("sha256:")
    path = store.root / "gate" / "kernels-of" / f"{key}.json"
    try:
        known = EngineKernels.model_validate_json(path.read_bytes())
        mark_used(path)
        return known
    except (OSError, ValidationError):
        modules = _read(tree.folder, tree.package)
    places = {(m.name, name) for m in modules.values() for name in m.jits}
    launched: dict[Place, set[str]] = {}
    called: set[Place] = set()
    for module in modules.values():
        for name, hosts in module.hosts.items():
            place = _resolved(modules, module, name)
            if place in places:
                before = "" if place[0] == module.name else f"{module.name}:"
                launched.setdefault(place, set()).update(before + host for host in hosts)
        called |= {place for name in module.called if (place := _resolved(modules, module, name))}
    kernels = [
        KernelFunction(module=m.name, name=name, line=node.lineno, launched_by=sorted(hosts))
        for m in modules.values()
        for name, node in m.jits.items()
        if (hosts := launched.get((m.name, name), set()))
    ]
    own = [k for k in kernels if not _ELSEWHERE.search(k.module)]
    rest = sorted(places - launched.keys())
    found = EngineKernels(
        kernels=sorted(own, key=lambda k: (k.module, k.line)),
        elsewhere=[(k.module, k.name) for k in kernels if _ELSEWHERE.search(k.module)],
        helpers=[place for place in rest if place in called],
        idle=[place for place in rest if place not in called],
    )
    write_bytes(path, found.model_dump_json().encode())
    return found


def _read(folder: Path, package: str) -> dict[str, _Module]:
    """Parses files that define Triton functions, then those that name one of them."""
    texts = {p: p.read_text("utf-8", "replace") for p in sorted((folder / package).rglob("*.py"))}
    modules: dict[str, _Module] = {}

    def parse(path: Path) -> None:
        name = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        with suppress(SyntaxError, ValueError, RecursionError):
            tree = ast.parse(texts[path])
            modules[name] = _Module(name, path.name == "__init__.py")
            _ModuleReader(modules[name]).visit(tree)

    defining = {path for path, text in texts.items() if _MENTIONS_JIT.search(text)}
    for path in (path for path in texts if path in defining):
        parse(path)
    names = {name for module in modules.values() for name in module.jits}
    for path, text in texts.items():
        if path not in defining and not names.isdisjoint(re.findall(r"\w+", text)):
            parse(path)
    return modules


class _ModuleReader(ast.NodeVisitor):
    """Walks one file, knowing in which function it is and whether that is Triton's."""

    def __init__(self, module: _Module) -> None:
        self._module = module
        self._path: list[str] = []
        self._in_jit = False
        self._is_derived = False  # the class around us has a base that may launch its kernel

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            target = alias.name if alias.asname else alias.name.partition(".")[0]
            self._module.imports[alias.asname or target] = (target, None)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            up = self._module.name.split(".")
            up = up[: len(up) - node.level + self._module.is_package]
            base = ".".join([*up, base] if base else up)
        for alias in node.names:
            self._module.imports[alias.asname or alias.name] = (base, alias.name)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._is_derived = self._is_derived, bool(node.bases)
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()
        self._is_derived = outer

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node.name, node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if not any(self._is_jit(d) for d in node.decorator_list):
            return self._function(node.name, [*node.decorator_list, *node.body])
        self._module.jits[node.name] = node
        if self._is_derived:
            self._note(node.name)
        self._in_jit = True
        for part in node.body:
            self.visit(part)
        self._in_jit = False

    def _function(self, name: str, body: Iterable[ast.AST]) -> None:
        self._path.append(name)
        for part in body:
            self.visit(part)
        self._path.pop()

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._note(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        base = node.value.id if isinstance(node.value, ast.Name) else ""
        if base in self._module.imports:
            self._note(f"{base}.{node.attr}")
        elif base in ("self", "cls"):
            self._note(node.attr)
        self.generic_visit(node)

    def _note(self, name: str) -> None:
        if self._in_jit:
            self._module.called.add(name)
        else:
            self._module.hosts.setdefault(name, set()).add(".".join(self._path) or "<module>")

    def _is_jit(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            return self._is_jit(node.func)
        if isinstance(node, ast.Attribute):
            # `tl.core._jit` and the like do not end in jit
            base = node.value
            named = base.id if isinstance(base, ast.Name) else getattr(base, "attr", "")
            origin = self._module.imports.get(named, (named, None))
            return node.attr == "jit" and (named in _COMPILERS or origin[0] in _COMPILERS)
        if isinstance(node, ast.Name) and node.id == "jit":
            return self._module.imports.get("jit", ("", None))[0].partition(".")[0] == "triton"
        return False


def _resolved(modules: dict[str, _Module], module: _Module, name: str) -> Place | None:
    """Finds where a name that a module uses is defined."""
    owner, _, attribute = name.rpartition(".")
    place = (module.name, name)
    if owner:
        target, inner = module.imports[owner]
        place = (f"{target}.{inner}" if inner else target, attribute)
    # bounded: packages may import names from each other in a circle
    for _ in range(_MOST_IMPORTS):
        owning = modules.get(place[0])
        if owning is None:
            return None
        if place[1] in owning.jits:
            return place
        target, inner = owning.imports.get(place[1], ("", None))
        if not target or inner is None:
            return None
        place = (target, inner)
    return None


def coverage(engine: EngineKernels, reached: set[Place]) -> Coverage:
    """How many of the kernels some case compiled, and which ones none did."""
    rest = [k for k in engine.kernels if (k.module, k.name) not in reached]
    return Coverage(
        kernels=len(engine.kernels),
        reached=len(engine.kernels) - len(rest),
        elsewhere=len(engine.elsewhere),
        helpers=len(engine.helpers),
        idle=len(engine.idle),
        rest=rest,
    )
