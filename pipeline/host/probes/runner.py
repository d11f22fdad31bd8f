"""Starts the function tests with a Python that has torch, and reads their answer."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from pipeline import proc
from pipeline.errors import FactsUnreadable, ProbeUnstarted
from pipeline.model import Frozen

_NAME = "answer.json"
PROBES = Path(__file__).with_name("worker")
LIMIT_S = 1800.0
# what the role `nccl` leaves for containers: settings, and a patched library where it applies
NCCL_SETTINGS = Path("/etc/sm120/nccl.env")
NCCL_LIBRARY = Path("/usr/local/lib/sm120")
# What the engine's own environment decides about CUDA and NCCL must reach the tests too.
_BY_CDI = ("--device", "nvidia.com/gpu=all")
NAME = "sm120-probes"  # of the container
_CDI_SINCE = 25  # Docker's major version
_PASSED = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME")


class ProbeRow(Frozen):
    """One test of one thing."""

    check: str
    subject: str
    verdict: Literal["passed", "failed", "unknown", "not applicable"]
    why: str
    measured: dict[str, Any]


class ProbeAnswer(Frozen):
    """What the tests found."""

    version: Literal[1]
    verdict: Literal["passed", "failed", "unknown"]
    device: Literal["cuda", "cpu"]
    count: int
    seconds: float
    floors: dict[str, float]
    rows: list[ProbeRow]

    def lines(self) -> list[str]:
        """The answer as a log, for the table of known issues."""
        said = [f"{r.check} {r.subject}: {r.why}" for r in self.rows if r.why]
        words = [w for r in self.rows for w in r.measured.get("words", [])]
        return [*said, *(line for w in words for line in w.splitlines())]


def read_answer(path: Path) -> ProbeAnswer:
    """An answer that was kept."""
    try:
        return parse_answer(path.read_bytes(), str(path))
    except OSError as error:
        raise FactsUnreadable(f"{path}: {error.strerror}") from error


def parse_answer(data: bytes, name: str) -> ProbeAnswer:
    """An answer as the tests wrote it."""
    try:
        return ProbeAnswer.model_validate_json(data)
    except (ValidationError, RecursionError) as error:
        words = str(error).splitlines()[0]
        raise FactsUnreadable(f"{name}: is no answer of the function tests: {words}") from error


def run_probes(
    python: str, arguments: Sequence[str], settings: dict[str, str] | None = None
) -> ProbeAnswer:
    """Run them here; each of their processes has its own time limit."""
    if shutil.which(python) is None:
        raise ProbeUnstarted(f"{python}: there is no such program")
    names = [n for n in os.environ if n.startswith(("NCCL_", "GLOO_", "OMP_"))]
    env = proc.environment(*_PASSED, *names, **(settings or {}))
    return _answer(lambda folder: [python, str(PROBES), str(folder / _NAME), *arguments], env)


def run_in_image(
    image: str, arguments: Sequence[str], settings: dict[str, str] | None = None
) -> ProbeAnswer:
    """Run them in a container of an engine image, with all cards.

    Without settings of the caller the container has those of the host, as an engine there.
    """
    proc.find_tool("docker", "Install Docker, or name a Python that has torch with --python.")
    env = proc.environment("DOCKER_HOST")
    said = proc.read(["docker", "version", "--format", "{{.Server.Version}}"], env=env)
    cards = card_words("docker", said.stdout.decode(errors="replace"))
    nccl = nccl_words() if not settings else ()
    name = f"sm120-probes-{secrets.token_hex(4)}"

    def command(folder: Path) -> list[str]:
        # the image's user is not ours
        folder.chmod(0o777)
        return container_command(
            image, folder, arguments, settings or {}, name=name, cards=cards, nccl=nccl
        )

    try:
        return _answer(command, env)
    except BaseException:
        # the program that started the container is gone; the container is not
        proc.read(["docker", "rm", "--force", name], env=env, timeout_s=60.0)
        raise


def nccl_words() -> tuple[str, ...]:
    """How a container is given the host's NCCL settings and patched library, if any."""
    words = ("--env-file", str(NCCL_SETTINGS)) if NCCL_SETTINGS.is_file() else ()
    volume = ("--volume", f"{NCCL_LIBRARY}:{NCCL_LIBRARY}:ro") if NCCL_LIBRARY.is_dir() else ()
    return (*words, *volume)


def card_words(engine: str, version: object) -> tuple[str, ...]:
    """How a container is given all cards: by CDI, which Docker knows from version 25 on."""
    major = re.match(r"\d+(?=\.)", version) if isinstance(version, str) else None
    if engine == "docker" and major and int(major[0]) < _CDI_SINCE:
        return ("--gpus", "all")
    return _BY_CDI


def container_command(
    image: str,
    folder: Path,
    arguments: Sequence[str],
    settings: dict[str, str],
    *,
    name: str = NAME,
    probes: Path = PROBES,
    cards: Sequence[str] = _BY_CDI,
    nccl: Sequence[str] = (),
) -> list[str]:
    """Nothing is pulled, no network; shared memory and locked pages as engines need them."""
    return [
        *("docker", "run", "--rm", "--name", name),
        *("--pull=never", "--network=none", "--ipc=host"),
        *("--ulimit", "memlock=-1", *cards, *nccl),
        *(x for k, v in sorted(settings.items()) for x in ("--env", f"{k}={v}")),
        *("--volume", f"{probes}:/probes:ro", "--volume", f"{folder}:/answer"),
        *("--entrypoint", "python3", image, "/probes", f"/answer/{_NAME}", *arguments),
    ]


def _answer(command: Callable[[Path], list[str]], env: dict[str, str]) -> ProbeAnswer:
    with tempfile.TemporaryDirectory(prefix="sm120-probes-") as name:
        folder = Path(name)
        try:
            done = proc.read(command(folder), env=env, timeout_s=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise ProbeUnstarted(f"the function tests did not end within {LIMIT_S:g} s") from error
        if not (folder / _NAME).is_file():
            raise ProbeUnstarted(last_words(done.stderr.decode(errors="replace")))
        return read_answer(folder / _NAME)


def last_words(said: str) -> str:
    """Why they did not start; below it Docker points at its own help."""
    told = [line for line in said.splitlines() if not re.match("(See|Run) 'docker ", line)]
    return proc.last_line("\n".join(told), "the function tests said nothing")


def as_json(answer: ProbeAnswer) -> dict[str, Any]:
    """For programs."""
    found: dict[str, Any] = json.loads(answer.model_dump_json())
    return found
