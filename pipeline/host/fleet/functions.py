"""The function tests on a host, inside a container of an engine image that it has."""

from __future__ import annotations

import base64
import io
import shlex
import tarfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import FactsUnreadable
from pipeline.host.facts import HostFacts
from pipeline.host.fleet.promised import Promised
from pipeline.host.fleet.remote import Remote
from pipeline.host.fleet.result import not_tested
from pipeline.host.probing import (
    PROBES,
    ProbeAnswer,
    ProbeRow,
    card_words,
    container_command,
    last_words,
    parse_answer,
)

LIMIT_S = 1800.0
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
    said = remote.run(function_script(engine, image, arguments, cards), LIMIT_S)
    try:
        return parse_answer(said.out, "the function tests")
    except FactsUnreadable:
        words = last_words((said.err.strip() or said.out).decode(errors="replace"))
        return f"the function tests did not start: {words}"


def function_script(engine: str, image: str, arguments: Sequence[str], cards: Sequence[str]) -> str:
    """A script that brings the tests, runs them in a container and prints their answer.

    The image's user is not root, so the folder of the answer is open while the tests run.
    """
    command = container_command(
        image, _FOLDER / "answer", arguments, {}, probes=_FOLDER / "code", cards=cards
    )
    return "\n".join(
        [
            f"rm -rf {_FOLDER} && mkdir -p {_FOLDER}/code {_FOLDER}/answer || exit 1",
            f"trap 'rm -rf {_FOLDER}' EXIT",
            f"chmod 755 {_FOLDER} {_FOLDER}/code && chmod 777 {_FOLDER}/answer",
            f"echo {_packed()} | base64 -d | tar -xz -C {_FOLDER}/code || exit 1",
            f"{shlex.join([engine, *command[1:]])} >&2",
            # why there is no answer was said above
            f"cat {_FOLDER}/answer/answer.json 2>/dev/null",
        ]
    )


def _packed() -> str:
    """The tests' own files, small enough for a command line."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=9) as tar:
        for path in sorted(PROBES.glob("*.py")):
            tar.add(path, arcname=path.name)
    return base64.b64encode(out.getvalue()).decode()
