"""Kernel knobs, governor, power limit, time, and updates kept away from the driver."""

from __future__ import annotations

import re

from pipeline.host.facts.model import HostFacts
from pipeline.host.fleet.promised import TuningPromise
from pipeline.host.promises.checks import (
    Host,
    require_gone,
    require_packages,
    require_text,
    require_unit,
    require_untouched_unit,
)
from pipeline.host.promises.outcome import (
    Undecided,
    known,
    not_applicable,
    require,
    require_known,
    require_none,
)
from pipeline.known import Unknown, unknown

OURS = "/etc/sysctl.d/60-sm120.conf"
# systemd-sysctl prints a file below a comment with its path
_HEAD = re.compile(r"# /\S*/sysctl\.d/\S+\.conf$")
# prefixes of packages that the lock decides about
_KEPT_AWAY = ("nvidia-", "libnvidia-", "cuda-", "libnccl")


def test_its_files_are_as_written(host: Host, wanted: TuningPromise) -> None:
    """And none is left of what nobody asks for any more."""
    for path, text in wanted.files.items():
        require_text(host, path, text)
    require_gone(host, wanted.gone)


def test_the_kernel_knobs_are_in_effect(host: Host, wanted: TuningPromise) -> None:
    """As the running kernel reports them."""
    wrong = []
    for name, value in wanted.sysctls.items():
        path = f"/proc/sys/{name.replace('.', '/')}"
        got = host.run(f"cat {path}").stdout.split()
        if got != str(value).split():
            wrong.append(f"{name} is {' '.join(got) or 'unknown to this kernel'}, not {value}")
    require_none(wrong, "not in effect", "Run sysctl --system, and find out what else sets it.")


def test_no_later_file_sets_the_kernel_knobs_otherwise(host: Host, wanted: TuningPromise) -> None:
    """Of all files that systemd reads at a boot, the last one counts."""
    if not wanted.sysctls:
        not_applicable("no knobs are set")
    done = host.run("/lib/systemd/systemd-sysctl --cat-config")
    if done.rc != 0:
        raise Undecided("systemd-sysctl does not print its settings")
    last = last_settings(done.stdout)
    want = {name: " ".join(str(value).split()) for name, value in wanted.sysctls.items()}
    got = {name: last.get(name, (OURS, "nothing")) for name in want}
    wrong = [f"{p} sets {n} to {v}" for n, (p, v) in got.items() if v != want[n]]
    files = sorted({path for n, (path, v) in got.items() if v != want[n]} - {OURS})
    fix = f"Take it out of {', '.join(files)}, which is read after ours; then sysctl --system."
    require_none(wrong, "at the next boot", fix if files else "")


def last_settings(text: str) -> dict[str, tuple[str, str]]:
    """Path and value of the last line for each knob, from what systemd-sysctl shows."""
    last: dict[str, tuple[str, str]] = {}
    path = OURS
    for line in text.splitlines():
        # a dash: errors are ignored; slashes may stand for dots, see sysctl.d(5)
        name, sign, value = line.strip().removeprefix("-").partition("=")
        if _HEAD.match(line):
            path = line.removeprefix("# ")
        elif sign and not name.startswith(("#", ";")):
            last[name.strip().replace("/", ".")] = (path, " ".join(value.split()))
    return last


def test_the_governor_is_set_at_each_boot(host: Host, wanted: TuningPromise) -> None:
    """By a unit of our own."""
    if wanted.governor == "keep":
        not_applicable("the governor is left alone")
    require_unit(host, "sm120-governor")
    require_untouched_unit(host, "sm120-governor.service")


def test_the_governor_is_in_effect(facts: HostFacts, wanted: TuningPromise) -> None:
    """On every processor."""
    if wanted.governor == "keep":
        not_applicable("the governor is left alone")
    if isinstance(facts.cpu.governors, Unknown):
        not_applicable(f"this machine scales no frequency ({facts.cpu.governors.unknown})")
    good = facts.cpu.governors == [wanted.governor]
    require(good, f"it is {', '.join(facts.cpu.governors)}", "systemctl restart sm120-governor")


def test_the_power_limit_is_set_at_each_boot(host: Host, wanted: TuningPromise) -> None:
    """By a unit of our own."""
    if not wanted.power_limit_w:
        not_applicable("no limit is asked for")
    require_unit(host, "sm120-power-limit", running=False)
    require_untouched_unit(host, "sm120-power-limit.service")


def test_the_power_limit_is_in_effect(facts: HostFacts, wanted: TuningPromise) -> None:
    """As each card reports it."""
    if not wanted.power_limit_w:
        not_applicable("no limit is asked for")
    limits = {f"GPU {g.index}": g.power.limit_w for g in known(facts.gpus)}
    require_known(limits.values() or [unknown("no card answers")])
    wrong = [f"{n} has {w} W" for n, w in limits.items() if w != float(wanted.power_limit_w)]
    require_none(wrong, f"{wanted.power_limit_w} W", "systemctl restart sm120-power-limit")


def test_the_clock_is_kept(host: Host, wanted: TuningPromise) -> None:
    """Logs and certificates need it."""
    if not wanted.time_sync:
        not_applicable("time is kept by somebody else")
    require_packages(host, ["chrony"])
    require_unit(host, "chrony")


def test_updates_at_night_stay_away_from_the_driver(host: Host, wanted: TuningPromise) -> None:
    """As apt itself reads its settings."""
    if not wanted.keep_driver:
        not_applicable("host_tuning_keep_driver is off")
    output = host.run("apt-config dump Unattended-Upgrade::Package-Blacklist").stdout
    listed = re.findall(r'^\S+:: "([^"]+)";$', output, re.M)
    require_none([n for n in _KEPT_AWAY if n not in listed], "not on apt's list")
