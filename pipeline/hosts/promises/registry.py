"""The private registry: TLS by its own certificate, a password for everybody."""

from __future__ import annotations

from pathlib import Path

from pipeline.core.proc import last_line
from pipeline.hosts.fleet.promised import RegistryPromise
from pipeline.hosts.promises import checks
from pipeline.hosts.promises.checks import Host, require, require_none

# long enough to notice it and to renew
_DAYS = 30
# sha256sum of the certificates that the role made
NOTE = "/var/lib/sm120/registry.sha256"
_DROP_IN = "/etc/systemd/system/docker-registry.service.d/sm120.conf"
# asks the registry as a client would: by its own name, trusting only its own CA, without a password
_ASK = """
import http.client, os, socket, ssl, sys
ca, name, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
# a file of the host, or a CA of the site itself, as the inventory has it
given = {"cadata": ca} if "BEGIN CERT" in ca else {"cafile": ca} if os.path.exists(ca) else {}
trust = ssl.create_default_context(**given)
trust.verify_flags &= ~ssl.VERIFY_X509_STRICT  # from 3.13 on it refuses a CA that Docker takes
raw = trust.wrap_socket(socket.create_connection(("127.0.0.1", port), 10), server_hostname=name)
raw.sendall(f"GET {sys.argv[4]} HTTP/1.0\\r\\nHost: {name}\\r\\n\\r\\n".encode())
print(raw.makefile("rb").readline().split()[1].decode())
"""


def test_it_runs_and_starts_at_boot(host: Host) -> None:
    """By the system's own unit with our settings."""
    checks.require_unit(host, "docker-registry")
    checks.require_untouched_unit(host, "docker-registry.service", ours=[_DROP_IN])


def test_it_answers_over_tls_and_asks_for_a_password(host: Host, wanted: RegistryPromise) -> None:
    """A real request to the running registry."""
    _require_password(host, wanted, wanted.port, "docker-registry")


def _require_password(
    host: Host, wanted: RegistryPromise, port: int, unit: str, path: str = "/v2/"
) -> None:
    own = wanted.certificate and wanted.ca
    ca = Path(wanted.ca).read_text(encoding="utf-8") if own else f"{wanted.home}/ca.crt"
    done = host.run("python3 -c %s %s %s %s %s", _ASK, ca, wanted.name, str(port), path)
    fix = f"systemctl status {unit}; look at its certificate."
    require(done.rc == 0, last_line(done.stderr), fix)
    code = done.stdout.strip()
    require(code == "401", f"without a password it answers {code}, not 401")


def test_its_mirror_fetches_from_the_named_registry(host: Host, wanted: RegistryPromise) -> None:
    """A second registry with the same passwords; none if the inventory names none."""
    path, unit = f"{wanted.home}/mirror.yml", "sm120-registry-mirror"
    if not wanted.mirror_of:
        fix = "Run the playbook: it removes a mirror that the inventory does not name."
        return require(not host.file(path).exists, f"{path} is there, and no mirror is named", fix)
    checks.require_unit(host, unit)
    output = checks.text_of(host, path)
    for setting in (
        *(f'addr: ":{wanted.mirror_port}"', f'rootdirectory: "{wanted.mirror_storage}"'),
        *(f'remoteurl: "{wanted.mirror_of}"', f'path: "{wanted.home}/htpasswd"'),
    ):
        require(setting in output, f"{path} lacks {setting}")
    mode = host.file(path).mode
    # it may hold the password of the other registry
    require(mode & 0o077 == 0, f"{path} is open to others ({mode:04o})", f"chmod 600 {path}")
    _require_password(host, wanted, wanted.mirror_port, unit)


def test_its_objects_are_for_those_with_a_password(host: Host, wanted: RegistryPromise) -> None:
    """Whoever writes there chooses what others compile; no server if none is named."""
    path, unit = f"{wanted.home}/objects.conf", "sm120-objects"
    if not wanted.objects_port:
        fix = "Run the playbook: it removes a server that the inventory does not name."
        return require(not host.file(path).exists, f"{path} is there, and none is named", fix)
    checks.require_unit(host, unit)
    output = checks.text_of(host, path)
    for setting in (
        *(f"listen {wanted.objects_port} ssl;", f"root {wanted.objects_storage};"),
        f"auth_basic_user_file {wanted.home}/htpasswd;",
    ):
        require(setting in output, f"{path} lacks {setting}")
    _require_password(host, wanted, wanted.objects_port, unit, "/objects/")
    find = f"find {wanted.objects_storage} -maxdepth 2 -perm -0002 ! -type l"
    require_none(host.run(find).stdout.split(), "writable by everybody", "chmod o-w each of them.")


def test_its_certificate_lasts(host: Host, wanted: RegistryPromise) -> None:
    """At least for another month."""
    path = f"{wanted.home}/server.crt"
    checks.text_of(host, path)
    done = host.run(f"openssl x509 -checkend {_DAYS * 86400} -noout -enddate -in {path}")
    fix = f"Remove {path} and run the playbook, or bring a new certificate."
    require(done.rc == 0, f"it ends within {_DAYS} days: {done.stdout.split(chr(10))[0]}", fix)


def test_its_certificates_are_those_it_was_given(host: Host, wanted: RegistryPromise) -> None:
    """The inventory's own, or those that the role made; clients trust whoever has the CA."""
    if wanted.certificate:
        return checks.require_same_file(host, f"{wanted.home}/server.crt", Path(wanted.certificate))
    if wanted.ca:
        checks.require_same_file(host, f"{wanted.home}/ca.crt", Path(wanted.ca))
    why = f"{NOTE} is missing, to which they are compared: run the playbook"
    checks.undecided_unless(host.file(NOTE).exists, why)
    lines = [line.split() for line in checks.text_of(host, NOTE).splitlines()]
    paths = {name: f"{wanted.home}/{name}" for _, name in (x for x in lines if len(x) == 2)}
    require({*paths} >= {"ca.crt", "server.crt"}, f"{NOTE} lacks a certificate")
    wrong = [paths[n] for digest, n in lines if host.file(paths[n]).sha256sum != digest]
    fix = (
        f"Find out who replaced it. If that was meant: rm {NOTE}, run the playbook, and give the "
        "new CA to the clients."
    )
    require_none(wrong, "replaced since the role made it", fix)


def test_its_key_and_its_images_are_nobody_elses(host: Host, wanted: RegistryPromise) -> None:
    """A reader of the key can answer in its name; a writer of the storage can change images."""
    key = f"{wanted.home}/server.key"
    require(host.file(key).exists, f"{key} is missing")
    mode = host.file(key).mode
    fix = f"chmod 600 {key}, then a new key and certificate: remove both and run the playbook."
    require(mode & 0o077 == 0, f"{key} is open to others ({mode:04o})", fix)
    # the first levels: below them the registry made each folder itself
    storage = f"{wanted.storage} {wanted.mirror_storage}" if wanted.mirror_of else wanted.storage
    form = f"find {storage} -maxdepth 4 -perm -0002 ! -type l"
    fix = f"chmod -R o-w {storage}, and verify the images that clients pull from it."
    require_none(host.run(form).stdout.split(), "writable by everybody", fix)


def test_the_passwords_are_the_inventorys(host: Host, wanted: RegistryPromise) -> None:
    """Compared by digest, and readable by their owner alone."""
    path = f"{wanted.home}/htpasswd"
    file = host.file(path)
    require(file.exists, f"{path} is missing")
    require(file.sha256sum == wanted.passwords_sha256, f"{path} has other passwords")
    require(file.mode & 0o077 == 0, f"{path} is open to others ({file.mode:04o})")


def test_its_settings_are_ours(host: Host, wanted: RegistryPromise) -> None:
    """Port, storage, TLS and passwords."""
    output = checks.text_of(host, f"{wanted.home}/config.yml")
    for setting in (
        *(f'addr: ":{wanted.port}"', f'rootdirectory: "{wanted.storage}"', "htpasswd:"),
        *(f'path: "{wanted.home}/htpasswd"', f'certificate: "{wanted.home}/server.crt"'),
    ):
        require(setting in output, f"{wanted.home}/config.yml lacks {setting}")
    used = f"{wanted.home}/config.yml" in checks.text_of(host, _DROP_IN)
    require(used, "the unit does not use our settings")
