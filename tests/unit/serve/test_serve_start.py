from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.containers.arguments import EngineKind
from pipeline.artifacts.containers.facts import ContainerFacts, ImageFacts
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import (
    AlreadyServed,
    BackendDiffers,
    DockerUnavailable,
    ImageDiffers,
    Interrupted,
    StartFailed,
)
from pipeline.serving.recipe.launch import Launch
from pipeline.serving.recipe.model import ContainerSpec, Expectations, LogLine
from pipeline.serving.serve import start as start_module
from pipeline.serving.serve.start import Start, make_room, start_engine
from tests.testbed.ports import unused_port
from tests.unit.docker_sdk import Asked, docker_on
from tests.unit.serve.fake_engine import BUILT, RECORD, FakeEngine, answering, digest


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_module, "_POLL_S", 0.01)
    monkeypatch.setattr(start_module, "_AFTERMATH_S", 0.2)


def launch(port: int, **changes: Any) -> Launch:
    values: dict[str, Any] = {
        "recipe": "tiny-cpu",
        "engine": "llama-cpp",
        "image": "llama-cpp-cpu",
        "digest": RECORD.digest,
        "program": ["llama-server"],
        "arguments": ["-m", "/models/tiny.gguf"],
        "environment": {},
        "mounts": [],
        "port": port,
        "cards": 0,
        "container": ContainerSpec(),
        "model": "tiny",
    }
    return Launch(**{**values, **changes})


def attempt(
    containers: FakeEngine,
    tmp_path: Path,
    port: int,
    expect: Expectations | None = None,
    timeout_s: float = 60,
    **changes: Any,
) -> str:
    start = Start(
        launch=launch(port, **changes),
        record=RECORD,
        expect=expect or Expectations(),
        timeout_s=timeout_s,
        log_file=tmp_path / "attempts" / "1.log",
        labels=(("sm120.attempt", "1"),),
    )
    return start_engine(containers, Store(tmp_path), start).url


def lines(*patterns: str) -> list[LogLine]:
    return [LogLine(pattern=pattern, why="the recipe says so") for pattern in patterns]


def test_an_engine_that_answers_with_the_model_is_served_and_stays(tmp_path: Path) -> None:
    engine = FakeEngine(log=[b"hello\n"])
    with answering(["tiny"]) as port:
        assert attempt(engine, tmp_path, port) == f"http://127.0.0.1:{port}/v1"
    assert [*engine.known] == ["sm120-tiny-cpu"]
    assert engine.created[0].image == BUILT.id
    assert engine.created[0].labels["sm120.attempt"] == "1"


def test_an_image_that_the_engine_lacks_is_loaded_by_digest(tmp_path: Path) -> None:
    engine = FakeEngine(images={})
    with answering(["tiny"]) as port:
        attempt(engine, tmp_path, port)
    assert engine.loads == [RECORD.digest]


@pytest.mark.parametrize(
    "loaded", [None, ImageFacts(id=BUILT.id, layers=[digest("1"), digest("9")])]
)
def test_what_was_loaded_must_be_what_was_built(tmp_path: Path, loaded: ImageFacts | None) -> None:
    engine = FakeEngine(images={}, loadable=loaded)
    with pytest.raises(ImageDiffers):
        attempt(engine, tmp_path, 1)
    assert not engine.created


def test_a_container_of_another_image_is_refused_and_removed(tmp_path: Path) -> None:
    other = ImageFacts(id=digest("e"), layers=BUILT.layers)
    engine = FakeEngine(images={BUILT.id: BUILT, other.id: other}, image_of_container=other.id)
    with answering(["tiny"]) as port, pytest.raises(ImageDiffers, match="built was"):
        attempt(engine, tmp_path, port)
    assert not engine.known


def test_an_engine_that_ends_is_removed_and_its_last_line_is_the_reason(tmp_path: Path) -> None:
    engine = FakeEngine(ends_with=2, log=[b"usage: x\n", b"error: unrecognized arguments: --y\n"])
    with pytest.raises(StartFailed, match=r"ended \(2\): error: unrecognized arguments: --y"):
        attempt(engine, tmp_path, 1)
    assert not engine.known
    assert b"--y" in (tmp_path / "attempts" / "1.log").read_bytes()


def test_an_engine_that_was_killed_for_memory_says_so(tmp_path: Path) -> None:
    engine = FakeEngine(ends_with=137, out_of_memory=True)
    with pytest.raises(StartFailed, match="its memory ended: it printed nothing"):
        attempt(engine, tmp_path, 1)


def test_a_known_issue_in_the_log_becomes_the_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = b"out of resource: shared memory, Required: 106496, Hardware limit: 101376\n"
    engine = FakeEngine(ends_with=1, log=[line, b"the end\n"])
    with pytest.raises(StartFailed) as failure:
        attempt(engine, tmp_path, 1)
    assert failure.value.issues
    assert "101376" in capsys.readouterr().err
    assert str(tmp_path / "attempts" / "1.log") in failure.value.hint


def test_an_engine_that_never_answers_is_given_up_and_removed(tmp_path: Path) -> None:
    engine = FakeEngine()
    with (
        answering(["tiny"], health=503) as port,
        pytest.raises(StartFailed, match="did not answer"),
    ):
        attempt(engine, tmp_path, port, timeout_s=0.2)
    assert not engine.known


READY = b"srv  llama_server: model loaded\nmain: model loaded\n"


@pytest.mark.parametrize(("kind", "word"), [("podman", "Podman keeps rules"), ("docker", "Docker")])
def test_a_published_port_that_stays_silent_after_the_engine_is_ready_is_named(
    kind: EngineKind, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_module, "_SILENT_S", 0.05)
    engine, port = FakeEngine(log=[READY], kind=kind), unused_port()
    with pytest.raises(StartFailed, match=rf"is ready, and port {port}, where it") as caught:
        attempt(engine, tmp_path, port, timeout_s=60)
    assert word in caught.value.hint
    assert not engine.known


def test_an_engine_that_does_not_say_that_it_is_ready_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_module, "_SILENT_S", 0.05)
    with pytest.raises(StartFailed, match="did not answer within"):
        attempt(FakeEngine(log=[b"hello\n"]), tmp_path, unused_port(), timeout_s=0.3)


def test_an_engine_that_is_ready_and_says_503_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_module, "_SILENT_S", 0.05)
    engine = FakeEngine(log=[READY])
    with (
        answering(["tiny"], health=503) as port,
        pytest.raises(StartFailed, match="did not answer within"),
    ):
        attempt(engine, tmp_path, port, timeout_s=0.3)


# Ascend/pytorch#83
LOST = b"[2025-09-13 05:28:15 TP4] Scheduler hit an exception: Traceback (most recent call last):\n"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("vllm", LOST),
        ("sglang", b"[2026-01-15 13:31:50 DP1 TP1] Load weight begin. avail mem=60.59 GB\n"),
    ],
)
def test_other_lines_and_other_engines_are_waited_for(
    tmp_path: Path, name: str, line: bytes
) -> None:
    engine = FakeEngine(log=[line])
    with (
        answering([], health=503) as port,
        pytest.raises(StartFailed, match="did not answer within"),
    ):
        attempt(engine, tmp_path, port, timeout_s=0.5, engine=name)


def test_an_engine_that_lost_its_scheduler_is_not_waited_for(tmp_path: Path) -> None:
    engine = FakeEngine(log=[LOST, b"RuntimeError: x\n"])
    with answering([], health=503) as port, pytest.raises(StartFailed, match="Scheduler hit"):
        attempt(engine, tmp_path, port, timeout_s=60, engine="sglang")
    assert not engine.known


def test_another_server_on_the_port_is_not_taken_for_the_engine(tmp_path: Path) -> None:
    with answering(["other"]) as port, pytest.raises(StartFailed, match="serves other, not tiny"):
        attempt(engine := FakeEngine(), tmp_path, port)
    assert not engine.known


def test_ctrl_c_leaves_no_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(port: int) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(start_module, "is_healthy", stopped)
    engine = FakeEngine()
    with pytest.raises(Interrupted, match="stopped") as caught:
        attempt(engine, tmp_path, 1)
    assert caught.value.hint.startswith("The container sm120-tiny-cpu was removed")
    assert engine.created
    assert not engine.known


def test_the_log_shows_what_the_recipe_expects(tmp_path: Path) -> None:
    engine = FakeEngine(log=[b"Using TRITON_", b"MLA backend\nok\n"])
    expect = Expectations(log=lines("Using TRITON_MLA backend"), never=lines("Marlin"))
    with answering(["tiny"]) as port:
        attempt(engine, tmp_path, port, expect)
    assert engine.known


@pytest.mark.parametrize(
    ("said", "expect", "reason"),
    [
        (b"Using FLASHINFER\n", Expectations(log=lines("TRITON_MLA")), "nothing in the log"),
        (b"", Expectations(log=lines("TRITON_MLA")), "nothing in the log"),
        (b"leveraging the Marlin kernel\n", Expectations(never=lines("Marlin")), "must not have"),
        (b"TRITON\nMarlin\n", Expectations(log=lines("TRI"), never=lines("Marlin")), "must not"),
    ],
)
def test_a_silent_fallback_is_refused_and_removed(
    tmp_path: Path, said: bytes, expect: Expectations, reason: str
) -> None:
    engine = FakeEngine(log=[said])
    with answering(["tiny"]) as port, pytest.raises(BackendDiffers, match=reason):
        attempt(engine, tmp_path, port, expect)
    assert not engine.known


class LateLog(FakeEngine):
    """A machine so busy that the log comes after the first answer."""

    def output(self, identity: str, *, follow: bool, tail: int | None = None) -> Iterator[bytes]:
        for piece in self.log:
            # longer than a start waits for lines that a recipe expects
            time.sleep(0.5 if follow else 0)
            yield piece


@pytest.mark.parametrize("pieces", [[b"a Marlin kernel\n"], [b"one\n", b"a Marlin kernel\n"]])
def test_a_fallback_that_the_log_shows_late_is_refused_and_removed(
    tmp_path: Path, pieces: list[bytes]
) -> None:
    engine = LateLog(log=pieces)
    with answering(["tiny"]) as port, pytest.raises(BackendDiffers, match="must not have"):
        attempt(engine, tmp_path, port, Expectations(never=lines("Marlin")))
    assert not engine.known


def test_a_log_that_comes_late_is_kept_whole_before_the_engine_counts_as_served(
    tmp_path: Path,
) -> None:
    with answering(["tiny"]) as port:
        attempt(LateLog(log=[b"one\n", b"two\n"]), tmp_path, port)
    assert (tmp_path / "attempts" / "1.log").read_bytes() == b"one\ntwo\n"


def test_the_reason_of_an_engine_that_ends_is_waited_for(tmp_path: Path) -> None:
    engine = LateLog(ends_with=1, log=[b"one\n", b"bad flag\n"])
    with pytest.raises(StartFailed, match="bad flag"):
        attempt(engine, tmp_path, 1)


def test_a_log_that_can_be_read_once_only_holds_up_no_start(tmp_path: Path) -> None:
    class Once(FakeEngine):
        def output(
            self, identity: str, *, follow: bool, tail: int | None = None
        ) -> Iterator[bytes]:
            if not follow:
                raise DockerUnavailable("Docker could not read the log")
            yield b"one\n"

    with answering(["tiny"]) as port:
        attempt(Once(), tmp_path, port)


def test_a_recipe_that_runs_already_is_left_alone() -> None:
    engine = FakeEngine()
    engine.put("sm120-tiny-cpu", {"sm120.recipe": "tiny-cpu"})
    with pytest.raises(AlreadyServed, match="is served already") as caught:
        make_room(engine, "tiny-cpu")
    assert "`sm120 recipe stop tiny-cpu`" in (caught.value.hint or "")
    assert engine.known


def test_a_container_that_is_not_ours_is_left_alone() -> None:
    engine = FakeEngine(ends_with=0)
    engine.put("sm120-tiny-cpu", {})
    with pytest.raises(AlreadyServed, match="not started by"):
        make_room(engine, "tiny-cpu")
    assert engine.known


def test_a_container_of_another_recipe_is_named_as_that() -> None:
    engine = FakeEngine()
    engine.put("sm120-tiny-cpu", {"sm120.recipe": "tiny.cpu"})
    with pytest.raises(AlreadyServed, match=r"is of the recipe tiny\.cpu") as caught:
        make_room(engine, "tiny-cpu")
    assert "`sm120 recipe stop tiny.cpu`" in caught.value.hint
    assert engine.known


def test_what_is_left_of_an_ended_one_makes_room() -> None:
    engine = FakeEngine(ends_with=1)
    engine.put("sm120-tiny-cpu", {"sm120.recipe": "tiny-cpu"})
    make_room(engine, "tiny-cpu")
    assert not engine.known


def test_docker_s_sdk_is_told_what_the_command_line_would_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pipeline.artifacts.containers.arguments import Mount
    from pipeline.serving.recipe.container import container_arguments

    mounts = [Mount(host="/data/kimi", inside="/models")]
    spec = ContainerSpec(capabilities=["SYS_NICE"])
    given = container_arguments(
        launch(8000, cards=8, engine="vllm", mounts=mounts, container=spec), image="x"
    )
    asked = Asked()
    docker_on(asked, monkeypatch).create(given)
    told = asked.wanted
    assert told["ports"] == {"8000/tcp": ("127.0.0.1", 8000)}
    assert told["device_requests"][0]["DeviceIDs"] == ["nvidia.com/gpu=all"]
    assert told["device_requests"][0]["Driver"] == "cdi"
    assert (told["ipc_mode"], told["cap_drop"], told["cap_add"]) == ("host", ["ALL"], ["SYS_NICE"])
    weights, cache = told["mounts"]
    assert (weights["Source"], weights["ReadOnly"]) == ("/data/kimi", True)
    assert (cache["Type"], cache["Target"]) == ("volume", "/home/engine")


class _EndsAfterItsFirstAnswer(FakeEngine):
    def container(self, name: str) -> ContainerFacts | None:
        facts = super().container(name)
        return facts and facts.model_copy(update={"running": False, "exit_code": 139})


def test_an_engine_that_ends_after_its_first_answer_is_not_served(tmp_path: Path) -> None:
    engine = _EndsAfterItsFirstAnswer(log=[b"Segmentation fault\n"])
    with (
        answering(["tiny"]) as port,
        pytest.raises(StartFailed, match=r"ended \(139\): Segmentation fault"),
    ):
        attempt(engine, tmp_path, port)
    assert not engine.known


class _StoppedTwice(FakeEngine):
    """Ctrl-C while it starts, and again while it is removed."""

    times: int = 0

    def start(self, identity: str) -> None:
        raise KeyboardInterrupt

    def remove(self, identity: str) -> None:
        self.times += 1
        if self.times == 1:
            raise KeyboardInterrupt
        super().remove(identity)


def test_who_stops_twice_leaves_no_container(tmp_path: Path) -> None:
    engine = _StoppedTwice()
    with pytest.raises(Interrupted) as caught:
        attempt(engine, tmp_path, 1)
    assert "was removed" in caught.value.hint
    assert not engine.known


class _Gone(FakeEngine):
    """Its socket vanishes while it is waited for."""

    def container(self, name: str) -> ContainerFacts | None:
        raise DockerUnavailable("Docker could not look at a container: no such file")

    def remove(self, identity: str) -> None:
        raise DockerUnavailable("Docker could not remove the container: no such file")


def test_a_container_that_cannot_be_removed_is_named_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(DockerUnavailable, match="could not remove") as caught:
        attempt(_Gone(), tmp_path, 1)
    assert "`docker rm --force sm120-tiny-cpu`" in caught.value.hint
