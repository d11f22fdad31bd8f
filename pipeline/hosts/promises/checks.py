"""Checks that promises share: outcomes other than kept, and a host's files, units and packages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pipeline.core.errors import PipelineError
from pipeline.core.known import Known, Unknown, Value, first_unknown, unknown
from pipeline.core.proc import last_line
from pipeline.core.verdict import RuleVerdict
from pipeline.hosts.lock_model import TargetLock, read_host_lock

# testinfra ships no types
Host = Any
# systemd's folders for units and drop-ins of packages
_SHIPPED = ("/usr/lib/systemd/", "/lib/systemd/")


class Outcome(Exception):
    """A promise that is not simply kept: its verdict, the reason, and the fix."""

    verdict: RuleVerdict = "failed"

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(why)
        # as long as an unknown fact's reason may be
        self.why, self.fix = " ".join(why.split())[:400], fix


class Broken(Outcome):
    """The promise does not hold."""


class Undecided(Outcome):
    """Whether the promise holds cannot be determined."""

    verdict = "unknown"


class NotApplicable(Outcome):
    """The promise has nothing to judge on this host."""

    verdict = "not applicable"


Test = TypeVar("Test", bound=Callable[..., None])


def known_by(rule: str) -> Callable[[Test], Test]:
    """Tie a promise to the rule by which known issues refer to it."""

    def tied(test: Test) -> Test:
        test.rule = rule  # type: ignore[attr-defined]
        return test

    return tied


def require(good: object, why: str, fix: str = "") -> None:
    """Raise Broken unless good; an unknown value is undecided."""
    if not known(good):
        raise Broken(why, fix)


def known(value: Known[Value]) -> Value:
    """Return the value; undecided if it is unknown."""
    if isinstance(value, Unknown):
        raise Undecided(value.unknown)
    return value


def require_known(values: Iterable[object]) -> None:
    """Undecided if one of the values is unknown."""
    reason = first_unknown(*values)
    if reason is not None:
        raise Undecided(reason.unknown)


def require_none(wrong: Sequence[str], why: str, fix: str = "") -> None:
    """Broken where anything is in the list; names the first few."""
    if wrong:
        # three are enough to find the cause, and a row stays one line
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise Broken(f"{why}: {', '.join(wrong[:3])}{more}", fix)


def skip_unless(applies: object, why: str) -> None:
    """End a test that has nothing to judge on this host."""
    if not applies:
        raise NotApplicable(why)


def undecided_unless(good: object, why: str) -> None:
    """End a test whose promise cannot be judged on this host."""
    if not good:
        raise Undecided(why)


def text_of(host: Host, path: str) -> str:
    """A file's text; a missing one is a broken promise."""
    file = host.file(path)
    require(file.exists, f"{path} is missing")
    return str(file.content_string)


def require_text(host: Host, path: str, want: str) -> None:
    """The file has exactly these lines, but for blank ones."""
    got = [x.rstrip() for x in text_of(host, path).splitlines() if x.strip()]
    wanted = [x.rstrip() for x in want.splitlines() if x.strip()]
    require_none([f"`{x}` is not ours" for x in got if x not in wanted], path)
    require_none([f"`{x}` is missing" for x in wanted if x not in got], path)


def require_same_file(host: Host, path: str, source: Path) -> None:
    """The file on the host has the bytes of the controller's."""
    undecided_unless(source.is_file(), f"{source} is not on this controller to compare with")
    require(host.file(path).exists, f"{path} is missing")
    # by digest: a file may be large or secret
    want, got = hashlib.sha256(source.read_bytes()).hexdigest(), host.file(path).sha256sum
    require(got == want, f"{path} has other bytes ({got[:12]}… instead of {want[:12]}…)")


def require_gone(host: Host, paths: list[str]) -> None:
    """Broken if one of these files exists."""
    require_none([p for p in paths if host.file(p).exists], "is still there")


def require_unit(host: Host, name: str, *, running: bool = True) -> None:
    """A unit starts at boot and, where it must, runs now."""
    service = host.service(name)
    require(service.is_enabled, f"{name} does not start at boot")
    require(not running or service.is_running, f"{name} does not run")


def texts_in(host: Host, *patterns: str) -> dict[str, str]:
    """Read every matching file, by path; in the order of the patterns, then names."""
    # a link to /dev/null acts as an empty file: that is how a site disables a package's file
    there = '[ ! -f "$f" ] && [ ! -c "$f" ]'
    # a separator that no path has; what is not ASCII is never ours and might not decode
    form = there + " || { printf '\\036%s\\n' \"$f\"; tr -d '\\036\\200-\\377' <\"$f\"; }"
    done = host.run(f"for f in {' '.join(patterns)}; do {form}; done")
    # it fails at a home on a file server that does not answer, for example
    reason = f"{patterns[0]} and others cannot be read: {last_line(done.stderr)}"
    undecided_unless(done.rc == 0, reason)
    parts = (x.partition("\n") for x in done.stdout.split("\x1e") if x)
    return {path: text for path, _, text in parts}


def output_of(host: Host, otherwise: str, command: str, *arguments: str) -> str:
    """Return a command's output; undecided, for the reason `otherwise`, if it fails."""
    done = host.run(command, *arguments)
    undecided_unless(done.rc == 0, f"{otherwise}: {done.stderr.strip()[-100:]}")
    return str(done.stdout)


def unit_properties(host: Host, unit: str, *properties: str) -> dict[str, str]:
    """Properties of a unit as systemd has them now; of systemd itself without a unit."""
    output = host.run(f"systemctl show {unit} --property={','.join(properties)}".replace("  ", " "))
    return dict(line.partition("=")[::2] for line in output.stdout.splitlines())


def require_untouched_unit(host: Host, name: str, ours: Sequence[str] = ()) -> None:
    """Broken if anything changes a shipped unit: a drop-in not ours, a file in its place."""
    unit = unit_properties(host, name, "FragmentPath", "DropInPaths", "NeedDaemonReload")
    require(unit.get("FragmentPath"), f"{name} does not exist")
    files = unit.get("DropInPaths", "").split()
    # a file of that name in /etc takes the place of the package's
    own = f"/etc/systemd/system/{name}"
    if unit["FragmentPath"] == own and not name.startswith("sm120-"):
        files.append(own)
    wrong = [x for x in files if x not in ours and not x.startswith(_SHIPPED)]
    fix = f"rm {' '.join(wrong)}; systemctl daemon-reload; systemctl restart {name}"
    require_none(wrong, f"{name} is changed by", fix)
    # even if somebody added or removed a drop-in
    fix = f"Read them with `systemctl cat {name}`, then daemon-reload and restart it."
    is_read = unit.get("NeedDaemonReload") != "yes"
    require(is_read, f"the files of {name} changed after systemd read them", fix)


def require_packages(host: Host, names: list[str]) -> None:
    """Broken if a package is not installed, at whatever version."""
    have = installed_packages(host, names)
    require_none([n for n in names if n not in have], "not installed")


def installed_packages(host: Host, names: list[str]) -> dict[str, tuple[str, str]]:
    """Version and wanted state (`install`, `hold`) of those that are installed."""
    form = "${binary:Package}\\t${Version}\\t${db:Status-Want}\\t${db:Status-Status}\\n"
    output = host.run(f"dpkg-query --show --showformat '{form}' {' '.join(names)}").stdout
    rows = [line.split("\t") for line in output.splitlines() if line.count("\t") == 3]
    good = [r for r in rows if r[3] == "installed"]
    # a library that may be installed for two architectures is shown as NAME:amd64
    return {name.partition(":")[0]: (version, want) for name, version, want, _ in good}


def kernel_arguments(host: Host) -> list[str]:
    """The arguments that the running kernel was booted with."""
    done = host.run("cat /proc/cmdline")
    undecided_unless(done.rc == 0, "/proc/cmdline cannot be read")
    return str(done.stdout).split()


def locked_target(lock_file: Path | None, target: str) -> Known[TargetLock]:
    """The packages that the lock names for a host's system."""
    try:
        lock = read_host_lock(lock_file or Path("host.lock.yaml"))
    except PipelineError as error:
        return unknown(str(error))
    return lock.targets.get(target) or unknown(f"the lock has no packages for {target}")
