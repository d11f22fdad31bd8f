"""A host on which every promise holds, the promises, and hosts that differ in one thing."""

from __future__ import annotations

import hashlib
from typing import Any

from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.fleet.promised import (
    DriverPromise,
    NcclPromise,
    PciePromise,
    RegistryPromise,
    RepositoryPromise,
    RuntimePromise,
    TuningPromise,
)
from pipeline.hosts.lock_model import LockedPart, TargetLock
from pipeline.hosts.promises.boot import ROLE_FILES
from pipeline.hosts.promises.owned import LOOSE
from pipeline.images.lock.model import DebPin
from tests.unit.hosts.fake_host import FakeHost
from tests.unit.hosts.machines import blackwell, changed, facts


def deb(name: str, version: str) -> DebPin:
    path = f"{name}_{version}_all.deb"
    return DebPin(name=name, version=version, path=path, size_bytes=1, sha256="0" * 64)


def part(*pinned: tuple[str, str]) -> LockedPart:
    return LockedPart(packages=[pinned[0][0]], debs=[deb(*p) for p in pinned])


LOCK = TargetLock(
    index_date="today",
    driver=part(("nvidia-open", "595.58.03-1"), ("nvidia-kernel-open-dkms", "595.58.03-1")),
    cuda=part(("cuda-toolkit-13-2", "13.2.0-1")),
    container_toolkit=part(("nvidia-container-toolkit", "1.18.2-1")),
    nccl=part(("libnccl2", "2.28.9-1")),
)
KEYS = "ForceP2P=0x11;RMForceP2PType=1"
CMDLINE = "root=/dev/vda iommu=pt pcie_aspm=off"
ACS, UNIT = "/usr/local/sbin/sm120-acs", "/etc/systemd/system/sm120-acs.service"
PREF = "Package: nvidia-open\nPin: version 595.58.03-1\nPin-Priority: 1001\n"
DKMS = PREF.replace("nvidia-open", "nvidia-kernel-open-dkms")
SOURCE = "/etc/apt/sources.list.d/sm120-nvidia.sources"
SYSTEM_SOURCE = "/etc/apt/sources.list.d/sm120-system.sources"
SYSTEM_KEY = "/usr/share/keyrings/debian-archive-keyring.gpg"
SCRUB = "/etc/systemd/system/sm120-scrub.service"
LOADED = "/proc/driver/nvidia/version"


def machine(**more: Any) -> HostFacts:
    """Two cards behind ports of their own, as promised."""
    params = f'RegistryDwords: "{KEYS}"\n'
    files = {
        "/proc/cmdline": CMDLINE,
        "/proc/driver/nvidia/params": params,
        **more.pop("files", {}),
    }
    return facts(changed(blackwell(2, iommu="identity", **more), files=files))


def shown(name: str, *drop_ins: str, fragment: str = "/usr/lib/systemd/system") -> str:
    """The output of `systemctl show` for a unit."""
    return (
        f"FragmentPath={fragment}/{name}\nDropInPaths={' '.join(drop_ins)}\nNeedDaemonReload=no\n"
    )


OURS_IN = "/etc/systemd/system"
SHOWN = {
    **{
        f"systemctl show {name} --property=FragmentPath": (0, shown(name))
        for name in (
            *("nvidia-persistenced.service", "nvidia-cdi-refresh.service"),
            *("nvidia-cdi-refresh.path", "docker-registry.service"),
        )
    },
    **{
        f"systemctl show {name} --property=FragmentPath": (0, shown(name, fragment=OURS_IN))
        for name in (
            *("sm120-acs.service", "sm120-governor.service", "sm120-power-limit.service"),
            *("sm120-scrub.service", "sm120-scrub.timer", "sm120-clocks.service"),
        )
    },
}
GRUB_ARGUMENTS = "/bin/sh -c #!/bin/sh\n# The kernel's arguments"
GRUB_ROWS = (
    "/etc/default/grub\tquiet\n/etc/default/grub.d/60-sm120.cfg\tquiet iommu=pt pcie_aspm=off\n"
)
END = "end\t\n"
HEADERS = "/bin/sh -c #!/bin/sh\n# The headers"
SYSCTL = "/lib/systemd/systemd-sysctl --cat-config"
KNOBS = "# /etc/sysctl.d/60-sm120.conf\nvm.swappiness = 0\n"
WHO = f"python3 -c {LOOSE[:20]}"
OFFERED = f"Package: nvidia-open\nVersion: 595.58.03-1\nSHA256: {'0' * 64}\n"
GOOD = FakeHost(
    files={
        "/proc/cmdline": CMDLINE,
        LOADED: "NVRM version: NVIDIA UNIX Open Kernel Module  595.58.03  Release Build\n",
        "/etc/modprobe.d/sm120-nouveau.conf": (
            "# Written by the role nvidia_driver.\nblacklist nouveau\noptions nouveau modeset=0\n"
        ),
        "/etc/default/grub.d/60-sm120.cfg": 'GRUB="$GRUB iommu=pt pcie_aspm=off"\n',
        "/etc/modprobe.d/sm120-pcie.conf": (
            "# Written by the role pcie; pcie_state=absent removes it.\noptions a b=1\n"
        ),
        ACS: (ROLE_FILES / "sm120-acs").read_text(),
        UNIT: (ROLE_FILES / "sm120-acs.service").read_text(),
        "/var/lib/sm120/pcie/before.txt": "cmdline: none\n",
        "/var/lib/sm120/pcie/after.txt": "cmdline: none\n",
        "/var/lib/sm120/before/packages": "apt\n",
        SOURCE: (
            "# Written by the role\nTypes: deb\nURIs: http://mirror\nSuites: ./\n"
            "Signed-By: /etc/apt/keyrings/sm120-nvidia.gpg\n"
        ),
        SYSTEM_SOURCE: (
            "Types: deb\nURIs: http://bundle/system\nSuites: bookworm\nComponents: main\n"
            f"# none are in it\nLanguages: none\nSigned-By: {SYSTEM_KEY}\n"
        ),
        "/etc/apt/keyrings/sm120-nvidia.gpg": "key",
        "/etc/apt/sources.list": "# deb [trusted=yes] http://old x main\ndeb http://a x main\n",
        "/etc/apt/sources.list.d/off.sources": "Types: deb\nEnabled: no\nTrusted: yes\n",
        "/etc/passwd": "root:x:0:0::/root:/bin/sh\nops:x:1000:1000::/home/ops:/bin/sh\n",
        "/etc/environment": "# NCCL_PROTO=Simple\nLANG=C\n",
        "/root/.nccl.conf": "NCCL_PROTO=LL\nNCCL_DEBUG=INFO\n",
        "/usr/lib/modprobe.d/nvidia.conf": "options nvidia-drm modeset=1\noptions a c=2\n",
        # switched off by the site
        "/usr/lib/modprobe.d/off.conf": "options a b=7\nblacklist nvidia\n",
        "/etc/modprobe.d/off.conf": "",
        "/etc/apt/preferences.d/sm120-driver.pref": f"# ours\n\n{PREF}\n{DKMS}",
        "/usr/local/cuda-13.2/version.json": '{"cuda": {"version": "13.2.0"}}',
        "/etc/nccl.conf": "# Written by the role nccl; profile latency.\nNCCL_PROTO=LL\n",
        "/etc/sm120/nccl.env": "# ours\nNCCL_PROTO=LL\nLD_PRELOAD=/x\n",
        "/etc/docker/daemon.json": (
            '{"mine": 1, "default-shm-size": "16g", "features": {"cdi": true}}'
        ),
        "/etc/docker/certs.d/r:5000/ca.crt": "key",
        "/root/.docker/config.json": '{"auths": {"r:5000": {"auth": "dTpw"}}}',
        "/etc/sysctl.d/60-sm120.conf": "vm.swappiness = 0\n",
        "/proc/sys/vm/swappiness": "0\n",
        "/reg/htpasswd": "ops:hash\n",
        "/reg/server.crt": "certificate",
        "/reg/config.yml": (
            'addr: ":5000"\nrootdirectory: "/images"\ntls: {certificate: "/reg/server.crt"}\n'
            'htpasswd: {path: "/reg/htpasswd"}\n'
        ),
        "/etc/systemd/system/docker-registry.service.d/sm120.conf": "ExecStart=x /reg/config.yml\n",
        "/opt/sm120/checkout/lockfiles/weights/tiny.lock.yaml": "key",
        "/opt/sm120/requirements.txt": "key",
        "/opt/sm120/key": "key",
        "/etc/systemd/system/sm120-scrub.timer": "OnCalendar=daily\n",
        SCRUB: "ExecStart=sm120 weights scrub /models/tiny --every-days 30\n",
    },
    modes={"/root/.docker/config.json": 0o600, "/reg/htpasswd": 0o600},
    units={
        **dict.fromkeys(("docker", "chrony", "sm120-acs", "sm120-governor"), (True, True)),
        "sm120-clocks": (True, True),
        **dict.fromkeys(("nvidia-persistenced", "docker-registry"), (True, True)),
        "nvidia-cdi-refresh.path": (True, True),
        **dict.fromkeys(("nvidia-cdi-refresh", "sm120-power-limit"), (True, False)),
        "sm120-scrub.timer": (True, True),
    },
    outputs={
        **SHOWN,
        WHO: (0, "\n"),
        GRUB_ARGUMENTS: (0, GRUB_ROWS + END),
        HEADERS: (0, "headers\n"),
        SYSCTL: (0, KNOBS),
        "find /etc/apt": (0, ""),
        "systemctl show-environment": (0, "PATH=/usr/bin\nNCCL_DEBUG=INFO\n"),
        "apt-cache show": (0, OFFERED),
        "ls /run/sm120/reboot": (2, ""),
        "dpkg --audit": (0, ""),
        "command -v docker": (0, "/usr/bin/docker\n"),
        "grep -c '^nouveau '": (1, "0\n"),
        "ls -v /boot": (0, "grub\nvmlinuz\nvmlinuz-6.8.0-9-generic\nvmlinuz-6.8.0-11-generic\n"),
        "/sbin/modinfo --set-version 6.8.0-11-generic ": (0, "595.58.03\n"),
        "nvidia-smi --query-gpu": (0, "595.58.03\n595.58.03\n"),
        "dpkg-query --show --showformat '${binary:Package}": (
            0,
            "nvidia-open\t595.58.03-1\thold\tinstalled\n"
            "nvidia-kernel-open-dkms\t595.58.03-1\thold\tinstalled\n"
            "dkms\t3\tinstall\tinstalled\nheaders\t1\tinstall\tinstalled\n"
            "docker.io\t20\tinstall\tinstalled\nchrony\t4\tinstall\tinstalled\n",
        ),
        "dpkg-query --show --showformat '${Package} ": (0, "nvidia-open installed\n"),
        "apt-cache policy": (
            0,
            "nvidia-open:\n  Installed: 595.58.03-1\n  Candidate: 595.58.03-1\n"
            "nvidia-kernel-open-dkms:\n  Installed: x\n  Candidate: 595.58.03-1\n",
        ),
        "dpkg --verify": (0, "??5?????? c /etc/nvidia.conf\n"),
        "grep -E '^[[:space:]]*linux'": (0, "linux /vmlinuz iommu=pt pcie_aspm=off\n"),
        "head -n 1 /etc/nccl.conf": (0, "# Written by the role nccl\n"),
        "date +%s": (0, "200\n100\n"),
        "cat /var/run/cdi": (0, "kind: nvidia.com/gpu\n"),
        "apt-config dump": (
            0,
            'X "";\n'
            + "".join(f'X:: "{n}";\n' for n in ("nvidia-", "libnvidia-", "cuda-", "libnccl")),
        ),
        "python3 -c": (0, "401\n"),
        "openssl x509": (0, "notAfter=…\n"),
        "/opt/sm120/venv/bin/sm120 --version": (0, "1\n"),
        "/opt/sm120/venv/bin/sm120 --checkout /opt/sm120/checkout weights verify": (0, ""),
        "systemctl show sm120-scrub": (0, "success\n"),
    },
    mounted=("/models",),
)

REPOSITORY = RepositoryPromise(
    state="present",
    url="http://mirror",
    suite="./",
    components=[],
    key="",
    key_place="/etc/apt/keyrings/sm120-nvidia.gpg",
    system_url="http://bundle/system",
    system_suite="bookworm",
    system_components=["main"],
    system_key=SYSTEM_KEY,
)
DRIVER = DriverPromise(state="present", headers="headers")
PCIE = PciePromise(
    state="present",
    cmdline=["iommu=pt", "pcie_aspm=off"],
    module_lines=["options a b=1"],
    iommu="pt",
    acs_off=True,
    aspm_off=True,
    hmm_off=True,
    p2p_keys=KEYS,
    bar1_mib=32,
)
NCCL = NcclPromise(
    state="present",
    library=False,
    settings={"NCCL_PROTO": "LL"},
    container_settings={"NCCL_PROTO": "LL", "LD_PRELOAD": "/x"},
    patched="",
    patched_at="/usr/local/lib/sm120/libnccl.so.2",
)
RUNTIME = RuntimePromise(
    state="present",
    engine="docker",
    packages=["docker.io", "docker-ce"],
    settings={"default-shm-size": "16g", "features": {"cdi": True}},
    limits="",
    certs="/etc/docker/certs.d",
    registry="r:5000",
    registry_ca="",
    login_sha256=hashlib.sha256(b"dTpw").hexdigest(),
)
TUNING = TuningPromise(
    state="present",
    sysctls={"vm.swappiness": 0},
    governor="performance",
    time_sync=True,
    power_limit_w=600,
    gpu_clocks_mhz=[300, 2800],
    memory_clocks_mhz=[5000, 14001],
    keep_driver=True,
    files={"/etc/sysctl.d/60-sm120.conf": "vm.swappiness = 0\n"},
    gone=["/etc/systemd/system/old.service"],
)
REGISTRY = RegistryPromise(
    state="present",
    name="r",
    port=5000,
    storage="/images",
    home="/reg",
    passwords_sha256=hashlib.sha256(b"ops:hash\n").hexdigest(),
)


def with_file(path: str, text: str | None) -> FakeHost:
    return GOOD.but(files={path: text})


def saying(message: str, text: str, rc: int = 0) -> FakeHost:
    return GOOD.but(outputs={message: (rc, text)})


def unit(name: str, enabled: bool, running: bool) -> FakeHost:
    return GOOD.but(units={name: (enabled, running)})


QUERY = "dpkg-query --show --showformat '${binary:Package}"
GRUB = "grep -E '^[[:space:]]*linux'"
