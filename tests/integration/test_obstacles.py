"""What stands in the way of a run on a real server, put in its way on a node.

Real: apt, its locks, dpkg, signatures, SSH. Stand-ins: cards, processor and firmware, as files.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.site import Site, new_site
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.nodes import Node
from tests.testbed.playbook import Run

pytestmark = pytest.mark.timeout(1800)
HOLD = (
    "import fcntl, sys, time; f = open('/var/lib/apt/lists/lock', 'w');"
    " fcntl.lockf(f, fcntl.LOCK_EX); open('/run/held', 'w').close(); time.sleep(float(sys.argv[1]))"
)
SECURE_BOOT = "efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
ZEN_5 = "vendor_id : AuthenticAMD\ncpu family : 26\n"


@pytest.fixture(scope="module")
def site(docker_daemon: DockerDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A fresh node, and the repository's key in the form in which NVIDIA publishes it."""
    with new_site(docker_daemon, tmp_path_factory.mktemp("obstacles"), ["n1"]) as place:
        armored = place.tmp / "3bf863cc.pub"
        armored.write_bytes(place.repository.signer.armored())
        place.values["nvidia_repository_key"] = str(armored)
        yield place


def flat(run: Run) -> str:
    return " ".join(run.text.split())


@contextmanager
def reading(node: Node, seconds: float) -> Iterator[None]:
    """Somebody on the node who holds the lock of apt's lists."""
    code = base64.b64encode(HOLD.encode()).decode()
    node.shell(
        f"rm -f /run/held; echo {code} | base64 -d > /run/apt-daily.py;"
        f" systemd-run --quiet --unit=apt-stand-in python3 /run/apt-daily.py {seconds};"
        " until [ -e /run/held ]; do sleep 0.1; done"
    )
    try:
        yield
    finally:
        node.shell("systemctl stop apt-stand-in", check=False)


@pytest.mark.big
def test_an_armored_key_is_read_by_the_nodes_apt_and_goes_away_again(site: Site) -> None:
    only = ("--tags", "nvidia_repository")
    site.run(*only).require_good()
    assert site.run(*only).require_good().count("changed") == 0
    keys = "ls /etc/apt/keyrings"
    assert site.first.shell(keys) == "sm120-nvidia.asc\n"
    binary = str(site.repository.keyring)
    site.run(*only, nvidia_repository_key=binary).require_good()
    assert site.first.shell(keys) == "sm120-nvidia.gpg\n"
    site.run(*only, nvidia_repository_state="absent").require_good()
    assert site.first.shell(keys) == ""
    site.run(*only).require_good()


@pytest.mark.big
def test_an_apt_that_is_reading_its_indexes_is_waited_for(site: Site) -> None:
    with reading(site.first, 25):
        site.run("--tags", "nvidia_repository").require_good()


def test_an_apt_that_reads_for_ever_is_named_and_the_network_is_not_blamed(site: Site) -> None:
    with reading(site.first, 900):
        run = site.run("--tags", "nvidia_repository", pinned_packages_wait_s=3)
    assert run.count("failed") == 1
    output = flat(run)
    assert "Another program has been reading apt's indexes" in output
    assert "held by: apt-stand-in.service" in output
    assert "apt-daily.py" in output
    assert "the proxy" not in output


def test_headers_that_the_archive_dropped_are_named_before_anything_is_installed(
    site: Site,
) -> None:
    before = site.first.shell("dpkg --get-selections")
    run = site.run(
        *("--tags", "nvidia_repository,nvidia_driver"),
        nvidia_driver_headers="linux-headers-6.1.0-23-amd64",
    )
    assert run.count("failed") == 1
    output = flat(run)
    assert "archives offer no linux-headers-6.1.0-23-amd64" in output
    assert "reboot into it, and run the play again" in output
    assert "No package matching" not in output
    assert site.first.shell("dpkg --get-selections") == before


def test_secure_boot_without_an_enrolled_key_stops_with_every_step_on_stand_in_firmware(
    site: Site,
) -> None:
    site.first.shell(
        "mount -t tmpfs tmpfs /sys/firmware && mkdir -p /sys/firmware/efi/efivars"
        f" && printf '\\006\\000\\000\\000\\001' > /sys/firmware/{SECURE_BOOT}"
    )
    try:
        run = site.run("--tags", "nvidia_repository,nvidia_driver", "--check")
    finally:
        site.first.shell("umount /sys/firmware")
    assert run.count("failed") == 1
    output = flat(run)
    for step in ("openssl req", "mokutil --import /var/lib/dkms/mok.pub", "Enroll MOK"):
        assert step in output


def test_a_patched_library_comes_to_a_fresh_node_with_eight_stand_in_cards(
    site: Site, tmp_path: Path, is_long: bool
) -> None:
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"patched")
    cards = "".join(
        f"mkdir /sys/bus/pci/devices/c{n}; echo 0x10de > /sys/bus/pci/devices/c{n}/vendor;"
        f" echo 0x030200 > /sys/bus/pci/devices/c{n}/class;"
        for n in range(8)
    )
    site.first.shell(
        f"printf '{ZEN_5}' > /run/cpuinfo && mount --bind /run/cpuinfo /proc/cpuinfo"
        f" && mount -t tmpfs tmpfs /sys/bus/pci/devices && {{ {cards} }}"
    )
    only = ("--tags", "nvidia_repository,nccl")
    values: dict[str, Any] = {"nccl_patched_library": str(library), "sm120_parts": ["nccl"]}
    try:
        assert "No such file" in site.first.shell("cat /proc/driver/nvidia/version", check=False)
        site.run(*only, **values).require_good()
        if is_long:
            assert site.run(*only, **values).require_good().count("changed") == 0
    finally:
        site.first.shell("umount /proc/cpuinfo /sys/bus/pci/devices")
    digest = site.first.shell("sha256sum /usr/local/lib/sm120/libnccl.so.2").split()[0]
    assert digest == hashlib.sha256(b"patched").hexdigest()
