"""A real OCI registry on a free loopback port, with TLS and passwords on request."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import bcrypt

from tests.testbed.packages import CannotHave, ensure_debian_packages, find_program
from tests.testbed.programs import daemon, last_words, run_program, wait_for

PACKAGES = ("docker-registry", "openssl")
READY_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
LISTENING = re.compile(r"listening on (?P<host_port>[^\s,\"]+:\d+)")


@dataclass(frozen=True)
class Registry:
    """A running registry; `ca_file` is set when it speaks TLS."""

    host_port: str
    ca_file: Path | None
    storage: Path
    log_file: Path

    @property
    def url(self) -> str:
        """The address of its API, with the scheme."""
        return f"{'https' if self.ca_file else 'http'}://{self.host_port}"


@contextmanager
def oci_registry(
    tmp: Path,
    *,
    tls: bool = False,
    htpasswd: Mapping[str, str] | None = None,
    address: str = "127.0.0.1",
    delete: bool = True,
) -> Iterator[Registry]:
    """Run a registry with its files under `tmp`; `htpasswd` maps users to passwords.

    Docker does not check certificates on 127.0.0.0/8: to test trust in the CA, give the
    `gateway` of a `DockerDaemon` as the address.
    """
    ensure_debian_packages(PACKAGES)
    home = tmp / "registry"
    home.mkdir(parents=True)
    try:
        ca_file = make_certificates(home, address) if tls else None
        config = home / "config.yml"
        settings = make_config(home, address, tls=tls, htpasswd=htpasswd, delete=delete)
        config.write_text(json.dumps(settings))
        with started(home, config) as (host_port, log_file):
            yield Registry(host_port, ca_file, home / "storage", log_file)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def trusted_by_docker(registry: Registry) -> Iterator[None]:
    """The registry's CA lies where Docker looks for it."""
    folder = Path("/etc/docker/certs.d") / registry.host_port
    folder.mkdir(parents=True)
    try:
        if registry.ca_file:
            shutil.copyfile(registry.ca_file, folder / "ca.crt")
        yield
    finally:
        shutil.rmtree(folder)


def make_config(
    home: Path, address: str, *, tls: bool, htpasswd: Mapping[str, str] | None, delete: bool
) -> dict[str, object]:
    """The registry's configuration; JSON is YAML too."""
    # Port 0: the kernel picks a free one and the log says which, so no two tests can race for it.
    http: dict[str, object] = {"addr": f"{address}:0", "secret": "throwaway"}
    if tls:
        http["tls"] = {"certificate": f"{home}/server.crt", "key": f"{home}/server.key"}
    config: dict[str, object] = {
        "version": 0.1,
        "log": {"level": "info"},
        "storage": {
            "filesystem": {"rootdirectory": f"{home}/storage"},
            "delete": {"enabled": delete},
        },
        "http": http,
    }
    if htpasswd is not None:
        write_htpasswd(home / "htpasswd", htpasswd)
        config["auth"] = {"htpasswd": {"realm": "testbed", "path": f"{home}/htpasswd"}}
    return config


def write_htpasswd(path: Path, passwords: Mapping[str, str]) -> None:
    """The password file; the registry takes bcrypt only, here at its cheapest."""
    rows = [
        f"{user}:{bcrypt.hashpw(password.encode(), bcrypt.gensalt(rounds=4)).decode()}\n"
        for user, password in passwords.items()
    ]
    path.write_text("".join(rows))


def make_certificates(home: Path, address: str) -> Path:
    """A throwaway CA and a server's certificate, of an address or a name; returns the CA's file."""
    ca_file, request = home / "ca.crt", home / "server.csr"
    extensions = home / "server.ext"
    kind = "IP" if address.replace(".", "").isdigit() else "DNS"
    extensions.write_text(f"subjectAltName = {kind}:{address}, IP:127.0.0.1, DNS:localhost\n")
    openssl = partial(run_program, "openssl")
    new_key = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl(
        *(*new_key, "-x509", "-days", "60", "-subj", "/CN=sm120 testbed CA"),
        *("-keyout", f"{home}/ca.key", "-out", f"{ca_file}"),
    )
    openssl(
        *(*new_key, "-subj", f"/CN={address}"),
        *("-keyout", f"{home}/server.key", "-out", f"{request}"),
    )
    openssl(
        *("x509", "-req", "-days", "60", "-in", f"{request}", "-extfile", f"{extensions}"),
        *("-CA", f"{ca_file}", "-CAkey", f"{home}/ca.key", "-CAcreateserial"),
        *("-out", f"{home}/server.crt"),
    )
    return ca_file


@contextmanager
def started(home: Path, config: Path) -> Iterator[tuple[str, Path]]:
    """The registry's process, from its first request until its end."""
    log_file = home / "registry.log"
    command = [find_program("docker-registry"), "serve", str(config)]

    def says_where() -> re.Match[str] | None:
        """The kernel queues requests from then on."""
        return LISTENING.search(log_file.read_text(errors="replace"))

    with daemon(command, log_file, STOP_TIMEOUT_S) as process:
        found = wait_for(process, says_where, READY_TIMEOUT_S)
        if found is None:
            raise CannotHave(f"docker-registry does not start here: {last_words(log_file)}")
        yield found["host_port"], log_file
