"""The playbook against two fresh nodes over SSH, with a signed repository of stand-ins.

Real: SSH, sudo, apt, signatures, pins, holds, units, the order of a reboot. Stand-ins: packages'
contents, kernel files and GRUB. A test that leans on a stand-in says so in its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import requests
import yaml

from pipeline.weights.model import WeightsSpec, write_weights_lock
from tests.integration.host_command import Hosts
from tests.integration.site import LEFT, Site
from tests.testbed.apt_repository import DRIVER, NEW_DRIVER, OLD_DRIVER, PLAIN_DRIVER
from tests.testbed.debian import NOBLE
from tests.testbed.locked_set import SMALL, make_set, random_bytes
from tests.testbed.nodes import Node
from tests.testbed.own_wheel import REQUIREMENTS, build_wheel, neighbour_serving, wheelhouse
from tests.testbed.playbook import Run
from tests.testbed.snapshot import differences, snapshot

pytestmark = pytest.mark.timeout(1800)
SPEC = WeightsSpec(
    name="tiny",
    repository="org/tiny",
    format="safetensors",
    quant="bf16",
    about="A set of weights that is only here for the tests.",
)


@pytest.fixture
def site(hosts: Hosts) -> Site:
    """The hosts after their first run."""
    assert hosts.first_run.code == 0, hosts.first_run.out[-3000:] + hosts.first_run.err
    return hosts.site


def version_on(nodes: Iterable[Node], package: str) -> list[str]:
    """A package's version on each node, and whether it is held."""
    query = f"dpkg-query -W -f '${{Version}} ${{db:Status-Want}}' {package} 2>/dev/null"
    return [node.shell(query, check=False) for node in nodes]


def loaded_on(nodes: Iterable[Node]) -> list[str]:
    """What the stand-in for the kernel says of the driver it has loaded."""
    return [node.shell("cat /proc/driver/nvidia/version") for node in nodes]


def test_check_mode_on_a_fresh_node_shows_the_plan_and_changes_nothing(hosts: Hosts) -> None:
    checked = hosts.checked.require_good()
    assert checked.count("changed") > 0
    assert "+Pin-Priority: 1001" in checked.text
    assert "This host would reboot for" in checked.text
    assert "The kernel was booted without" not in checked.text
    assert differences(hosts.fresh, hosts.after_check, ()) == []


def test_the_first_run_installs_pins_holds_and_reboots_into_stand_in_kernel_files(
    site: Site, hosts: Hosts
) -> None:
    assert set(version_on(hosts.whole(), "nvidia-open")) == {f"{DRIVER}-1 hold"}
    assert all(DRIVER in text for text in loaded_on(hosts.whole()))
    for node in hosts.whole():
        message = node.shell("cat /proc/cmdline").split()
        assert {"iommu=pt", "pcie_aspm=off", "pcie_port_pm=off"} <= set(message)
        assert "mitigations=off" not in message


def test_every_promise_holds_as_testinfra_sees_it(site: Site, hosts: Hosts) -> None:
    testinfra = pytest.importorskip("testinfra", reason="pytest-testinfra is not installed.")
    for node in hosts.whole():
        host = testinfra.get_host(f"ssh://{node.name}", ssh_config=str(node.ssh_config))
        assert host.package("nvidia-container-toolkit").version == "1.18.2-1"
        assert not host.package("cuda-toolkit-13-0").is_installed
        for name in ("docker", "chrony", "nvidia-persistenced", "sm120-acs", "sm120-governor"):
            assert host.service(name).is_enabled, name
            assert host.service(name).is_running, name
        assert host.file("/etc/nccl.conf").content_string.count("NCCL_PROTO=LL\n") == 1
        assert host.file("/etc/sm120/nccl.env").contains("NCCL_IB_DISABLE=1")
        assert host.file("/etc/modprobe.d/sm120-nouveau.conf").contains("blacklist nouveau")
        assert host.file("/etc/modprobe.d/sm120-pcie.conf").contains("uvm_disable_hmm=1")
        assert host.file("/etc/docker/daemon.json").contains("memlock")
        assert host.file("/var/lib/sm120/pcie/before.txt").contains("cmdline: none")
        assert host.file("/var/lib/sm120/pcie/after.txt").contains("iommu=pt")


def test_the_second_run_changes_only_what_has_drifted_where_it_has(
    site: Site, is_long: bool
) -> None:
    site.first.shell(
        "rm /etc/sysctl.d/60-sm120.conf && sysctl --quiet --write vm.swappiness=33"
        " && systemctl disable --now sm120-governor"
    )
    # the first has every role that the second has
    where = () if is_long else ("--limit", "n1")
    run = site.run(*where).require_good()
    print(f"second run: {run.tasks} tasks, {run.seconds:.0f} s, {run.recap}")
    assert len(run.recap) == (2 if is_long else 1)
    changed = re.findall(
        r"^TASK \[(\S+) : [^\n]*\n(?:(?!TASK)[^\n]*\n)*?changed: \[n1\]", run.text, re.M
    )
    assert set(changed) == {"host_tuning"}, changed
    assert len(changed) == run.count("changed") >= 3
    assert site.first.shell("sysctl --values vm.swappiness") == "0\n"
    assert site.first.shell("systemctl is-active sm120-governor") == "active\n"
    # and the role's own part is still now
    assert site.run("--check", "--tags", "host_tuning", *where).require_good().count("changed") == 0


@pytest.mark.big
def test_check_mode_finds_drift_and_the_second_run_of_all_roles_changes_nothing(site: Site) -> None:
    site.first.shell("sysctl --quiet --write vm.swappiness=33")
    only = ("--tags", "host_tuning")
    assert site.run("--check", *only).require_good().recap["n1"]["changed"] >= 1
    site.run(*only).require_good()
    assert site.run().require_good().count("changed") == 0


@pytest.mark.big
def test_a_grub_file_that_overrides_our_arguments_ends_the_run_without_a_reboot(
    site: Site,
) -> None:
    booted = site.first.shell("cat /proc/sys/kernel/random/boot_id")
    other = "/etc/default/grub.d/90-other.cfg"
    site.first.shell(f"echo 'GRUB_CMDLINE_LINUX_DEFAULT=quiet' >{other}")
    run = site.run("--tags", "pcie", "--limit", "n1")
    site.first.shell(f"rm {other}")
    assert run.recap["n1"]["failed"] == 1
    assert f"{other} is read after ours" in run.text
    assert site.first.shell("cat /proc/sys/kernel/random/boot_id") == booted


@pytest.mark.big
def test_a_masked_persistence_daemon_runs_again(site: Site) -> None:
    site.first.shell("systemctl mask --now nvidia-persistenced")
    site.run("--tags", "nvidia_driver", "--limit", "n1").require_good()
    assert site.first.shell("systemctl is-active nvidia-persistenced") == "active\n"


@pytest.mark.big
def test_a_power_limit_is_in_effect_at_once_and_given_back_on_stand_in_cards(
    site: Site,
) -> None:
    only = ("--tags", "host_tuning", "--limit", "n1")
    limits = "nvidia-smi --query-gpu=power.limit --format=csv,noheader,nounits"

    def limited(watts: int) -> Run:
        return site.run(
            *only, host_tuning_card="server", host_tuning_power_limit_w=watts
        ).require_good()

    for watts in (450, 500):
        assert limited(watts).count("changed") > 0
        assert site.first.shell(limits) == f"{watts}.00\n" * 2
        assert limited(watts).count("changed") == 0
    site.first.shell("nvidia-smi --power-limit=600")
    assert limited(500).count("changed") == 1
    assert site.first.shell(limits) == "500.00\n500.00\n"
    site.run(*only).require_good()
    assert site.first.shell(limits) == "600.00\n600.00\n"
    assert site.run(*only).require_good().count("changed") == 0


@pytest.mark.big
def test_a_package_that_lost_its_hold_and_its_version_is_brought_back(
    site: Site,
) -> None:
    names = "nvidia-container-toolkit nvidia-container-toolkit-base"
    older = " ".join(f"{name}=1.17.8-1" for name in names.split())
    site.first.shell(
        f"apt-mark unhold {names} && apt-get --quiet --yes --allow-downgrades install {older}"
    )
    site.run("--tags", "container_runtime", "--limit", "n1").require_good()
    assert version_on(site.fleet.nodes, "nvidia-container-toolkit") == ["1.18.2-1 hold"] * 2


@pytest.mark.share(2, "plays that stop")
def test_a_tampered_repository_is_refused_with_cause_and_fix(
    site: Site,
) -> None:
    kept = {name: (site.repository.root / name).read_bytes() for name in ("Packages", "InRelease")}
    site.repository.tamper()
    try:
        run = site.run("--tags", "nvidia_repository", "--limit", "n1")
    finally:
        for name, data in kept.items():
            (site.repository.root / name).write_bytes(data)
    assert run.code != 0
    assert run.count("failed") == 1
    assert "was REFUSED" in run.text
    assert "correct nvidia_repository_key" in " ".join(run.text.split())


@pytest.mark.share(2, "plays that stop")
def test_a_repository_signed_anew_with_other_bytes_under_a_locked_version_is_refused(
    site: Site,
) -> None:
    kept = list(site.repository.stanzas)
    site.repository.stanzas = [
        s.replace("SHA256: ", "SHA256: " + "0" * 8, 1)[:-9] + "\n"
        if s.startswith("Package: nvidia-container-toolkit\nVersion: 1.18.2")
        else s
        for s in kept
    ]
    site.repository.publish()
    try:
        run = site.run("--tags", "nvidia_repository,container_runtime", "--limit", "n1")
    finally:
        site.repository.stanzas = kept
        site.repository.publish()
        # else the node keeps the other index, and a later check of its promises finds it
        site.first.shell("apt-get --quiet update")
    assert run.count("failed") == 1
    assert "does not offer the locked packages" in " ".join(run.text.split())


@pytest.mark.big
def test_a_package_with_other_bytes_than_the_signed_index_promises_is_refused(
    site: Site,
) -> None:
    (deb,) = site.repository.root.glob("cuda-nvcc-13-0_*.deb")
    kept = deb.read_bytes()
    deb.write_bytes(kept[:-20] + bytes(20))
    values: dict[str, Any] = {"sm120_parts": ["cuda"]}
    try:
        run = site.run("--tags", "nvidia_repository,cuda", "--limit", "n1", **values)
    finally:
        deb.write_bytes(kept)
    assert run.count("failed") == 1
    assert "a package was REFUSED" in " ".join(run.text.split())
    assert version_on(site.fleet.nodes, "cuda-nvcc-13-0")[0] == ""
    site.run("--tags", "cuda", "--limit", "n1", **values).require_good()
    site.run("--tags", "cuda", "--limit", "n1", **values, cuda_state="absent").require_good()


@pytest.mark.big
def test_a_disk_that_fills_up_while_apt_works_is_named_with_its_fix(
    site: Site,
) -> None:
    archives = "/var/lib/sm120/packages/cuda"
    fill = f"dd if=/dev/zero of={archives}/full bs=4k count=9 2>/dev/null || true"
    site.first.shell(
        f"mkdir -p {archives} && mount -t tmpfs -o size=4k tmpfs {archives}"
        f" && mkdir {archives}/partial; {fill}"
    )
    try:
        run = site.run("--tags", "cuda", "--limit", "n1", sm120_parts=["cuda"])
    finally:
        site.first.shell(f"umount --lazy {archives}")
    assert run.count("failed") == 1
    assert "the disk is full. Free some" in " ".join(run.text.split())
    site.run(
        "--tags", "cuda", "--limit", "n1", sm120_parts=["cuda"], cuda_state="absent"
    ).require_good()


@pytest.mark.share(2, "plays that stop")
def test_a_wrong_sudo_password_ends_before_anything_is_touched(
    site: Site,
) -> None:
    run = site.run("--limit", "n1", password="wrong")
    assert run.code != 0
    assert "Incorrect sudo password" in run.text or "sudo" in run.text.lower()
    assert run.count("changed") == 0
    assert run.count("ok") == 0


@pytest.mark.share(2, "plays that stop")
def test_a_full_disk_stops_the_play_with_the_free_space_and_a_fix(
    site: Site,
) -> None:
    site.first.shell("mount -t tmpfs -o size=8m tmpfs /var")
    try:
        run = site.run("--tags", "nvidia_repository", sm120_max_fail_percentage=100)
    finally:
        site.first.shell("umount --lazy /var")
    assert run.recap["n1"]["failed"] == 1
    assert run.recap["n2"]["failed"] == 0
    assert "Only 8 MiB are free on / or /var" in run.text
    assert "apt-get clean" in run.text


@pytest.mark.share(2, "plays that stop")
def test_a_node_that_is_down_is_named_and_the_other_is_provisioned(
    site: Site,
) -> None:
    site.second.stop()
    try:
        run = site.run(
            *("--tags", "nvidia_repository", "--timeout", "5"), sm120_max_fail_percentage=100
        )
    finally:
        site.second.start()
    assert run.code == 4
    assert run.recap["n2"]["unreachable"] == 1
    assert run.recap["n1"]["failed"] == 0
    assert run.recap["n1"]["ok"] > 3


@pytest.mark.share(2, "plays that stop")
def test_a_lock_without_this_system_stops_the_play_and_says_how_to_lock(
    site: Site, tmp_path: Path
) -> None:
    empty = tmp_path / "host.lock.yaml"
    empty.write_text("targets: {}\n")
    for lock_file in (empty, tmp_path / "missing.yaml"):
        only = ("--tags", "nvidia_driver", "--limit", "n1")
        run = site.run(*only, sm120_lock_file=str(lock_file))
        assert run.count("failed") == 1
        assert f"sm120 host lock --target {site.system.target}" in " ".join(run.text.split())


@pytest.mark.big
def test_the_driver_pin_moves_down_and_up_and_between_the_two_ways_of_naming_on_stand_ins(
    site: Site,
) -> None:
    only = ("--tags", "nvidia_repository,nvidia_driver")
    site.lock(packages=["nvidia-driver-580-open"], version=OLD_DRIVER)
    site.run(*only).require_good()
    assert (
        version_on(site.fleet.nodes, "nvidia-driver-580-open")
        == [f"{OLD_DRIVER}-0ubuntu1 hold"] * 2
    )
    assert version_on(site.fleet.nodes, "nvidia-open") == ["", ""]
    assert all(OLD_DRIVER in text for text in loaded_on(site.fleet.nodes))
    site.lock(packages=["nvidia-driver-580-open"], version=NEW_DRIVER)
    site.run(*only).require_good()
    assert all(NEW_DRIVER in text for text in loaded_on(site.fleet.nodes))


@pytest.mark.big
@pytest.mark.parametrize(
    "task", ["Pin the versions", "Install exactly the locked bytes", "Hold them", "Reboot"]
)
def test_a_run_cut_off_in_the_middle_is_finished_by_the_next_one(site: Site, task: str) -> None:
    only = ("--tags", "nvidia_repository,nvidia_driver", "--limit", "n1")
    wanted = PLAIN_DRIVER if DRIVER in loaded_on(site.fleet.nodes)[0] else DRIVER
    site.lock(branch=int(wanted.partition(".")[0]), version=wanted)
    cut = site.run(*only, cut_off_at=f": {task}]")
    assert cut.code != 0
    assert not cut.recap
    site.run(*only).require_good()
    assert version_on(site.fleet.nodes, "nvidia-open")[0] == f"{wanted}-1 hold"
    assert wanted in loaded_on(site.fleet.nodes)[0]
    assert site.run(*only).require_good().count("changed") == 0


@pytest.mark.big
@pytest.mark.parametrize("task", ["Set the modules' options", "Update GRUB", "Reboot"])
def test_a_cut_between_a_file_and_what_is_made_of_it_is_mended_on_stand_in_kernel_files(
    site: Site, task: str
) -> None:
    only = ("--tags", "pcie", "--limit", "n1")
    wanted = "pt" if "iommu=off" in site.first.shell("cat /proc/cmdline") else "off"
    cut = site.run(*only, pcie_iommu=wanted, cut_off_at=f": {task}]")
    assert not cut.recap
    site.run(*only, pcie_iommu=wanted).require_good()
    assert f"iommu={wanted}" in site.first.shell("cat /proc/cmdline").split()
    assert site.run(*only, pcie_iommu=wanted).require_good().count("changed") == 0


@pytest.mark.big
def test_a_kernel_that_follows_updates_gets_headers_that_follow_them_too(
    site: Site,
) -> None:
    site.first.shell("apt-get --quiet --yes install linux-image-stand-in")
    only = ("--tags", "nvidia_driver", "--limit", "n1")
    site.run(*only).require_good()
    assert version_on(site.fleet.nodes, "linux-headers-stand-in") == ["1.0 install", ""]
    assert site.run(*only).require_good().count("changed") == 0


@pytest.mark.big
def test_an_engine_from_dockers_own_archive_stays(site: Site) -> None:
    site.first.shell("apt-get --quiet --yes install docker-ce")
    assert version_on(site.fleet.nodes, "docker.io")[0] in ("", "20.10.24+dfsg1-1 deinstall")
    site.run("--tags", "container_runtime", "--limit", "n1").require_good()
    assert version_on(site.fleet.nodes, "docker-ce")[0] == "5:29.0.0-1 install"
    assert site.first.shell("systemctl is-active docker") == "active\n"
    site.first.shell("apt-get --quiet --yes install docker.io")


@pytest.mark.big
def test_dockers_settings_and_roots_logins_that_were_there_stay_and_come_back(
    site: Site,
) -> None:
    only = ("--tags", "nvidia_repository,container_runtime", "--limit", "n1")
    values: dict[str, Any] = {
        "container_runtime_registry": "registry.example:5000",
        "container_runtime_registry_login": "ops:open sesame",
    }
    site.run(*only, container_runtime_state="absent").require_good()
    daemon, logins = (
        '{"default-shm-size": "1g", "debug": true}',
        '{"auths": {"a": {"auth": "eA=="}}}',
    )
    site.first.shell(
        f"mkdir -p /etc/docker /root/.docker && echo '{daemon}' > /etc/docker/daemon.json"
        f" && chmod 600 /etc/docker/daemon.json && echo '{logins}' > /root/.docker/config.json"
    )
    site.run(*only, **values).require_good()
    assert site.run(*only, **values).require_good().count("changed") == 0
    assert json.loads(site.first.shell("cat /etc/docker/daemon.json"))["debug"] is True
    known = json.loads(site.first.shell("cat /root/.docker/config.json"))["auths"]
    assert known == {
        "a": {"auth": "eA=="},
        "registry.example:5000": {"auth": "b3BzOm9wZW4gc2VzYW1l"},
    }
    site.run(*only, **values, container_runtime_state="absent").require_good()
    again = site.run(*only, **values, container_runtime_state="absent").require_good()
    assert again.count("changed") == 0
    assert site.first.shell("cat /etc/docker/daemon.json") == f"{daemon}\n"
    assert site.first.shell("stat -c %a /etc/docker/daemon.json") == "600\n"
    assert json.loads(site.first.shell("cat /root/.docker/config.json")) == json.loads(logins)
    for path in ("/etc/docker/daemon.json", "/root/.docker/config.json"):
        site.first.shell(f"cp {path} /root/kept && echo 'not: json' > {path}")
        run = site.run(*only, **values)
        assert run.count("failed") == 1
        assert f"{path} is not JSON" in " ".join(run.text.split())
        assert site.first.shell(f"cat {path}") == "not: json\n"
        site.first.shell(f"mv /root/kept {path}")
    site.first.shell("rm -r /etc/docker /root/.docker")
    site.run(*only).require_good()


@pytest.mark.big
def test_an_archive_that_cannot_be_read_is_named_and_what_is_there_is_enough(
    site: Site,
) -> None:
    site.first.shell("echo 'deb http://127.0.0.1:9/ ./' > /etc/apt/sources.list.d/dead.list")
    try:
        run = site.run("--tags", "host_tuning", "--limit", "n1").require_good()
    finally:
        site.first.shell("rm /etc/apt/sources.list.d/dead.list")
    assert "apt could not read every index" in run.text
    assert "127.0.0.1" in run.text
    assert run.count("changed") == 0


@pytest.mark.big
def test_a_package_left_half_installed_is_finished_by_the_next_run(
    site: Site,
) -> None:
    deb = next(site.archive.root.glob("make_*.deb")).name
    get = f"import urllib.request as u; u.urlretrieve('{site.archive.url}/{deb}', '/tmp/{deb}')"
    site.first.shell(f'python3 -c "{get}" && dpkg --unpack /tmp/{deb}')
    assert "unpacked" in site.first.shell("dpkg-query -W -f '${Status}' make")
    site.run("--tags", "nvidia_repository", "--limit", "n1").require_good()
    assert site.first.shell("dpkg --audit") == ""


@pytest.mark.big
def test_ubuntu_gets_the_names_with_the_branch_by_its_os_release_on_a_stand_in(
    site: Site,
) -> None:
    os_release = 'ID=ubuntu\nNAME="Ubuntu"\nVERSION_ID="24.04"\nVERSION="24.04 LTS (Noble)"\n'
    site.lock(NOBLE.target)
    site.first.shell(f"mv /etc/os-release /root/kept && echo '{os_release}' > /etc/os-release")
    try:
        run = site.run("--tags", "nvidia_repository,nvidia_driver", "--limit", "n1")
    finally:
        site.first.shell("mv /root/kept /etc/os-release")
        site.lock()
    run.require_good()
    assert (
        version_on(site.fleet.nodes, "nvidia-driver-580-open")[0] == f"{NEW_DRIVER}-0ubuntu1 hold"
    )


@pytest.mark.big
def test_the_private_registry_asks_for_a_password_over_tls_and_goes_away_again(
    site: Site, tmp_path: Path
) -> None:
    site.offer("docker-registry")
    hashed = bcrypt.hashpw(b"open sesame", bcrypt.gensalt(rounds=4)).decode()
    address = site.first.address
    values: dict[str, Any] = {
        "sm120_parts": ["registry"],
        "registry_name": address,
        "registry_htpasswd": [f"ops:{hashed}"],
    }
    only = ("--tags", "registry", "--limit", "n1")
    site.run(*only, **values).require_good()
    ca_file = tmp_path / "ca.crt"
    ca_file.write_text(site.first.shell("cat /etc/sm120-registry/ca.crt"))
    # of itself: that the other one is asked is shown where two registries run
    values["registry_mirror_of"] = f"https://{address}:5000"
    values["registry_mirror_ca"] = str(ca_file)
    run = site.run(*only, **values)
    log = site.first.shell(
        "journalctl --unit sm120-registry-mirror | grep -B1 -A3 panic | tail -20", check=False
    )
    assert run.code == 0, log + run.text[-2000:]
    assert site.run(*only, **values).require_good().count("changed") == 0
    url = f"https://{address}:5000/v2/"
    session = requests.Session()
    session.trust_env = False
    session.verify = str(ca_file)
    assert session.get(url, timeout=10).status_code == 401
    assert session.get(url, auth=("ops", "wrong"), timeout=10).status_code == 401
    assert session.get(url, auth=("ops", "open sesame"), timeout=10).status_code == 200
    mirror = f"https://{address}:5001/v2/"
    assert session.get(mirror, timeout=10).status_code == 401
    assert session.get(mirror, auth=("ops", "open sesame"), timeout=10).status_code == 200
    site.run(*only, **{**values, "registry_mirror_of": ""}).require_good()
    with pytest.raises(requests.ConnectionError):
        session.get(mirror, timeout=10)
    site.run(*only, **values, registry_state="absent").require_good()
    assert "docker-registry" not in site.first.shell("dpkg --get-selections | grep -w install")


@pytest.mark.big
def test_weights_come_from_a_neighbour_and_are_scrubbed_by_the_command_installed_on_the_node(
    site: Site, tmp_path: Path
) -> None:
    lock_weights(site.checkout, tmp_path / "neighbour")
    wheel = build_wheel(tmp_path / "wheel")
    site.first.put(wheelhouse(tmp_path / "wheels"), "/srv/wheels")
    values: dict[str, Any] = {
        "sm120_parts": ["weights"],
        "weights_wheel": str(wheel),
        "weights_requirements": str(REQUIREMENTS),
        "weights_wheelhouse": "/srv/wheels",
        "weights_checkout": str(site.checkout),
        "weights_sets": ["tiny"],
        "weights_scrub_days": 1,
    }
    only = ("--tags", "weights", "--limit", "n1")
    with neighbour_serving(tmp_path / "neighbour", site.fleet.gateway) as url:
        values["weights_neighbour"] = url
        site.run(*only, **values).require_good()
    # nobody serves any more, and nothing has to be brought
    assert site.run(*only, **values).require_good().count("changed") == 0
    assert "model_type" in site.first.shell("cat /models/tiny/config.json")
    assert "active" in site.first.shell("systemctl is-active sm120-scrub.timer")
    assert "sm120-scrub.timer" in site.first.shell("systemctl list-timers --no-legend")
    site.first.shell("systemctl start sm120-scrub.service")
    site.first.shell("printf x | dd of=/models/tiny/model.safetensors bs=1 conv=notrunc seek=4711")
    # a scrub reads no file twice in its days: without its book all of them are due again
    site.first.shell("rm /models/tiny/.sm120/scrub.json")
    assert "failed" in site.first.shell(
        "systemctl start sm120-scrub.service; systemctl is-failed sm120-scrub.service", check=False
    )
    assert "model.safetensors" in site.first.shell("journalctl --unit sm120-scrub --no-pager")
    site.first.shell("systemctl reset-failed sm120-scrub.service")
    site.run(*only, **values, weights_state="absent").require_good()
    assert site.first.shell(
        "ls /opt /models; ls /etc/systemd/system | grep sm120-scrub", check=False
    ) == ("/models:\ntiny\n\n/opt:\n")
    again = site.run(*only, **values, weights_state="absent").require_good()
    assert again.count("changed") == 0
    site.first.shell("rm -r /models /srv/wheels")


def lock_weights(checkout: Path, neighbour: Path) -> None:
    """A small locked set: its spec and lock in the checkout, its files in a folder."""
    large = {"model.safetensors": random_bytes(1 << 20)}
    place = make_set(neighbour, {"config.json": SMALL["config.json"]}, large)
    folder = checkout / "lockfiles" / "weights"
    folder.mkdir(parents=True)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(SPEC.model_dump(mode="json")))
    write_weights_lock(folder / "tiny.lock.yaml", place.lock)


CLOSED = {"name": "nvidia-driver-580", "version": "580.95.05-1", "sha256": "0" * 64}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("pcie", {"pcie_extra_cmdline": ["mitigations=off"]}, "This role never does that"),
    (
        "nvidia_driver",
        {"nvidia_driver_packages": [CLOSED["name"]], "nvidia_driver_pins": [CLOSED]},
        "are not the open kernel modules",
    ),
    ("nvidia_driver", {"nvidia_driver_pins": None}, "nvidia_driver_pins"),
    ("cuda", {"cuda_image_releases": ["13.2"]}, "CUDA 13.2 needs driver branch 595"),
    ("cuda", {"cuda_image_releases": ["13.9"]}, "(unknown to lockfiles/host.yaml)"),
    (
        "host_tuning",
        {"host_tuning_card": "max-q", "host_tuning_power_limit_w": 600},
        "600 W is not a limit of a max-q card (250 to 325 W)",
    ),
    ("nccl", {"nccl_patched_library": "/etc/hostname"}, "where it was never measured"),
    ("registry", {"registry_name": "x", "registry_htpasswd": ["ops:secret"]}, "bcrypt hash"),
]


@pytest.mark.big
@pytest.mark.parametrize(("part", "values", "message"), REFUSED)
def test_what_cannot_work_is_refused_with_cause_and_fix_before_anything_changes(
    site: Site, part: str, values: dict[str, Any], message: str
) -> None:
    only = ("--tags", part, "--limit", "n1", "--check")
    run = site.run(*only, sm120_parts=[part], **values)
    assert run.count("failed") == 1
    assert run.count("changed") == 0
    assert message in " ".join(run.text.split())


@pytest.mark.big
def test_state_absent_leaves_the_node_as_it_was(site: Site, hosts: Hosts) -> None:
    before = hosts.fresh
    names = ("nvidia_repository", "nvidia_driver", "pcie", "nccl", "container_runtime")
    gone = {f"{name}_state": "absent" for name in (*names, "host_tuning")}
    site.run(**gone).require_good()
    # the first node keeps what the tests of other roles left there on purpose, such as images
    assert differences(before, snapshot(site.second), LEFT) == []
    again = site.run(**gone).require_good()
    assert again.count("changed") == 0, again.text
    assert differences(before, snapshot(site.second), LEFT) == []


@pytest.mark.big
def test_a_role_that_ran_alone_on_a_fresh_node_is_undone_alone(site: Site, hosts: Hosts) -> None:
    before = hosts.fresh
    only = ("--tags", "host_tuning", "--limit", "n2")
    site.run(*only, host_tuning_state="absent").require_good()
    site.second.shell("rm -rf /var/lib/sm120")
    site.run(*only).require_good()
    assert "vm.swappiness = 0" in site.second.shell("sysctl vm.swappiness")
    site.run(*only, host_tuning_state="absent").require_good()
    left = differences(before, snapshot(site.second), (*LEFT, "/var/lib/sm120"))
    assert left == []
