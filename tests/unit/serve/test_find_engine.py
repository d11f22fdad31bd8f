"""Docker and Podman beside each other: which is asked, and what is said where one is missing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pipeline.artifacts.containers import container_engine as module
from pipeline.artifacts.containers.arguments import EngineKind
from pipeline.artifacts.containers.container_engine import find_engine, find_engines
from pipeline.core.errors import DockerUnavailable, MissingTool, NothingServed, PipelineError
from pipeline.serving.serve.run import find_among
from tests.unit.serve.fake_engine import FakeEngine


@dataclass
class Machine:
    """Which of the two are there, and whether Podman works."""

    docker: bool
    podman: bool
    podman_works: bool = True

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "Docker", self._docker)
        podman = type("Podman", (), {"__new__": lambda cls: self._podman()})
        podman.is_there = staticmethod(lambda: self.podman)  # type: ignore[attr-defined]
        works = self.podman and self.podman_works
        podman.answers = staticmethod(lambda: works)  # type: ignore[attr-defined]
        monkeypatch.setattr(module, "Podman", podman)

    def _docker(self) -> FakeEngine:
        if not self.docker:
            raise DockerUnavailable("Docker does not answer: no socket")
        return FakeEngine()

    def _podman(self) -> FakeEngine:
        if not self.podman:
            raise MissingTool("podman is not installed", "Install Podman.")
        return FakeEngine(kind="podman")


@pytest.mark.parametrize(
    ("machine", "kinds"),
    [
        (Machine(docker=True, podman=True), ["docker", "podman"]),
        (Machine(docker=True, podman=True, podman_works=False), ["docker"]),
        (Machine(docker=True, podman=False), ["docker"]),
        (Machine(docker=False, podman=True), ["podman"]),
    ],
)
def test_without_a_choice_every_engine_that_answers_is_asked(
    machine: Machine, kinds: list[EngineKind], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.use(monkeypatch)
    assert [engine.kind for engine in find_engines("auto")] == kinds
    assert find_engine("auto").kind == kinds[0]


@pytest.mark.parametrize("kind", ["docker", "podman"])
def test_a_named_engine_is_the_only_one(kind: EngineKind, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(docker=True, podman=True).use(monkeypatch)
    assert [engine.kind for engine in find_engines(kind)] == [kind]


@pytest.mark.parametrize(
    ("machine", "wanted", "hint"),
    [
        (Machine(docker=False, podman=True), "docker", "Podman answers here: leave --runtime out."),
        (Machine(docker=True, podman=False), "podman", "Docker answers here: leave --runtime out"),
    ],
)
def test_the_engine_that_answers_is_named_where_the_other_does_not(
    machine: Machine, wanted: EngineKind, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.use(monkeypatch)
    with pytest.raises(PipelineError) as caught:
        find_engine(wanted)
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("wanted", "podman"), [("auto", False), ("docker", False), ("docker", True), ("podman", False)]
)
def test_an_engine_that_does_not_answer_is_not_recommended(
    wanted: module.Wanted, podman: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(docker=False, podman=podman, podman_works=False).use(monkeypatch)
    with pytest.raises(PipelineError) as caught:
        find_engine(wanted)
    assert "answers here" not in caught.value.hint


def test_a_machine_with_neither_is_told_that_either_will_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Machine(docker=False, podman=False).use(monkeypatch)
    with pytest.raises(DockerUnavailable) as caught:
        find_engine("auto")
    assert "install Podman" in caught.value.hint


def test_a_recipe_is_found_in_the_engine_that_holds_it() -> None:
    docker, podman = FakeEngine(), FakeEngine(kind="podman")
    podman.put("sm120-tiny-cpu", {"sm120.recipe": "tiny-cpu"})
    engine, facts = find_among([docker, podman], "tiny-cpu")
    assert (engine.kind, facts.name) == ("podman", "sm120-tiny-cpu")
    with pytest.raises(NothingServed, match="is in Docker and Podman"):
        find_among([docker, podman], "other")
    with pytest.raises(NothingServed, match=r"is in Docker$"):
        find_among([docker], "tiny-cpu")
