"""What a host is: its facts, what moved since they were recorded, who differs, what is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline import log
from pipeline.cli.common import json_option, say_json
from pipeline.cli.statements import without_statements
from pipeline.errors import FactsUnreadable, HostDrifted, HostOutlier, IssueFound

if TYPE_CHECKING:
    from pipeline.host.facts.model import Gpu, HostFacts
    from pipeline.host.rules.issues import Finding

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)

root_option = click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True),
    help="A copied tree, or a file that host/facts/capture.py wrote, instead of this machine.",
)
redact_option = click.option(
    "--redact", is_flag=True, help="Leave out serial numbers, UUIDs, names and the like."
)


def facts_of(root: Path | None, *, redacted: bool = False, name: str | None = None) -> HostFacts:
    """This machine's facts, or those of a captured one."""
    from pipeline.host.facts.gather import gather
    from pipeline.host.facts.redact import redact
    from pipeline.host.facts.source import read_capture

    capture = read_capture(root)
    return gather(redact(capture) if redacted else capture, name)


@click.command("facts")
@click.option("--name", help="What to call this host; else a digest of its machine id.")
@click.option("--capture", "as_capture", is_flag=True, help="Answer with what was read, unjudged.")
@root_option
@redact_option
@json_option
def facts(
    name: str | None, as_capture: bool, root: Path | None, redact: bool, as_json: bool
) -> None:
    """Say what this host is: cards, driver, bus, kernel, processors, disks, software.

    Every field is there or says why it is not. Nothing is changed, and no server is asked.
    """
    from pipeline.host.facts.redact import redact as redacted
    from pipeline.host.facts.source import read_capture

    if as_capture:
        capture = read_capture(root)
        kept = redacted(capture) if redact else capture
        return say_json(kept.model_dump(mode="json", exclude_none=True))
    found = facts_of(root, redacted=redact, name=name)
    if as_json:
        return say_json(found.model_dump(mode="json"))
    click.echo(_text(found))


def _text(found: HostFacts) -> str:
    from pipeline.known import Unknown

    rows = [
        ["host", found.host],
        ["system", f"{_say(found.software.os)}, Linux {_say(found.kernel.release)}"],
        ["processor", f"{_say(found.cpu.name)} ({_say(found.cpu.threads)} threads)"],
        ["memory", _size(found.memory_bytes)],
        ["driver", f"{_say(found.driver.version)}, open module: {_say(found.driver.is_open)}"],
        ["CUDA", f"driver {_say(found.driver.cuda)}, toolkit {_say(found.software.cuda_toolkit)}"],
        ["IOMMU, ASPM", f"{_say(found.pci.iommu)}, {_say(found.pci.aspm_policy)}"],
        [
            "containers",
            f"docker {_say(found.software.docker)}, podman {_say(found.software.podman)}",
        ],
    ]
    lines = [log.table(["what", "is"], rows), ""]
    if isinstance(found.gpus, Unknown):
        return "\n".join([*lines, f"no cards: {found.gpus.unknown}"])
    head = ["GPU", "name", "memory", "BAR1", "link", "limit", "VBIOS"]
    return "\n".join([*lines, log.table(head, [_card(g) for g in found.gpus])])


def _card(gpu: Gpu) -> list[str]:
    link = f"gen {_say(gpu.link.generation_max)} x{_say(gpu.link.width)}"
    sizes = [_size(gpu.memory_bytes), _size(gpu.bar1_bytes)]
    return [
        str(gpu.index),
        _say(gpu.name),
        *sizes,
        link,
        f"{_say(gpu.power.limit_w)} W",
        _say(gpu.vbios),
    ]


def _say(value: object) -> str:
    why = getattr(value, "unknown", None)
    return f"unknown ({why})" if why else str(value)


def _size(value: object) -> str:
    return log.size(value) if isinstance(value, int) else _say(value)


@click.command("drift")
@click.argument("old", type=_FILE)
@click.argument("new", metavar="[NEW|live]", default="live")
@root_option
@json_option
def drift(old: Path, new: str, root: Path | None, as_json: bool) -> None:
    """Compare recorded facts (OLD) with this machine's, or with other recorded ones (NEW).

    Fields that move by themselves, such as clocks of the moment, are left out.
    """
    from pipeline.host.facts.drift import compare, read_facts

    before = read_facts(old)
    live = new == "live"
    after = facts_of(root, name=before.host) if live else read_facts(Path(new))
    found = compare(before, after)
    if as_json:
        say_json([d.model_dump() for d in found])
    elif found:
        rows = [[d.field, d.kind, d.before, d.after] for d in found]
        click.echo(log.table(["field", "how", "before", "after"], rows))
    else:
        click.echo("nothing has moved")
    bad = [d for d in found if d.kind != "gained"]
    if bad:
        raise HostDrifted(f"{before.host}: {len(bad)} fields moved, such as {bad[0].field}")


@click.command("outliers")
@click.argument("files", nargs=-1, required=True, type=_FILE)
@click.option(
    "--checks", multiple=True, type=_FILE, help="Answers of `host check --json`, in order."
)
@json_option
def outliers(files: tuple[Path, ...], checks: tuple[Path, ...], as_json: bool) -> None:
    """Find the node or card that differs from its equals, by recorded facts and measurements."""
    from pipeline.host.facts.drift import read_facts
    from pipeline.host.rules.outliers import find_outliers

    files = without_statements(files)
    hosts = {f.stem: read_facts(f) for f in files}
    if len(hosts) != len(files):
        raise FactsUnreadable("two of the files have the same name", "Name each after its host.")
    if checks and len(checks) != len(files):
        raise FactsUnreadable(f"{len(files)} hosts, but {len(checks)} checks")
    probes = {f.stem: _functions(c) for f, c in zip(files, checks, strict=False)}
    found = find_outliers(hosts, probes)
    if as_json:
        say_json(found.model_dump())
    else:
        rows = [[o.subject, o.field, o.value, o.others] for o in found.outliers]
        click.echo(log.table(["who", "field", "has", "its equals have"], rows) if rows else "none")
        for words in found.unjudged:
            click.echo(f"not judged: {words}")
    if found.outliers:
        first = found.outliers[0]
        raise HostOutlier(f"{first.subject}: {first.field} is {first.value}, not {first.others}")


def _functions(path: Path) -> dict[str, object]:
    """The function tests of a kept check; a bare answer of theirs serves too."""
    try:
        value = json.loads(path.read_bytes())
        found = value.get("functions", value)
        assert isinstance(found, dict)
        assert isinstance(found["rows"], list)
    except (OSError, ValueError, RecursionError, AssertionError, KeyError, AttributeError) as error:
        raise FactsUnreadable(f"{path}: is no answer of `host check --json`") from error
    return found


@click.command("doctor")
@click.argument("logs", nargs=-1, type=_FILE)
@click.option("--no-facts", is_flag=True, help="Look at the logs only, not at this machine.")
@root_option
@json_option
def doctor(logs: tuple[Path, ...], no_facts: bool, root: Path | None, as_json: bool) -> None:
    """Recognise known issues in logs and in this machine's facts; name their cause and fix."""
    from pipeline.host.facts.source import read_capture
    from pipeline.host.rules.issues import findings, match_lines, match_rules
    from pipeline.host.rules.judge import judge

    matches = []
    for path in logs:
        with path.open(encoding="utf-8", errors="replace") as lines:
            matches.append(match_lines(path.name, lines))
    if not no_facts:
        capture = read_capture(root)
        matches.append(match_rules(judge(facts_of(root))))
        for name in ("dmesg", "journal"):
            output = capture.output(name)
            if isinstance(output, str):
                matches.append(match_lines(name, output.splitlines()))
    found = findings(matches)
    say_findings(found, as_json)
    if found:
        raise IssueFound(f"{len(found)} known issues, such as {found[0].issue.id}")


def say_findings(found: list[Finding], as_json: bool) -> None:
    """Cause and fix of each, or that nothing known was seen."""
    if as_json:
        return say_json([f.model_dump() for f in found])
    for one in found:
        issue = one.issue
        click.echo(f"{issue.id}: {issue.title} (seen {one.times}x)")
        click.echo(f"  {one.seen[0]}\n  cause: {issue.cause}\n  fix:   {issue.fix}")
        click.echo(f"  see:   {', '.join(issue.sources)}\n")
    if not found:
        click.echo("no known issue was recognised; that does not prove that there is none")
