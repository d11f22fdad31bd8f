"""What is asked of a Docker daemon when an image is loaded, and what a person sees meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core import log
from pipeline.core.errors import DockerUnavailable
from tests.makers import build_in, make_deb, root_image
from tests.unit.docker_sdk import docker_on

FIXED, MOVING = "sm120/root:abc", "sm120/root:latest"
Load = Callable[[Any, Any], str]
LAYER = {"status": "Loading layer", "id": "aa"}


class Daemon:
    """A daemon that answers with given lines, and keeps the tags that it is told."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers, self.tags, self.asked = answers, list[str](), ""
        self.api = self.images = self

    def ping(self) -> bool:
        return True

    def load_image(self, data: Iterable[bytes], quiet: bool = True) -> Iterator[dict[str, Any]]:
        self.received, self.quiet = sum(map(len, data)), quiet
        return iter(self.answers)

    def get(self, name: str) -> Any:
        self.asked = name
        return SimpleNamespace(id="sha256:1", tag=lambda *named: self.tags.append(":".join(named)))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("world")
    _, store, built = build_in(place, root_image([make_deb(place / "mirror", "tool")]))
    return SimpleNamespace(store=store, digest=built.digest)


@pytest.fixture
def load_into(monkeypatch: pytest.MonkeyPatch) -> Load:
    def load(daemon: Any, built: Any) -> str:
        docker = docker_on(daemon, monkeypatch)
        return docker.load(built.store, "root", built.digest, [FIXED, MOVING])

    return load


def test_the_first_name_travels_and_the_others_are_given_afterwards(
    built: Any, load_into: Load
) -> None:
    daemon = Daemon({"stream": f"Loaded image: {FIXED}\n"})
    assert load_into(daemon, built) == "sha256:1"
    assert (daemon.asked, daemon.tags) == (FIXED, [MOVING])
    assert daemon.received > 0
    # else a daemon says nothing while it unpacks
    assert not daemon.quiet


@pytest.mark.parametrize(
    "answers",
    [
        [{"errorDetail": {"message": "no space left on device"}, "error": "no space left"}],
        [LAYER, {"errorDetail": {"message": "no space left on device"}}],
    ],
)
def test_what_docker_refuses_is_an_error_with_its_reason(
    built: Any, answers: list[dict[str, Any]], load_into: Load
) -> None:
    with pytest.raises(DockerUnavailable, match="no space left on device"):
        load_into(Daemon(*answers), built)


def test_unpacking_is_shown_after_sending(
    built: Any, load_into: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []

    class Bar:
        def __init__(self, title: str, total_bytes: int) -> None:
            self.title = title

        def advance(self, n_bytes: int) -> None:
            seen.append((self.title, n_bytes))

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            return

    monkeypatch.setattr(log, "progress", Bar)
    steps = [{**LAYER, "progressDetail": {"current": n, "total": 30}} for n in (10, 25)]
    other = {**LAYER, "id": "bb", "progressDetail": {"current": 7}}
    load_into(Daemon(*steps, other, {"stream": f"Loaded image: {FIXED}"}), built)
    assert seen[0][0] == "sent"
    assert seen[-3:] == [("unpacked", 10), ("unpacked", 15), ("unpacked", 7)]
