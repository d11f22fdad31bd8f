"""The measurement of one set to several hosts, with two hosts and files of megabytes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.perf.measure import Report
from tests.perf.weights_peers import PeerSizes, measure_peers
from tests.testbed.packages import CannotHave
from tests.testbed.rack import rack


def test_a_link_of_the_rack_carries_what_it_is_limited_to_and_no_more() -> None:
    """Else every number of the measurement would mean nothing."""
    with rack(2, 40) as (origin, host):
        before = origin.sent_bytes()
        send = "import socket,sys; s=socket.create_server((sys.argv[1], 9000)); c=s.accept()[0]"
        receive = (
            "import socket,sys,time\n"
            "for _ in range(100):\n"
            "    try: s=socket.create_connection((sys.argv[1], 9000)); break\n"
            "    except OSError: time.sleep(0.1)\n"
            "t=time.monotonic(); n=0\n"
            "while d:=s.recv(65536): n+=len(d)\n"
            "print(n/(time.monotonic()-t)*8/1e6)\n"
        )
        python = ("python3", "-c")
        sender = subprocess.Popen(
            origin.inside(*python, f"{send}; c.sendall(bytes(5_000_000))", origin.address)
        )
        got = subprocess.run(
            host.inside(*python, receive, origin.address), capture_output=True, check=True
        )
        assert sender.wait(20) == 0
        mbit, sent = float(got.stdout), origin.sent_bytes() - before
    # the bucket lets a little through at once
    assert 20 < mbit < 44
    assert 5_000_000 < sent < 5_600_000


def test_namespaces_of_a_rack_are_gone_after_it() -> None:
    with rack(1, 10) as (host,):
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, check=True).stdout
        assert host.namespace.encode() in names
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, check=True).stdout
    assert host.namespace.encode() not in names


def test_a_rack_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(CannotHave, match="need root"), rack(1, 10):
        pass


def test_the_measurement_of_peers_runs_whole(tmp_path: Path) -> None:
    report = Report()
    measure_peers(report, tmp_path, PeerSizes(2, 200, 2, 3_000_000), 1, None)
    text = str(report)
    lines = [line for line in text.splitlines() if line.startswith("- 6.0 MB of weights to 2")]
    # files of megabytes are over before peers help: that row may be among the lost ones
    facts = [line for line in lines if "against" not in line]
    plain, peers, ideal = facts
    assert "all from the origin" in plain
    assert "one copy over one link: 0.2 s" in ideal
    copies = {line: float(line.rpartition("sent ")[2].split()[0]) for line in (plain, peers)}
    assert 2.0 <= copies[plain] < 2.1
    # a host that starts late, on a busy machine, finds the other one gone
    assert 1.0 <= copies[peers] < 2.1
    assert "by peers" in text
