"""The program by which the role engine looks at a host: what it calls current, refused and gone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.testbed.playbook import ROOT
from tests.unit.hosts.test_engine_promises import CONFIG, DIGEST, RECORD

SCRIPT = ROOT / "ansible" / "roles" / "engine" / "files" / "engine_host.py"
MODELS = json.dumps({"data": [{"id": "tiny"}]}).encode()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # not imported: its compiled form would lie in the role, and travel with the collection
    module = ModuleType("engine_host")
    exec(compile(SCRIPT.read_text(encoding="utf-8"), str(SCRIPT), "exec"), module.__dict__)
    monkeypatch.setattr(module, "HOME", tmp_path)
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    return module


Programs = dict[str, tuple[int, str]]
IMAGE = {"Id": CONFIG, "RootFS": {"Layers": RECORD.layers}}
CONTAINER = {"Image": CONFIG, "State": {"Running": True}}
GOOD: Programs = {
    "docker image inspect": (0, json.dumps([IMAGE])),
    "docker container inspect": (0, json.dumps([CONTAINER])),
    "systemctl show": (0, "ActiveState=active\nUnitFileState=enabled\nNRestarts=0\n"),
}


@pytest.fixture
def host(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """A host on which the order is deployed and passed, but for some things; returns the order."""

    def make(
        programs: Programs | None = None,
        answers: dict[str, tuple[int, bytes]] | None = None,
        unit: str | None = RECORD.unit,
        **record: Any,
    ) -> dict[str, Any]:
        said = {**GOOD, **(programs or {})}
        told = {"/health": (200, b""), "/v1/models": (200, MODELS), **(answers or {})}

        def run(*words: str) -> tuple[int, str]:
            line = " ".join(words)
            return next((v for k, v in said.items() if line.startswith(k)), (127, "missing"))

        monkeypatch.setattr(program, "run", run)
        monkeypatch.setattr(program, "answer", lambda port, path: told[path])
        order = {**RECORD.model_dump(), "unit_path": str(tmp_path / "x.service")}
        if unit is not None:
            Path(order["unit_path"]).write_text(unit)
        (tmp_path / "tiny").mkdir()
        passed = {**order, "at": "2026-01-01T00:00:00Z", "smoke": {"verdict": "passed"}, **record}
        (tmp_path / "tiny" / "passed.json").write_text(json.dumps(passed))
        return order

    return make


def test_a_host_that_has_what_is_ordered_and_passed_differs_in_nothing(
    program: ModuleType, host: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    order = host()
    assert program.main(["look", json.dumps(order)]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["differs"] == []
    assert seen["passed"]["at"] == "2026-01-01T00:00:00Z"
    assert seen["platform"].startswith("linux/")


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"image_digest": CONFIG}, "image_digest is another"),
    ({"recipe_digest": "sha256:1"}, "recipe_digest is another"),
    ({"format": 2}, "no version has passed on this host"),
    ({"unit": "[Service]\nUser=me\n"}, "its unit is another"),
    ({"unit": None}, "its unit is missing"),
    ({"answers": {"/health": (503, b"")}}, "it does not answer"),
    (
        {"programs": {"systemctl show": (0, "ActiveState=failed\nUnitFileState=enabled\n")}},
        "its service does not run",
    ),
    (
        {"programs": {"systemctl show": (0, "ActiveState=active\nUnitFileState=disabled\n")}},
        "its unit does not start at boot",
    ),
    (
        {"programs": {"docker container inspect": (1, "")}},
        "its container sm120-tiny does not run",
    ),
    (
        {"programs": {"docker container inspect": (0, json.dumps([{**CONTAINER, "Image": "0"}]))}},
        f"the container runs the image 0, not {CONFIG}",
    ),
    (
        {"answers": {"/v1/models": (200, b'{"data": [{"id": "other"}]}')}},
        "port 8080 serves other, not tiny",
    ),
]


@pytest.mark.parametrize(("changes", "reason"), BROKEN, ids=[row[1] for row in BROKEN])
def test_each_thing_that_differs_is_a_reason_to_deploy_again(
    program: ModuleType,
    host: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    reason: str,
) -> None:
    program.main(["look", json.dumps(host(**changes))])
    assert json.loads(capsys.readouterr().out)["differs"] == [reason]


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (IMAGE, ""),
        ({**IMAGE, "Id": DIGEST}, ""),
        ({**IMAGE, "Id": CONFIG.removeprefix("sha256:")}, ""),
        ({**IMAGE, "Id": "sha256:" + "0" * 64}, "the host reports the image sha256:0000"),
        ({**IMAGE, "RootFS": {"Layers": ["sha256:1"]}}, "the host reports 1 layers, which are not"),
        ({**IMAGE, "RootFS": {}}, "the host reports 0 layers"),
        (None, "is not on the host"),
    ],
    ids=["config", "manifest", "podman", "another", "other layers", "no layers", "none"],
)
def test_a_host_must_report_the_signed_image(
    program: ModuleType,
    host: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    image: dict[str, Any] | None,
    reason: str,
) -> None:
    said = (0, json.dumps([image])) if image else (1, "no such image")
    order = host(programs={"docker image inspect": said})
    assert program.main(["image", json.dumps(order)]) == (1 if reason else 0)
    assert reason in capsys.readouterr().err


def test_waiting_ends_with_the_answer_the_crash_or_the_time(
    program: ModuleType, host: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    order = host()
    assert program.wait_problem(order, 1) == ""
    (tmp_path / "tiny" / "passed.json").unlink()
    (tmp_path / "tiny").rmdir()
    silent = {"/health": (0, b"")}
    assert program.wait_problem(host(answers=silent) or order, 0) == "it did not answer within 0 s"


def test_an_engine_that_ends_again_and_again_is_not_waited_for(
    program: ModuleType, host: Callable[..., dict[str, Any]]
) -> None:
    journal = "loading\nCUDA error: out of memory\nsm120-tiny.service: Failed with result.\n"
    order = host(
        programs={
            "systemctl show": (0, "ActiveState=activating\nNRestarts=2\n"),
            "journalctl": (0, journal),
        },
        answers={"/health": (0, b"")},
    )
    why = program.wait_problem(order, 3600)
    assert why == "the engine ended 2 times: CUDA error: out of memory"
