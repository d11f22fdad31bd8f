"""A signed apt repository of stand-in packages that are named like NVIDIA's.

The packages hold no driver and no toolkit: they let apt, dpkg, pins and holds do real work.
"""

from __future__ import annotations

import base64
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.testbed.deb_file import Item, deb_bytes, folder, tar
from tests.testbed.nodes import Node
from tests.testbed.signer import Signer

OLD_DRIVER, DRIVER, NEW_DRIVER = "580.82.07", "580.95.05", "580.105.08"
_UNITS = (".service", ".path")
PLAIN_DRIVER = "590.48.01"
# as the toolkit's own, but for the file it watches
CDI_PATH = b"""[Path]
PathChanged=/usr/lib/stand-in/nvidia-version
[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class StandIn:
    """One package: its name, version, what it needs and the few files it brings."""

    name: str
    version: str
    depends: str = ""
    files: Sequence[Item] = ()
    provides: str = ""
    conflicts: str = ""
    architecture: str = "all"

    @property
    def control(self) -> str:
        fields = {
            "Package": self.name,
            "Version": self.version,
            "Architecture": self.architecture,
            "Maintainer": "Testbed <testbed@example.invalid>",
            "Depends": self.depends,
            "Provides": self.provides,
            "Conflicts": self.conflicts,
            "Description": f"stand-in for {self.name}",
        }
        return "".join(f"{key}: {value}\n" for key, value in fields.items() if value)


@dataclass
class AptRepository:
    """A folder that is served as a flat repository, and the key that signs it."""

    root: Path
    signer: Signer
    url: str = ""
    stanzas: list[str] = field(default_factory=list)

    @property
    def keyring(self) -> Path:
        return self.signer.keyring

    def add(self, package: StandIn) -> None:
        """Write a package's .deb and remember its stanza."""
        folders = sorted({str(p) for i in package.files for p in Path(i.name).parents} - {"."})
        items = [folder("./"), *(folder(f"./{name}/") for name in folders)]
        files = [Item(f"./{i.name}", i.content, i.flag, i.mode, i.target) for i in package.files]
        data = deb_bytes(tar([*items, *files]), package.control, scripts_of(package))
        self.add_file(
            f"{package.name}_{package.version}_{package.architecture}.deb", data, package.control
        )

    def add_file(self, name: str, data: bytes, control: str) -> None:
        """Take in a .deb that exists, with its control text."""
        (self.root / name).write_bytes(data)
        sha256 = hashlib.sha256(data).hexdigest()
        place = f"Filename: ./{name}\nSize: {len(data)}\nSHA256: {sha256}\n"
        self.stanzas.append(control.rstrip("\n") + "\n" + place)

    def take(self, name: str, stanzas: Mapping[str, str]) -> None:
        """Offer a real package whose file lies in the folder already."""
        self.stanzas.append(stanzas[name])
        self.publish()

    def publish(self) -> None:
        """Write and sign the index over everything added so far."""
        packages = "\n".join(self.stanzas).encode()
        (self.root / "Packages").write_bytes(packages)
        date = format_datetime(datetime.now(UTC), usegmt=True)
        row = f" {hashlib.sha256(packages).hexdigest()} {len(packages)} Packages"
        text = f"Origin: testbed\nLabel: testbed\nDate: {date}\nSHA256:\n{row}\n"
        (self.root / "InRelease").write_bytes(self.signer.sign(text))

    def tamper(self) -> None:
        """Change a package and its index as somebody without the key would."""
        packages = (self.root / "Packages").read_bytes()
        (self.root / "Packages").write_bytes(packages.replace(b"stand-in for", b"trojan horse"))
        signed = (self.root / "InRelease").read_bytes()
        digest = hashlib.sha256(packages).hexdigest().encode()
        forged = hashlib.sha256((self.root / "Packages").read_bytes()).hexdigest().encode()
        (self.root / "InRelease").write_bytes(signed.replace(digest, forged))


@contextmanager
def served(repository: AptRepository, address: str) -> Iterator[str]:
    """Serve the repository on an address of this machine; yields where."""
    handler = partial(_Quiet, directory=str(repository.root))
    server = ThreadingHTTPServer((address, 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    repository.url = f"http://{address}:{server.server_address[1]}"
    try:
        yield repository.url
    finally:
        server.shutdown()
        server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    """A file server that keeps its requests to itself."""

    def log_message(self, format: str, *args: object) -> None:
        return


def new_repository(root: Path, signer: Signer, packages: Sequence[StandIn]) -> AptRepository:
    """A repository of these packages, published."""
    root.mkdir(parents=True)
    repository = AptRepository(root, signer)
    for package in packages:
        repository.add(package)
    repository.publish()
    return repository


def give_source(node: Node, repository: AptRepository) -> None:
    """Make the repository the node's own archive, with no index read, as in a fresh image."""
    key = base64.b64encode(repository.keyring.read_bytes()).decode()
    place = "/usr/share/keyrings/system.gpg"
    source = f"Types: deb\nURIs: {repository.url}\nSuites: ./\nSigned-By: {place}\n"
    node.shell(
        f"mkdir -p /usr/share/keyrings && echo '{key}' | base64 -d > {place} && echo '{source}' > "
        "/etc/apt/sources.list.d/system.sources && apt-get --quiet update"
        # what a fresh Debian or Ubuntu keeps its time with
        " && apt-get --quiet --yes install systemd-timesyncd"
        " && rm --recursive /var/lib/apt/lists/*"
    )


def nvidia_packages() -> list[StandIn]:
    """Stand-ins under NVIDIA's names, in both schemes and several versions."""
    found = []
    for version in (OLD_DRIVER, DRIVER, NEW_DRIVER):
        found += branch_named_driver(version)
    for version in (DRIVER, PLAIN_DRIVER):
        found += plain_driver(version)
    cuda_files = [Item("usr/local/cuda-13.0/version.json", b'{"cuda": {"version": "13.0.2"}}\n')]
    toolkit = "nvidia-container-toolkit"
    return [
        *found,
        StandIn("cuda-toolkit-13-0", "13.0.2-1", "cuda-nvcc-13-0 (>= 13.0.88)", cuda_files),
        StandIn("cuda-nvcc-13-0", "13.0.88-1"),
        StandIn("cuda-toolkit-13-1", "13.1.0-1"),
        StandIn("libnccl2", "2.27.7-1+cuda12.9"),
        StandIn("libnccl2", "2.28.9-1+cuda13.0"),
        StandIn(toolkit, "1.17.8-1", "nvidia-container-toolkit-base (= 1.17.8-1)"),
        StandIn("nvidia-container-toolkit-base", "1.17.8-1"),
        StandIn(toolkit, "1.18.2-1", "nvidia-container-toolkit-base (= 1.18.2-1)"),
        StandIn(
            "nvidia-container-toolkit-base",
            "1.18.2-1",
            files=[
                script("usr/bin/nvidia-ctk", 'echo "stand-in: nvidia-ctk $*"'),
                unit("nvidia-cdi-refresh", "oneshot", "/bin/true"),
                Item("usr/lib/systemd/system/nvidia-cdi-refresh.path", CDI_PATH),
            ],
        ),
    ]


def branch_named_driver(version: str) -> list[StandIn]:
    """Ubuntu's names up to R580."""
    full, branch = f"{version}-0ubuntu1", version.partition(".")[0]
    return [
        StandIn(
            f"nvidia-driver-{branch}-open",
            full,
            f"nvidia-dkms-{branch}-open (= {full}), nvidia-utils-{branch} (= {full}), libc6",
        ),
        StandIn(
            f"nvidia-dkms-{branch}-open",
            full,
            f"nvidia-kernel-source-{branch}-open (= {full}), dkms",
        ),
        StandIn(f"nvidia-kernel-source-{branch}-open", full, files=[loaded_at_boot(version)]),
        StandIn(f"nvidia-utils-{branch}", full, files=user_programs(version)),
    ]


def plain_driver(version: str) -> list[StandIn]:
    """The names without a branch: Debian's always, Ubuntu's from R590 on."""
    full = f"{version}-1"
    return [
        StandIn(
            "nvidia-open",
            full,
            f"nvidia-kernel-open-dkms (= {full}), nvidia-driver-cuda (>= {version})",
        ),
        StandIn("nvidia-kernel-open-dkms", full, "dkms", files=[loaded_at_boot(version)]),
        StandIn("nvidia-driver-cuda", full, files=user_programs(version)),
    ]


def loaded_at_boot(version: str) -> Item:
    """What node-init takes for an installed kernel module."""
    return Item("usr/lib/stand-in/nvidia-version", f"{version}\n".encode())


def user_programs(version: str) -> list[Item]:
    """nvidia-smi and the persistence daemon, which know their version and a limit for two cards."""
    rows = "\\n".join(["NVIDIA RTX PRO 6000 Blackwell Server Edition, 98304 MiB, 600.00 W"] * 2)
    answers = {
        "*driver_version*": f"echo {version}",
        "*=power.limit*": "cat /run/limit 2>/dev/null || printf '600.00\\n600.00\\n'",
        "*default_limit*": "printf '0, 600.00\\n1, 600.00\\n'",
        "*query-gpu*": f"printf '{rows}\\n'",
        "*--power-limit=*": 'printf \'%.2f\\n%.2f\\n\' "${*##*=}" "${*##*=}" >/run/limit',
    }
    cases = " ".join(f"{asked}) {said};;" for asked, said in answers.items())
    return [
        script("usr/bin/nvidia-smi", f'case "$*" in {cases} esac'),
        unit("nvidia-persistenced", "exec", "/bin/sleep infinity"),
    ]


def system_packages(command_apart: bool = False) -> list[StandIn]:
    """What comes from the system's own archive on a real host.

    `command_apart`: docker.io has no `docker`, as in Debian 13.
    """
    kernel = os.uname().release
    daemon = "/bin/sleep infinity"
    return [
        StandIn("dkms", "3.0.10-8+deb12u1", "make"),
        StandIn("make", "4.3-4.1"),
        StandIn(f"linux-headers-{kernel}", "1.0"),
        # a kernel that follows updates, and its headers
        StandIn("linux-image-stand-in", "1.0"),
        StandIn("linux-headers-stand-in", "1.0", f"linux-headers-{kernel}"),
        StandIn("pciutils", "1:3.9.0-4", files=[script("usr/bin/setpci", "exit 0")]),
        # as in Debian, the one takes the other's place
        time_service("chrony", "4.3-2"),
        time_service("systemd-timesyncd", "252.39-1~deb12u1"),
        *docker(command_apart),
        StandIn(
            *("docker-ce", "5:29.0.0-1"),
            files=[unit("docker", "exec", daemon), DOCKER],
            conflicts="docker.io",
        ),
        StandIn("containerd", "1.6.20~ds1-1", files=[unit("containerd", "exec", daemon)]),
        StandIn("podman", "4.3.1+ds1-8", files=[script("usr/bin/podman", "exit 0")]),
    ]


def docker(command_apart: bool) -> list[StandIn]:
    """The daemon with its command, or both apart."""
    daemon = unit("docker", "exec", "/bin/sleep infinity")
    if not command_apart:
        return [StandIn("docker.io", "20.10.24+dfsg1-1", "containerd", files=[daemon, DOCKER])]
    version = "26.1.5+dfsg1-9"
    return [
        StandIn("docker.io", version, "containerd", files=[daemon]),
        StandIn("docker-cli", version, files=[DOCKER]),
    ]


def time_service(name: str, version: str) -> StandIn:
    """A service of which a host has one at a time."""
    files = [unit(name, "exec", "/bin/sleep infinity")]
    only = "time-daemon"
    return StandIn(name, version, files=files, provides=only, conflicts=only)


def scripts_of(package: StandIn) -> list[Item]:
    """What Debian's packages do with their units when they go: stop and disable them."""
    units = [Path(item.name).name for item in package.files if item.name.endswith(_UNITS)]
    if not units:
        return []
    links = " ".join(f"/etc/systemd/system/*.wants/{name}" for name in units)
    stop = f'#!/bin/sh\n[ "$1" != remove ] || systemctl stop {" ".join(units)} || true\n'
    forget = f'#!/bin/sh\n[ "$1" != purge ] || rm -f {links}\nsystemctl daemon-reload || true\n'
    return [
        Item("./prerm", stop.encode(), mode=0o755),
        Item("./postrm", forget.encode(), mode=0o755),
    ]


def script(name: str, body: str) -> Item:
    return Item(name, f"#!/bin/sh\n{body}\n".encode(), mode=0o755)


def unit(name: str, kind: str, command: str) -> Item:
    """A service that systemd can start."""
    text = (
        f"[Unit]\nDescription=stand-in for {name}\n[Service]\nType={kind}\nExecStart={command}\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )
    return Item(f"usr/lib/systemd/system/{name}.service", text.encode())


DOCKER = script("usr/bin/docker", 'echo "stand-in: docker $*"')
