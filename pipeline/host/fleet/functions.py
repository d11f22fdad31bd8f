"""The function tests on a host, inside a container of an engine image that it has."""

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
    LIMIT_S,
    NAME,
    NCCL_LIBRARY,
    NCCL_SETTINGS,
    PROBES,
    ProbeAnswer,
    ProbeRow,
    card_words,
    container_command,
    last_words,
    parse_answer,
)

# the script's own limit comes first, so that it can tidy up
_TIDY_S = 60.0
_FOLDER = Path("/run/sm120/probes")


def run_functions(
    remote: Remote,
    promised: Promised,
    facts: HostFacts | None,
    image: str | None,
    arguments: Sequence[str],
) -> tuple[list[ProbeRow], list[str]]:
    """Rows, and words for the table of known issues; nothing where nobody asked."""
    if image is None:
        return [], []
    if facts is not None and not facts.pci.gpus:
        return [not_tested("no GPU is on the bus of this host: the function tests did not run")], []
    runtime = promised.roles.container_runtime
    engine = runtime.engine if runtime else "docker"
    cards = card_words(engine, facts.software.docker if facts is not None else None)
    answer = _answer(remote, engine, image, arguments, cards)
    if isinstance(answer, str):
        return [not_tested(answer)], []
    return answer.rows, answer.lines()


def _answer(
    remote: Remote, engine: str, image: str, arguments: Sequence[str], cards: Sequence[str]
) -> ProbeAnswer | str:
    """What the tests found, or why they did not start."""
    said = remote.run(function_script(engine, image, arguments, cards), LIMIT_S + _TIDY_S)
    try:
        return parse_answer(said.out, "the function tests")
    except FactsUnreadable:
        # a script that was killed could not
        remote.run(tidy_up(engine), _TIDY_S)
        words = last_words((said.err.strip() or said.out).decode(errors="replace"))
        return f"the function tests gave no answer: {words}"


def function_script(engine: str, image: str, arguments: Sequence[str], cards: Sequence[str]) -> str:
    """A script that brings the tests, runs them in a container and prints their answer.

    The image's user is not root, so the folder of the answer is open while the tests run.
    """
    command = container_command(
        image,
        _FOLDER / "answer",
        arguments,
        {},
        probes=_FOLDER / "code",
        cards=cards,
        nccl=["@NCCL@"],
    )
    run = shlex.join([engine, *command[1:]]).replace("@NCCL@", '"$@"')
    limit = f"{LIMIT_S:.0f}"
    return "\n".join(
        [
            f"{tidy_up(engine)}; mkdir -p {_FOLDER}/code {_FOLDER}/answer || exit 1",
            f"trap '{tidy_up(engine)}' EXIT",
            f"chmod 755 {_FOLDER} {_FOLDER}/code && chmod 777 {_FOLDER}/answer",
            f"echo {_packed()} | base64 -d | tar -xz -C {_FOLDER}/code || exit 1",
            # as an engine on this host gets them
            f"set --; [ ! -f {NCCL_SETTINGS} ] || set -- --env-file {NCCL_SETTINGS}",
            f'[ ! -d {NCCL_LIBRARY} ] || set -- "$@" --volume {NCCL_LIBRARY}:{NCCL_LIBRARY}:ro',
            f"timeout --kill-after=10 {limit} {run} >&2",
            f'[ $? -ne 124 ] || echo "did not end within {limit} s and were ended" >&2',
            # why there is no answer was said above
            f"cat {_FOLDER}/answer/answer.json 2>/dev/null",
        ]
    )


def tidy_up(engine: str) -> str:
    """Commands that end the tests' container, whoever left it, and remove their folder."""
    return f"{engine} rm --force {NAME} >/dev/null 2>&1; rm -rf {_FOLDER}"


def _packed() -> str:
    """The tests' own files, small enough for a command line."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=9) as tar:
        for path in sorted(PROBES.glob("*.py")):
            tar.add(path, arcname=path.name)
    return base64.b64encode(out.getvalue()).decode()
