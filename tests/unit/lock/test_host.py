"""The hosts' lock: exact packages from a signed index, or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.core.errors import (
    IndexBroken,
    LockEdited,
    LockMissing,
    LockStale,
    PipelineError,
    ResolveFailed,
    SignatureInvalid,
    SpecInvalid,
    UnknownPackage,
)
from pipeline.core.yaml_file import read_yaml
from pipeline.hosts.lock import lock_target, read_package_index
from pipeline.hosts.lock_model import (
    TargetLock,
    current_host_lock,
    read_host_lock,
    write_host_lock,
)
from pipeline.hosts.spec import HostSpec
from tests.testbed.apt_repository import (
    DRIVER,
    NEW_DRIVER,
    OLD_DRIVER,
    PLAIN_DRIVER,
    AptRepository,
    StandIn,
    new_repository,
    nvidia_packages,
)
from tests.testbed.signer import Signer, new_old_signer, new_signer
from tests.unit.support import ROOT, Command

UBUNTU, DEBIAN = "ubuntu-24.04/amd64", "debian-12/amd64"


@pytest.fixture(scope="module")
def signer() -> Iterator[Signer]:
    with new_signer("testbed@example.invalid") as key:
        yield key


@pytest.fixture(scope="module")
def stranger() -> Iterator[Signer]:
    with new_signer("stranger@example.invalid") as key:
        yield key


@pytest.fixture
def repository(tmp_path: Path, signer: Signer) -> AptRepository:
    return new_repository(tmp_path / "repository", signer, nvidia_packages())


def spec_data(**driver: Any) -> dict[str, Any]:
    """The spec that is shipped, with another driver."""
    data: dict[str, Any] = yaml.safe_load((ROOT / "lockfiles" / "host.yaml").read_text())
    data["driver"] |= driver
    return data


def spec_for(**driver: Any) -> HostSpec:
    return HostSpec.model_validate(spec_data(**driver))


def locked(repository: AptRepository, target: str = DEBIAN, **driver: Any) -> TargetLock:
    index = read_package_index(
        lambda path, most_bytes: (repository.root / path).read_bytes(),
        repository.keyring,
        target.partition("/")[2],
    )
    return lock_target(spec_for(**driver), target, index)


def driver_pins(lock: TargetLock) -> dict[str, str]:
    return {pin.name: pin.version for pin in lock.driver.debs}


def test_the_spec_that_is_shipped_is_valid() -> None:
    assert read_yaml(ROOT / "lockfiles" / "host.yaml", HostSpec).driver.branch == 580


def test_ubuntu_gets_the_names_with_the_branch_and_the_newest_version_of_it(
    repository: AptRepository,
) -> None:
    full = f"{NEW_DRIVER}-0ubuntu1"
    assert driver_pins(locked(repository, UBUNTU)) == {
        "nvidia-driver-580-open": full,
        "nvidia-dkms-580-open": full,
        "nvidia-kernel-source-580-open": full,
        "nvidia-utils-580": full,
    }


@pytest.mark.parametrize(("branch", "version"), [(580, DRIVER), (590, PLAIN_DRIVER)])
def test_names_without_a_branch_still_give_one_branch_in_all_packages(
    repository: AptRepository, branch: int, version: str
) -> None:
    found = driver_pins(locked(repository, DEBIAN, branch=branch))
    assert found == dict.fromkeys(
        ("nvidia-open", "nvidia-kernel-open-dkms", "nvidia-driver-cuda"), f"{version}-1"
    )


def test_ubuntu_drops_the_branch_from_its_names_at_r590(repository: AptRepository) -> None:
    assert locked(repository, UBUNTU, branch=590).driver.packages == ["nvidia-open"]


def test_one_exact_version_can_be_asked_for(repository: AptRepository) -> None:
    found = locked(repository, UBUNTU, version=OLD_DRIVER)
    assert set(driver_pins(found).values()) == {f"{OLD_DRIVER}-0ubuntu1"}


def test_toolkit_cuda_and_nccl_are_those_that_go_together(repository: AptRepository) -> None:
    pins = locked(repository).pins()
    assert pins["nvidia-container-toolkit-base"].version == "1.18.2-1"
    assert pins["libnccl2"].version == "2.28.9-1+cuda13.0"
    assert pins["cuda-toolkit-13-0"].version == "13.0.2-1"
    assert pins["cuda-nvcc-13-0"].path == "cuda-nvcc-13-0_13.0.88-1_all.deb"


def test_a_library_built_for_two_cuda_releases_is_taken_in_the_build_for_ours(
    tmp_path: Path, signer: Signer
) -> None:
    others = [p for p in nvidia_packages() if p.name != "libnccl2"]
    builds = ("13.1", "12.9", "13.0", "13.10", "113.0")
    offered = [StandIn("libnccl2", f"2.28.9-1+cuda{release}") for release in builds]
    newer = [StandIn("libnccl2", "2.29.2-1+cuda13.0"), StandIn("libnccl2", "2.28.9-1")]
    repository = new_repository(tmp_path / "two", signer, [*others, *newer, *offered])
    assert locked(repository).pins()["libnccl2"].version == "2.28.9-1+cuda13.0"


@pytest.mark.parametrize(
    "version", ["2.28.9-1+cuda12.9", "2.28.9-1+cuda13.1", "2.29.2-1+cuda13.0", "2.28.9-1"]
)
def test_a_library_for_another_cuda_or_of_another_release_alone_is_no_answer(
    tmp_path: Path, signer: Signer, version: str
) -> None:
    others = [p for p in nvidia_packages() if p.name != "libnccl2"]
    repository = new_repository(tmp_path / "other", signer, [*others, StandIn("libnccl2", version)])
    with pytest.raises(ResolveFailed, match=r"libnccl2: no version satisfies"):
        locked(repository)


def test_what_only_the_system_has_is_left_to_the_system(repository: AptRepository) -> None:
    assert not {"dkms", "libc6"} & locked(repository, UBUNTU).pins().keys()


def test_a_name_that_is_only_provided_leads_to_its_provider(tmp_path: Path, signer: Signer) -> None:
    packages = [
        *(p for p in nvidia_packages() if p.name != "nvidia-open"),
        StandIn("nvidia-open", "580.95.05-1", "nvidia-kernel-module"),
        StandIn("nvidia-kernel-real", "580.95.05-1", provides="nvidia-kernel-module"),
    ]
    found = locked(new_repository(tmp_path / "other", signer, packages))
    assert "nvidia-kernel-real" in driver_pins(found)


@pytest.mark.parametrize(
    ("driver", "error", "words"),
    [
        ({"branch": 585}, ResolveFailed, "no version satisfies the spec"),
        ({"branch": 580, "version": "580.1.1"}, ResolveFailed, "no version satisfies"),
        ({"packages": ["nvidia-opn"]}, UnknownPackage, "has no package nvidia-opn"),
    ],
)
def test_a_spec_that_the_repository_cannot_answer_is_said_to_be_one(
    repository: AptRepository, driver: dict[str, Any], error: type[PipelineError], words: str
) -> None:
    with pytest.raises(error, match=words):
        locked(repository, DEBIAN, **driver)


def test_a_driver_that_cannot_run_what_the_toolkit_compiles_is_refused_with_the_branch() -> None:
    with pytest.raises(ValueError, match="that needs 580 or newer"):
        spec_for(branch=570)


def test_two_parts_that_need_two_versions_of_one_package_are_refused(
    tmp_path: Path, signer: Signer
) -> None:
    packages = [
        *nvidia_packages(),
        StandIn("shared", "1"),
        StandIn("shared", "2"),
        StandIn("cuda-toolkit-13-0", "13.0.9-1", "shared (= 1)"),
        StandIn("libnccl2", "2.28.99-1+cuda13.0", "shared (= 2)"),
    ]
    with pytest.raises(ResolveFailed, match="shared"):
        locked(new_repository(tmp_path / "other", signer, packages))


@pytest.mark.parametrize(
    "change",
    [
        {"driver": {"branch": 580, "version": "590.48.01"}},
        {"driver": {"branch": 580, "flavour": "open"}},
        {"container_toolkit": {"at_least": "1.17.0"}},
        {"container_toolkit": {"at_least": "latest"}},
        {"cuda": {"release": "12.8", "oldest_branches": {}}},
        {"cuda": {"release": "13.4", "oldest_branches": {"13.0": 580}}},
        {"cuda": {"release": "13.1", "oldest_branches": {"13.1": 590}}},
        {"targets": ["ubuntu-22.04/amd64"]},
        {"targets": []},
    ],
)
def test_a_spec_that_cannot_work_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "host.yaml"
    path.write_text(yaml.safe_dump(spec_data() | change))
    with pytest.raises(SpecInvalid):
        read_yaml(path, HostSpec)


def test_an_index_by_a_stranger_is_refused(repository: AptRepository, stranger: Signer) -> None:
    def get(path: str, most_bytes: int) -> bytes:
        return (repository.root / path).read_bytes()

    with pytest.raises(SignatureInvalid, match="unknown key"):
        read_package_index(get, stranger.keyring, "amd64")


def test_a_tampered_index_is_refused(repository: AptRepository) -> None:
    repository.tamper()
    with pytest.raises(SignatureInvalid, match="changed after it was signed"):
        locked(repository)


def test_packages_that_are_not_those_of_the_signed_index_are_refused(
    repository: AptRepository,
) -> None:
    path = repository.root / "Packages"
    path.write_bytes(path.read_bytes().replace(b"1.18.2", b"1.18.3"))
    with pytest.raises(IndexBroken, match="promises"):
        locked(repository)


def test_a_lock_is_read_back_as_it_was_written(repository: AptRepository, tmp_path: Path) -> None:
    path, again = tmp_path / "host.lock.yaml", tmp_path / "again.lock.yaml"
    targets = {UBUNTU: locked(repository, UBUNTU), DEBIAN: locked(repository)}
    lock = write_host_lock(path, spec_for(), targets)
    assert current_host_lock(path, spec_for()) == lock
    write_host_lock(again, spec_for(), read_host_lock(path).targets)
    assert again.read_text() == path.read_text()


def test_a_lock_that_is_missing_edited_or_stale_is_refused(
    repository: AptRepository, tmp_path: Path
) -> None:
    path = tmp_path / "host.lock.yaml"
    with pytest.raises(LockMissing):
        read_host_lock(path)
    write_host_lock(path, spec_for(), {DEBIAN: locked(repository)})
    with pytest.raises(LockStale) as stale:
        current_host_lock(path, spec_for(branch=590))
    assert "`sm120 host lock --dry-run`" in stale.value.hint
    path.write_text(path.read_text().replace("1.18.2-1", "1.18.3-1"))
    with pytest.raises(LockEdited):
        read_host_lock(path)


@pytest.fixture
def checkout(sm120: Command) -> Path:
    for name in ("images", "lockfiles"):
        (sm120.cwd / name).mkdir()
    (sm120.cwd / "lockfiles" / "host.yaml").write_text(yaml.safe_dump(spec_data()))
    return sm120.cwd


def test_the_command_locks_one_system_after_the_other(
    sm120: Command, checkout: Path, repository: AptRepository
) -> None:
    place = ("--repository", repository.root, "--keyring", repository.keyring)
    assert sm120("host", "lock", "--check").error == "LockMissing"
    assert "8 would change" in sm120("host", "lock", "--target", DEBIAN, *place, "--dry-run").out
    assert sm120("host", "lock", "--check").error == "LockMissing"
    assert "8 changed" in sm120("host", "lock", "--target", DEBIAN, *place).out
    assert "9 changed" in sm120("host", "lock", "--target", UBUNTU, *place).out
    assert "nothing changed" in sm120("host", "lock", "--target", DEBIAN, *place).out
    done = sm120("host", "lock", "--check")
    assert done.out == f"{DEBIAN}: 8 packages, current\n{UBUNTU}: 9 packages, current\n"
    text = (checkout / "lockfiles" / "host.lock.yaml").read_text()
    assert str(repository.root) not in text


def test_pins_of_another_spec_do_not_stay_in_the_lock(
    sm120: Command, checkout: Path, repository: AptRepository
) -> None:
    place = ("--repository", repository.root, "--keyring", repository.keyring)
    sm120("host", "lock", "--target", UBUNTU, *place)
    spec = checkout / "lockfiles" / "host.yaml"
    spec.write_text(yaml.safe_dump(spec_data(branch=590)))
    assert sm120("host", "lock", "--check").error == "LockStale"
    locked = sm120("host", "lock", "--target", DEBIAN, *place)
    assert f"host.yaml changed since {UBUNTU} was locked" in locked.err
    assert "Warning" not in sm120("host", "lock", "--target", DEBIAN, *place).err
    assert UBUNTU not in sm120("host", "lock", "--check").out


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--target", "debian-11/amd64", "--repository", "x", "--keyring", "y"], 10),
        (["--target", DEBIAN], 10),
        (["--check", "--target", UBUNTU], 11),
    ],
)
def test_a_lock_asked_for_in_a_wrong_way_ends_with_a_code_and_a_hint(
    sm120: Command, checkout: Path, args: list[str], code: int
) -> None:
    done = sm120("host", "lock", *args)
    assert done.code == code
    assert len(done.err.strip().splitlines()) == 2


@pytest.fixture(scope="module")
def old_signer() -> Iterator[Signer]:
    """A key like NVIDIA's 3BF863CC: its own signature is SHA-1."""
    with new_old_signer("old@example.invalid") as key:
        yield key


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("target", [UBUNTU, "debian-12/arm64", "debian-13/amd64"])
def test_a_key_bound_by_sha1_and_armored_locks_and_only_debian_13_is_warned_of_it(
    sm120: Command, tmp_path: Path, old_signer: Signer, target: str
) -> None:
    repository = new_repository(tmp_path / "old", old_signer, nvidia_packages())
    key = tmp_path / "3bf863cc.pub"
    key.write_bytes(old_signer.armored())
    place = ("--repository", repository.root, "--keyring", key)
    done = sm120("host", "lock", "--target", target, *place)
    assert done.code == 0, done.err
    warned = f"apt on {target} will refuse this repository: its key {old_signer.fingerprint()}"
    assert (warned in done.err) == target.startswith("debian-13")


@pytest.mark.usefixtures("checkout")
def test_a_key_of_today_is_warned_of_nowhere(sm120: Command, repository: AptRepository) -> None:
    place = ("--repository", repository.root, "--keyring", repository.keyring)
    done = sm120("host", "lock", "--target", "debian-13/amd64", *place)
    assert done.code == 0
    assert "will refuse" not in done.err
