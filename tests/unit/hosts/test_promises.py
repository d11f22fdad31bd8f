"""Every promise: kept on a good host, and broken on hosts that differ in one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import WeightsDamaged, WeightsUnknown
from pipeline.hosts.fleet.promised import (
    CudaPromise,
    Promised,
    RepositoryPromise,
    Roles,
    RuntimePromise,
)
from pipeline.hosts.fleet.remote import Remote
from pipeline.hosts.promises import container_runtime as runtime
from pipeline.hosts.promises import host as base
from pipeline.hosts.promises import host_tuning as tuning
from pipeline.hosts.promises import nccl, owned, pcie, registry, run, weights
from pipeline.hosts.promises import nvidia_driver as driver
from pipeline.hosts.promises import nvidia_repository as repository
from pipeline.hosts.promises import pinned_packages as pins
from pipeline.hosts.promises.checks import Broken
from pipeline.hosts.promises.run import MODULES, checks_in, judge_promises
from tests.unit.hosts.fake_host import FakeHost
from tests.unit.hosts.good_host import (
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
    SYSTEM_SOURCE,
    TUNING,
    UNIT,
    WHO,
    machine,
    saying,
    unit,
    with_file,
)
from tests.unit.hosts.promise_values import changed_unit, keyed, weights_with
from tests.unit.hosts.test_engine_promises import WANTED as ENGINES
from tests.unit.hosts.test_operations_promises import GOOD_OPERATIONS, HEALTH, METRICS
from tests.unit.hosts.test_slurm_promises import GOOD as CLUSTER
from tests.unit.hosts.test_slurm_promises import HEAD

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
            with_file(SYSTEM_SOURCE, None),
            with_file(SYSTEM_SOURCE, GOOD.files[SYSTEM_SOURCE].replace("bundle", "elsewhere")),
            with_file(SYSTEM_SOURCE, GOOD.files[SYSTEM_SOURCE].replace("debian-", "other-")),
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
    (
        tuning.test_the_clocks_of_the_cards_are_limited_at_each_boot,
        (machine(), TUNING),
        [
            unit("sm120-clocks", False, True),
            # a card refused them
            unit("sm120-clocks", True, False),
            *changed_unit("sm120-clocks.service", OURS_IN)[:2],
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
        registry.test_its_mirror_fetches_from_the_named_registry,
        (REGISTRY,),
        [with_file("/reg/mirror.yml", "x"), with_file("/reg/mirror.yml", "")],
    ),
    (
        registry.test_its_objects_are_for_those_with_a_password,
        (REGISTRY,),
        [with_file("/reg/objects.conf", "x"), with_file("/reg/objects.conf", "")],
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


def test_every_check_of_every_role_gets_what_it_asks_for(
    promised: Promised, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = GOOD
    for other in (CLUSTER, GOOD_OPERATIONS):
        more = {name: getattr(other, name) for name in ("files", "modes", "owners", "units")}
        both = both.but(**more, outputs=other.outputs)
    monkeypatch.setattr(run, "_testinfra", lambda *_: both)
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
        slurm=HEAD,
        engine=ENGINES,
        metrics=METRICS,
        health=HEALTH,
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


MIRROR = """\
rootdirectory: "/mirrored"
addr: ":5001"
path: "/reg/htpasswd"
remoteurl: "https://far.example"
"""
MIRRORED = REGISTRY.model_copy(
    update={"mirror_of": "https://far.example", "mirror_storage": "/mirrored"}
)
HAS_MIRROR = GOOD.but(
    files={"/reg/mirror.yml": MIRROR},
    modes={"/reg/mirror.yml": 0o600},
    units={"sm120-registry-mirror": (True, True)},
)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        (HAS_MIRROR.but(units={"sm120-registry-mirror": (True, False)}), "sm120-registry-mirror"),
        (HAS_MIRROR.but(files={"/reg/mirror.yml": None}), "/reg/mirror.yml"),
        (
            HAS_MIRROR.but(files={"/reg/mirror.yml": MIRROR.replace("far", "evil")}),
            'lacks remoteurl: "https://far.example"',
        ),
        (
            HAS_MIRROR.but(files={"/reg/mirror.yml": MIRROR.replace("htpasswd", "none")}),
            "/reg/mirror.yml lacks path",
        ),
        (HAS_MIRROR.but(modes={"/reg/mirror.yml": 0o644}), "is open to others (0644)"),
        (HAS_MIRROR.but(outputs={"python3 -c": (0, "200\n")}), "it answers 200, not 401"),
    ],
)
def test_a_mirror_that_is_not_as_promised_is_named(host: FakeHost, why: str) -> None:
    registry.test_its_mirror_fetches_from_the_named_registry(HAS_MIRROR, MIRRORED)
    with pytest.raises(Broken) as raised:
        registry.test_its_mirror_fetches_from_the_named_registry(host, MIRRORED)
    assert why in raised.value.why


OBJECTS = "listen 5002 ssl;\nroot /objs;\nauth_basic_user_file /reg/htpasswd;\n"
SHARING = REGISTRY.model_copy(update={"objects_port": 5002, "objects_storage": "/objs"})
FIND_OBJECTS = "find /objs -maxdepth 2"
HAS_OBJECTS = GOOD.but(
    files={"/reg/objects.conf": OBJECTS},
    units={"sm120-objects": (True, True)},
    outputs={FIND_OBJECTS: (0, "")},
)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        (HAS_OBJECTS.but(units={"sm120-objects": (False, True)}), "sm120-objects"),
        (HAS_OBJECTS.but(files={"/reg/objects.conf": None}), "/reg/objects.conf"),
        (
            HAS_OBJECTS.but(files={"/reg/objects.conf": OBJECTS.replace("htpasswd", "none")}),
            "lacks auth_basic_user_file /reg/htpasswd;",
        ),
        (HAS_OBJECTS.but(outputs={"python3 -c": (0, "404\n")}), "it answers 404, not 401"),
        (HAS_OBJECTS.but(outputs={FIND_OBJECTS: (0, "/objs/objects\n")}), "writable by everybody"),
    ],
)
def test_a_server_of_objects_that_is_not_as_promised_is_named(host: FakeHost, why: str) -> None:
    registry.test_its_objects_are_for_those_with_a_password(HAS_OBJECTS, SHARING)
    with pytest.raises(Broken) as raised:
        registry.test_its_objects_are_for_those_with_a_password(host, SHARING)
    assert why in raised.value.why
