"""The function tests on a host, in a container of an engine image that the host has."""

from __future__ import annotations

import base64
import io
import shlex
import tarfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import FactsUnreadable
from pipeline.host.facts.model import HostFacts
from pipeline.host.fleet.promised import Promised
from pipeline.host.fleet.remote import Remote
from pipeline.host.fleet.result import not_tested
from pipeline.host.probes.runner import (
    CONTAINER,
    LIMIT_S,
    NCCL_LIBRARY,
    NCCL_SETTINGS,
    REPORT_NAME,
    WORKER,
    ProbeReport,
    ProbeRow,
    card_options,
    container_command,
    last_message,
    parse_report,
)

# the script's own limit comes first, so that it can clean up
_CLEAN_UP_S = 60.0
# unlike in /tmp only root writes there; it is empty after a boot
_FOLDER = Path("/run/sm120/probes")


def run_functions(
    remote: Remote,
    promised: Promised,
    facts: HostFacts | None,
    image: str | None,
    arguments: Sequence[str],
) -> tuple[list[ProbeRow], list[str]]:
    """Rows, and output in which known issues are recognised; nothing where no image is named."""
    if image is None:
        return [], []
    if facts is not None and not facts.pci.gpus:
        return [not_tested("no GPU is on the bus of this host: the function tests did not run")], []
    runtime = promised.roles.container_runtime
    engine = runtime.engine if runtime else "docker"
    cards = card_options(engine, facts.software.docker if facts is not None else None)
    report = _report(remote, engine, image, arguments, cards)
    if isinstance(report, str):
        return [not_tested(report)], []
    return report.rows, report.lines()


def _report(
    remote: Remote, engine: str, image: str, arguments: Sequence[str], cards: Sequence[str]
) -> ProbeReport | str:
    """The report of the tests, or why there is none."""
    done = remote.run(function_script(engine, image, arguments, cards), LIMIT_S + _CLEAN_UP_S)
    try:
        return parse_report(done.out, "the function tests")
    except FactsUnreadable:
        # a script that was killed could not do it itself
        remote.run(clean_up(engine), _CLEAN_UP_S)
        message = last_message((done.err.strip() or done.out).decode(errors="replace"))
        return f"the function tests gave no report: {message}"


def function_script(engine: str, image: str, arguments: Sequence[str], cards: Sequence[str]) -> str:
    """A script that unpacks the tests, runs them in a container and prints their report.

    The image's user is not root, so the folder of the report is open while the tests run.
    """
    command = container_command(
        image,
        _FOLDER / "report",
        arguments,
        {},
        worker=_FOLDER / "code",
        cards=cards,
        nccl=["@NCCL@"],
    )
    # whether the host has NCCL settings is seen only there, by the lines before
    run = shlex.join([engine, *command[1:]]).replace("@NCCL@", '"$@"')
    limit = f"{LIMIT_S:.0f}"
    return "\n".join(
        [
            f"{clean_up(engine)}; mkdir -p {_FOLDER}/code {_FOLDER}/report || exit 1",
            f"trap '{clean_up(engine)}' EXIT",
            f"chmod 755 {_FOLDER} {_FOLDER}/code && chmod 777 {_FOLDER}/report",
            f"echo {_packed()} | base64 -d | tar -xz -C {_FOLDER}/code || exit 1",
            # the same settings and library that an engine on this host gets
            f"set --; [ ! -f {NCCL_SETTINGS} ] || set -- --env-file {NCCL_SETTINGS}",
            f'[ ! -d {NCCL_LIBRARY} ] || set -- "$@" --volume {NCCL_LIBRARY}:{NCCL_LIBRARY}:ro',
            # stdout is for the report alone
            f"timeout --kill-after=10 {limit} {run} >&2",
            f'[ $? -ne 124 ] || echo "did not finish within {limit} s"  >&2',
            # stderr above has the reason where there is no report
            f"cat {_FOLDER}/report/{REPORT_NAME} 2>/dev/null",
        ]
    )


def clean_up(engine: str) -> str:
    """Commands that remove the tests' container and folder, also those of an earlier run."""
    return f"{engine} rm --force {CONTAINER} >/dev/null 2>&1; rm -rf {_FOLDER}"


def _packed() -> str:
    """The tests' own files as base64, small enough for a command line."""
    out = io.BytesIO()
    # an argument has at most 128 KiB, see execve(2); the script is one
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=9) as tar:
        for path in sorted(WORKER.glob("*.py")):
            tar.add(path, arcname=path.name)
    return base64.b64encode(out.getvalue()).decode()
