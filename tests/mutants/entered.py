"""A pytest plugin: which functions of a folder each test enters, and a run of chosen tests.

Calls are seen by a trace function that looks at nothing else, in every thread and in forked
children; a program that a test starts is not seen.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--entered FILE --within FOLDER` writes the map, `--chosen FILE` runs the tests in it."""
    parser.addoption("--entered", type=Path, help="write which functions each test enters")
    parser.addoption("--within", type=Path, help="the folder whose functions count")
    parser.addoption("--chosen", type=Path, help="run only the tests named in this file, in order")


def pytest_configure(config: pytest.Config) -> None:
    """Watch from before the first import."""
    if config.option.entered:
        config.pluginmanager.register(Watch(config.option.entered, config.option.within))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only the chosen tests, in their order."""
    if not config.option.chosen:
        return
    names = json.loads(config.option.chosen.read_text(encoding="utf-8"))
    place = {name: at for at, name in enumerate(names)}
    items[:] = sorted((i for i in items if i.nodeid in place), key=lambda i: place[i.nodeid])


class Watch:
    """Writes a line for each function that a test, a shared fixture or an import enters."""

    def __init__(self, file: Path, within: Path) -> None:
        self._root = f"{Path.cwd()}{os.sep}"
        self._within = f"{within.resolve()}"
        # one write a line, so children that were forked write into the same file
        self._out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._name = ""
        self._seen: set[int] = set()
        self._codes: list[Any] = []

    def pytest_sessionstart(self) -> None:
        threading.settrace(self._called)
        sys.settrace(self._called)

    def pytest_sessionfinish(self) -> None:
        sys.settrace(None)
        threading.settrace(None)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        """What the import of a test file enters is of all its tests."""
        with_name = self._change(f"file {collector.nodeid}")
        try:
            return (yield)
        finally:
            self._change(with_name)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """What a shared fixture enters is of all the tests that ask for it."""
        if fixturedef.scope == "function":
            return (yield)
        before = self._change(f"fixture {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self._change(before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        # a value that an earlier test left in a cache would hide who depends on the function
        for cached in _caches():
            cached.cache_clear()
        self._change(f"test {item.nodeid}")
        self._write("uses", sorted(getattr(item, "fixturenames", ())))
        try:
            return (yield)
        finally:
            self._change("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._write(report.outcome, report.duration)

    def _change(self, name: str) -> str:
        before, self._name = self._name, name
        self._seen = set()
        # tests that trace, and pytest's own guard against them, leave none behind
        if sys.gettrace() != self._called:
            sys.settrace(self._called)
        return before

    def _called(self, frame: FrameType, _event: str, _arg: Any) -> None:
        code = frame.f_code
        if id(code) in self._seen:
            return
        self._seen.add(id(code))
        if code.co_filename.startswith(self._within):
            self._codes.append(code)  # so that its id stays its own
            self._write("enters", [code.co_filename.removeprefix(self._root), code.co_qualname])

    def _write(self, what: str, value: Any) -> None:
        os.write(self._out, (json.dumps([self._name, what, value]) + "\n").encode())


def _caches() -> list[Any]:
    """Functions of the pipeline that remember their answers (`functools.cache`)."""
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] == "pipeline"]
    spaces: list[Mapping[str, Any]] = [vars(m) for m in modules]
    spaces += [vars(v) for space in spaces[:] for v in space.values() if isinstance(v, type)]
    kind = functools._lru_cache_wrapper
    return [value for space in spaces for value in space.values() if isinstance(value, kind)]
