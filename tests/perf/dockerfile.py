"""The usual way, for comparison: the same wheels and patch through a Dockerfile."""

from __future__ import annotations

from pathlib import Path

from pipeline.files import link_or_copy
from tests.perf.measure import Cost, run
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.packages import find_program

# pip runs from its own wheel, as the base image has none; the patch comes last, so that an edit
# of it finds everything before it in the cache: the kindest order for this comparison. The base is
# for this machine's processor, whatever the wheels are for: no emulator is measured.
DOCKERFILE = """\
FROM {base}
USER root
COPY wheels /wheels
RUN python3 /wheels/pip.whl/pip install --quiet --no-index --no-deps --no-compile \\
    --only-binary=:all: {platforms} \\
    --target /opt/venv/lib/python3.11/site-packages /wheels/closure/*.whl
COPY edit.py /edit.py
RUN python3 /edit.py
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


def docker(daemon: DockerDaemon, *args: str, cwd: Path | None = None) -> Cost:
    """Run the docker client against the private daemon."""
    env = {"DOCKER_HOST": daemon.socket_url, "DOCKER_BUILDKIT": "0"}
    return run([find_program("docker"), *args], env=env, cwd=cwd)
