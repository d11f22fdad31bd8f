"""Real parts, once per test session; a machine that cannot have one skips with the reason."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TypeVar

import pytest

from pipeline.artifacts.store.store import default_root
from pipeline.core.files import locked
from tests.integration.bench import Bench, make_bench
from tests.integration.built import STRANGE, make_lean, run_sm120, sm120
from tests.integration.host_command import Hosts, provisioned_hosts
from tests.integration.published import PASSWORD, USER
from tests.side_by_side import SHARED_FOLDER
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.dockerd import docker_daemon as start_daemon
from tests.testbed.oci_door import Door, behind, oci_door
from tests.testbed.playbook import packed_once
from tests.testbed.registry import Registry, oci_registry, trusted_by_docker
from tests.testbed.tiny_gguf import write_tiny_gguf
from tests.testbed.trixie import trixie_program

Part = TypeVar("Part")


@pytest.fixture(scope="session", autouse=True)
def _packed_once() -> Iterator[None]:
    """Also the runs of Ansible that a command of ours starts share what they pack."""
    with pytest.MonkeyPatch.context() as patch:
        with suppress(PackageNotFoundError):  # without Ansible nothing is packed
            for name, value in packed_once().items():
                patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def docker_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerDaemon]:
    """A private Docker daemon."""
    with ExitStack() as stack:
        yield stack.enter_context(start_daemon(tmp_path_factory.mktemp("docker")))


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry without TLS or passwords."""
    with ExitStack() as stack:
        yield stack.enter_context(oci_registry(tmp_path_factory.mktemp("registry")))


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    """A way to a fresh real registry on which things can go wrong."""
    with ExitStack() as stack:
        registry = stack.enter_context(oci_registry(tmp_path / "registry"))
        yield stack.enter_context(oci_door(behind(registry.host_port)))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A small image, built without a network; what one module signs is nothing to another."""
    return make_bench(tmp_path_factory.mktemp("bench"), thing=12_000_000, other=1_000_000)


@pytest.fixture(scope="module")
def at_the_bridge(
    docker_daemon: DockerDaemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Registry]:
    """A registry with TLS and a password on the daemon's bridge, where Docker checks its CA."""
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("bridge")
        part = oci_registry(
            folder, tls=True, htpasswd={USER: PASSWORD}, address=docker_daemon.gateway
        )
        registry = stack.enter_context(part)
        stack.enter_context(trusted_by_docker(registry))
        yield registry


@pytest.fixture(scope="session")
def shared_hosts(
    docker_daemon: DockerDaemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hosts]:
    """Two provisioned hosts for all files that test hosts: most of their time is Ansible's."""
    with ExitStack() as stack:
        tmp = tmp_path_factory.mktemp("site")
        yield stack.enter_context(provisioned_hosts(docker_daemon, tmp, both_whole=False))


@pytest.fixture(scope="module")
def hosts(
    request: pytest.FixtureRequest, is_long: bool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hosts]:
    """The shared hosts; in a long run, whose tests break and undo much more, a file's own."""
    with ExitStack() as stack:
        if is_long:
            daemon = request.getfixturevalue("docker_daemon")
            tmp = tmp_path_factory.mktemp("site")
            yield stack.enter_context(provisioned_hosts(daemon, tmp, both_whole=True))
        else:
            yield request.getfixturevalue("shared_hosts")


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A builder's key and the trust file that knows it."""
    home = tmp_path_factory.mktemp("keys")
    entry = sm120(home, "evidence", "new-key", "builder", "--output", str(home)).stdout
    (home / "trust.yaml").write_text(f"format: 1\nkeys:\n{entry}")
    return home


@pytest.fixture(scope="session")
def trixie(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Programs of Debian 13, unpacked."""
    given = os.environ.get("SM120_TEST_TRIXIE")
    folder = Path(given or tmp_path_factory.mktemp("trixie"))

    def find(name: str) -> Path:
        return trixie_program(folder, name)

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
def is_long(request: pytest.FixtureRequest) -> bool:
    """Whether the run may take hours."""
    return bool(request.config.getoption("--big"))


@pytest.fixture(scope="session")
def kills(is_long: bool) -> int:
    """How often a test kills what it tests, each time at another moment."""
    return 20 if is_long else 4


@pytest.fixture(scope="session")
def made_once(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Callable[[str, Callable[[Path], object]], Path]:
    """Makes a folder that all processes of a run share; the first that asks makes it."""

    def make_once(name: str, make: Callable[[Path], object]) -> Path:
        folder = pytestconfig.stash.get(SHARED_FOLDER, tmp_path_factory.getbasetemp()) / name
        with locked(folder.with_suffix(".lock")):
            if not folder.exists():
                new = folder.with_suffix(".new")
                new.mkdir()
                make(new)
                new.rename(folder)
        return folder

    return make_once


@pytest.fixture(scope="module")
def small_store(
    made_once: Callable[[str, Callable[[Path], object]], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A file's own store with the small image; a copy, since tests damage what lies in it."""
    # a machine without an index or a mirror skips where a test asks for the image
    # in a strange environment: whoever uses it proves the golden digest along the way
    built = made_once(
        "built-once", lambda store: run_sm120(store, "build", "llama-cpp-cpu", **STRANGE)
    )
    return shutil.copytree(built, tmp_path_factory.mktemp("store") / "store", symlinks=True)


@pytest.fixture(scope="module")
def lean_store(
    made_once: Callable[[str, Callable[[Path], object]], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Such a store for who only serves or sends the image: without compilers."""
    folder = tmp_path_factory.mktemp("lean") / "lean"
    return shutil.copytree(made_once("lean-once", make_lean), folder, symlinks=True) / "store"


@pytest.fixture(scope="session")
def big_store(is_long: bool) -> Path:
    """The user's own store for the engine images: gigabytes that are not fetched twice."""
    if not is_long:
        pytest.skip("Engine images are gigabytes: run with --big.")
    return default_root()
