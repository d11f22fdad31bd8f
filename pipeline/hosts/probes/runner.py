"""Starts the function tests with a Python that has torch, and reads their report."""

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
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter, ValidationError

from pipeline.core import proc
from pipeline.core.errors import FactsUnreadable, ProbeUnstarted
from pipeline.core.model import FILE_VERSION, Frozen
from pipeline.core.verdict import RuleVerdict, RunVerdict

REPORT_NAME = "report.json"
NO_OUTPUT = "the function tests gave no output"
WORKER = Path(__file__).with_name("worker")
# More than the slowest sound machine needs for all tests: each step has its own, shorter limit.
LIMIT_S = 1800.0
# what the role `nccl` leaves for containers: settings, and a patched library where it applies
NCCL_SETTINGS = Path("/etc/sm120/nccl.env")
NCCL_LIBRARY = Path("/usr/local/lib/sm120")
CONTAINER = "sm120-probes"
_BY_CDI = ("--device", "nvidia.com/gpu=all")
# Docker resolves CDI devices from this major version on; older ones know only --gpus.
_CDI_SINCE = 25
# What the caller's environment decides about CUDA and NCCL must reach the tests too.
_PASSED = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME")


class ProbeRow(Frozen):
    """One test of one thing."""

    check: str
    subject: str
    verdict: RuleVerdict
    why: str
    measured: dict[str, Any]


class ProbeReport(Frozen):
    """The results of all tests of one machine."""

    version: Annotated[Literal[1], FILE_VERSION]
    verdict: RunVerdict
    device: Literal["cuda", "cpu"]
    count: int
    seconds: float
    floors: dict[str, float]
    rows: list[ProbeRow]

    def lines(self) -> list[str]:
        """The report as log lines, to search for known issues."""
        reasons = [f"{r.check} {r.subject}: {r.why}" for r in self.rows if r.why]
        output = [text for r in self.rows for text in r.measured.get("output", [])]
        return [*reasons, *(line for text in output for line in text.splitlines())]


def parse_report(data: bytes, name: str) -> ProbeReport:
    """A report as the tests wrote it."""
    try:
        return ProbeReport.model_validate_json(data)
    except (ValidationError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise FactsUnreadable(f"{name}: not a report of the function tests: {reason}") from error


def read_probe_rows(path: Path) -> list[ProbeRow]:
    """The function tests of a saved `host check --json`."""
    try:
        tests = json.loads(path.read_bytes())["functions"]
        return TypeAdapter(list[ProbeRow]).validate_python(tests["rows"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise FactsUnreadable(f"{path}: is not a result of `host check --json`") from error


def run_probes(
    python: str, arguments: Sequence[str], settings: dict[str, str] | None = None
) -> ProbeReport:
    """Run the function tests here; each of their processes has its own time limit."""
    if shutil.which(python) is None:
        raise ProbeUnstarted(f"{python}: no such program")
    names = [n for n in os.environ if n.startswith(("NCCL_", "GLOO_", "OMP_"))]
    env = proc.child_environment(*_PASSED, *names, **(settings or {}))
    return _report(lambda folder: [python, str(WORKER), str(folder / REPORT_NAME), *arguments], env)


def run_in_image(
    image: str, arguments: Sequence[str], settings: dict[str, str] | None = None
) -> ProbeReport:
    """Run them in a container of an engine image, with all cards.

    Without settings from the caller the container gets those of the host, as an engine would.
    """
    proc.find_tool("docker", "Install Docker, or name a Python that has torch with --python.")
    env = proc.child_environment("DOCKER_HOST")
    done = proc.read(["docker", "version", "--format", "{{.Server.Version}}"], env=env)
    cards = card_options("docker", done.stdout.decode(errors="replace"))
    nccl: list[str] = []
    if not settings and NCCL_SETTINGS.is_file():
        nccl += ["--env-file", str(NCCL_SETTINGS)]
    if not settings and NCCL_LIBRARY.is_dir():
        nccl += ["--volume", f"{NCCL_LIBRARY}:{NCCL_LIBRARY}:ro"]
    # several people may test on one machine
    name = f"{CONTAINER}-{secrets.token_hex(4)}"

    def command(folder: Path) -> list[str]:
        # the image's user is not ours, and has to write the report
        folder.chmod(0o777)
        return container_command(
            image, folder, arguments, settings or {}, name=name, cards=cards, nccl=nccl
        )

    try:
        return _report(command, env)
    except BaseException:
        # ending `docker run` does not end its container
        proc.read(["docker", "rm", "--force", name], env=env, timeout_s=60.0)
        raise


def card_options(engine: str, version: object) -> tuple[str, ...]:
    """Options that give a container all cards: by CDI, unless this Docker is too old for it."""
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
    name: str = CONTAINER,
    worker: Path = WORKER,
    cards: Sequence[str] = _BY_CDI,
    nccl: Sequence[str] = (),
) -> list[str]:
    """Pull nothing, allow no network; share memory and lock pages as engines need."""
    return [
        *("docker", "run", "--rm", "--name", name),
        # --ipc=host: Docker gives a container 64 MB of shared memory, too little for NCCL
        *("--pull=never", "--network=none", "--ipc=host"),
        *("--ulimit", "memlock=-1", *cards, *nccl),
        *(x for k, v in sorted(settings.items()) for x in ("--env", f"{k}={v}")),
        *("--volume", f"{worker}:/probes:ro", "--volume", f"{folder}:/report"),
        # the image's own entrypoint would start its engine
        *("--entrypoint", "python3", image, "/probes", f"/report/{REPORT_NAME}", *arguments),
    ]


def _report(command: Callable[[Path], list[str]], env: dict[str, str]) -> ProbeReport:
    with tempfile.TemporaryDirectory(prefix="sm120-probes-") as name:
        folder = Path(name)
        try:
            done = proc.read(command(folder), env=env, timeout_s=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise ProbeUnstarted(
                f"the function tests did not finish within {LIMIT_S:g} s"
            ) from error
        report = folder / REPORT_NAME
        if not report.is_file():
            output = done.stderr.decode(errors="replace")
            raise ProbeUnstarted(proc.last_line(output, NO_OUTPUT))
        return parse_report(report.read_bytes(), str(report))
