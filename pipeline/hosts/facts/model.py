"""A machine at one time. Every field has a value, or the reason why it has none."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from pipeline.core.known import Known, Unknown, unknown
from pipeline.core.model import FILE_VERSION, Count, Frozen

# A field that changes by itself: a difference does not count as drift.
VOLATILE: dict[str, Any] = {"volatile": True}
# Kernels keep some MiB more or less for themselves; a dead memory module is far more.
SAME_MEMORY = 0.01
NEARLY: dict[str, Any] = {"within": SAME_MEMORY}


IommuMode: TypeAlias = Literal["off", "passthrough", "translated"]


class Link(Frozen):
    """A card's PCIe link. An idle card lowers its generation by itself."""

    generation: Known[Count] = Field(json_schema_extra=VOLATILE)
    generation_max: Known[Count]  # of card and slot together
    generation_device_max: Known[Count]  # of the card alone
    width: Known[Count]
    width_max: Known[Count]
    replays: Known[Count] = Field(json_schema_extra=VOLATILE)  # a riser or cable that is at fault


class Power(Frozen):
    """What a card may draw, and draws."""

    limit_w: Known[float]
    default_w: Known[float]
    min_w: Known[float]
    max_w: Known[float]
    draw_w: Known[float] = Field(json_schema_extra=VOLATILE)


class Clocks(Frozen):
    """How fast a card may run, and runs."""

    sm_mhz: Known[Count] = Field(json_schema_extra=VOLATILE)
    memory_mhz: Known[Count] = Field(json_schema_extra=VOLATILE)
    sm_max_mhz: Known[Count]
    memory_max_mhz: Known[Count]


class EccErrors(Frozen):
    """Errors in a card's memory."""

    uncorrectable_now: Known[Count]
    uncorrectable_ever: Known[Count]
    remapped_failure: Known[bool]


class Gpu(Frozen):
    """One card as its driver reports it."""

    index: Count
    address: Known[str]
    name: Known[str]
    architecture: Known[str]
    compute_capability: Known[str]
    uuid: Known[str]
    serial: Known[str]
    vbios: Known[str]
    memory_bytes: Known[Count]
    bar1_bytes: Known[Count]
    persistence: Known[bool]
    display_active: Known[bool]
    mig: Known[bool]
    ecc: Known[bool]
    ecc_errors: EccErrors
    recovery_action: Known[str]
    # reasons of nvidia-smi other than idle, such as hw_thermal_slowdown
    slowed_by: Known[list[str]] = Field(json_schema_extra=VOLATILE)
    link: Link
    power: Power
    clocks: Clocks


class Topology(Frozen):
    """How cards see each other: `0-1: PIX`; what the driver claims of peer-to-peer: `0-1: OK`."""

    links: Known[dict[str, str]]
    # only a claim: it is OK also where the first all_reduce hangs (NVIDIA/nccl#2079)
    peers_claimed: Known[dict[str, str]]


class Driver(Frozen):
    """The kernel modules and their parameters."""

    version: Known[str]
    cuda: Known[str]
    is_open: Known[bool]
    modules: Known[list[str]]
    parameters: Known[dict[str, str]]
    # From /proc/driver/nvidia/params: sysfs shows it empty even where it is set.
    registry: Known[dict[str, str]]
    hmm_disabled: Known[bool]  # uvm_disable_hmm of nvidia_uvm


class PciGpu(Frozen):
    """An NVIDIA display device on the bus, whether a driver has it or not."""

    address: str
    device: Known[str]
    numa_node: Known[int]
    width: Known[Count]
    width_max: Known[Count]
    bar1_bytes: Known[Count]
    bar1_base: Known[Count] = unknown("was not recorded")  # from 4 GiB on: Above 4G Decoding is on
    # the largest window that the card offers (Resizable BAR); 0: its window has one size
    rebar_max_bytes: Known[Count] = unknown("was not recorded")
    iommu_group: Known[str]
    aspm: Known[str]
    bridges: list[str]  # from the card upwards


class Bridge(Frozen):
    """A bridge above a card. ACS redirection sends card-to-card traffic through the root."""

    address: str
    has_acs: Known[bool]
    acs_control: Known[str]  # the register, such as 0x001d
    acs_redirect: Known[bool]
    aspm: Known[str]


class Pci(Frozen):
    """The bus between the cards."""

    iommu: Known[IommuMode]
    aspm_policy: Known[str]
    gpus: list[PciGpu]
    bridges: list[Bridge]


class Kernel(Frozen):
    """The running kernel."""

    release: Known[str]
    command_line: Known[str]
    swappiness: Known[Count]
    numa_balancing: Known[Count]
    memlock: Known[str]  # bytes, or unlimited
    shm_bytes: Known[Count]


class Cpu(Frozen):
    """The processors."""

    name: Known[str]
    vendor: Known[str]
    family: Known[Count]
    model: Known[Count]
    sockets: Known[Count]
    cores: Known[Count]
    threads: Known[Count]
    microcode: Known[str]
    governors: Known[list[str]]  # each that some processor has
    numa_nodes: Known[dict[str, str]]


class Disk(Frozen):
    """One disk and its file systems."""

    name: str
    model: Known[str]
    size_bytes: Count
    rotating: bool
    file_systems: dict[str, str]  # mount point: kind


class Software(Frozen):
    """What is installed beside the driver."""

    os: Known[str]
    docker: Known[str]
    podman: Known[str]
    container_toolkit: Known[str]
    cuda_toolkit: Known[str]
    nccl: Known[list[str]]
    nccl_conf: Known[str]


class Xid(Frozen):
    """A kind of error that a card has reported, and how often."""

    code: Count
    address: str
    times: Count
    last_message: str


class HostFacts(Frozen):
    """A machine at one time: what a number measured on it depends on."""

    version: Annotated[Literal[1], FILE_VERSION] = 1
    host: str  # a name chosen for it, or a digest of its machine id
    taken_at: Count = Field(json_schema_extra=VOLATILE)
    board: Known[str]
    bios: Known[str]
    memory_bytes: Known[Count] = Field(json_schema_extra=NEARLY)
    gpus: Known[list[Gpu]]
    topology: Topology
    driver: Driver
    pci: Pci
    kernel: Kernel
    cpu: Cpu
    disks: Known[list[Disk]]
    software: Software
    xids: Known[list[Xid]]
    # why the role `health` took it out of service; none: it did not, or is not there
    out_of_service: str | None = Field(default=None, json_schema_extra=VOLATILE)


def gpus_of(facts: HostFacts) -> list[Gpu]:
    """The cards that the driver reports."""
    return [] if isinstance(facts.gpus, Unknown) else facts.gpus
