"""`sm120 doctor`: known issues in logs and on this machine, and the kernel behind a crash."""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from pipeline import log
from pipeline.cli.context import checkout_or_none, own_name, say_json, store_to_read
from pipeline.cli.host.facts import root_option
from pipeline.cli.options import json_option
from pipeline.errors import IssueFound, SpecInvalid
from pipeline.files import bounded_lines, opened_log
from pipeline.gate.tracebacks import KnownKernel, Overrun, TracebackReader, known_kernels
from pipeline.host.facts.gather import gather
from pipeline.host.facts.source import read_capture
from pipeline.host.rules.issues import Finding, findings, match_lines, match_rules
from pipeline.host.rules.judge import judge

_STDIN = Path("-")
_LOG = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
# The known issue that overruns are of; all else in its entry is text.
_OVERRUN_ISSUE = "shared-memory-101376"
_SEE_BELOW = "Take an image in which this kernel is patched; what is known about it stands below."
_MOST_KERNELS = 4
# What rotated logs begin with: gzip, xz and zstd.
_UNPACKERS = {b"\x1f\x8b\x08": "zcat", b"\xfd7z": "xzcat", b"\x28\xb5\x2f": "zstdcat"}
# For the first bytes of a pipe: whatever writes there has begun by then, and under CI, cron and ssh
# standard input is often a pipe that nobody writes to or closes.
_PATIENCE_S = 10.0


@click.command("doctor")
@click.argument("logs", nargs=-1, type=_LOG)
@click.option("--no-facts", is_flag=True, help="Read the logs only, not this machine.")
@root_option
@json_option
@click.pass_context
def doctor(
    context: click.Context,
    logs: tuple[Path, ...],
    no_facts: bool,
    root: Path | None,
    as_json: bool,
) -> None:
    """Recognise known issues in logs and in the facts of this machine; name cause and fix.

    Logs may come from a pipe: `docker logs NAME 2>&1 | sm120 doctor -`. The `-` waits until the
    pipe ends; without it, a pipe in which nothing comes is left alone after ten seconds. In a
    checkout a kernel that needs too much shared memory is looked up in its gates, and the image
    and the patch with exactly these bytes are named.
    """
    reader = TracebackReader()
    paths = logs or _piped()
    if no_facts and not paths:
        raise click.UsageError("name a log, or leave --no-facts out: there is nothing to read")
    matches = [_match_log(path, reader) for path in paths]
    if not no_facts:
        matches += _match_machine(root)
    issues = findings(matches)
    kernels = _look_up(context, reader.overruns)
    if as_json:
        say_json([_as_json(each, kernels) for each in issues])
    else:
        _show_findings(issues, kernels)
    if issues:
        raise IssueFound(f"{log.count(len(issues), 'known issue')}, such as {issues[0].issue.id}")


def _piped() -> tuple[Path, ...]:
    """Standard input, where somebody sends something: a terminal or /dev/null has no log."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:  # closed
        return ()
    # sshd gives a command a socket
    may_be_silent = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    if stat.S_ISREG(mode) or (may_be_silent and _begins()):
        return (_STDIN,)
    return ()


def _begins() -> bool:
    """Whether something comes through standard input, or its end."""
    if select.select([0], [], [], 0)[0]:
        return True
    patience = log.seconds(_PATIENCE_S)
    log.say(f"Waiting {patience} for a log in standard input (`-` waits for as long as it takes)")
    if select.select([0], [], [], _PATIENCE_S)[0]:
        return True
    log.say("Nothing came: standard input is not read")
    return False


def _match_log(path: Path, reader: TracebackReader) -> dict[str, list[str]]:
    name = "stdin" if path == _STDIN else path.name
    with _opened(path) as lines:
        return match_lines(name, reader.watch(lines))


@contextmanager
def _opened(path: Path) -> Iterator[Iterable[str]]:
    _require_text(path)
    # line by line, and whatever its encoding: engines write logs of gigabytes
    if path == _STDIN:
        log.say("Reading the log from standard input, to its end")
        with open(0, "rb", closefd=False) as file:
            yield bounded_lines(file)
    else:
        with opened_log(path, _PATIENCE_S) as file:
            yield bounded_lines(file)


def _require_text(path: Path) -> None:
    """A compressed log has no line that is known; to find nothing in it would mislead."""
    # a pipe (`<(docker logs NAME)`) can be read only once
    if not path.is_file():
        return
    with path.open("rb") as file:
        program = _UNPACKERS.get(file.read(3))
    if program:
        hint = f"Unpack it on the way: `{program} {path} | sm120 doctor -`."
        raise SpecInvalid(f"{path}: is compressed", hint)


def _match_machine(root: Path | None) -> list[dict[str, list[str]]]:
    capture = read_capture(root)
    # either may be closed to users, or already have dropped the line
    texts = {name: capture.output(name) for name in ("dmesg", "journal")}
    kept = [
        match_lines(name, text.splitlines())
        for name, text in texts.items()
        if isinstance(text, str)
    ]
    return [match_rules(judge(gather(capture))), *kept]


Kernels = list[tuple[Overrun, list[KnownKernel] | None]]


def _look_up(context: click.Context, overruns: list[Overrun]) -> Kernels:
    """What the gates of a checkout know about overruns; None where there is no checkout."""
    checkout = checkout_or_none(context) if overruns else None
    if checkout is None:
        return [(each, None) for each in overruns]
    store = store_to_read(context)
    return [(each, known_kernels(checkout, store, each)) for each in overruns]


def _as_json(finding: Finding, kernels: Kernels) -> dict[str, object]:
    of_this = kernels if finding.issue.id == _OVERRUN_ISSUE else []
    rows = [
        {
            "required_bytes": overrun.required_bytes,
            "limit_bytes": overrun.limit_bytes,
            "known": [{**k.model_dump(), "commands": k.commands} for k in known or []],
        }
        for overrun, known in of_this
    ]
    return {**finding.model_dump(), "kernels": rows}


def _show_findings(issues: list[Finding], kernels: Kernels) -> None:
    for each in issues:
        click.echo(f"{each.issue.id}: {each.issue.title} (seen {each.times}x)\n  {each.seen[0]}")
        is_looked_up = each.issue.id == _OVERRUN_ISSUE and kernels
        show_fix(each, _SEE_BELOW if is_looked_up else "")
        click.echo(f"  see:   {', '.join(each.issue.sources)}\n")
        if each.issue.id == _OVERRUN_ISSUE:
            for overrun, known in kernels:
                _show_overrun(overrun, known)
    if not issues:
        # an empty result must not read as a clean bill of health
        click.echo("no known issue was recognised; that does not prove that there is none")


def show_fix(finding: Finding, fix: str = "") -> None:
    """Cause and fix of a known issue; another fix, where more is known."""
    click.echo(f"  cause: {finding.issue.cause}\n  fix:   {fix or finding.issue.fix}")


def _show_overrun(overrun: Overrun, known: list[KnownKernel] | None) -> None:
    over = overrun.required_bytes - overrun.limit_bytes
    click.echo(f"{overrun.required_bytes} bytes of shared memory, {over} too many:")
    if known is None:
        click.echo(
            "  No checkout is here: with --checkout DIR its gates name the image and the patch.\n"
        )
        return
    for kernel in known[:_MOST_KERNELS]:
        _show_kernel(kernel)
    if len(known) > _MOST_KERNELS:
        click.echo(f"  and {len(known) - _MOST_KERNELS} more, which --json lists")
    if not known:
        click.echo("  No patch, case or recorded result of this checkout has these bytes.")
        click.echo(f"  run:    {own_name()} gate run IMAGE --only smem --unpatched")
    click.echo("")


def _show_kernel(kernel: KnownKernel) -> None:
    click.echo(
        f"  kernel: {', '.join(kernel.kernels)} of {kernel.engine}, gate {kernel.gate}"
        f" ({', '.join(kernel.stands_for[:4])})"
    )
    click.echo(f"  image:  {kernel.image}: {_known_about(kernel)}")
    click.echo(f"  match:  {_certainty(kernel)}")
    for title, command in zip(("run:", ""), kernel.commands, strict=False):
        click.echo(f"  {title:7} {command}")


def _known_about(kernel: KnownKernel) -> str:
    if kernel.patch:
        return f"{kernel.patch} mends this in {kernel.applies_to}"
    if kernel.accepted:
        return f"over the limit there, too, and accepted: {kernel.accepted}"
    return "its cases call this kernel, and no patch changes it"


def _certainty(kernel: KnownKernel) -> str:
    if not kernel.in_traceback:
        return "exactly these bytes; other kernels may need as many, and the log has no traceback"
    named = "it" if kernel.same_path else "its function, in a file of this name elsewhere"
    bytes_too = ", with exactly these bytes" if kernel.same_bytes else ""
    return f"the traceback names {named}{bytes_too}"
