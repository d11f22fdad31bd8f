"""Real parts, once per test session; a machine that cannot have one skips with the reason."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TypeVar

import pytest

from pipeline.store.store import default_root
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.dockerd import docker_daemon as start_daemon
from tests.testbed.packages import CannotHave
from tests.testbed.registry import Registry, oci_registry
from tests.testbed.tiny_gguf import write_tiny_gguf
from tests.testbed.trixie import trixie_program

Part = TypeVar("Part")


def entered_or_skipped(stack: ExitStack, part: AbstractContextManager[Part]) -> Part:
    """The part, kept until the stack ends; or a skip that says why there is none."""
    try:
        return stack.enter_context(part)
    except CannotHave as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def docker_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerDaemon]:
    """A private Docker daemon."""
    with ExitStack() as stack:
        yield entered_or_skipped(stack, start_daemon(tmp_path_factory.mktemp("docker")))


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry without TLS or passwords."""
    with ExitStack() as stack:
        yield entered_or_skipped(stack, oci_registry(tmp_path_factory.mktemp("registry")))


@pytest.fixture(scope="session")
def trixie(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Programs of Debian 13, unpacked."""
    given = os.environ.get("SM120_TEST_TRIXIE")
    folder = Path(given or tmp_path_factory.mktemp("trixie"))

    def find(name: str) -> Path:
        try:
            return trixie_program(folder, name)
        except CannotHave as reason:
            pytest.skip(str(reason))

    return find


@pytest.fixture(scope="session")
def cosign(trixie: Callable[[str], Path]) -> Path:
    """A judge of signatures that is not ours."""
    return trixie("cosign")


@pytest.fixture(scope="session")
def oras(trixie: Callable[[str], Path]) -> Path:
    """A client of registries that is not ours."""
    return trixie("oras")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GGUF model whose greedy answer is known; readable by the container's user."""
    folder = tmp_path_factory.mktemp("model")
    folder.chmod(0o755)
    path = folder / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture(scope="session")
def kills(request: pytest.FixtureRequest) -> int:
    """How often a test kills what it tests, each time at another moment."""
    return 20 if request.config.getoption("--big") else 8


@pytest.fixture(scope="session")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store for the small images, filled by the first test that needs one."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def big_store(request: pytest.FixtureRequest) -> Path:
    """The user's own store for the engine images: gigabytes that are not fetched twice."""
    if not request.config.getoption("--big"):
        pytest.skip("Engine images are gigabytes: run with --big.")
    return default_root()
