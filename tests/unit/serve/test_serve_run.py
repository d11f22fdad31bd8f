from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.errors import (
    AlreadyServed,
    DiskFull,
    Interrupted,
    NothingServed,
    PreflightFailed,
    StartFailed,
    UnknownImage,
    WeightsUnknown,
)
from pipeline.serving.recipe.launch import Overrides, plan_launch
from pipeline.serving.serve import start as start_module
from pipeline.serving.serve.attempts import AttemptList, Begun, Ended
from pipeline.serving.serve.preflight import CHECKS
from pipeline.serving.serve.run import (
    ServeJob,
    attempts_of,
    find_served,
    kept_attempt,
    new_attempt,
    recipe_digest,
    serve_launch,
    status_of,
    stop_container,
)
from pipeline.serving.serve.weights import tiny_weights
from tests.unit.serve.fake_engine import BUILT, RECORD, FakeEngine, answering, digest
from tests.unit.serve.recipes import recipe


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_module, "_POLL_S", 0.01)
    monkeypatch.setattr(start_module, "_AFTERMATH_S", 0.2)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def job(store: Store, port: int, **changes: Any) -> ServeJob:
    """The port is that of a test's own server, so it is not free."""
    tiny = recipe()
    weights = tiny_weights(store, tiny)
    overrides = Overrides(port=port)
    launch = plan_launch(tiny, overrides, weights=str(weights.folder), digest=RECORD.digest)
    made = ServeJob(
        recipe=tiny,
        port=port,
        image_is_built=True,
        weights=weights,
        cuda=None,
        launch=launch,
        record=RECORD,
        timeout_s=60,
        skipped=("port",),
    )
    return replace(made, **changes)


def outcomes(store: Store) -> list[tuple[str, str]]:
    return [(a.outcome, a.failure) for a in attempts_of(store).read().attempts]


def test_what_is_served_is_kept_as_an_attempt_with_all_of_its_digests(store: Store) -> None:
    engine = FakeEngine()
    with answering(["tiny"]) as port:
        todo = job(store, port)
        serve_launch(engine, store, todo, new_attempt(todo))
    (attempt,) = attempts_of(store).read().attempts
    assert attempt.outcome == "serving"
    assert attempt.begun.image_digest == RECORD.digest
    assert todo.weights is not None
    assert attempt.begun.weights_digest == todo.weights.digest
    assert attempt.begun.recipe_digest == recipe_digest(recipe())
    assert engine.created[0].labels["sm120.attempt"] == attempt.begun.id


def test_the_kernels_that_a_log_names_are_kept_of_an_engine_that_serves(store: Store) -> None:
    said = [b"INFO Using TRITON_MLA attention backend out of [..]\n", b"INFO ready\n"]
    with answering(["tiny"]) as port:
        todo = job(store, port)
        serve_launch(FakeEngine(log=said), store, todo, new_attempt(todo))
    todo = job(store, 1)
    with pytest.raises(StartFailed):
        serve_launch(FakeEngine(ends_with=2, log=said), store, todo, new_attempt(todo))
    kernels = [attempt.ends[0].kernels for attempt in attempts_of(store).read().attempts]
    assert sorted(kernels) == [[], ["Using TRITON_MLA attention backend"]]


def test_the_digest_of_a_recipe_moves_with_every_field() -> None:
    assert recipe_digest(recipe()) == recipe_digest(recipe())
    assert recipe_digest(recipe(port=1)) != recipe_digest(recipe())
    assert recipe_digest(recipe(summary="other")) != recipe_digest(recipe())


def test_a_failed_start_is_kept_with_its_reason(store: Store) -> None:
    todo = job(store, 1)
    with pytest.raises(StartFailed):
        serve_launch(FakeEngine(ends_with=2, log=[b"bad flag\n"]), store, todo, new_attempt(todo))
    ((outcome, failure),) = outcomes(store)
    assert outcome == "failed"
    assert failure == "StartFailed: tiny-cpu: the engine ended (2): bad flag"


def test_a_machine_that_is_not_ready_starts_nothing_and_is_kept(store: Store) -> None:
    engine = FakeEngine()
    with answering(["tiny"]) as port:
        todo = job(store, port, skipped=())
        with pytest.raises(PreflightFailed):
            serve_launch(engine, store, todo, new_attempt(todo))
    assert not engine.created
    assert outcomes(store)[0][0] == "failed"


@pytest.mark.parametrize(
    ("port_of_other", "named"), [(0, True), (1, False)], ids=["its port", "another port"]
)
def test_the_recipe_that_holds_the_port_is_named(
    store: Store, port_of_other: int, named: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine()
    with answering(["tiny"]) as port:
        held = str(port_of_other or port)
        engine.put("sm120-other", {"sm120.recipe": "other", "sm120.port": held})
        todo = job(store, port, skipped=())
        with pytest.raises(PreflightFailed) as caught:
            serve_launch(engine, store, todo, new_attempt(todo))
    text = f"{caught.value} {caught.value.hint} {capsys.readouterr().err}"
    assert ("other is served there" in text, "sm120 recipe stop other" in text) == (named, named)


def test_ctrl_c_is_kept_as_such(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(port: int) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(start_module, "is_healthy", stopped)
    engine, todo = FakeEngine(), job(store, 1)
    with pytest.raises(Interrupted, match="stopped"):
        serve_launch(engine, store, todo, new_attempt(todo))
    assert outcomes(store)[0][0] == "interrupted"
    assert not engine.known


class _FullAtItsEnd(AttemptList):
    def add(self, entry: Begun | Ended) -> None:
        if isinstance(entry, Ended):
            raise DiskFull("no space left")


def test_a_disk_that_is_full_at_the_end_takes_neither_the_result_nor_the_reason(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts, begun = _FullAtItsEnd(store.root / "attempts"), new_attempt(job(store, 1))
    with kept_attempt(attempts, begun, "serving"):
        pass
    assert "is not kept: no space left" in capsys.readouterr().err
    with pytest.raises(StartFailed, match="the reason"), kept_attempt(attempts, begun, "serving"):
        raise StartFailed("the reason")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("stopped")])
def test_a_smoke_test_that_is_stopped_is_kept_in_the_same_words(
    store: Store, error: BaseException
) -> None:
    with (
        pytest.raises(type(error)),
        kept_attempt(attempts_of(store), new_attempt(job(store, 1)), "passed"),
    ):
        raise error
    assert outcomes(store) == [("interrupted", "stopped")]


def test_a_defect_of_ours_is_kept_as_a_failure(store: Store) -> None:
    with (
        pytest.raises(ValueError),
        kept_attempt(attempts_of(store), new_attempt(job(store, 1)), "passed"),
    ):
        raise ValueError("no such number")
    assert outcomes(store) == [("failed", "ValueError: no such number")]


def test_an_image_that_is_not_built_and_a_folder_that_is_not_named_start_nothing(
    store: Store,
) -> None:
    unbuilt = job(store, 1, record=None, skipped=[*CHECKS])
    with pytest.raises(UnknownImage):
        serve_launch(FakeEngine(), store, unbuilt, new_attempt(unbuilt))
    bare = plan_launch(recipe(), Overrides(), weights="")
    unnamed = job(store, 1, launch=bare, weights=None, skipped=[*CHECKS])
    with pytest.raises(WeightsUnknown, match="no folder is named for /models"):
        serve_launch(FakeEngine(), store, unnamed, new_attempt(unnamed))


def test_a_recipe_that_is_served_already_is_said_before_its_own_port_is_blamed(
    store: Store,
) -> None:
    engine = FakeEngine()
    engine.put("sm120-tiny-cpu", {"sm120.recipe": "tiny-cpu"})
    with answering(["tiny"]) as port:
        todo = job(store, port, skipped=())
        with pytest.raises(AlreadyServed):
            serve_launch(engine, store, todo, new_attempt(todo))


def test_stopping_removes_the_container_and_ends_the_attempt(store: Store) -> None:
    engine = FakeEngine()
    with answering(["tiny"]) as port:
        todo = job(store, port)
        serve_launch(engine, store, todo, new_attempt(todo))
    assert stop_container(engine, store, find_served(engine, "tiny-cpu"), 7) >= 0
    assert engine.stopped == [("sm120-tiny-cpu", 7)]
    assert not engine.known
    assert outcomes(store) == [("stopped", "")]


def test_a_container_of_another_store_is_stopped_without_an_entry(store: Store) -> None:
    engine = FakeEngine()
    engine.put("sm120-tiny-cpu", {"sm120.recipe": "tiny-cpu", "sm120.attempt": "no id"})
    stop_container(engine, store, find_served(engine, "tiny-cpu"), 1)
    assert outcomes(store) == []


@pytest.mark.parametrize("labels", [{}, {"sm120.recipe": "other"}])
def test_a_container_that_only_has_the_name_is_not_served(labels: dict[str, str]) -> None:
    engine = FakeEngine()
    engine.put("sm120-tiny-cpu", labels)
    with pytest.raises(NothingServed):
        find_served(engine, "tiny-cpu")


def labels(port: int = 1) -> dict[str, str]:
    return {
        "sm120.recipe": "tiny-cpu",
        "sm120.digest": RECORD.digest,
        "sm120.port": str(port),
        "sm120.image": "llama-cpp-cpu",
    }


def test_status_tells_what_is_as_it_was_built(store: Store) -> None:
    store.keep_image("llama-cpp-cpu", "linux/arm64", RECORD)
    engine = FakeEngine()
    with answering(["tiny"]) as port:
        engine.put("sm120-tiny-cpu", labels(port))
        (row,) = status_of(engine, store)
    assert (row.built, row.healthy, row.port) == ("same", True, port)


def test_status_tells_that_podman_forgot_what_runs(store: Store) -> None:
    engine = FakeEngine()
    with answering(["tiny"]) as port:
        engine.put("sm120-tiny-cpu", labels(port))
        facts = engine.known["sm120-tiny-cpu"]
        for status, forgotten in (("created", True), ("exited", False)):
            changes = {"status": status, "running": False}
            engine.known["sm120-tiny-cpu"] = facts.model_copy(update=changes)
            (row,) = status_of(engine, store)
            assert (row.healthy, row.is_forgotten) == (forgotten, forgotten)


def test_status_tells_what_is_not_as_it_was_built(store: Store) -> None:
    store.keep_image("llama-cpp-cpu", "linux/arm64", RECORD)
    engine = FakeEngine(image_of_container=digest("e"))
    engine.put("sm120-tiny-cpu", labels())
    assert status_of(engine, store)[0].built == "other"
    engine = FakeEngine(images={BUILT.id: BUILT.model_copy(update={"layers": [digest("1")]})})
    engine.put("sm120-tiny-cpu", labels())
    assert status_of(engine, store)[0].built == "other"


@pytest.mark.parametrize("port", ["", "x", "-1", "²", "0", "99999", "9" * 5000])
def test_status_survives_labels_that_somebody_else_wrote(store: Store, port: str) -> None:
    engine = FakeEngine()
    engine.put("sm120-tiny-cpu", {"sm120.recipe": "tiny-cpu", "sm120.port": port})
    (row,) = status_of(engine, store)
    assert (row.port, row.healthy, row.built) == (None, False, "unknown")
