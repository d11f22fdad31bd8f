from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pipeline.core.errors import StartFailed
from pipeline.serving.serve import start as start_module
from pipeline.serving.serve.start import restart
from tests.unit.serve.fake_engine import FakeEngine


@dataclass
class Switched(FakeEngine):
    """A container that answers from its start to its stop."""

    answers: bool = True
    starts: list[str] = field(default_factory=list)
    after_start: Callable[[Switched], None] = lambda engine: setattr(engine, "answers", True)

    def stop(self, identity: str, timeout_s: int) -> None:
        super().stop(identity, timeout_s)
        self.answers = False

    def start(self, identity: str) -> None:
        self.starts.append(identity)
        self.after_start(self)


def restarted(engine: Switched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_module, "is_healthy", lambda port: engine.answers)
    monkeypatch.setattr(start_module, "_POLL_S", 0.01)
    engine.put("sm120-tiny", {})
    restart(engine, engine.known["sm120-tiny"], 8080, timeout_s=0.05)


def test_the_same_container_is_stopped_and_started(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Switched()
    restarted(engine, monkeypatch)
    assert ([name for name, _ in engine.stopped], engine.starts) == (["sm120-tiny"], ["sm120-tiny"])
    assert engine.created == []


def test_a_container_that_ends_again_is_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(engine: Switched) -> None:
        engine.ends_with = 3
        engine.put("sm120-tiny", {})

    with pytest.raises(StartFailed, match=r"ended \(3\) after a restart"):
        restarted(Switched(after_start=ends), monkeypatch)


def test_one_that_never_answers_is_left_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartFailed, match="does not answer after a restart"):
        restarted(Switched(after_start=lambda engine: None), monkeypatch)


def test_a_port_that_answers_while_nothing_runs_is_somebody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Switched()
    monkeypatch.setattr(engine, "stop", lambda identity, timeout_s: None)
    with pytest.raises(StartFailed, match="port 8080 still answers") as caught:
        restarted(engine, monkeypatch)
    assert "ss -ltnp" in caught.value.hint
    assert engine.starts == []


def test_an_engine_that_podman_forgot_is_not_called_somebody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Switched(ends_with=0, kind="podman")
    monkeypatch.setattr(engine, "stop", lambda identity, timeout_s: None)
    with pytest.raises(StartFailed, match="port 8080 still answers") as caught:
        restarted(engine, monkeypatch)
    assert "podman does not know that it runs" in caught.value.hint
