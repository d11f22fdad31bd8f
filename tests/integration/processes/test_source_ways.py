"""One small source, compiled in each backend: the same bytes, the same limits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.artifacts.containers.backend import KINDS, Kind, SandboxBackend
from pipeline.artifacts.containers.container_engine import find_backend
from pipeline.core.errors import SandboxUnavailable, StepFailed
from tests.testbed.dockerd import docker_daemon
from tests.testbed.tiny_source import Bench, toolchain_deb

# All that a step can see of where it runs, written into an output.
LOOK = """
exec > facts
env -u PWD -u SHLVL -u _ | sort
uname -n
date +%Z
nproc
pwd
umask
id -u
ls /src /objects /tmp
head -c 0 /proc/1/cmdline
for line in $(cat /proc/net/dev); do case $line in *:) echo "$line";; esac; done
for place in /usr/made /etc/made /made /src/../made; do
  touch $place 2>/dev/null && echo "could write $place"
done
touch /src/made /build/made /objects/made /tmp/made && echo "could write its own"
"""


@pytest.fixture(scope="module")
def deb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toolchain_deb(tmp_path_factory.mktemp("mirror"))


@pytest.fixture(scope="module")
def docker_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ExitStack() as stack:
        yield stack.enter_context(docker_daemon(tmp_path_factory.mktemp("dockerd"))).socket_url


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SandboxBackend:
    return _backend(request.param, request, monkeypatch)


def _backend(
    kind: Kind, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> SandboxBackend:
    if kind == "docker":
        monkeypatch.setenv("DOCKER_HOST", request.getfixturevalue("docker_socket"))
    try:
        return find_backend(kind)
    except SandboxUnavailable as error:
        pytest.skip(f"This machine cannot: {error}")


@pytest.fixture
def bench(tmp_path: Path, deb: Path) -> Callable[[str], Bench]:
    def make(script: str, **more: object) -> Bench:
        made = Bench(tmp_path, deb, {"build.sh": script}, ("facts",), dict(more))
        made.write()
        return made

    return make


def test_every_way_shows_a_step_the_same_and_gives_the_same_layer(
    bench: Callable[[str], Bench],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    made = bench(LOOK)
    seen: dict[str, str] = {}
    layers: dict[str, str] = {}
    for kind in KINDS:
        try:
            backend = _backend(kind, request, monkeypatch)
        except pytest.skip.Exception:
            continue
        record = made.compile(backend, jobs=1)
        seen[kind], layers[kind] = made.output(record, "facts").decode(), record.digest
        assert made.tree().sandbox == kind
        for name in ("layers", "trees", "objects"):
            shutil.rmtree(tmp_path / "store" / name)
    if len(seen) < 2:
        pytest.skip(f"Only one way to compare: {list(seen)}.")
    assert len(set(seen.values())) == 1, seen
    assert len(set(layers.values())) == 1
    (facts, *_) = seen.values()
    lines = facts.splitlines()
    assert {"build", "UTC", "TZ=UTC", "/build", "0022", "lo:", "could write its own"} <= set(lines)
    assert [x for x in lines if x.startswith("could")] == ["could write its own"]
    assert [x for x in lines if x.endswith(":") and " " not in x and "/" not in x] == ["lo:"]
    assert "1" in lines


def test_a_step_that_hangs_is_ended_and_nothing_of_it_stays(
    backend: SandboxBackend, bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench("echo begun; sleep 600 & sleep 600")
    monkeypatch.setattr("pipeline.images.source.compiled.MINUTE_S", 0.02)
    with pytest.raises(StepFailed, match="printed nothing for"):
        made.compile(backend)
    assert made.left() == []


def test_a_step_without_end_is_ended_though_it_prints(
    backend: SandboxBackend, bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench("while true; do echo more; sleep 0.2; done")
    monkeypatch.setattr("pipeline.images.source.compiled.SHORTEST_LIMIT_S", 2.0)
    monkeypatch.setattr("pipeline.images.source.compiled.SLOWEST_MACHINE", 0.001)
    with pytest.raises(StepFailed, match="took longer than 2"):
        made.compile(backend)
    assert made.left() == []


def test_a_step_that_wants_all_memory_is_refused_it(
    backend: SandboxBackend, bench: Callable[[str], Bench]
) -> None:
    made = bench("dd if=/dev/zero of=/dev/null bs=1G count=1; echo got it > facts")
    with pytest.raises(StepFailed, match=r"memory|killed"):
        made.compile(backend, memory_bytes=200 << 20)
    assert made.left() == []


SCRIPT = """
from pathlib import Path
from tests.testbed.tiny_source import Bench, toolchain_deb

home = Path.home()
made = Bench(home, toolchain_deb(home / "mirror"), {"build.sh": "id -u > facts"}, ("facts",))
made.write()
print(made.output(made.compile(), "facts").decode(), made.tree().sandbox)
"""


def test_an_ordinary_user_compiles_through_a_user_namespace(tmp_path: Path) -> None:
    # the system's own interpreter: that of root's may lie where others cannot go
    python = Path("/usr/bin") / f"python{sys.version_info.major}.{sys.version_info.minor}"
    if os.geteuid() != 0 or not shutil.which("setpriv") or not python.exists():
        pytest.skip(f"Becoming another user needs root, setpriv and {python}.")
    home = Path("/var/tmp") / f"sm120-{os.getpid()}-{tmp_path.name}"
    home.mkdir()
    os.chown(home, 12345, 12345)
    paths = ":".join(["", str(Path.cwd()), *(x for x in sys.path if x.endswith("site-packages"))])
    user = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "--inh-caps=-all"]
    try:
        done = subprocess.run(
            [*user, str(python), "-c", SCRIPT],
            env={"HOME": str(home), "PATH": "/usr/bin:/bin", "PYTHONPATH": paths},
            cwd=home,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        shutil.rmtree(home)
    if "SandboxUnavailable" in done.stderr:
        pytest.skip(f"This system lets no ordinary user do it: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["12345", "namespaces"]
