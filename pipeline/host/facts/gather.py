"""From a captured machine to its facts."""

from __future__ import annotations

from pipeline.host.facts.kernel import read_driver, read_kernel, read_xids
from pipeline.host.facts.machine import read_disks, read_memory, read_software
from pipeline.host.facts.model import HostFacts, Topology
from pipeline.host.facts.pci import read_pci
from pipeline.host.facts.processor import read_cpu
from pipeline.host.facts.smi import plain_address, read_gpus, read_matrix
from pipeline.host.facts.source import Capture
from pipeline.known import Known, then, unknown
from pipeline.model import sha256_of


def gather(capture: Capture, name: str | None = None) -> HostFacts:
    """All facts; a value that is missing has its reason."""
    capabilities = then(capture.output("nvidia-smi capability"), _capabilities)
    return HostFacts(
        host=name or host_name(capture),
        taken_at=capture.taken_at,
        board=_board(capture),
        bios=capture.text("/sys/class/dmi/id/bios_version"),
        memory_bytes=read_memory(capture),
        gpus=then(capture.output("nvidia-smi"), lambda x: read_gpus(x, capabilities)),
        topology=Topology(
            links=then(capture.output("nvidia-smi topo"), read_matrix),
            peers_claimed=then(
                capture.output("nvidia-smi p2p"), lambda x: read_matrix(x, peers=True)
            ),
        ),
        driver=read_driver(capture),
        pci=read_pci(capture),
        kernel=read_kernel(capture),
        cpu=read_cpu(capture),
        disks=read_disks(capture),
        software=read_software(capture),
        xids=read_xids(capture),
    )


def host_name(capture: Capture) -> str:
    """A name that tells machines apart and reveals nothing: a digest of the machine id."""
    # systemd asks programs not to publish the machine id itself, see machine-id(5)
    identity = capture.text("/etc/machine-id")
    if isinstance(identity, str) and len(identity) >= 32:
        return sha256_of(f"sm120-host:{identity}".encode())
    return "unnamed"


def _capabilities(text: str) -> Known[dict[str, str]]:
    pairs = [line.split(",") for line in text.splitlines() if line.count(",") == 1]
    capabilities = {plain_address(a.strip()): b.strip() for a, b in pairs}
    return capabilities or unknown("nvidia-smi names no compute capability")


def _board(capture: Capture) -> Known[str]:
    vendor, board = (capture.text(f"/sys/class/dmi/id/board_{x}") for x in ("vendor", "name"))
    if not isinstance(board, str):
        return board
    return f"{vendor} {board}" if isinstance(vendor, str) else board
