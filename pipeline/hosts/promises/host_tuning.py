"""Kernel knobs, governor, power and clock limits, time, and updates kept away from the driver."""

from __future__ import annotations

import re

from pipeline.core.known import Unknown, unknown
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.fleet.promised import TuningPromise
from pipeline.hosts.promises import checks
from pipeline.hosts.promises.checks import Host, require, require_none, skip_unless

OURS = "/etc/sysctl.d/60-sm120.conf"
# systemd-sysctl prints a file below a comment with its path
_HEAD = re.compile(r"# /\S*/sysctl\.d/\S+\.conf$")
# prefixes of packages that the lock decides about
_KEPT_AWAY = ("nvidia-", "libnvidia-", "cuda-", "libnccl")
# what runs at boot or by the clock besides files of sysctl.d
_STARTED = (
    "/etc/rc.local /etc/rc.d /etc/init.d /etc/systemd/system /etc/cron.d /etc/crontab"
    " /etc/cron.hourly /etc/cron.daily /etc/cron.weekly /etc/cron.monthly /var/spool/cron"
    " /etc/udev/rules.d /etc/tmpfiles.d /etc/network /etc/networkd-dispatcher /etc/tuned"
    " /usr/local/bin /usr/local/sbin"
)
# only programs written for it can use reserved memory; losing a tenth hurts
_MOST_HUGE = 0.1
_TIME = re.compile(r"^\s*(server|pool|peer|refclock)\s+\S", re.M)
_CHRONY = (
    *("/etc/chrony/chrony.conf", "/etc/chrony/conf.d/*.conf", "/etc/chrony/sources.d/*.sources"),
    "/run/chrony-dhcp/*.sources",
)
_UPGRADE = r"(apt|apt-get|aptitude)\b.*\b(safe-|full-|dist-)?upgrade\b"


def test_its_files_are_as_written(host: Host, wanted: TuningPromise) -> None:
    """And no file remains of settings that the inventory dropped."""
    for path, text in wanted.files.items():
        checks.require_text(host, path, text)
    checks.require_gone(host, wanted.gone)


def test_the_kernel_knobs_are_in_effect(host: Host, wanted: TuningPromise) -> None:
    """As the running kernel reports them."""
    wrong = []
    for name, value in wanted.sysctls.items():
        got = host.run(f"cat /proc/sys/{name.replace('.', '/')}").stdout.split()
        if got != str(value).split():
            wrong.append(f"{name} is {' '.join(got) or 'unknown to this kernel'}, not {value}")
    require_none(wrong, "not in effect", "Run sysctl --system, and find out what else sets it.")


def test_no_later_file_sets_the_kernel_knobs_otherwise(host: Host, wanted: TuningPromise) -> None:
    """Of all files that systemd reads at a boot, the last one counts."""
    skip_unless(wanted.sysctls, "no knobs are set")
    done = host.run("/lib/systemd/systemd-sysctl --cat-config")
    checks.undecided_unless(done.rc == 0, "systemd-sysctl does not print its settings")
    last = last_settings(done.stdout)
    want = {name: " ".join(str(value).split()) for name, value in wanted.sysctls.items()}
    got = {name: last.get(name, (OURS, "nothing")) for name in want}
    wrong = [f"{p} sets {n} to {v}" for n, (p, v) in got.items() if v != want[n]]
    files = sorted({path for n, (path, v) in got.items() if v != want[n]} - {OURS})
    fix = f"Take it out of {', '.join(files)}, which is read after ours; then sysctl --system."
    require_none(wrong, "at the next boot", fix if files else "")


def test_nothing_started_at_boot_sets_the_kernel_knobs(host: Host, wanted: TuningPromise) -> None:
    """Units, rc.local, cron and udev come after sysctl.d, and need no file of it."""
    skip_unless(wanted.sysctls, "no knobs are set")
    names = "|".join(re.escape(n).replace(r"\.", "[./]") for n in sorted(wanted.sysctls))
    wrong = []
    for path, line in _grep(host, names):
        for name, value in wanted.sysctls.items():
            # a line may repeat the value that is wanted, as a setting or by echo
            want, knob = " ".join(str(value).split()), re.escape(name).replace(r"\.", "[./]")
            same = rf"{knob}\s*=\s*[\"']?{want}\b|echo\s+[\"']?{want}[\"']?\s*>\s*\S*{knob}"
            if name in line.replace("/", ".") and not re.search(same, line):
                wrong.append(f"{path}: {line}")
    fix = "Take it out of that file, or name the value in host_tuning_sysctls of the inventory."
    require_none(wrong, "set after sysctl.d", fix)


def _grep(host: Host, pattern: str) -> list[tuple[str, str]]:
    """Lines of what is started at boot or by the clock, but for comments and our own files."""
    output = host.run(f"grep -rIsE --regexp=%s {_STARTED}", pattern).stdout
    rows = [line.partition(":")[::2] for line in output.splitlines()]
    return [
        (path, " ".join(line.split()))
        for path, line in rows
        if not line.lstrip().startswith(("#", ";")) and "/sm120-" not in path
    ]


def test_huge_pages_leave_memory_to_programs(host: Host, wanted: TuningPromise) -> None:
    """Reserved now, or by a setting for the next boot."""
    skip_unless("vm.nr_hugepages" not in wanted.sysctls, "the inventory sets vm.nr_hugepages")
    rows = (line.split() for line in host.run("cat /proc/meminfo").stdout.splitlines())
    kib = {r[0].rstrip(":"): int(r[1]) for r in rows if len(r) > 1 and r[1].isdigit()}
    checks.undecided_unless("MemTotal" in kib, "/proc/meminfo cannot be read")
    total, page = kib["MemTotal"], kib.get("Hugepagesize", 2048)
    settings = last_settings(host.run("/lib/systemd/systemd-sysctl --cat-config").stdout)
    path, value = settings.get("vm.nr_hugepages", ("", "0"))
    set_to = int(value) * page if value.isdigit() else 0
    found = [("the kernel", kib.get("Hugetlb", 0)), (path, set_to)]
    wrong = [
        f"{by} reserves {n >> 20} of {total >> 20} GiB" for by, n in found if n > total * _MOST_HUGE
    ]
    fix = "Set vm.nr_hugepages to 0; where a program needs them, name it in host_tuning_sysctls."
    require_none(wrong, "huge pages", fix)


def test_swap_stays_off(host: Host, wanted: TuningPromise) -> None:
    """Now and at the next boot, where the inventory asks for it."""
    skip_unless(wanted.swap != "keep", "host_tuning_swap leaves it alone")
    rows = [line.split()[0] for line in host.run("cat /proc/swaps").stdout.splitlines()[1:]]
    require_none(rows, "in use", "swapoff -a")
    state = host.run("systemctl is-enabled swap.target").stdout.strip()
    require(state == "masked", f"the next boot may start swap.target ({state})")


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
    skip_unless(wanted.governor != "keep", "the governor is left alone")
    checks.require_unit(host, "sm120-governor")
    checks.require_untouched_unit(host, "sm120-governor.service")


def test_the_governor_is_in_effect(facts: HostFacts, wanted: TuningPromise) -> None:
    """On every processor."""
    skip_unless(wanted.governor != "keep", "the governor is left alone")
    if isinstance(facts.cpu.governors, Unknown):
        reason = facts.cpu.governors.unknown
        raise checks.NotApplicable(f"this machine scales no frequency ({reason})")
    good = facts.cpu.governors == [wanted.governor]
    require(good, f"it is {', '.join(facts.cpu.governors)}", "systemctl restart sm120-governor")


def test_the_power_limit_is_set_at_each_boot(host: Host, wanted: TuningPromise) -> None:
    """By a unit of our own."""
    skip_unless(wanted.power_limit_w, "no limit is asked for")
    checks.require_unit(host, "sm120-power-limit", running=False)
    checks.require_untouched_unit(host, "sm120-power-limit.service")


def test_the_power_limit_is_in_effect(facts: HostFacts, wanted: TuningPromise) -> None:
    """As each card reports it."""
    skip_unless(wanted.power_limit_w, "no limit is asked for")
    limits = {f"GPU {g.index}": g.power.limit_w for g in checks.known(facts.gpus)}
    checks.require_known(limits.values() or [unknown("no card answers")])
    wrong = [f"{n} has {w} W" for n, w in limits.items() if w != float(wanted.power_limit_w)]
    require_none(wrong, f"{wanted.power_limit_w} W", "systemctl restart sm120-power-limit")


def test_the_clocks_of_the_cards_are_limited_at_each_boot(
    host: Host, facts: HostFacts, wanted: TuningPromise
) -> None:
    """By a unit of our own, which fails if a card refuses them."""
    skip_unless(wanted.gpu_clocks_mhz + wanted.memory_clocks_mhz, "no limit is asked for")
    # without a driver there is nothing to limit until the next boot
    checks.require_unit(host, "sm120-clocks", running=not isinstance(facts.gpus, Unknown))
    checks.require_untouched_unit(host, "sm120-clocks.service")


def test_no_card_runs_faster_than_its_limit(facts: HostFacts, wanted: TuningPromise) -> None:
    """As each card reports it now: no driver says which clocks are locked."""
    meant = {"sm_mhz": wanted.gpu_clocks_mhz, "memory_mhz": wanted.memory_clocks_mhz}
    limits = {name: found[1] for name, found in meant.items() if found}
    skip_unless(limits, "no limit is asked for")
    cards = checks.known(facts.gpus)
    now = {
        f"GPU {gpu.index}, {name}": (getattr(gpu.clocks, name), most)
        for gpu in cards
        for name, most in limits.items()
    }
    checks.require_known([clock for clock, _ in now.values()] or [unknown("no card answers")])
    wrong = [
        f"{card} is {clock}, not {most}" for card, (clock, most) in now.items() if clock > most
    ]
    require_none(wrong, "too fast", "systemctl restart sm120-clocks")


def test_the_clock_is_kept(host: Host, wanted: TuningPromise) -> None:
    """Logs and certificates need it."""
    skip_unless(wanted.time_sync, "time is kept by somebody else")
    checks.require_packages(host, ["chrony"])
    checks.require_unit(host, "chrony")
    texts = checks.texts_in(host, *_CHRONY).values()
    fix = "Name a server in /etc/chrony/sources.d, then `chronyc reload sources`."
    named = not texts or any(_TIME.search(text) for text in texts)
    require(named, "chrony's settings name no server, pool or clock", fix)
    done = host.run("chronyc -n sources")
    # a row begins with the kind and the state of a source, `^*`; a line of `=` parts the head
    asked = [x for x in done.stdout.splitlines() if x[:1] in ("^", "=", "#") and x[1:2] != "="]
    # if chronyc is missing or chrony does not answer, judge by the settings
    require(done.rc != 0 or asked, "the running chrony asks no server", fix)


def test_updates_at_night_stay_away_from_the_driver(host: Host, wanted: TuningPromise) -> None:
    """As apt itself reads its settings."""
    skip_unless(wanted.keep_driver, "host_tuning_keep_driver is off")
    output = host.run("apt-config dump Unattended-Upgrade::Package-Blacklist").stdout
    listed = re.findall(r'^\S+:: "([^"]+)";$', output, re.M)
    require_none([n for n in _KEPT_AWAY if n not in listed], "not on apt's list")
    jobs = [f"{path}: {line}" for path, line in _grep(host, _UPGRADE)]
    fix = "Remove the job; unattended-upgrades keeps what apt's list names at its version."
    require_none(jobs, "a job upgrades everything", fix)
