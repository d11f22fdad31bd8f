"""The exporter answers where it was told to, and the GPUs' numbers in it are fresh."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from pipeline.core.proc import last_line
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.fleet.promised import MetricsPromise
from pipeline.hosts.promises import checks
from pipeline.hosts.promises.checks import Host, require, require_none

_EXPORTER = "prometheus-node-exporter"
# by the exporter's own address; without a proxy, which a login may have set
ASK = """
import sys, time, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
text = opener.open("http://%s/metrics" % sys.argv[1], timeout=20).read().decode()
print("now %d" % time.time())
print("\\n".join(x for x in text.splitlines() if x.startswith("sm120_")))
"""
# a number counts as old after this many failed readings in a row
_MISSED = 4


def test_the_collector_and_its_units_are_as_written(host: Host, wanted: MetricsPromise) -> None:
    """The program that root runs, its units, and the exporter's drop-in."""
    checks.require_same_file(host, wanted.program, Path(wanted.source))
    for path, text in wanted.files.items():
        checks.require_text(host, path, text)
    units = {PurePosixPath(path).name for path in wanted.files if ".d/" not in path}
    for name in sorted(units):
        checks.require_untouched_unit(host, name)
    checks.require_untouched_unit(host, f"{_EXPORTER}.service", ours=[*wanted.files])


def test_the_exporter_and_the_timer_run_and_start_at_boot(
    host: Host, wanted: MetricsPromise
) -> None:
    """The exporter, and the timer that reads the GPUs."""
    checks.require_packages(host, [_EXPORTER])
    for name in (_EXPORTER, "sm120-gpu-metrics.timer"):
        checks.require_unit(host, name)


def test_it_listens_where_it_was_told_to_only(host: Host, wanted: MetricsPromise) -> None:
    """It has no password."""
    command = "ss --no-header --listening --tcp --numeric --processes"
    rows = checks.output_of(host, "ss cannot be asked", command).splitlines()
    # the kernel keeps fifteen letters of a program's name
    found = {row.split()[3] for row in rows if f'"{_EXPORTER[:15]}"' in row and row.split()[3:]}
    address, _, port = wanted.listen.rpartition(":")
    # in a container root may not see which program of another user has a socket; then the port
    found |= {row.split()[3] for row in rows if "users:" not in row and f":{port} " in row}
    require(found, "it listens nowhere", "journalctl -u prometheus-node-exporter")
    # `*` is what ss shows for every address, of IPv6 and IPv4 together
    meant = {f"{each}:{port}" for each in ([address] if address else ["*", "[::]"])}
    fix = f"Take --web.listen-address out of /etc/default/{_EXPORTER}, then restart it."
    require_none(sorted(found - meant), f"besides {wanted.listen} it listens on", fix)


def test_the_numbers_of_the_gpus_are_served_and_fresh(
    host: Host, facts: HostFacts, wanted: MetricsPromise
) -> None:
    """For every card that the driver reports."""
    address = wanted.listen if not wanted.listen.startswith(":") else f"127.0.0.1{wanted.listen}"
    done = host.run("python3 -I -c %s %s", ASK, address)
    fix = "journalctl -u sm120-gpu-metrics -u prometheus-node-exporter names the reason."
    require(done.rc == 0, f"{address} does not answer: {last_line(done.stderr)}", fix)
    rows = re.findall(r"^(\w+)(?:\{.*\})? (\S+)$", done.stdout, re.M)
    last = {name: float(value) for name, value in rows}
    age = last.get("now", 0.0) - last.get("sm120_gpu_collector_time_seconds", 0.0)
    require("sm120_gpu_collector_success" in last, "the exporter serves no numbers of ours", fix)
    limit = _MISSED * wanted.every_s + 60
    require(age <= limit, f"the numbers are {age:.0f} s old (limit {limit} s)", fix)
    cards = len(checks.known(facts.gpus))
    require(last["sm120_gpu_collector_success"] == 1, "nvidia-smi did not answer it", fix)
    count = [name for name, _ in rows].count("sm120_gpu_info")
    require(count == cards, f"numbers of {count} cards, the driver has {cards}", fix)
