"""The hosts' spec: a driver branch, a CUDA release, a container toolkit, NCCL."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from pipeline.core.errors import LockMissing
from pipeline.core.model import FILE_VERSION, Frozen, Name, canonical_json, sha256_of
from pipeline.core.yaml_file import read_yaml
from pipeline.images.spec.checkout import Checkout

# One line of an inventory: which system, which processor.
Target = Annotated[
    str, StringConstraints(pattern=r"^(ubuntu-24\.04|debian-12|debian-13)/(amd64|arm64)$")
]
Release = Annotated[str, StringConstraints(pattern=r"^\d{1,3}(\.\d{1,3}){1,3}$")]
# The toolkit is for compiling at run time, and the engines' wheels are of CUDA 13.
CudaRelease = Annotated[str, StringConstraints(pattern=r"^13\.\d{1,2}$")]
# Earlier ones do not regenerate CDI files after a driver change where modules are compressed.
OLDEST_TOOLKIT = "1.18.2"


class DriverSpec(Frozen):
    """The driver's branch; its newest version unless one is named."""

    # R570 is the first branch with the cards of sm_120
    branch: Annotated[int, Field(ge=570, le=9999)]
    version: Release | None = None
    packages: list[Name] | None = None

    @model_validator(mode="after")
    def _version_is_of_the_branch(self) -> DriverSpec:
        if self.version is not None and not self.version.startswith(f"{self.branch}."):
            raise ValueError(f"version {self.version} is not of branch {self.branch}")
        return self


class HostCudaSpec(Frozen):
    """The toolkit's release, and the oldest driver branch that runs what each release compiles."""

    release: CudaRelease
    oldest_branches: dict[CudaRelease, Annotated[int, Field(ge=570)]]


class ToolkitSpec(Frozen):
    """NVIDIA's container toolkit: this version or a newer one."""

    at_least: Release

    @model_validator(mode="after")
    def _is_not_too_old(self) -> ToolkitSpec:
        given, oldest = (tuple(map(int, r.split("."))) for r in (self.at_least, OLDEST_TOOLKIT))
        if given < oldest:
            raise ValueError(f"{self.at_least} is older than {OLDEST_TOOLKIT}")
        return self


class NcclSpec(Frozen):
    """NCCL's release, in its newest build for the CUDA release."""

    release: Release


class HostSpec(Frozen):
    """What all hosts have to have."""

    format: Annotated[Literal[1], FILE_VERSION] = 1
    targets: Annotated[list[Target], Field(min_length=1)]
    driver: DriverSpec
    cuda: HostCudaSpec
    container_toolkit: ToolkitSpec
    nccl: NcclSpec

    @model_validator(mode="after")
    def _driver_runs_the_toolkit(self) -> HostSpec:
        oldest = self.cuda.oldest_branches.get(self.cuda.release)
        if oldest is None:
            raise ValueError(f"cuda.oldest_branches does not name {self.cuda.release}")
        # minor-version compatibility does not cover PTX that is compiled at run time:
        # https://github.com/NVIDIA/nvbandwidth/issues/61
        if self.driver.branch < oldest:
            raise ValueError(
                f"driver branch {self.driver.branch} cannot run what CUDA {self.cuda.release} "
                f"compiles at run time; that needs {oldest} or newer"
            )
        return self

    def digest(self) -> str:
        """The digest by which a lock names its spec."""
        return sha256_of(canonical_json(self.model_dump()))


def read_host_spec(checkout: Checkout) -> HostSpec:
    """The spec of this checkout."""
    path = checkout.root / "lockfiles" / "host.yaml"
    if not path.exists():
        raise LockMissing(
            "lockfiles/host.yaml does not exist",
            "Restore it with `git checkout lockfiles/host.yaml`.",
        )
    return read_yaml(path, HostSpec)
