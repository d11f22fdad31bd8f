"""`sm120 gate find`: which case judges a kernel that a log or a profile names."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import click

from pipeline import log
from pipeline.cli.context import checkout_of, say_json
from pipeline.cli.options import json_option
from pipeline.errors import CaseNotFound
from pipeline.files import bounded_lines, opened_log
from pipeline.gate.files import has_cases
from pipeline.gate.smem.cases import Gates, read_gates
from pipeline.gate.tracebacks import (
    FoundCase,
    TracebackReader,
    find_by_name,
    find_by_traceback,
    why_not_judged,
)
from pipeline.spec.checkout import Checkout

_PATIENCE_S = 10.0  # for the first bytes of a named pipe


@click.command()
@click.argument("kernels", metavar="[KERNEL]...", nargs=-1)
@click.option(
    "--traceback",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    metavar="FILE",
    help="Find the cases of the kernels in this log's tracebacks; `-` reads standard input.",
)
@click.option("--image", metavar="NAME", help="Look in this image only [default: in all].")
@json_option
@click.pass_context
def find(
    context: click.Context,
    kernels: tuple[str, ...],
    traceback: Path | None,
    image: str | None,
    as_json: bool,
) -> None:
    """Find the gate cases that judge a kernel, by its name or by a traceback.

    KERNEL is the name of a kernel, or of the function that launches it; `*mla*` matches several.
    Nothing is compiled or downloaded.
    """
    if not kernels and traceback is None:
        raise click.UsageError("name a kernel, or a log with --traceback FILE")
    gates = _gates(checkout_of(context), image)
    found = {name: find_by_name(gates, name) for name in kernels}
    if traceback is not None:
        found["the traceback"] = _in_log(gates, traceback)
    cases = list({(f.image, f.case): f for each in found.values() for f in each}.values())
    if as_json:
        say_json([case.model_dump(mode="json") for case in cases])
    elif cases:
        click.echo(_text(cases))
    if missing := [name for name, each in found.items() if not each]:
        raise _not_found(gates, missing)


def _gates(checkout: Checkout, image: str | None) -> Mapping[str, Gates]:
    if image is not None:
        checkout.spec(image)  # an error that lists the images, where there is none of this name
        return {image: read_gates(checkout, image)}
    names = [name for name in checkout.images() if has_cases(checkout, name)]
    return {name: read_gates(checkout, name) for name in names}


def _in_log(gates: Mapping[str, Gates], path: Path) -> list[FoundCase]:
    reader = TracebackReader()
    is_stdin = path == Path("-")
    with nullcontext(sys.stdin.buffer) if is_stdin else opened_log(path, _PATIENCE_S) as file:
        deque(reader.watch(bounded_lines(file)), maxlen=0)  # to its end, and keeps no line
    if not reader.tracebacks:
        raise CaseNotFound(
            "the log holds no Python traceback",
            "Give the log with the whole traceback; `sm120 doctor` reads single lines.",
        )
    return [case for each in reader.tracebacks for case in find_by_traceback(gates, each)]


def _not_found(gates: Mapping[str, Gates], names: list[str]) -> CaseNotFound:
    images = ", ".join(gates) or "this checkout"
    message = f"{', '.join(names)}: no case of {images} judges it"
    for name in names:
        if reasons := why_not_judged(gates, name):
            return CaseNotFound(
                f"{message}. {reasons[0]}", "`not_judged` in the image's gates/engine.yaml says so."
            )
    return CaseNotFound(message)


def _text(cases: list[FoundCase]) -> str:
    """One line a case; images that share a file of cases stand together."""
    images: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        images.setdefault((case.case, ", ".join(case.found_by)), []).append(case.image)
    stands_for = {case.case: ", ".join(case.stands_for) for case in cases}
    rows = [
        [case, ", ".join(found_in), found_by, stands_for[case]]
        for (case, found_by), found_in in images.items()
    ]
    first = cases[0]
    command = f"sm120 gate run {first.image} --only smem --case '{first.case}*'"
    return f"{log.table(['case', 'images', 'found by', 'stands for'], rows)}\n\nNext: {command}"
