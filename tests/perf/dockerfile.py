"""What people use, for comparison: the same wheels and patch through a Dockerfile and BuildKit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.core.files import link_or_copy
from tests.perf.measure import Cost, run, tree_cpu_s
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.packages import CannotHave, find_program

# Bind mounts, not `COPY wheels`: no wheel enters a layer, and BuildKit transfers a file of the
# context only when it changed. The cache mount is what people write; pip itself has no use for it
# with local files. pip runs from its own wheel, as the base image has none. The patch comes last,
# so that an edit of it finds everything before it in the cache: the kindest order. The base is for
# this machine's processor, whatever the wheels are for: no emulator is measured.
DOCKERFILE = """\
FROM {base}
USER root
RUN --mount=type=bind,source=wheels,target=/wheels \\
    --mount=type=cache,target=/root/.cache/pip \\
    python3 /wheels/pip.whl/pip install --quiet --no-index --no-deps --no-compile \\
    --only-binary=:all: {platforms} \\
    --target /opt/venv/lib/python3.11/site-packages /wheels/closure/*.whl
RUN --mount=type=bind,source=edit.py,target=/edit.py python3 /edit.py
"""


def write_context(folder: Path, base: str, wheels: list[Path], pip_wheel: Path) -> None:
    """A build context with the wheels in it, hard-linked where possible."""
    closure = folder / "wheels" / "closure"
    closure.mkdir(parents=True)
    for wheel in wheels:
        link_or_copy(wheel, closure / wheel.name)
    link_or_copy(pip_wheel, folder / "wheels" / "pip.whl")
    text = DOCKERFILE.format(base=base, platforms=platform_options(wheels))
    (folder / "Dockerfile").write_text(text, encoding="utf-8")
    edit(folder, "first")


def platform_options(wheels: list[Path]) -> str:
    """pip's options for the platforms that wheels name, so that it takes them on any processor."""
    tags = {tag for wheel in wheels for tag in wheel.stem.rsplit("-", 1)[1].split(".")}
    return " ".join(f"--platform {tag}" for tag in sorted(tags - {"any"}))


def edit(folder: Path, words: str) -> None:
    """The one-line change: a script that appends a comment to one file of the engine."""
    script = (
        "import pathlib\n"
        "for path in pathlib.Path('/opt/venv').rglob('extend_attention.py'):\n"
        f"    path.write_text(path.read_text() + '# {words}\\n')\n"
    )
    (folder / "edit.py").write_text(script, encoding="utf-8")


def docker(daemon: DockerDaemon, *args: str) -> Cost:
    """Run the docker client against the private daemon, whose own CPU is counted apart."""
    before = tree_cpu_s(daemon.pid)
    # Docker 20.10 has BuildKit in its daemon, and its client uses it without buildx
    env = {"DOCKER_HOST": daemon.socket_url, "DOCKER_BUILDKIT": "1"}
    cost = run([find_program("docker"), *args], env=env)
    return replace(cost, daemon_cpu_s=tree_cpu_s(daemon.pid) - before)


def remove_earlier_builds(daemon: DockerDaemon) -> None:
    """Remove the steps of earlier builds: three engine images fill a disk of 50 GB."""
    docker(daemon, "image", "prune", "-f")
    # only the steps: the context that was sent before stays
    docker(daemon, "builder", "prune", "-af", "--filter", "type=regular")


def require_buildkit(daemon: DockerDaemon, scratch: Path) -> None:
    """Refuse to compare with the old builder, which people no longer use."""
    (scratch / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n", encoding="utf-8")
    try:
        docker(daemon, "build", "-q", str(scratch))
    except SystemExit as error:
        raise CannotHave(f"docker build cannot use BuildKit here: {error}") from error
