"""Promises that are judged by a host's facts, by its lock, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.fleet.promised import CudaPromise, Promised
from pipeline.hosts.promises import cuda, owned, pcie
from pipeline.hosts.promises import host as base
from pipeline.hosts.promises import host_tuning as tuning
from pipeline.hosts.promises import nvidia_driver as driver
from pipeline.hosts.promises import nvidia_repository as repository
from pipeline.hosts.promises.checks import Broken, NotApplicable, Outcome, Undecided
from pipeline.hosts.promises.owned import FILES
from tests.unit.hosts.fake_host import FakeHost
from tests.unit.hosts.good_host import (
    CMDLINE,
    GOOD,
    LOADED,
    LOCK,
    PCIE,
    REPOSITORY,
    TUNING,
    machine,
    saying,
    with_file,
)
from tests.unit.hosts.machines import ACS_ON, blackwell, changed, facts, h200
from tests.unit.hosts.promise_values import keyed

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


@pytest.mark.parametrize("role", sorted(FILES))
def test_a_role_that_was_undone_leaves_nothing(promised: Promised, role: str) -> None:
    clean = FakeHost()
    owned.test_nothing_of_the_role_is_left(clean, role)
    for path in FILES[role].left:
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
