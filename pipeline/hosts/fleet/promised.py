"""What each role promises a host, as the roles read the inventory (ansible/promises.yml)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ValidationError

from pipeline.core.errors import FleetUnready
from pipeline.core.model import FILE_VERSION, Frozen

State: TypeAlias = Literal["present", "absent"]


class HostConnection(Frozen):
    """How to reach a host and become root on it."""

    kind: str = "ssh"
    address: str
    port: int = 0  # empty fields: as ~/.ssh/config has it
    user: str = ""
    key: str = ""
    arguments: str = ""
    password: str = ""  # of SSH itself; empty where a key or an agent lets us in
    become_method: str = "sudo"
    become_password: str = ""


class RolePromise(Frozen):
    """What every role promises: whether it is on the host."""

    state: State


class RepositoryPromise(RolePromise):
    """The apt source, trusted by its key only."""

    url: str
    suite: str
    components: list[str]
    key: str  # on the controller
    key_place: str
    # where the host reaches no archive of its own system
    system_url: str = ""
    system_suite: str = ""
    system_components: list[str] = []
    system_key: str = ""


class DriverPromise(RolePromise):
    """The locked driver with open kernel modules."""

    headers: str


class CudaPromise(RolePromise):
    """The toolkit, and images that the driver must be new enough for."""

    toolkit: bool
    image_releases: list[str]


class PciePromise(RolePromise):
    """Settings of the bus, by the host's profile."""

    cmdline: list[str]
    module_lines: list[str]
    iommu: Literal["keep", "pt", "off"]
    acs_off: bool
    aspm_off: bool
    hmm_off: bool
    p2p_keys: str  # for NVreg_RegistryDwords; empty: the driver decides
    bar1_mib: int  # 0: any size will do
    bios: str = ""  # the firmware's version; empty: any


class NcclPromise(RolePromise):
    """NCCL's settings and library."""

    library: bool
    settings: dict[str, Any]
    container_settings: dict[str, Any]  # with LD_PRELOAD of the patched library, if any
    patched: str  # on the controller
    patched_at: str


class RuntimePromise(RolePromise):
    """Docker or Podman, CDI, limits and a private registry."""

    engine: Literal["docker", "podman"]
    packages: list[str]  # any of them
    settings: dict[str, Any]  # of Docker's daemon.json
    limits: str  # the text of Podman's file
    certs: str
    registry: str
    registry_ca: str  # on the controller
    login_sha256: str  # the login itself stays in the vault


class TuningPromise(RolePromise):
    """Kernel knobs, governor, power, time, updates."""

    sysctls: dict[str, Any]
    governor: Literal["keep", "performance"]
    time_sync: bool
    power_limit_w: int  # 0: left alone
    gpu_clocks_mhz: list[int] = []  # least and most; empty: left alone
    memory_clocks_mhz: list[int] = []
    keep_driver: bool
    files: dict[str, str]
    gone: list[str]  # files of settings that are not asked for
    swap: Literal["keep", "off"] = "keep"


class RegistryPromise(RolePromise):
    """A private registry with TLS and passwords."""

    name: str
    port: int
    storage: str
    home: str
    passwords_sha256: str
    mirror_of: str = ""  # the registry that a second one here fetches from; empty: there is none
    mirror_port: int = 5001
    mirror_storage: str = "/var/lib/docker-registry-mirror"
    objects_port: int = 0  # of a server of compiled objects; 0: there is none
    objects_storage: str = "/var/lib/sm120-objects"
    certificate: str = ""  # on the controller, as the next one; empty: the role made them
    ca: str = ""


class WeightsPromise(RolePromise):
    """`sm120 weights` on the host, locked sets, a nightly scrub."""

    root: str
    home: str
    command: str
    wheel: str  # on the controller, as the next two
    requirements: str
    locks: str
    sets: list[str]
    device: str  # empty: the folder needs no disk of its own
    scrub_days: int
    scrub_at: str


class SlurmPromise(RolePromise):
    """A part in a Slurm cluster: the queue, a node, or both."""

    is_head: bool
    is_node: bool
    cluster: str
    partition: str
    nodes: int  # of the whole cluster
    key_sha256: str  # the key itself stays in the vault


class EngineRecord(Frozen):
    """One version of a recipe on a host: image, recipe and unit, as `host deploy` ordered it.

    The host keeps the same as its record, with the moment and the smoke test that it passed.
    """

    format: Annotated[Literal[1], FILE_VERSION] = 1
    recipe: str
    recipe_digest: str
    recipe_body: dict[str, Any]
    image: str  # in the registry, by digest
    image_digest: str
    image_ids: list[str]  # by which container engines may name it
    layers: list[str]  # their diffIDs, from the bottom
    platform: str
    runtime: Literal["docker", "podman"]
    name: str  # of the container and of the service
    unit: str
    unit_path: str
    port: int
    model: str
    weights: str  # a folder of the host; empty where the engine fetches them
    weights_digest: str | None


class EnginePromise(RolePromise):
    """Recipes that were deployed, each in the version that passed."""

    engines: list[EngineRecord]


class HealthPromise(RolePromise):
    """A look at the kernel's log that takes the host out of service after a fatal Xid."""

    program: str
    source: str  # of the program, on the controller
    files: dict[str, str]  # units, by path


class MetricsPromise(RolePromise):
    """The node exporter, and the GPUs' numbers that it serves."""

    program: str
    source: str  # of the program, on the controller
    files: dict[str, str]  # units and drop-ins, by path
    listen: str
    every_s: int


class Roles(Frozen):
    """The promises of every role that the host has."""

    nvidia_repository: RepositoryPromise | None = None
    nvidia_driver: DriverPromise | None = None
    cuda: CudaPromise | None = None
    pcie: PciePromise | None = None
    nccl: NcclPromise | None = None
    container_runtime: RuntimePromise | None = None
    host_tuning: TuningPromise | None = None
    registry: RegistryPromise | None = None
    weights: WeightsPromise | None = None
    slurm: SlurmPromise | None = None
    engine: EnginePromise | None = None
    metrics: MetricsPromise | None = None
    health: HealthPromise | None = None

    def states(self) -> dict[str, State]:
        """The state of each promised role, by name."""
        roles = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: role.state for name, role in roles.items() if role is not None}


class Promised(Frozen):
    """One host: how to reach it and what it was promised, or why Ansible did not reach it."""

    host: str
    connection: HostConnection
    unreached: str | None = None
    lock_file: Path | None = None
    target: str = ""
    roles: Roles = Roles()


def read_promised(path: Path) -> Promised:
    """The file that the play wrote for one host."""
    try:
        return Promised.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        first = str(error).splitlines()
        raise FleetUnready(
            f"{path.stem}: the promises cannot be read: {' '.join(first[:2])}"
        ) from error
