"""The promises of the roles metrics and health: kept, and broken in each way."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.core.known import unknown
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.fleet.promised import HealthPromise, MetricsPromise
from pipeline.hosts.promises import health, metrics, pcie
from pipeline.hosts.promises import host_tuning as tuning
from pipeline.hosts.promises.checks import Broken, NotApplicable, Undecided
from tests.testbed.playbook import ROOT
from tests.unit.hosts.fake_host import FakeHost
from tests.unit.hosts.good_host import PCIE, TUNING, machine, shown

ROLES = ROOT / "ansible" / "roles"
SYSTEMD = "/etc/systemd/system"
UNITS = (
    *("sm120-health.service", "sm120-health.timer"),
    *("sm120-gpu-metrics.service", "sm120-gpu-metrics.timer"),
)
DROP_IN = f"{SYSTEMD}/prometheus-node-exporter.service.d/sm120.conf"
EXPORTER = "prometheus-node-exporter"
HEALTH = HealthPromise(
    state="present",
    program="/usr/local/sbin/sm120-health",
    source=str(ROLES / "health/files/sm120_health.py"),
    files={f"{SYSTEMD}/{name}": f"# {name}\n" for name in UNITS[:2]},
)
METRICS = MetricsPromise(
    state="present",
    program="/usr/local/sbin/sm120-gpu-metrics",
    source=str(ROLES / "metrics/files/sm120_gpu_metrics.py"),
    files={DROP_IN: "# drop-in\n", **{f"{SYSTEMD}/{name}": f"# {name}\n" for name in UNITS[2:]}},
    listen="127.0.0.1:9100",
    every_s=15,
)
STATUS, RESULT = f"{HEALTH.program} status", "systemctl show sm120-health.service --property=Result"
SS, ASK, DPKG = "ss --no-header", f"python3 -I -c {metrics.ASK}", "dpkg-query"
LISTENS = 'LISTEN 0 4096 127.0.0.1:9100 0.0.0.0:* users:(("prometheus-node",pid=7,fd=3))\n'
OTHER = 'LISTEN 0 128 0.0.0.0:22 0.0.0.0:* users:(("sshd",pid=1,fd=3))\n'
SERVED = """now 1000
sm120_gpu_info{gpu="0"} 1
sm120_gpu_info{gpu="1"} 1
sm120_gpu_collector_success 1
sm120_gpu_collector_time_seconds 990
"""
SHOWN = {
    f"systemctl show {name} --property=FragmentPath": (0, shown(name, fragment=SYSTEMD))
    for name in UNITS
}
SHIPPED = f"systemctl show {EXPORTER}.service --property=FragmentPath"
GOOD_OPERATIONS = FakeHost(
    files={
        HEALTH.program: (ROLES / "health/files/sm120_health.py").read_text(),
        METRICS.program: (ROLES / "metrics/files/sm120_gpu_metrics.py").read_text(),
        **HEALTH.files,
        **METRICS.files,
    },
    units={
        "sm120-health.service": (True, False),
        **dict.fromkeys((UNITS[1], UNITS[3], EXPORTER), (True, True)),
    },
    outputs={
        **SHOWN,
        SHIPPED: (0, shown(f"{EXPORTER}.service", DROP_IN)),
        STATUS: (0, "in service\n"),
        RESULT: (0, "Result=success\n"),
        SS: (0, OTHER + LISTENS),
        ASK: (0, SERVED),
        DPKG: (0, f"{EXPORTER}\t1.5.0\tinstall\tinstalled\n"),
    },
)
GOOD = GOOD_OPERATIONS
FACTS: HostFacts = machine()
Check = Callable[[FakeHost], None]


def of(check: Any, wanted: object) -> Check:
    def judged(host: FakeHost) -> None:
        more = {"facts": FACTS} if "facts" in check.__annotations__ else {}
        check(host=host, wanted=wanted, **more)

    return judged


def holds(check: Check, host: FakeHost) -> bool:
    """A broken promise raises."""
    check(host)
    return True


def saying(command: str, text: str, rc: int = 0) -> FakeHost:
    return GOOD.but(outputs={command: (rc, text)})


FILES = of(health.test_the_probe_and_its_units_are_as_written, HEALTH)
LOOKS = of(health.test_the_log_is_read_at_each_boot_and_by_the_clock, HEALTH)
SERVES = of(health.test_the_host_is_in_service, HEALTH)
WRITTEN = of(metrics.test_the_collector_and_its_units_are_as_written, METRICS)
RUNS = of(metrics.test_the_exporter_and_the_timer_run_and_start_at_boot, METRICS)
LISTENING = of(metrics.test_it_listens_where_it_was_told_to_only, METRICS)
NUMBERS = of(metrics.test_the_numbers_of_the_gpus_are_served_and_fresh, METRICS)
EVERYWHERE = METRICS.model_copy(update={"listen": ":9100"})


@pytest.mark.parametrize("check", [FILES, LOOKS, SERVES, WRITTEN, RUNS, LISTENING, NUMBERS])
def test_a_sound_host_keeps_its_promises(check: Check) -> None:
    assert holds(check, GOOD)


def test_where_no_program_is_shown_the_port_decides() -> None:
    nameless = "\n".join(line.partition("users:")[0] for line in LISTENS.splitlines())
    assert holds(LISTENING, saying(SS, OTHER + nameless))
    for bad, why in (("*:9100", "it listens on: "), ("127.0.0.1:9101", "it listens nowhere")):
        with pytest.raises(Broken, match=re.escape(why)):
            holds(LISTENING, saying(SS, OTHER + nameless.replace("127.0.0.1:9100", bad)))


def test_every_address_may_be_asked_for() -> None:
    host = saying(SS, LISTENS.replace("127.0.0.1:9100", "*:9100"))
    assert holds(of(metrics.test_it_listens_where_it_was_told_to_only, EVERYWHERE), host)
    assert holds(of(metrics.test_the_numbers_of_the_gpus_are_served_and_fresh, EVERYWHERE), host)


BROKEN: list[tuple[str, Check, FakeHost, str]] = [
    ("another program", FILES, GOOD.but(files={HEALTH.program: "x"}), "has other bytes"),
    ("no program", FILES, GOOD.but(files={HEALTH.program: None}), "is missing"),
    (
        *("another timer", FILES),
        *(GOOD.but(files={f"{SYSTEMD}/{UNITS[1]}": "[Timer]\n"}), "`[Timer]` is not ours"),
    ),
    (
        *("a drop-in of somebody's", FILES),
        saying(next(iter(SHOWN)), shown(UNITS[0], "/etc/x.conf", fragment=SYSTEMD)),
        "sm120-health.service is changed by: /etc/x.conf",
    ),
    ("not at boot", LOOKS, GOOD.but(units={UNITS[0]: (False, False)}), "does not start at boot"),
    ("no timer", LOOKS, GOOD.but(units={UNITS[1]: (True, False)}), "timer does not run"),
    ("a failed look", LOOKS, saying(RESULT, "Result=exit-code\n"), "ended with exit-code"),
    (
        *("out of service", SERVES),
        saying(STATUS, "out of service since 2026-11-18T06:00:00Z: Xid 79 at 0000:c1:00\n", 3),
        "out of service since 2026-11-18T06:00:00Z: Xid 79 at 0000:c1:00",
    ),
    ("another collector", WRITTEN, GOOD.but(files={METRICS.program: "x"}), "has other bytes"),
    ("no drop-in", WRITTEN, GOOD.but(files={DROP_IN: None}), f"{DROP_IN} is missing"),
    (
        *("another drop-in", WRITTEN),
        *(saying(SHIPPED, shown(f"{EXPORTER}.service", DROP_IN, "/etc/y.conf")), "/etc/y.conf"),
    ),
    ("not installed", RUNS, saying(DPKG, ""), f"not installed: {EXPORTER}"),
    ("not running", RUNS, GOOD.but(units={EXPORTER: (True, False)}), "exporter does not run"),
    ("no readings", RUNS, GOOD.but(units={UNITS[3]: (True, False)}), "timer does not run"),
    ("nowhere", LISTENING, saying(SS, OTHER), "it listens nowhere"),
    (
        *("everywhere", LISTENING),
        *(saying(SS, LISTENS + LISTENS.replace("127.0.0.1:9100", "*:9100")), "listens on: *:9100"),
    ),
    ("no answer", NUMBERS, saying(ASK, "x\nConnection refused", 1), "does not answer: Connection"),
    ("not ours", NUMBERS, saying(ASK, "now 1000\n"), "serves no numbers of ours"),
    ("old", NUMBERS, saying(ASK, SERVED.replace("990", "100")), "the numbers are 900 s old"),
    (
        *("no driver", NUMBERS),
        *(saying(ASK, SERVED.replace("success 1", "success 0")), "nvidia-smi did not answer"),
    ),
    (
        *("a card lost", NUMBERS),
        *(saying(ASK, SERVED.replace('sm120_gpu_info{gpu="1"} 1\n', "")), "numbers of 1 cards"),
    ),
]


@pytest.mark.parametrize(
    ("check", "host", "why"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN]
)
def test_each_break_of_operations_is_noticed(check: Check, host: FakeHost, why: str) -> None:
    with pytest.raises(Broken) as broken:
        check(host)
    assert why in broken.value.why


@pytest.mark.parametrize(
    ("check", "host"),
    [
        (SERVES, saying(STATUS, "", 127)),
        (SERVES, saying(STATUS, "", 3)),
        (LISTENING, saying(SS, "not found", 127)),
    ],
)
def test_what_cannot_be_asked_is_undecided(check: Check, host: FakeHost) -> None:
    with pytest.raises(Undecided):
        check(host)


FASTER = tuning.test_no_card_runs_faster_than_its_limit


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"gpu_clocks_mhz": [100, 200]}, "too fast: GPU 0, sm_mhz is"),
        ({"memory_clocks_mhz": [100, 200]}, "too fast: GPU 0, memory_mhz is"),
    ],
)
def test_a_card_above_its_limit_of_clocks_is_noticed(
    limits: dict[str, list[int]], why: str
) -> None:
    assert holds(lambda _: FASTER(FACTS, TUNING), GOOD)
    with pytest.raises(Broken) as broken:
        FASTER(FACTS, TUNING.model_copy(update=limits))
    assert why in broken.value.why


def test_clocks_without_a_limit_or_an_answer_are_not_judged() -> None:
    none = TUNING.model_copy(update={"gpu_clocks_mhz": [], "memory_clocks_mhz": []})
    with pytest.raises(NotApplicable):
        FASTER(FACTS, none)
    with pytest.raises(Undecided):
        FASTER(FACTS.model_copy(update={"gpus": unknown("no driver")}), TUNING)


@pytest.mark.parametrize("found", ["1.1", "2.0 "])
def test_another_version_of_the_firmware_is_noticed(found: str) -> None:
    check = pcie.test_the_firmware_has_the_version_of_the_inventory
    wanted = PCIE.model_copy(update={"bios": "2.0"})
    assert holds(lambda _: check(FACTS.model_copy(update={"bios": "2.0"}), wanted), GOOD)
    with pytest.raises(Broken) as broken:
        check(FACTS.model_copy(update={"bios": found}), wanted)
    assert f"the firmware has {found}"[:20] in broken.value.why
    with pytest.raises(Undecided):
        check(FACTS.model_copy(update={"bios": unknown("no DMI")}), wanted)
    with pytest.raises(NotApplicable):
        check(FACTS, PCIE)
