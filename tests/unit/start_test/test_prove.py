"""A run of an image's checks: what it printed, what it did not reach, and where it cannot run."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from pipeline.artifacts.containers.backend import Kind, Running, StepContainer
from pipeline.artifacts.oci.config import ImageConfig, read_image_config
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import StepFailed
from pipeline.images.assemble.image import Built
from pipeline.images.gate.runs import ImageRun
from pipeline.images.start_test import prove
from pipeline.images.start_test.inside.check import MARK
from pipeline.images.start_test.prove import prove_start
from tests.makers import build_in, make_deb, root_image
from tests.testbed.deb_file import Item

Script = Callable[[StepContainer], tuple[list[str], int]]


class FakeBackend:
    """Prints lines in place of running anything."""

    kind: Kind = "namespaces"

    def __init__(self, script: Script) -> None:
        self._script = script

    @contextmanager
    def running(self, container: StepContainer, command: Sequence[str]) -> Iterator[Running]:
        lines, code = self._script(container)
        reader, writer = os.pipe()
        os.write(writer, "".join(f"{line}\n" for line in lines).encode())
        os.close(writer)
        try:
            yield Running(reader, lambda: code)
        finally:
            os.close(reader)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Built]:
    place = tmp_path_factory.mktemp("starts")
    deb = make_deb(place / "mirror", "tool", Item("./usr/bin/tool", b"#!"))
    _, store, built = build_in(place, root_image([deb], user="engine"))
    return store, built


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image is for this machine, and nothing changes owners."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: None)


def config_with(world: tuple[Store, Built], user: str) -> ImageConfig:
    """The image's config, for another user."""
    store, built = world
    config = read_image_config(store.read_blob(built.record.config))
    return config.model_copy(update={"settings": config.runs.model_copy(update={"user": user})})


def line(check: str, verdict: str, **more: Any) -> str:
    row = {"check": check, "name": check, "verdict": verdict, "message": "so it is", **more}
    return MARK + json.dumps(row)


def every(container: StepContainer, verdict: str = "passed") -> list[str]:
    wanted = json.loads((container.mounts["/sm120-start"] / "wanted.json").read_text())
    return [line(check, verdict) for check in wanted["checks"]]


def proved(world: tuple[Store, Built], script: Script) -> ImageRun:
    store, built = world
    return prove_start(store, built, FakeBackend(script), None)


def failed(run: ImageRun) -> dict[str, str]:
    return {test.name: test.message for test in run.tests if test.verdict == "failed"}


def test_an_image_that_answers_everything_starts(world: tuple[Store, Built]) -> None:
    run = proved(world, lambda container: (["Loading…", *every(container)], 0))
    assert (run.kind, run.verdict) == ("start", "passed")
    assert [test.name for test in run.tests] == [
        "owners",
        "user",
        "folders",
        "libraries",
        "programs",
    ]
    assert run.machine == {"sandbox": "namespaces", "processor": "x86_64", "emulator": "none"}
    assert run.made_by["checks"].startswith("sha256:")


def test_the_same_findings_give_the_same_run(world: tuple[Store, Built]) -> None:
    runs = [proved(world, lambda container: (every(container), 0)) for _ in range(2)]
    assert runs[0] == runs[1]


def test_it_runs_as_the_images_own_user_with_its_own_variables(world: tuple[Store, Built]) -> None:
    containers: list[StepContainer] = []

    def script(container: StepContainer) -> tuple[list[str], int]:
        containers.append(container)
        scripts = sorted(path.name for path in container.mounts["/sm120-start"].iterdir())
        assert scripts == ["check.py", "libraries.py", "print_flags.py", "wanted.json"]
        return every(container), 0

    proved(world, script)
    assert containers[0].user == (1000, 1000)
    assert containers[0].env["HOME"] == "/home/engine"
    assert containers[0].env["PATH"] == "/opt/venv/bin:/usr/bin"


def test_a_failed_check_is_kept_with_its_message(world: tuple[Store, Built]) -> None:
    bad = line("libraries", "failed", name="library libfoo.so", message="missing from the image")
    run = proved(world, lambda container: ([*every(container), bad], 0))
    assert run.verdict == "failed"
    assert failed(run) == {"library libfoo.so": "missing from the image"}


def test_what_was_not_reached_has_failed(world: tuple[Store, Built]) -> None:
    run = proved(world, lambda container: ([*every(container)[:1], "Segmentation fault"], 139))
    assert list(failed(run)) == ["folders", "libraries", "programs"]
    assert "exit code 139: Segmentation fault" in failed(run)["folders"]


def test_an_image_whose_python_is_missing_has_failed_everything(world: tuple[Store, Built]) -> None:
    run = proved(world, lambda container: (["No such file or directory"], 127))
    assert len(failed(run)) == 4


def test_a_run_that_is_ended_has_failed_what_it_did_not_reach(world: tuple[Store, Built]) -> None:
    def script(container: StepContainer) -> tuple[list[str], int]:
        raise StepFailed("took longer than 2 h, so it was ended")

    assert "took longer" in failed(proved(world, script))["libraries"]


@pytest.mark.parametrize(
    "text",
    [
        MARK + "{",
        MARK + "[]",
        MARK + json.dumps({"check": "user", "name": "user", "verdict": "splendid", "message": ""}),
        MARK + json.dumps({"name": "user", "verdict": "passed", "message": ""}),
        MARK + json.dumps({"check": "user", "name": "user", "verdict": "passed", "more": 1}),
        json.dumps({"check": "user", "name": "user", "verdict": "passed", "message": ""}),
    ],
)
def test_a_line_that_is_no_verdict_counts_for_nothing(
    world: tuple[Store, Built], text: str
) -> None:
    run = proved(world, lambda container: ([text, *every(container)[1:]], 0))
    assert list(failed(run)) == ["user"]


def test_a_user_whom_the_image_does_not_know_is_caught_before_anything_runs(
    world: tuple[Store, Built], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_with(world, "nobody")
    monkeypatch.setattr(prove, "read_image_config", lambda data: config)
    run = proved(world, lambda container: cast("tuple[list[str], int]", None))
    assert [test.name for test in run.tests] == ["user"]
    assert run.verdict == "failed"


def test_an_image_for_another_processor_is_unknown_without_an_emulator(
    world: tuple[Store, Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(prove, "_BINFMT", tmp_path)
    run = proved(world, lambda container: cast("tuple[list[str], int]", None))
    assert run.verdict == "unknown"
    assert "no emulator is registered" in run.tests[0].message


REGISTERED = "enabled\ninterpreter /usr/bin/qemu\nflags: {}\n"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (REGISTERED.format("PF"), "qemu-x86_64"),
        (REGISTERED.format("P"), None),
        (REGISTERED.format("PF").replace("enabled", "disabled"), None),
        ("", None),
    ],
)
def test_an_emulator_counts_where_it_works_in_other_roots(
    world: tuple[Store, Built],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    want: str | None,
) -> None:
    (tmp_path / "qemu-x86_64").write_text(text)
    monkeypatch.setattr(prove, "_BINFMT", tmp_path)
    assert proved(world, lambda container: (every(container), 0)).machine["emulator"] == "none"
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    run = proved(world, lambda container: (every(container), 0))
    assert run.machine["emulator"] == (want or "none")
    assert (run.tests[0].name == "processor") == (want is None)


@pytest.mark.parametrize(
    ("user", "want"),
    [
        ("0:0", (0, 0, "/root")),
        ("1000:1000", (1000, 1000, "/home/e")),
        ("1000", (1000, 0, "/home/e")),
        ("1001", (1001, 0, "/")),
        ("engine", (1000, 1001, "/home/e")),
        ("engine:staff", (1000, 1001, "/home/e")),
        ("bad", None),
        ("nobody", None),
        ("", (0, 0, "/root")),
    ],
)
def test_a_user_is_a_number_or_an_account_of_passwd(
    world: tuple[Store, Built],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    user: str,
    want: tuple[int, int, str] | None,
) -> None:
    passwd = "root:*:0:0:root:/root:/bin/sh\nbad:line\nengine:x:1000:1001::/home/e:/bin/sh\n"
    monkeypatch.setattr(prove, "unpacked", lambda store, image: nullcontext(tmp_path))
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text(passwd)
    assert user_of(world, tmp_path / "a", user) == (want or (None, None, "/"))
    (tmp_path / "etc" / "passwd").unlink()
    assert user_of(world, tmp_path / "b", "5:6") == (5, 6, "/")


def user_of(
    world: tuple[Store, Built], scratch: Path, user: str
) -> tuple[int | None, int | None, str]:
    scratch.mkdir()
    config, backend = config_with(world, user), FakeBackend(lambda container: ([], 0))
    with prove._container(*world, backend, config, scratch) as container:
        return *(container.user or (None, None)), container.env["HOME"]
