"""Every promise: kept on a good host, and broken or unknown on hosts that differ in one thing."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import WeightsDamaged, WeightsUnknown
from pipeline.host.facts.model import HostFacts
from pipeline.host.fleet.promised import (
    CudaPromise,
    Promised,
    RepositoryPromise,
    Roles,
    RuntimePromise,
    WeightsPromise,
)
from pipeline.host.fleet.remote import Remote
from pipeline.host.promises import container_runtime as runtime
from pipeline.host.promises import cuda, nccl, owned, pcie, registry, run, weights
from pipeline.host.promises import host as base
from pipeline.host.promises import host_tuning as tuning
from pipeline.host.promises import nvidia_driver as driver
from pipeline.host.promises import nvidia_repository as repository
from pipeline.host.promises import pinned_packages as pins
from pipeline.host.promises.boot import without_effect
from pipeline.host.promises.outcome import Broken, NotApplicable, Outcome, Undecided
from pipeline.host.promises.owned import LEFT, LOOSE
from pipeline.host.promises.run import MODULES, checks_in, judge_promises
from pipeline.lock.host_model import HostLock, sealed_host, write_host_lock
from pipeline.spec.host import HostSpec
from tests.unit.host.fake_host import FakeHost
from tests.unit.host.good_host import (
    ACS,
    CMDLINE,
    DKMS,
    DRIVER,
    END,
    GOOD,
    GRUB,
    GRUB_ARGUMENTS,
    GRUB_ROWS,
    HEADERS,
    KNOBS,
    LOADED,
    LOCK,
    NCCL,
    OFFERED,
    OURS_IN,
    PCIE,
    PREF,
    QUERY,
    REGISTRY,
    REPOSITORY,
    RUNTIME,
    SCRUB,
    SOURCE,
    SYSCTL,
    TUNING,
    UNIT,
    WHO,
    machine,
    saying,
    shown,
    unit,
    with_file,
)
from tests.unit.host.machines import ACS_ON, blackwell, changed, facts, h200


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A file on the controller that the host has too."""
    path = tmp_path / "key"
    path.write_text("key")
    (tmp_path / "tiny.lock.yaml").write_text("key")
    return path


def weights_with(key: Path) -> WeightsPromise:
    return WeightsPromise(
        state="present",
        root="/models",
        home="/opt/sm120",
        command="/opt/sm120/venv/bin/sm120",
        wheel=str(key),
        requirements=str(key),
        locks=str(key.parent),
        sets=["tiny"],
        device="LABEL=models",
        scrub_days=30,
        scrub_at="daily",
    )


def keyed(promise: Any, key: Path) -> Any:
    """A promise that names the controller's file."""
    fields = {"key", "registry_ca"} & set(type(promise).model_fields)
    return promise.model_copy(update=dict.fromkeys(fields, str(key)))


def changed_unit(name: str, fragment: str = "/usr/lib/systemd/system") -> list[FakeHost]:
    """Hosts on which a unit is not as it was shipped."""
    asked = f"systemctl show {name} --property=FragmentPath"
    drop_in = f"/etc/systemd/system/{name}.d/x.conf"
    return [
        saying(asked, shown(name, drop_in, fragment=fragment)),
        # files that systemd has not read yet
        saying(asked, shown(name, fragment=fragment).replace("=no", "=yes")),
        saying(asked, shown(name, fragment="/etc/systemd/system")),
        saying(asked, "FragmentPath=\n"),
    ]


# each promise that is judged by the host alone, with hosts on which it must not hold
ON_HOST: list[tuple[Any, tuple[Any, ...], list[FakeHost]]] = [
    (base.test_no_change_waits_for_a_reboot, (), [saying("ls /run/sm120/reboot", "pcie\n")]),
    (base.test_no_package_is_left_half_installed, (), [saying("dpkg --audit", "half\n")]),
    (
        repository.test_the_source_is_the_one_of_the_inventory,
        (REPOSITORY,),
        [
            with_file(SOURCE, None),
            with_file(SOURCE, GOOD.files[SOURCE].replace("mirror", "elsewhere")),
            with_file(SOURCE, GOOD.files[SOURCE].replace("Signed-By", "#")),
            with_file(SOURCE, GOOD.files[SOURCE] + "Trusted: yes\n"),
        ],
    ),
    (
        repository.test_the_source_is_believed_by_its_own_key_only,
        (REPOSITORY,),
        [
            with_file("/etc/apt/keyrings/sm120-nvidia.gpg", "other"),
            with_file("/etc/apt/keyrings/sm120-nvidia.gpg", None),
        ],
    ),
    (
        base.test_nobody_else_can_change_what_the_system_reads,
        (),
        [saying("find /etc/apt", x) for x in ("/etc/sysctl.d\n", "/usr/local/sbin/sm120-acs\n")],
    ),
    (
        owned.test_nobody_but_root_can_change_its_files,
        ("pcie",),
        [
            saying(WHO, "/usr/local/sbin/sm120-acs has mode 0777\n"),
            saying(WHO, "/usr/local/sbin belongs to ops\n"),
        ],
    ),
    (
        repository.test_no_source_of_the_host_is_believed_without_a_signature,
        (),
        [
            with_file("/etc/apt/sources.list", "deb [arch=amd64 Trusted=yes] http://x y main\n"),
            with_file(
                "/etc/apt/sources.list.d/x.list", "deb-src [ allow-insecure=yes ] http://x y\n"
            ),
            with_file("/etc/apt/sources.list.d/x.sources", "Types: deb\nTRUSTED:yes\n"),
            with_file("/etc/apt/sources.list.d/x.sources", "Types: deb\n\nAllow-Weak: true\n"),
            with_file("/etc/apt/sources.list.d/x.sources", "Enabled: yes\nTrusted: 1\n"),
        ],
    ),
    (
        repository.test_apt_checks_signatures_and_certificates,
        (),
        [
            saying("apt-config dump", f"{x};\n")
            for x in (
                'APT::Get::AllowUnauthenticated "true"',
                'Acquire::AllowInsecureRepositories "1"',
                'Acquire::AllowDowngradeToInsecureRepositories "yes"',
                'Acquire::https::mirror.example::Verify-Peer "false"',
                'Acquire::https::Verify-Host "0"',
                'APT::Key::gpgvcommand "/bin/true"',
            )
        ],
    ),
    (
        pins.test_no_source_offers_other_bytes_under_a_locked_version,
        (LOCK, "driver"),
        [
            saying("apt-cache show", f"{OFFERED}\n{OFFERED.replace('0000', '1111')}"),
            saying("apt-cache show", OFFERED.replace("00000000", "0000000a", 1)),
        ],
    ),
    (
        driver.test_nothing_keeps_its_modules_from_loading,
        (),
        [
            *(
                with_file("/run/modprobe.d/x.conf", x)
                for x in (
                    "blacklist nvidia\n",
                    " blacklist nvidia-uvm\n",
                    "install nvidia /bin/false\n",
                    "options nvidia \\\n NVreg_EnableGpuFirmware=0\n",
                )
            ),
            with_file("/proc/cmdline", f"{CMDLINE} modprobe.blacklist=nouveau,nvidia"),
            with_file("/proc/cmdline", f"{CMDLINE} nvidia.NVreg_EnableGpuFirmware=0"),
        ],
    ),
    (
        driver.test_the_headers_that_follow_updates_are_installed,
        (),
        [
            saying(HEADERS, "headers\nlinux-headers-generic\n"),
            saying(QUERY, "dkms\t3\tinstall\tinstalled\n"),
        ],
    ),
    (
        pcie.test_no_other_file_of_grub_overrides_its_arguments,
        (PCIE,),
        [
            saying(GRUB_ARGUMENTS, f"{GRUB_ROWS}/etc/default/grub.d/99-x.cfg\tquiet\n{END}"),
            saying(
                GRUB_ARGUMENTS,
                f"{GRUB_ROWS}/etc/default/grub.d/99-x.cfg\tpcie_aspm=off iommu=pt iommu=on\n{END}",
            ),
            saying(GRUB_ARGUMENTS, f"/etc/default/grub\tquiet\n{END}"),
            # a file that cannot be read to its end
            saying(GRUB_ARGUMENTS, GRUB_ROWS),
        ],
    ),
    (
        pcie.test_no_other_file_sets_the_modules_options,
        (PCIE,),
        [
            with_file("/etc/modprobe.d/aaa.conf", "options a b=0\n"),
            with_file("/run/modprobe.d/zzz.conf", 'options a c=1 b="2"\n'),
            with_file("/usr/lib/modprobe.d/zzz.conf", "options a \\\nb=0\n"),
            with_file("/proc/cmdline", f"{CMDLINE} a.b=0"),
        ],
    ),
    (
        nccl.test_no_home_has_settings_of_its_own,
        (NCCL,),
        [
            with_file("/root/.nccl.conf", "NCCL_PROTO=Simple\n"),
            with_file("/home/ops/.nccl.conf", "NCCL_P2P_DISABLE=1\n"),
        ],
    ),
    (
        nccl.test_no_environment_has_settings_of_its_own,
        (NCCL,),
        [
            with_file("/etc/environment", 'NCCL_PROTO="Simple"\n'),
            with_file("/etc/profile.d/x.sh", "LANG=C; export NCCL_P2P_DISABLE=1\n"),
            with_file("/etc/security/pam_env.conf", "NCCL_PROTO DEFAULT=Simple\n"),
            with_file(
                "/etc/systemd/system.conf.d/x.conf", 'DefaultEnvironment="NCCL_PROTO=LL128" A=b\n'
            ),
            with_file("/etc/containers/containers.conf", 'env = ["A=b", "NCCL_CONF_FILE=/x"]\n'),
            saying("systemctl show-environment", "NCCL_PROTO=Simple\n"),
        ],
    ),
    (
        tuning.test_no_later_file_sets_the_kernel_knobs_otherwise,
        (TUNING,),
        [
            saying(SYSCTL, f"{KNOBS}# /etc/sysctl.d/99-x.conf\nvm.swappiness=60\n"),
            saying(SYSCTL, f"{KNOBS}# /run/sysctl.d/99-x.conf\n-vm/swappiness = 1\n"),
            saying(SYSCTL, "# /etc/sysctl.d/10-x.conf\nvm.other = 0\n"),
        ],
    ),
    (
        repository.test_what_the_host_had_before_is_noted,
        (),
        [
            with_file("/var/lib/sm120/before/packages", None),
            with_file("/var/lib/sm120/before/packages", " \n"),
        ],
    ),
    (
        pins.test_the_locked_versions_are_installed,
        (LOCK, "driver"),
        [
            saying(QUERY, ""),
            saying(
                QUERY, GOOD.outputs[QUERY][1].replace("595.58.03-1\thold", "595.58.03-2\thold", 1)
            ),
            saying(QUERY, GOOD.outputs[QUERY][1].replace("installed\n", "half-configured\n", 1)),
        ],
    ),
    (
        pins.test_they_are_held,
        (LOCK, "driver"),
        [
            saying(QUERY, ""),
            saying(QUERY, GOOD.outputs[QUERY][1].replace("\thold\t", "\tinstall\t", 1)),
        ],
    ),
    (
        pins.test_apt_would_install_nothing_else,
        (LOCK, "driver"),
        [
            saying("apt-cache policy", ""),
            saying(
                "apt-cache policy", GOOD.outputs["apt-cache policy"][1].replace("58.03", "71.05")
            ),
        ],
    ),
    (
        pins.test_the_preferences_pin_these_and_no_others,
        (LOCK, "driver"),
        [
            with_file("/etc/apt/preferences.d/sm120-driver.pref", None),
            with_file("/etc/apt/preferences.d/sm120-driver.pref", PREF),
            with_file(
                "/etc/apt/preferences.d/sm120-driver.pref", f"{PREF}\n{DKMS}".replace("1001", "1")
            ),
            with_file(
                "/etc/apt/preferences.d/sm120-driver.pref",
                f"{PREF}\n{DKMS}\nPackage: old\nPin: version 1\nPin-Priority: 990\n",
            ),
        ],
    ),
    (
        pins.test_their_files_are_as_they_came,
        (LOCK, "driver"),
        [
            saying("dpkg --verify", "??5??????   /usr/bin/nvidia-smi\n"),
            saying("dpkg --verify", "missing     /usr/bin/nvidia-smi\n"),
            saying(QUERY, ""),
        ],
    ),
    (
        driver.test_the_locked_driver_is_the_loaded_one,
        (LOCK,),
        [with_file(LOADED, None), with_file(LOADED, "NVRM version: Open  595.58.030  x\n")],
    ),
    (
        driver.test_the_programs_are_of_the_same_version,
        (LOCK,),
        [
            saying("nvidia-smi --query-gpu", "595.71.05\n"),
            saying("nvidia-smi --query-gpu", "Failed: Driver/library version mismatch\n", 18),
        ],
    ),
    (
        driver.test_nouveau_is_kept_away,
        (),
        [
            with_file("/etc/modprobe.d/sm120-nouveau.conf", None),
            with_file("/etc/modprobe.d/sm120-nouveau.conf", "blacklist nouveau\n"),
            saying("grep -c '^nouveau '", "1\n"),
        ],
    ),
    (
        driver.test_the_driver_stays_initialised_between_jobs,
        (),
        [
            unit("nvidia-persistenced", False, True),
            unit("nvidia-persistenced", True, False),
            *changed_unit("nvidia-persistenced.service"),
        ],
    ),
    (
        driver.test_dkms_can_build_it_for_the_running_kernel,
        (DRIVER,),
        [
            saying(QUERY, "dkms\t3\tinstall\tinstalled\n"),
            saying(QUERY, "headers\t3\tinstall\tinstalled\n"),
        ],
    ),
    (
        driver.test_the_kernel_that_boots_next_has_the_driver,
        (LOCK,),
        [
            saying("/sbin/modinfo --set-version 6.8.0-11-generic ", "", 1),
            saying("/sbin/modinfo --set-version 6.8.0-11-generic ", "580.95.05\n"),
            saying("ls -v /boot", "vmlinuz-6.8.0-11-generic\nvmlinuz-6.11.0-1-generic\n"),
        ],
    ),
    (
        driver.test_no_other_driver_is_installed_beside_it,
        (LOCK,),
        [
            saying(
                "dpkg-query --show --showformat '${Package} ",
                "nvidia-open installed\nnvidia-driver-580 installed\n",
            ),
            saying(
                "dpkg-query --show --showformat '${Package} ", "nvidia-driver-570-open installed\n"
            ),
        ],
    ),
    (
        pcie.test_the_kernel_was_booted_with_its_arguments,
        (PCIE,),
        [
            with_file("/proc/cmdline", "root=/dev/vda iommu=pt"),
            with_file("/proc/cmdline", "iommu=pt2 pcie_aspm=off"),
        ],
    ),
    (
        pcie.test_the_next_boot_has_its_arguments_too,
        (PCIE,),
        [
            with_file("/etc/default/grub.d/60-sm120.cfg", None),
            with_file("/etc/default/grub.d/60-sm120.cfg", 'GRUB="iommu=pt"'),
            saying(GRUB, "linux /vmlinuz iommu=pt\n"),
            saying(GRUB, "linux /a iommu=pt pcie_aspm=off\nlinux /b pcie_aspm=off\n"),
        ],
    ),
    (
        pcie.test_the_mitigations_are_on,
        (),
        [
            with_file("/proc/cmdline", "mitigations=off"),
            with_file("/proc/cmdline", f"{CMDLINE} mitigations=off quiet"),
        ],
    ),
    (
        pcie.test_the_modules_options_are_written,
        (PCIE,),
        [
            with_file("/etc/modprobe.d/sm120-pcie.conf", None),
            with_file("/etc/modprobe.d/sm120-pcie.conf", "options a b=2\n"),
        ],
    ),
    (
        pcie.test_acs_is_switched_off_at_each_boot,
        (PCIE,),
        [
            unit("sm120-acs", True, False),
            unit("sm120-acs", False, True),
            with_file(ACS, "#!/bin/sh\nexit 0\n"),
            with_file(UNIT, None),
            *changed_unit("sm120-acs.service", OURS_IN)[:2],
        ],
    ),
    (
        pcie.test_the_probes_before_the_first_change_are_kept,
        (),
        [
            with_file("/var/lib/sm120/pcie/before.txt", None),
            with_file("/var/lib/sm120/pcie/before.txt", ""),
        ],
    ),
    (
        pcie.test_the_probes_after_the_last_change_are_kept,
        (),
        [with_file("/var/lib/sm120/pcie/after.txt", None)],
    ),
    (
        nccl.test_programs_on_the_host_get_the_settings,
        (NCCL,),
        [
            with_file("/etc/nccl.conf", None),
            with_file("/etc/nccl.conf", "NCCL_PROTO=Simple\n"),
            with_file("/etc/nccl.conf", "NCCL_PROTO=LL\nNCCL_P2P_DISABLE=1\n"),
        ],
    ),
    (
        nccl.test_containers_get_the_settings,
        (NCCL,),
        [
            with_file("/etc/sm120/nccl.env", None),
            with_file("/etc/sm120/nccl.env", "NCCL_PROTO=LL\n"),
        ],
    ),
    (
        nccl.test_the_patched_library_is_ours_or_none,
        (NCCL,),
        [with_file(NCCL.patched_at, "somebody's"), with_file(NCCL.patched_at, "")],
    ),
    (
        runtime.test_the_engine_is_installed_and_runs,
        (RUNTIME,),
        [saying(QUERY, ""), unit("docker", True, False), unit("docker", False, True)],
    ),
    (
        runtime.test_the_engines_command_is_there,
        (RUNTIME,),
        [
            GOOD.but(outputs={"command -v docker": (1, "")}),
            GOOD.but(outputs={"command -v docker": (127, "")}),
        ],
    ),
    (
        runtime.test_the_limits_are_set,
        (RUNTIME,),
        [
            with_file("/etc/docker/daemon.json", "{}"),
            with_file("/etc/docker/daemon.json", "{"),
            with_file("/etc/docker/daemon.json", '{"default-shm-size": "16g", "features": true}'),
        ],
    ),
    (
        runtime.test_the_engine_was_started_with_them,
        (RUNTIME,),
        [
            saying("date +%s", "100\n200\n"),
            saying("date +%s", "200\n"),
            saying("systemctl show docker --property=ExecStart", "dockerd --config-file /x.json"),
            saying("systemctl show docker --property=ExecStart", "dockerd --config-file=/x.json ;"),
        ],
    ),
    (
        runtime.test_cdi_is_made_again_after_each_change_of_the_driver,
        (),
        [
            unit("nvidia-cdi-refresh", False, True),
            unit("nvidia-cdi-refresh.path", False, True),
            unit("nvidia-cdi-refresh.path", True, False),
            *changed_unit("nvidia-cdi-refresh.service"),
            *changed_unit("nvidia-cdi-refresh.path"),
        ],
    ),
    (
        runtime.test_the_private_registry_is_trusted_by_its_own_ca,
        (RUNTIME,),
        [
            with_file("/etc/docker/certs.d/r:5000/ca.crt", None),
            with_file("/etc/docker/certs.d/r:5000/ca.crt", "other"),
        ],
    ),
    (
        runtime.test_the_login_is_there_and_nobody_elses_to_read,
        (RUNTIME,),
        [
            with_file("/root/.docker/config.json", "{}"),
            with_file("/root/.docker/config.json", '{"auths": {"r:5000": {"auth": "b3RoZXI="}}}'),
            GOOD.but(modes={"/root/.docker/config.json": 0o644}),
        ],
    ),
    (
        tuning.test_its_files_are_as_written,
        (TUNING,),
        [
            with_file("/etc/sysctl.d/60-sm120.conf", "vm.swappiness = 60\n"),
            with_file("/etc/systemd/system/old.service", "x"),
        ],
    ),
    (
        tuning.test_the_kernel_knobs_are_in_effect,
        (TUNING,),
        [with_file("/proc/sys/vm/swappiness", "60\n"), with_file("/proc/sys/vm/swappiness", None)],
    ),
    (
        tuning.test_the_governor_is_set_at_each_boot,
        (TUNING,),
        [
            unit("sm120-governor", False, True),
            unit("sm120-governor", True, False),
            *changed_unit("sm120-governor.service", OURS_IN)[:2],
        ],
    ),
    (
        tuning.test_the_power_limit_is_set_at_each_boot,
        (TUNING,),
        [
            unit("sm120-power-limit", False, True),
            *changed_unit("sm120-power-limit.service", OURS_IN)[:2],
        ],
    ),
    (tuning.test_the_clock_is_kept, (TUNING,), [saying(QUERY, ""), unit("chrony", True, False)]),
    (
        tuning.test_updates_at_night_stay_away_from_the_driver,
        (TUNING,),
        [saying("apt-config dump", 'X "";\n'), saying("apt-config dump", 'X:: "nvidia-";\n')],
    ),
    (
        registry.test_it_runs_and_starts_at_boot,
        (),
        [unit("docker-registry", True, False), *changed_unit("docker-registry.service")],
    ),
    (
        registry.test_it_answers_over_tls_and_asks_for_a_password,
        (REGISTRY,),
        [saying("python3 -c", "200\n"), saying("python3 -c", "ssl.SSLError\n", 1)],
    ),
    (
        registry.test_its_certificate_lasts,
        (REGISTRY,),
        [saying("openssl x509", "notAfter=tomorrow\n", 1), with_file("/reg/server.crt", None)],
    ),
    (
        registry.test_the_passwords_are_the_inventorys,
        (REGISTRY,),
        [
            with_file("/reg/htpasswd", "ops:other\n"),
            with_file("/reg/htpasswd", None),
            GOOD.but(modes={"/reg/htpasswd": 0o644}),
        ],
    ),
    (
        registry.test_its_settings_are_ours,
        (REGISTRY,),
        [
            with_file("/reg/config.yml", 'addr: ":5001"\n'),
            with_file("/etc/systemd/system/docker-registry.service.d/sm120.conf", "x"),
        ],
    ),
    (
        weights.test_the_program_is_the_controllers_wheel_and_runs,
        ("weights",),
        [
            with_file("/opt/sm120/key", "another wheel"),
            with_file("/opt/sm120/requirements.txt", "others"),
            saying("/opt/sm120/venv/bin/sm120 --version", "no\n", 1),
        ],
    ),
    (
        weights.test_the_locks_on_the_host_are_the_controllers,
        ("weights",),
        [
            with_file("/opt/sm120/checkout/lockfiles/weights/tiny.lock.yaml", x)
            for x in ("no", None)
        ],
    ),
    (
        weights.test_every_set_is_what_its_lock_says,
        ("weights",),
        [
            saying(
                "/opt/sm120/venv/bin/sm120 --checkout /opt/sm120/checkout weights verify",
                "damaged: x\n",
                WeightsDamaged.exit_code,
            ),
            saying(
                "/opt/sm120/venv/bin/sm120 --checkout /opt/sm120/checkout weights verify",
                "no set\n",
                WeightsUnknown.exit_code,
            ),
            saying(
                "/opt/sm120/venv/bin/sm120 --checkout /opt/sm120/checkout weights verify",
                "Traceback\n",
                1,
            ),
        ],
    ),
    (
        weights.test_a_part_is_read_again_each_night,
        ("weights",),
        [
            unit("sm120-scrub.timer", False, True),
            saying("systemctl show sm120-scrub", "exit-code\n"),
            with_file("/etc/systemd/system/sm120-scrub.timer", "OnCalendar=yearly\n"),
            with_file(SCRUB, "ExecStart=sm120 weights scrub --every-days 30\n"),
            with_file(SCRUB, "ExecStart=sm120 weights scrub /models/tiny --every-days 365\n"),
        ],
    ),
    (weights.test_the_disk_is_mounted, ("weights",), [GOOD.but(mounted=())]),
]
NAMED = [pytest.param(*row, id=row[0].__name__.removeprefix("test_")) for row in ON_HOST]


def filled(given: tuple[Any, ...], key: Path) -> list[Any]:
    """Arguments with the controller's files named."""
    kept = [weights_with(key) if g == "weights" else g for g in given]
    return [keyed(g, key) if isinstance(g, RepositoryPromise | RuntimePromise) else g for g in kept]


@pytest.mark.parametrize(("check", "given", "bad"), NAMED)
def test_a_promise_holds_on_a_good_host_and_is_broken_on_each_bad_one(
    check: Any, given: tuple[Any, ...], bad: list[FakeHost], key: Path
) -> None:
    check(GOOD, *filled(given, key))
    for host in bad:
        with pytest.raises(Broken) as error:
            check(host, *filled(given, key))
        assert error.value.why


TRANSLATING = facts(changed(blackwell(2, iommu="DMA-FQ"), files={"/proc/cmdline": CMDLINE}))
REDIRECTING = facts(blackwell(2, control=ACS_ON, iommu="identity"))
CLOSED = machine(files={LOADED: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  595.58.03  x\n"})
NO_HMM = {"/sys/module/nvidia_uvm/parameters/uvm_disable_hmm": "N\n"}
ONE_SLOW = {"/sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave\n"}
BY_FACTS: list[tuple[Any, tuple[Any, ...], list[HostFacts]]] = [
    (driver.test_the_open_kernel_modules_are_loaded, (), [CLOSED]),
    (
        driver.test_every_card_is_in_persistence_mode,
        (),
        [machine(persistence_mode="Disabled")],
    ),
    (pcie.test_the_iommu_does_not_translate, (PCIE,), [TRANSLATING]),
    (
        pcie.test_links_are_kept_awake,
        (PCIE,),
        [machine(files={"/proc/cmdline": x}) for x in ("root=x", "pcie_aspm=offf")],
    ),
    (pcie.test_hmm_is_off_in_the_loaded_module, (PCIE,), [machine(files=NO_HMM)]),
    (
        pcie.test_the_driver_was_loaded_with_its_registry_keys,
        (PCIE,),
        [
            machine(files={"/proc/driver/nvidia/params": f'RegistryDwords: "{x}"\n'})
            for x in ("", "ForceP2P=0x1;RMForceP2PType=1")
        ],
    ),
    (pcie.test_no_bridge_above_a_card_redirects, (PCIE,), [REDIRECTING]),
    (tuning.test_the_governor_is_in_effect, (TUNING,), [machine(files=ONE_SLOW)]),
    (
        tuning.test_the_power_limit_is_in_effect,
        (TUNING,),
        [machine(current_power_limit="450.00 W"), machine(current_power_limit="599.00 W")],
    ),
]


@pytest.mark.parametrize(
    ("check", "given", "bad"),
    [pytest.param(*row, id=row[0].__name__.removeprefix("test_")) for row in BY_FACTS],
)
def test_a_promise_about_facts_holds_on_a_good_machine_and_on_no_bad_one(
    check: Any, given: tuple[Any, ...], bad: list[HostFacts]
) -> None:
    check(machine(), *given)
    for result in bad:
        with pytest.raises(Broken):
            check(result, *given)


NOTHING = facts(changed(h200(), files={}).model_copy(update={"files": {}, "commands": {}}))


@pytest.mark.parametrize(
    ("check", "given"),
    [
        (driver.test_the_open_kernel_modules_are_loaded, ()),
        (pcie.test_the_iommu_does_not_translate, (PCIE,)),
        (pcie.test_links_are_kept_awake, (PCIE,)),
        (pcie.test_the_driver_was_loaded_with_its_registry_keys, (PCIE,)),
        (pcie.test_every_card_has_a_window_as_large_as_asked_for, (PCIE,)),
        (tuning.test_the_power_limit_is_in_effect, (TUNING,)),
        (base.test_its_facts_can_be_read, ()),
    ],
)
def test_what_cannot_be_seen_is_unknown_and_not_kept(check: Any, given: tuple[Any, ...]) -> None:
    with pytest.raises(Undecided):
        check(NOTHING, *given)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (saying("nvidia-smi --query-gpu", "No devices were found\n", 6), "No devices"),
        (saying("nvidia-smi --query-gpu", "", 127), "no output"),
    ],
)
def test_programs_that_see_no_card_say_nothing_of_their_version(
    host: FakeHost, message: str
) -> None:
    with pytest.raises(Undecided, match=message):
        driver.test_the_programs_are_of_the_same_version(host, LOCK)


def test_a_host_without_kernels_or_modinfo_says_nothing_of_the_next_boot() -> None:
    check = driver.test_the_kernel_that_boots_next_has_the_driver
    with pytest.raises(NotApplicable, match="no kernel"):
        check(saying("ls -v /boot", "grub\nvmlinuz\n"), LOCK)
    with pytest.raises(Undecided, match="modinfo is not installed"):
        check(saying("/sbin/modinfo --set-version 6.8.0-11-generic ", "", 127), LOCK)


def test_a_controllers_file_that_is_not_there_leaves_the_promise_unknown(tmp_path: Path) -> None:
    promise = keyed(REPOSITORY, tmp_path / "gone")
    with pytest.raises(Undecided, match="not on this controller"):
        repository.test_the_source_is_believed_by_its_own_key_only(GOOD, promise)


SPEC = HostSpec.model_validate(
    {
        "targets": ["debian-12/amd64"],
        "driver": {"branch": 595},
        "cuda": {"release": "13.2", "oldest_branches": {"13.2": 595, "13.3": 610}},
        "container_toolkit": {"at_least": "1.18.2"},
        "nccl": {"release": "2.28"},
    }
)


@pytest.fixture
def promised(tmp_path: Path) -> Promised:
    """A host whose lock is there to be read."""
    lock: HostLock = sealed_host(SPEC, {"debian-12/amd64": LOCK})
    write_host_lock(tmp_path / "host.lock.yaml", lock)
    text = json.dumps(
        {
            "host": "n1",
            "lock_file": str(tmp_path / "host.lock.yaml"),
            "target": "debian-12/amd64",
            "connection": {
                **dict.fromkeys(("address", "user", "key", "arguments", "become_password"), ""),
                **{"kind": "local", "port": 0, "password": "", "become_method": "sudo"},
            },
        }
    )
    return Promised.model_validate_json(text)


@pytest.mark.parametrize(
    ("releases", "error"), [([], None), (["13.3"], Broken), (["13.9"], Undecided)]
)
def test_the_driver_must_run_what_every_image_compiles(
    promised: Promised, releases: list[str], error: type[Outcome] | None
) -> None:
    wanted = CudaPromise(state="present", toolkit=True, image_releases=releases)
    if error is None:
        cuda.test_the_loaded_driver_runs_what_these_releases_compile(machine(), promised, wanted)
        return
    with pytest.raises(error):
        cuda.test_the_loaded_driver_runs_what_these_releases_compile(machine(), promised, wanted)


def test_the_toolkit_must_be_the_locked_release(promised: Promised) -> None:
    wanted = CudaPromise(state="present", toolkit=True, image_releases=[])
    check = cuda.test_the_toolkit_is_the_locked_release
    check(GOOD, promised, wanted)
    path = "/usr/local/cuda-13.2/version.json"
    for text in (None, '{"cuda": {"version": "13.20.1"}}'):
        with pytest.raises(Broken):
            check(with_file(path, text), promised, wanted)
    with pytest.raises(NotApplicable):
        check(GOOD, promised, wanted.model_copy(update={"toolkit": False}))


@pytest.mark.parametrize("role", sorted(LEFT))
def test_a_role_that_was_undone_leaves_nothing(promised: Promised, role: str) -> None:
    clean = FakeHost()
    owned.test_nothing_of_the_role_is_left(clean, role)
    for path in LEFT[role]:
        with pytest.raises(Broken, match="still there"):
            owned.test_nothing_of_the_role_is_left(FakeHost(files={path: "x"}), role)


def test_a_small_window_is_broken_and_names_the_card() -> None:
    huge = PCIE.model_copy(update={"bar1_mib": 1 << 30})
    small = changed(
        blackwell(1), files={"/sys/bus/pci/devices/0000:01:00.0/resource": _window(256)}
    )
    with pytest.raises(Broken, match=r"0000:01:00\.0 has 256 MiB"):
        pcie.test_every_card_has_a_window_as_large_as_asked_for(facts(small), huge)
    fits = PCIE.model_copy(update={"bar1_mib": 256})
    pcie.test_every_card_has_a_window_as_large_as_asked_for(facts(small), fits)


def _window(mib: int) -> str:
    """A device's `resource` file whose second line is BAR1."""
    end = 0x10000000 + mib * (1 << 20) - 1
    return f"0x1000 0x1fff 0x0\n0x0000000010000000 {end:#018x} 0x000000000014220c\n"


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
    assert f"{tree}/bin has mode 0775" in loose(tree / "bin" / "tool")
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


def test_every_check_of_every_role_gets_what_it_asks_for(
    promised: Promised, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_testinfra", lambda *_: GOOD)
    roles = Roles(
        nvidia_repository=keyed(REPOSITORY, key),
        nvidia_driver=DRIVER,
        cuda=CudaPromise(state="present", toolkit=True, image_releases=[]),
        pcie=PCIE,
        nccl=NCCL,
        container_runtime=keyed(RUNTIME, key),
        host_tuning=TUNING,
        registry=REGISTRY,
        weights=weights_with(key),
    )
    host = promised.model_copy(update={"roles": roles})
    rows = judge_promises(host, Remote(host.connection), machine())
    checks = [c for module in MODULES.values() for c in checks_in(module)]
    # of driver, toolkit and container toolkit: the library of NCCL is not asked for
    parts = 3 * len(checks_in(pins))
    assert len(rows) == len(checks) + len(Roles.model_fields) + parts
    assert [f"{r.promise}: {r.why}" for r in rows if "Error" in r.why] == []
    assert {r.role for r in rows} == set(MODULES)
    only = judge_promises(host, Remote(host.connection), machine(), ["pcie"])
    assert {r.role for r in only} == {"host", "pcie"}
