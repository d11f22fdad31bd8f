"""What the role nvidia_driver refuses, and whether its advice can be followed."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.integration.roles.role_values import role_values
from tests.testbed.packages import system_environment
from tests.testbed.playbook import ROOT

evaluated = partial(role_values, "nvidia_driver")
FILES = ROOT / "ansible" / "roles" / "nvidia_driver" / "files"
SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


OPEN = {
    "Debian": "nvidia-open nvidia-kernel-open-dkms nvidia-driver-cuda nvidia-opencl-icd",
    "Ubuntu": (
        "nvidia-driver-580-open nvidia-dkms-580-open nvidia-kernel-source-580-open"
        " nvidia-kernel-common-580 nvidia-utils-580"
    ),
    "Ubuntu's own": "nvidia-driver-580-server-open linux-modules-nvidia-580-server-open-generic",
}
CLOSED = {
    "Debian": "cuda-drivers nvidia-driver nvidia-kernel-dkms nvidia-opencl-icd",
    "Ubuntu": "nvidia-driver-580 nvidia-dkms-580 nvidia-kernel-source-580 nvidia-opencl-icd",
    "both": "nvidia-open nvidia-kernel-open-dkms nvidia-dkms-580",
    "no module": "nvidia-driver-cuda nvidia-opencl-icd libopengl0 nvidia-kernel-common-580",
    "Ubuntu's own": "linux-modules-nvidia-580-generic nvidia-opencl-icd",
}


def test_open_modules_are_known_by_the_packages_that_hold_them(tmp_path: Path) -> None:
    sets = [*OPEN.values(), *CLOSED.values()]
    cases = [{"nvidia_driver_pins": [{"name": n} for n in names.split()]} for names in sets]
    answers = evaluated(tmp_path, "nvidia_driver_modules_open", cases)
    assert answers == ["True"] * len(OPEN) + ["False"] * len(CLOSED)


def mok(root: Path, *, mokutil: str = "") -> list[str]:
    """The script, with a mokutil that says this; its other programs are the system's."""
    path = system_environment()["PATH"]
    if mokutil:
        tool = root / "bin" / "mokutil"
        tool.parent.mkdir()
        tool.write_text(f'#!/bin/sh\necho "$2 {mokutil}"\nexit 1\n')
        tool.chmod(0o755)
        path = f"{tool.parent}{os.pathsep}{path}"
    command = ["/bin/sh", str(FILES / "mok.sh"), str(root)]
    done = subprocess.run(
        command, env=system_environment(PATH=path), capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def secure_boot(root: Path, state: int) -> Path:
    place = root / SECURE_BOOT
    place.parent.mkdir(parents=True)
    place.write_bytes(bytes([6, 0, 0, 0, state]))
    return root


def test_without_secure_boot_no_key_is_looked_for(tmp_path: Path) -> None:
    assert mok(tmp_path) == []
    assert mok(secure_boot(tmp_path, 0)) == []


@pytest.mark.parametrize("place", ["var/lib/dkms/mok.pub", "var/lib/shim-signed/mok/MOK.der"])
@pytest.mark.parametrize(
    ("output", "enrolled"), [("is already enrolled", True), ("is not enrolled", False)]
)
def test_a_key_that_is_enrolled_is_seen_wherever_the_system_keeps_it(
    tmp_path: Path, place: str, output: str, enrolled: bool
) -> None:
    key = secure_boot(tmp_path, 1) / place
    key.parent.mkdir(parents=True)
    key.write_bytes(b"certificate")
    assert mok(tmp_path, mokutil=output) == ["on", *[f"enrolled {key}"] * enrolled]


def test_secure_boot_without_a_key_or_without_mokutil_is_on_and_not_enrolled(
    tmp_path: Path,
) -> None:
    key = secure_boot(tmp_path, 1) / "var/lib/dkms/mok.pub"
    assert mok(tmp_path) == ["on"]
    key.parent.mkdir(parents=True)
    key.write_bytes(b"certificate")
    assert mok(tmp_path) == ["on"]


def test_the_way_to_enroll_names_the_systems_own_key_and_every_step(tmp_path: Path) -> None:
    keys = {
        "Debian": ("/var/lib/dkms/mok.pub", "openssl req -new -x509"),
        "Ubuntu": ("/var/lib/shim-signed/mok/MOK.der", "update-secureboot-policy --new-key"),
    }
    cases = [{"ansible_facts": {"distribution": system}} for system in keys]
    reported = evaluated(tmp_path, "nvidia_driver_mok_steps", cases)
    for steps, (key, made_by) in zip(reported, keys.values(), strict=True):
        message = (made_by, f"mokutil --import {key}", "Enroll MOK", f"--test-key {key}")
        places = [steps.index(word) for word in message]
        assert places == sorted(places)


def missing_words(tmp_path: Path, system: str, lines: list[str], index: dict[str, object]) -> str:
    case = {
        "ansible_facts": {"distribution": system, "kernel": "6.1.0-23-amd64"},
        "nvidia_driver_archives": {"stdout_lines": lines},
        "pinned_packages_index": index,
    }
    (output,) = evaluated(tmp_path, "nvidia_driver_missing_why", [case])
    return output


def test_headers_that_the_archive_dropped_are_named_with_those_it_has_and_what_to_do(
    tmp_path: Path,
) -> None:
    lines = [
        "missing linux-headers-6.1.0-23-amd64",
        "offered linux-headers-6.1.0-40-amd64",
        "offered linux-headers-6.1.0-41-amd64",
    ]
    output = missing_words(tmp_path, "Debian", lines, {"rc": 0})
    assert "no linux-headers-6.1.0-23-amd64, which DKMS needs for the running kernel" in output
    assert "they have linux-headers-6.1.0-40-amd64, linux-headers-6.1.0-41-amd64" in output
    assert "apt-get install linux-image-amd64" in output
    assert "could not read" not in output


def test_an_archive_that_could_not_be_read_is_blamed_and_not_the_kernel(tmp_path: Path) -> None:
    index = {"rc": 100, "stderr_lines": ["E: Failed to fetch http://m  Could not connect"]}
    output = missing_words(tmp_path, "Ubuntu", ["missing dkms"], index)
    assert "no such headers at all" in output
    assert "Could not connect" in output
    assert "apt-get install linux-image" not in output
