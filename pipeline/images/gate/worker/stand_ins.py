"""Imports of what is not in this environment: absorbed, and noted."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any


class StandIn:
    """Absorbs what module-level code does with a package that is not here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # as a decorator it leaves the function alone
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else StandIn()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return StandIn()

    def __getitem__(self, key: Any) -> Any:
        return StandIn()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, bases: Any) -> Any:
        return (_Base,)


class _Base:
    def __class_getitem__(cls, key: Any) -> Any:
        return cls

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last: packages that the image has and the gate's environment has not."""

    def __init__(self, names: list[str]) -> None:
        self._names = set(names)
        self.used: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        # a submodule that a real package only looks for is not ours to invent
        parent = getattr(sys.modules.get(top), "__spec__", None)
        if top in self._names and (name == top or getattr(parent, "loader", None) is self):
            self.used.add(top)
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        # engines compare versions while they are imported, and want a new one
        module.__version__ = "9999"  # type: ignore[attr-defined]

        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return StandIn()

        module.__getattr__ = missing  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class BarePackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages whose __init__.py would start the whole engine: their modules, without it.

    A name that only the __init__.py would have defined is a stand-in, and is noted.
    """

    def __init__(self, root: str, names: list[str]) -> None:
        self._root, self._names = Path(root), set(names)
        self.used: set[str] = set()

    def _folder(self, name: str) -> Path:
        return self._root.joinpath(*name.split("."))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        folder = self._folder(name)
        if name not in self._names or not folder.is_dir():
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec

    def exec_module(self, module: types.ModuleType) -> None:
        package, folder = module.__name__, self._folder(module.__name__)

        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if (folder / name).is_dir() or (folder / f"{name}.py").is_file():
                return importlib.import_module(f"{package}.{name}")
            self.used.add(f"{package}.{name}")
            return StandIn()

        module.__getattr__ = missing  # type: ignore[method-assign]
