"""The kernel's log is watched, and no Xid has taken the host out of service."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from pipeline.hosts.fleet.promised import HealthPromise
from pipeline.hosts.promises import checks
from pipeline.hosts.promises.checks import Host, require

# what `sm120-health status` ends with where the host is out of service
_OUT = 3


def test_the_probe_and_its_units_are_as_written(host: Host, wanted: HealthPromise) -> None:
    """The program that root runs, and its units."""
    checks.require_same_file(host, wanted.program, Path(wanted.source))
    for path, text in wanted.files.items():
        checks.require_text(host, path, text)
        checks.require_untouched_unit(host, PurePosixPath(path).name)


def test_the_log_is_read_at_each_boot_and_by_the_clock(host: Host, wanted: HealthPromise) -> None:
    """And the last look at it succeeded."""
    checks.require_unit(host, "sm120-health.service", running=False)
    checks.require_unit(host, "sm120-health.timer")
    last = checks.unit_properties(host, "sm120-health.service", "Result").get("Result")
    fix = "journalctl -u sm120-health names the reason."
    require(last == "success", f"the last look at the kernel's log ended with {last}", fix)


def test_the_host_is_in_service(host: Host, wanted: HealthPromise) -> None:
    """As the program has it, after a fatal Xid until a person brings the host back."""
    done = host.run(f"{wanted.program} status")
    state = str(done.stdout).strip()
    known = done.rc == 0 or (done.rc == _OUT and state)
    checks.undecided_unless(known, f"{wanted.program} does not answer")
    fix = f"Repair or replace the card, reboot, then `{wanted.program} return` on the host."
    require(done.rc == 0, state, fix)
