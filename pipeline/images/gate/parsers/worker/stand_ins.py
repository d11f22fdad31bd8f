"""Imports of what parsers never call: stood in for, and noted.

The gate of kernels has stand-ins of its own (`worker/stand_ins.py`), which may be objects. Here
whole servers are imported, whose models and type checks need classes, so a name that begins with a
capital is a class.
"""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any

# Engines take a torch that has one of these for a machine with such a device.
_OTHER_DEVICES = ("hpu", "mlu", "mps", "musa", "npu", "xpu")


class _Kind(abc.ABCMeta):
    def __getattr__(cls, name: str) -> Any:
        return stand_in(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class Missing(metaclass=_Kind):
    """Anything of a package that is not here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__()

    def __class_getitem__(cls, key: Any) -> Any:
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return handler(Any)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # as a decorator it leaves the function alone
        is_decorator = len(args) == 1 and not kwargs
        is_decorator = is_decorator and isinstance(args[0], types.FunctionType | type)
        return args[0] if is_decorator else Missing()

    def __getattr__(self, name: str) -> Any:
        return stand_in(name)

    def __getitem__(self, key: Any) -> Any:
        return Missing()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __int__(self) -> int:
        return 0

    def __or__(self, other: Any) -> Any:
        return Missing

    __ror__ = __or__

    def __lt__(self, other: Any) -> bool:
        return False

    __le__ = __gt__ = __ge__ = __lt__


def stand_in(name: str) -> Any:
    """What a name of a missing package turns out to be."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Kind(name, (Missing,), {}) if name[:1].isupper() else Missing()


class MissingPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages that are not here, and parts of the engine that parsers never call."""

    def __init__(self, names: list[str]) -> None:
        self._names = set(names)
        self.used: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        parts = name.split(".")
        heads = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        head = next((each for each in heads if each in self._names), None)
        if head is None:
            return None
        self.used.add(head)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        # engines compare versions while they are imported, and want a new one
        module.__version__ = "9999"  # type: ignore[attr-defined]
        kept: dict[str, Any] = {}

        def missing(name: str) -> Any:
            if name in _OTHER_DEVICES:
                raise AttributeError(name)
            if name not in kept:
                kept[name] = stand_in(name)
            return kept[name]

        module.__getattr__ = missing  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class BareParents(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages whose __init__.py would start the whole engine: their modules, without it."""

    def __init__(self, root: str, names: list[str]) -> None:
        self._root, self._names = Path(root), set(names)
        self.used: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        folder = self._root.joinpath(*name.split("."))
        if name not in self._names or not folder.is_dir():
            return None
        self.used.add(name)
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "0"  # type: ignore[attr-defined]

        def missing(name: str) -> Any:
            folder = self._root.joinpath(*module.__name__.split("."))
            if (folder / name).is_dir() or (folder / f"{name}.py").is_file():
                return importlib.import_module(f"{module.__name__}.{name}")
            return stand_in(name)

        module.__getattr__ = missing  # type: ignore[method-assign]


def install_stand_ins(root: str, bare: list[str], missing: list[str]) -> Any:
    """Puts the engine first; gives back what notes which stand-ins were used."""
    sys.path.insert(0, root)
    hooks = BareParents(root, bare), MissingPackages(missing)
    # before Python's own finders: parts of the engine are there, and must not be found
    sys.meta_path[:0] = hooks
    if "torch" in missing:
        whole = types.SimpleNamespace(min=-(2**63), max=2**63 - 1)
        # requests check the range of their numbers by it
        importlib.import_module("torch").__dict__["iinfo"] = lambda kind: whole
        # xgrammar's binding would compile an extension of torch
        os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
    return lambda: sorted({name for hook in hooks for name in hook.used})
