"""The menu's own small decisions."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import TextIO

import click
import pytest

from pipeline.cli.image import build_command
from pipeline.hosts.fleet.playbook import ANSIBLE_HINT
from pipeline.images.spec.checkout import Checkout
from tests.unit.support import ROOT


@pytest.fixture(scope="module")
def menu() -> ModuleType:
    pytest.importorskip("nox", reason="There is no nox here to load the menu with.")
    spec = importlib.util.spec_from_file_location("menu", ROOT / "noxfile.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["menu"] = module
    spec.loader.exec_module(module)
    return module


PIN = re.compile(r"(?m)^[^\s=]+==\S+")
ENGINES, AMD64 = ("sglang-k2", "sglang", "vllm"), ("--platform", "linux/amd64")


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ([], [*ENGINES, *AMD64]),
        (["--gate"], [*ENGINES, "--gate", *AMD64]),
        (["--mirror", "wheels"], [*ENGINES, "--mirror", "wheels", *AMD64]),
        (["--mirror=wheels", "--gate"], [*ENGINES, "--mirror=wheels", "--gate", *AMD64]),
        (["--platform", "linux/arm64"], [*ENGINES, "--platform", "linux/arm64"]),
        (["--layers-from", "reg/x"], [*ENGINES, "--layers-from", "reg/x", *AMD64]),
        (["vllm"], ["vllm"]),
        (["vllm", "--gate"], ["vllm", "--gate"]),
        (["--platform", "host", "debian-python"], ["--platform", "host", "debian-python"]),
    ],
)
def test_options_alone_are_for_the_engine_images(
    menu: ModuleType, words: list[str], want: list[str]
) -> None:
    assert menu.with_images(words) == want


def test_a_value_of_an_option_of_build_is_no_image(menu: ModuleType) -> None:
    options = [each for each in build_command.params if isinstance(each, click.Option)]
    taking = [each.opts[0] for each in options if not each.is_flag]
    assert {"--mirror", "--layers-from", "--recipe"} < set(taking)
    for option in taking:
        assert menu.names_in([option, "value", "vllm"]) == ["vllm"], option


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ([], ([], False, None)),
        (["--gate"], (["--gate"], False, None)),
        (["--smoke"], ([], True, None)),
        (["--smoke", "tiny-cpu"], ([], True, "tiny-cpu")),
        (["--smoke=tiny-cpu", "--gate"], (["--gate"], True, "tiny-cpu")),
        (["--smoke", "--gate"], (["--gate"], True, None)),
        # an image that follows is an image
        (["--smoke", "vllm"], (["vllm"], True, None)),
        (["tiny-cpu", "--smoke"], (["tiny-cpu"], True, None)),
        (["vllm", "--smoke", "tiny-cpu", "--gate"], (["vllm", "--gate"], True, "tiny-cpu")),
    ],
)
def test_smoke_is_of_the_stage_after_the_build(
    menu: ModuleType, words: list[str], want: tuple[list[str], bool, str | None]
) -> None:
    assert menu.without_smoke(words) == want


class FakeSession:
    """What a session was asked to run."""

    def __init__(self, *posargs: str) -> None:
        self.name, self.posargs, self.ran = "lint", list(posargs), list[tuple[str, ...]]()

    def log(self, message: str) -> None:
        self.ran.append(("log", message))

    def error(self, message: str) -> None:
        raise RuntimeError(message)


@pytest.fixture
def ran(menu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """All commands of the menu, which are not run."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(menu, "run", lambda session, group, *words, **_: commands.append(words))
    monkeypatch.setattr(menu, "environment", lambda group: Path("bin"))
    return commands


def serve_ends_with(
    code: int, menu: ModuleType, monkeypatch: pytest.MonkeyPatch, *more: str
) -> None:
    def run(command: list[str], check: bool) -> CompletedProcess[bytes]:
        assert command == ["bin/sm120", "serve", "tiny-cpu", *more]
        return CompletedProcess(command, code)

    monkeypatch.setattr(menu.subprocess, "run", run)


def test_after_the_build_the_engine_images_prove_their_start(
    menu: ModuleType, ran: list[tuple[str, ...]]
) -> None:
    menu.build_sm120.func(FakeSession("--smoke", "--gate"))
    assert ran == [
        ("sm120", "build", *ENGINES, "--gate", *AMD64),
        ("sm120", "image", "test", *ENGINES, *AMD64),
    ]


def test_a_recipe_is_served_smoked_and_stopped_after_the_start(
    menu: ModuleType, ran: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_ends_with(0, menu, monkeypatch)
    menu.build_sm120.func(FakeSession("llama-cpp-cpu", "--smoke", "tiny-cpu"))
    assert ran == [
        ("sm120", "build", "llama-cpp-cpu", "--gate"),
        ("sm120", "image", "test", "llama-cpp-cpu"),
        ("sm120", "smoke", "tiny-cpu", "--restart"),
        ("sm120", "recipe", "stop", "tiny-cpu"),
    ]


def test_a_recipe_is_measured_after_its_ladder_also_on_another_host(
    menu: ModuleType, ran: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ("--on", "rig1", "-i", "hosts.yaml")
    serve_ends_with(0, menu, monkeypatch, *there)
    words = ("llama-cpp-cpu", "--gate", "--smoke", "tiny-cpu", "--bench", *there)
    menu.build_sm120.func(FakeSession(*words))
    out = ("--output", str(ROOT / "bench" / "tiny-cpu"))
    assert ran == [
        ("sm120", "build", "llama-cpp-cpu", "--gate"),
        ("sm120", "image", "test", "llama-cpp-cpu"),
        ("sm120", "smoke", "tiny-cpu", "--restart", *there),
        ("sm120", "bench", "tiny-cpu", *out, *there),
        ("sm120", "recipe", "stop", "tiny-cpu", *there),
    ]
    for wrong in (("--bench",), ("--on", "rig1"), ("--smoke", "--bench")):
        with pytest.raises(RuntimeError, match="are for --smoke RECIPE"):
            menu.build_sm120.func(FakeSession(*wrong))


def test_hints_name_sessions_that_exist(menu: ModuleType, ran: list[tuple[str, ...]]) -> None:
    assert "`nox -s sm120 --`" in ANSIBLE_HINT
    menu.any_command.func(FakeSession("serve", "tiny-cpu", "--on", "rig1", "-i", "hosts.yaml"))
    menu.bench.func(FakeSession("tiny-cpu"))
    assert ran == [
        ("sm120", "serve", "tiny-cpu", "--on", "rig1", "-i", "hosts.yaml"),
        ("sm120", "bench", "tiny-cpu"),
    ]


@pytest.mark.parametrize("code", [42, 91])
def test_a_machine_that_cannot_serve_a_recipe_ends_with_the_start(
    menu: ModuleType, ran: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    serve_ends_with(code, menu, monkeypatch)
    session = FakeSession("llama-cpp-cpu", "--smoke", "tiny-cpu")
    menu.build_sm120.func(session)
    assert ran[-1] == ("sm120", "image", "test", "llama-cpp-cpu")
    assert "cannot serve tiny-cpu" in session.ran[0][1]


def test_a_recipe_whose_engine_ends_is_an_error(
    menu: ModuleType, ran: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_ends_with(90, menu, monkeypatch)
    with pytest.raises(RuntimeError, match="was not served"):
        menu.build_sm120.func(FakeSession("llama-cpp-cpu", "--smoke", "tiny-cpu"))


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ([], ["image", "test", *ENGINES]),
        (["vllm", "--platform", "host"], ["image", "test", "vllm", "--platform", "host"]),
        (["tiny-cpu", "--quick"], ["smoke", "tiny-cpu", "--quick"]),
        (["http://gpu1:8000"], ["smoke", "http://gpu1:8000"]),
    ],
)
def test_smoke_alone_is_of_images_recipes_and_servers(
    menu: ModuleType, ran: list[tuple[str, ...]], words: list[str], want: list[str]
) -> None:
    menu.smoke.func(FakeSession(*words))
    assert ran == [("sm120", *want)]


def test_ci_makes_one_environment_for_lint_and_all_tests(
    menu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, str]] = []
    monkeypatch.setattr(menu, "run", lambda s, group, *words, **env: ran.append((group, words[0])))
    made: list[str] = []
    monkeypatch.setattr(menu, "environment", made.append)
    menu.tests.func(FakeSession())
    assert made == ["lint"]
    programs = ["mypy", "pytest", "python", "ruff", "ruff"]  # python: ansible-lint
    assert sorted(ran) == [("lint", program) for program in programs]
    test, lint = (set(PIN.findall((menu.LOCKS / f"{g}.txt").read_text())) for g in ("test", "lint"))
    assert test
    assert test <= lint


@pytest.mark.parametrize("program", ["ruff", "mypy", "tests.quick_lint"])
def test_what_any_linter_finds_is_an_error(
    menu: ModuleType, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    def run(session: object, group: str, *words: str, output: TextIO | None = None) -> None:
        if program in words:
            print(f"{program}: one thing", file=output)
            raise RuntimeError(f"{program} found something")

    monkeypatch.setattr(menu, "run", run)
    monkeypatch.setattr(menu, "environment", lambda group: Path("bin"))
    with pytest.raises(RuntimeError, match=program):
        menu.lint.func(FakeSession())
    session = FakeSession()
    with pytest.raises(RuntimeError, match=program):
        menu.tests.func(session)
    # after the tests, where who looks at the end of a long output sees it
    assert session.ran == [("log", f"Lint failed:\n{program}: one thing\n")]


def test_what_is_not_built_by_default_exists_and_is_named(menu: ModuleType) -> None:
    checkout = Checkout(ROOT)
    for name in menu.OTHERS:
        image, *platform = name.split(" --platform ")
        assert set(platform) <= set(checkout.spec(image).platforms)
        assert image not in menu.ENGINES or platform


def test_locks_are_made_for_every_python_that_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    prefix = "Programming Language :: Python :: "
    declared = [c.removeprefix(prefix) for c in project["project"]["classifiers"] if prefix in c]
    assert declared == ["3.11", "3.12", "3.13", "3.14"]
    least = declared[0]
    assert project["project"]["requires-python"] == f">={least}"
    assert project["tool"]["ruff"]["target-version"] == f"py{least.replace('.', '')}"
    menu = (ROOT / "noxfile.py").read_text("utf-8")
    assert f'"--python-version", "{least}"' in menu
    assert "--universal" in menu
    assert "{}.{}".format(*sys.version_info) in declared
