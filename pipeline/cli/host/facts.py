"""What this host is: facts, what changed since, which host differs."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline import log
from pipeline.cli.context import say_json
from pipeline.cli.file_statements import without_statements
from pipeline.cli.options import EXISTING_FILE, json_option
from pipeline.errors import FactsUnreadable, HostDrifted, HostOutlier
from pipeline.host.facts.drift import compare, read_facts
from pipeline.host.facts.gather import gather
from pipeline.host.facts.model import Gpu, HostFacts
from pipeline.host.facts.redact import redact as redact_capture
from pipeline.host.facts.source import read_capture
from pipeline.host.probes.runner import read_rows
from pipeline.host.rules.outliers import find_outliers
from pipeline.known import Unknown

# so that a host can be judged on another machine, and rules tested without its hardware
root_option = click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True),
    help="Read a copied file tree or a capture (host/facts/capture.py) instead of this machine.",
)
# for bug reports: serial numbers and UUIDs identify an owner
redact_option = click.option(
    "--redact", is_flag=True, help="Leave out serial numbers, UUIDs and names."
)


def facts_of(root: Path | None, *, redacted: bool = False, name: str | None = None) -> HostFacts:
    """This machine's facts, or those of a captured one."""
    capture = read_capture(root)
    return gather(redact_capture(capture) if redacted else capture, name)


@click.command("facts")
@click.option("--name", help="Name of this host [default: a digest of its machine id].")
@click.option(
    "--capture",
    "as_capture",
    is_flag=True,
    help="Print what was read, as JSON, without judging it.",
)
@root_option
@redact_option
@json_option
def facts(
    name: str | None, as_capture: bool, root: Path | None, redact: bool, as_json: bool
) -> None:
    """Show what this host is: GPUs, driver, bus, kernel, processors, disks, software.

    A field that could not be read shows why. Nothing is changed, and no server is asked.
    """
    if as_capture:
        capture = read_capture(root)
        shown = redact_capture(capture) if redact else capture
        return say_json(shown.model_dump(mode="json", exclude_none=True))
    host = facts_of(root, redacted=redact, name=name)
    if as_json:
        return say_json(host.model_dump(mode="json"))
    click.echo(_text(host))


def _text(host: HostFacts) -> str:
    rows = [
        ["host", host.host],
        ["system", f"{_shown(host.software.os)}, Linux {_shown(host.kernel.release)}"],
        ["processor", f"{_shown(host.cpu.name)} ({_shown(host.cpu.threads)} threads)"],
        ["memory", _size(host.memory_bytes)],
        ["driver", f"{_shown(host.driver.version)}, open module: {_shown(host.driver.is_open)}"],
        [
            "CUDA",
            f"driver {_shown(host.driver.cuda)}, toolkit {_shown(host.software.cuda_toolkit)}",
        ],
        ["IOMMU, ASPM", f"{_shown(host.pci.iommu)}, {_shown(host.pci.aspm_policy)}"],
        [
            "containers",
            f"docker {_shown(host.software.docker)}, podman {_shown(host.software.podman)}",
        ],
    ]
    lines = [log.table(["fact", "value"], rows), ""]
    if isinstance(host.gpus, Unknown):
        return "\n".join([*lines, f"no GPUs: {host.gpus.unknown}"])
    head = ["GPU", "name", "memory", "BAR1", "link", "limit", "VBIOS"]
    return "\n".join([*lines, log.table(head, [_card(g) for g in host.gpus])])


def _card(gpu: Gpu) -> list[str]:
    link = f"gen {_shown(gpu.link.generation_max)} x{_shown(gpu.link.width)}"
    sizes = [_size(gpu.memory_bytes), _size(gpu.bar1_bytes)]
    return [
        str(gpu.index),
        _shown(gpu.name),
        *sizes,
        link,
        f"{_shown(gpu.power.limit_w)} W",
        _shown(gpu.vbios),
    ]


def _shown(value: object) -> str:
    why = getattr(value, "unknown", None)
    return f"unknown ({why})" if why else str(value)


def _size(value: object) -> str:
    return log.size(value) if isinstance(value, int) else _shown(value)


@click.command("drift")
@click.argument("old", type=EXISTING_FILE)
@click.argument("new", metavar="[NEW|live]", default="live")
@root_option
@json_option
def drift(old: Path, new: str, root: Path | None, as_json: bool) -> None:
    """Compare recorded facts (OLD) with those of this machine, or with other recorded ones (NEW).

    Fields that change by themselves, such as current clocks, are left out.
    """
    before = read_facts(old)
    live = new == "live"
    after = facts_of(root, name=before.host) if live else read_facts(Path(new))
    differences = compare(before, after)
    if as_json:
        say_json([d.model_dump() for d in differences])
    elif differences:
        rows = [[d.field, d.kind, d.before, d.after] for d in differences]
        click.echo(log.table(["field", "change", "before", "after"], rows))
    else:
        click.echo("nothing has changed")
    # that a field can be read now which could not be before is no drift
    bad = [d for d in differences if d.kind != "gained"]
    if bad:
        raise HostDrifted(
            f"{before.host}: {log.count(len(bad), 'field')} changed, such as {bad[0].field}"
        )


@click.command("outliers")
@click.argument("files", nargs=-1, required=True, type=EXISTING_FILE)
@click.option(
    "--checks",
    multiple=True,
    type=EXISTING_FILE,
    help="Result of `host check --json` of each host, in the same order. Repeatable.",
)
@json_option
def outliers(files: tuple[Path, ...], checks: tuple[Path, ...], as_json: bool) -> None:
    """Find the host or GPU that differs from the rest, by recorded facts and measurements."""
    # `records/*.json` also matches the statements beside the records
    files = without_statements(files)
    hosts = {f.stem: read_facts(f) for f in files}
    if len(hosts) != len(files):
        raise FactsUnreadable("two of the files have the same name", "Name each after its host.")
    if checks and len(checks) != len(files):
        raise FactsUnreadable(
            f"{log.count(len(files), 'host')}, but {log.count(len(checks), 'check')}",
            "Give --checks once for each host, in the same order.",
        )
    probes = {f.stem: read_rows(c) for f, c in zip(files, checks, strict=False)}
    result = find_outliers(hosts, probes)
    if as_json:
        say_json(result.model_dump())
    else:
        rows = [[o.subject, o.field, o.value, o.others] for o in result.outliers]
        click.echo(
            log.table(["host or GPU", "field", "value", "the others"], rows) if rows else "none"
        )
        for reason in result.unjudged:
            click.echo(f"not judged: {reason}")
    if result.outliers:
        first = result.outliers[0]
        raise HostOutlier(f"{first.subject}: {first.field} is {first.value}, not {first.others}")
