"""How a promise reads what it judges: owners of files, words of the kernel, settings of others."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.hosts.promises import container_runtime as runtime
from pipeline.hosts.promises import nccl, pcie
from pipeline.hosts.promises import nvidia_driver as driver
from pipeline.hosts.promises import nvidia_repository as repository
from pipeline.hosts.promises.boot import without_effect
from pipeline.hosts.promises.checks import Broken, Undecided
from pipeline.hosts.promises.owned import LOOSE
from tests.unit.hosts.fake_host import FakeHost
from tests.unit.hosts.good_host import (
    END,
    GOOD,
    GRUB_ARGUMENTS,
    GRUB_ROWS,
    NCCL,
    PCIE,
    RUNTIME,
    saying,
    with_file,
)


def loose(*paths: Path) -> list[str]:
    """What the program of `require_root_alone` says of a tree that is ours."""
    owner = pwd.getpwuid(os.geteuid()).pw_name
    done = subprocess.run(
        [sys.executable, "-c", LOOSE, owner, *map(str, paths)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_files_and_folders_that_others_can_change_are_named_and_no_others(tmp_path: Path) -> None:
    tree = tmp_path / "opt"
    (tree / "bin").mkdir(parents=True)
    for name in ("good", "open", "bin/tool"):
        (tree / name).write_text("x")
        (tree / name).chmod(0o644)
    tree.chmod(0o755)
    (tree / "bin").chmod(0o755)
    (tree / "link").symlink_to("good")

    def named() -> list[str]:
        return [x for x in loose(tree, tmp_path / "gone") if str(tree) in x]

    assert named() == []
    (tree / "open").chmod(0o666)
    (tree / "bin").chmod(0o775)
    assert named() == [f"{tree}/bin has mode 0775", f"{tree}/open has mode 0666"]
    # the folder above decides who may put another file in the place of this one
    owner = pwd.getpwuid(os.geteuid()).pw_name  # above the tree only root will do
    what = "has mode 0775" if owner == "root" else f"belongs to {owner}"
    assert f"{tree}/bin {what}" in loose(tree / "bin" / "tool")
    assert f"{tree}/link is a link to good" in loose(tree / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="Only root can give files away.")
def test_a_file_of_another_owner_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").touch(mode=0o644)
    os.chown(tmp_path / "x", 65534, 65534)
    owner = pwd.getpwuid(65534).pw_name
    assert f"{tmp_path}/x belongs to {owner}" in loose(tmp_path / "x")
    os.chown(tmp_path / "x", 54321, 0)
    assert f"{tmp_path}/x belongs to 54321" in loose(tmp_path / "x")


def test_a_file_that_overrides_our_arguments_is_named_and_not_the_boot_loader() -> None:
    later = f"{GRUB_ROWS}/etc/default/grub.d/99-mine.cfg\tquiet\n{END}"
    host = GOOD.but(outputs={GRUB_ARGUMENTS: (0, later)}, files={"/proc/cmdline": "quiet"})
    with pytest.raises(Broken) as error:
        pcie.test_the_kernel_was_booted_with_its_arguments(host, PCIE)
    assert "/etc/default/grub.d/99-mine.cfg is read after ours" in error.value.fix
    with pytest.raises(Broken) as error:
        pcie.test_the_kernel_was_booted_with_its_arguments(
            with_file("/proc/cmdline", "quiet"), PCIE
        )
    assert "the boot loader" in error.value.fix


@pytest.mark.parametrize(
    ("wanted", "message", "lost"),
    [
        (["iommu=pt"], "iommu=nopt iommu=pt", []),
        (["console=ttyS0"], "console=ttyS0 console=tty1", []),
        (["pci=noaer", "pci=realloc"], "pci=noaer pci=realloc", []),
        (["iommu=pt"], "iommu=pt iommu=nopt", ["iommu=pt"]),
        (["pcie_aspm=off"], "pcie_aspm=off pcie_aspm=force", ["pcie_aspm=off"]),
        (["pci=noaer"], "pci=noae", ["pci=noaer"]),
    ],
)
def test_of_words_that_have_one_value_the_last_counts(
    wanted: list[str], message: str, lost: list[str]
) -> None:
    assert without_effect(wanted, message.split()) == lost


def test_an_environment_that_says_what_we_say_is_as_promised() -> None:
    several = NCCL.model_copy(update={"settings": {"NCCL_PROTO": "LL,LL128,Simple"}})
    good = with_file("/etc/environment", "NCCL_PROTO=LL,LL128,Simple\n")
    nccl.test_no_environment_has_settings_of_its_own(good, several)
    for text in ("NCCL_PROTO=LL,LL128\n", "NCCL_PROTO=LL\n"):
        with pytest.raises(Broken):
            nccl.test_no_environment_has_settings_of_its_own(
                with_file("/etc/environment", text), several
            )


@pytest.mark.parametrize(
    ("check", "given", "host", "message"),
    [
        (
            nccl.test_programs_on_the_host_get_the_settings,
            NCCL,
            saying("head -n 1 /etc/nccl.conf", "NCCL_PROTO=Simple\n"),
            "nccl_extra",
        ),
        (
            runtime.test_the_limits_are_set,
            RUNTIME,
            with_file("/etc/docker/daemon.json", "{"),
            "Repair or remove /etc/docker/daemon.json",
        ),
        (
            runtime.test_the_login_is_there_and_nobody_elses_to_read,
            RUNTIME,
            with_file("/root/.docker/config.json", "no JSON"),
            "Repair or remove /root/.docker/config.json",
        ),
    ],
)
def test_where_the_play_refuses_nobody_is_told_to_run_it_again(
    check: Any, given: Any, host: FakeHost, message: str
) -> None:
    with pytest.raises(Broken) as error:
        check(host, given)
    assert message in error.value.fix


PODMAN = RUNTIME.model_copy(update={"engine": "podman", "limits": 'shm_size = "16g"\n'})
FOLDER = "/etc/containers/containers.conf.d"


def test_podmans_limits_are_those_of_the_last_file_that_sets_them() -> None:
    ours = GOOD.but(files={f"{FOLDER}/60-sm120.conf": PODMAN.limits})
    runtime.test_the_limits_are_set(ours, PODMAN)
    runtime.test_the_limits_are_set(
        ours.but(files={f"{FOLDER}/10-x.conf": PODMAN.limits, f"{FOLDER}/99-x.conf": "a = 1\n"}),
        PODMAN,
    )
    for line in ('shm_size = "64m"\n', "default_ulimits=[]\n"):
        with pytest.raises(Broken, match=r"99-x\.conf"):
            runtime.test_the_limits_are_set(ours.but(files={f"{FOLDER}/99-x.conf": line}), PODMAN)


@pytest.mark.parametrize(
    ("name", "text", "unsigned"),
    [
        ("a.list", "deb [ trusted=yes ] http://x y", True),
        ("a.list", "deb\t[arch=amd64,arm64\ttrusted=1] http://x y", True),
        ("a.list", "deb [signed-by=/k TRUSTED=YES] http://x y", True),
        ("a.list", "deb [trusted=no] http://x y", False),
        ("a.list", "deb http://x/[trusted=yes] y", False),
        ("a.list", "deb http://x y # [trusted=yes]", False),
        ("a.sources", "Types: deb\nTrusted:\tyes\n", True),
        ("a.sources", "Types: deb\nTrusted:\n yes\n", True),
        ("a.sources", "Enabled: no\nTrusted: yes\n\nTypes: deb\nTrusted: yes", True),
        ("a.sources", "Types: deb\nX-Trusted: yes\n", False),
        ("a.sources", "Types: deb\nSigned-By:\n -----BEGIN\n .\n Trusted: yes\n", False),
    ],
)
def test_sources_are_read_as_apt_reads_them(name: str, text: str, unsigned: bool) -> None:
    assert bool(repository.unsigned(f"/etc/apt/{name}", text)) is unsigned


@pytest.mark.parametrize(
    ("check", "given"),
    [
        (nccl.test_no_home_has_settings_of_its_own, (NCCL,)),
        (nccl.test_no_environment_has_settings_of_its_own, (NCCL,)),
        (repository.test_no_source_of_the_host_is_believed_without_a_signature, ()),
        (pcie.test_no_other_file_sets_the_modules_options, (PCIE,)),
        (driver.test_nothing_keeps_its_modules_from_loading, ()),
    ],
)
def test_files_that_cannot_be_read_in_time_are_not_taken_for_good_ones(
    check: Any, given: tuple[Any, ...]
) -> None:
    with pytest.raises(Undecided, match="cannot be read: did not end"):
        check(saying("for f in ", "did not end within 120 s", 124), *given)
