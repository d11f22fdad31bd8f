"""The role registry: its key stays unseen, and its values reach no shell."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import bcrypt
import requests
import yaml
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from tests.integration.roles.role_values import role_values
from tests.testbed.packages import ensure_debian_packages
from tests.testbed.playbook import ROOT, ansible_environment, ansible_program
from tests.testbed.ports import unused_port
from tests.testbed.registry import make_certificates, oci_registry, started

ROLE = ROOT / "ansible" / "roles" / "registry"
KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQ-the-secret\n-----END PRIVATE KEY-----\n"


def task_of(name: str) -> dict[str, Any]:
    """One task of the role, without what only a real host has."""
    tasks = yaml.safe_load((ROLE / "tasks" / "present.yml").read_text(encoding="utf-8"))
    (task,) = [dict(task) for task in tasks if task["name"] == name]
    task.pop("notify", None)
    for module in task.values():
        if isinstance(module, dict):
            module.pop("owner", None)
            module.pop("group", None)
    return task


def run_tasks(
    tmp_path: Path, tasks: list[dict[str, Any]], *args: str, **values: Any
) -> subprocess.CompletedProcess[str]:
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars": {"ansible_python_interpreter": sys.executable, "registry_installed": {}, **values},
        "tasks": tasks,
    }
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    command = [ansible_program("ansible-playbook"), "--inventory", "localhost,", *args]
    return subprocess.run(
        [*command, str(tmp_path / "play.yml")],
        env={**ansible_environment(), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_plan_of_a_new_key_does_not_show_it(tmp_path: Path) -> None:
    key, certificate, home = (tmp_path / name for name in ("my.key", "my.crt", "home"))
    key.write_text(KEY)
    certificate.write_text("certificate\n")
    home.mkdir()
    (home / "server.key").write_text(KEY.replace("secret", "older"))
    done = run_tasks(
        tmp_path,
        [task_of("Copy the certificate")],
        *("--check", "--diff"),
        registry_key=str(key),
        registry_certificate=str(certificate),
        registry_home=str(home),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed=1" in done.stdout
    assert "MIIEvQ" not in done.stdout + done.stderr


def test_a_name_with_a_command_in_it_is_only_a_name(tmp_path: Path) -> None:
    (tmp_path / "files").symlink_to(ROLE / "files")
    planted = tmp_path / "planted"
    run_tasks(
        tmp_path,
        [task_of("Make an own CA and a certificate")],
        registry_home=str(tmp_path),
        registry_name=f"x; touch {planted} #",
        registry_alternative="DNS:x",
    )
    assert not planted.exists()
    assert (tmp_path / "ca.crt").exists()


GOOD = ("registry", "registry.example", "a-b.c1", "10.0.0.1", "::1", "fd00::5", "2001:db8::1.2.3.4")
BAD = (
    *("x; reboot", "x y", "-x", "x-", "", "x\n", "x\nDNS:evil", "$(id)", "`id`", "x/y", "x'"),
    *("DNS:x,IP:1.2.3.4", "é", "x" * 300),
)


def test_only_names_and_addresses_are_names(tmp_path: Path) -> None:
    cases = [{"registry_name": name} for name in (*GOOD, *BAD)]
    answers = role_values("registry", tmp_path, "registry_name is match(registry_name_form)", cases)
    assert answers == ["True"] * len(GOOD) + ["False"] * len(BAD)


MIRRORS = ("https://registry.example", "http://10.0.0.1:5000", "https://[fd00::5]:5000/v2-cache")
NO_MIRRORS = (
    *(
        "registry.example",
        "ftp://x",
        "https://user:secret@x",
        "https://x y",
        "https://x\n",
        "https://",
    ),
    *('https://x"', "https://x/$(id)"),
)


def test_only_addresses_without_a_login_can_be_mirrored(tmp_path: Path) -> None:
    cases = [{"registry_mirror_of": place} for place in (*MIRRORS, *NO_MIRRORS)]
    asked = "registry_mirror_of is match(registry_mirror_form)"
    answers = role_values("registry", tmp_path, asked, cases)
    assert answers == ["True"] * len(MIRRORS) + ["False"] * len(NO_MIRRORS)


def test_a_mirror_brings_an_image_once_and_has_it_when_the_other_registry_is_gone(
    tmp_path: Path,
) -> None:
    """The role's own settings, and two real registries."""
    blob, home = b"a layer", tmp_path / "home"
    digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
    home.mkdir()
    ca_file = make_certificates(home, "127.0.0.1")
    hashed = bcrypt.hashpw(b"open sesame", bcrypt.gensalt(rounds=4)).decode()
    (home / "htpasswd").write_text(f"ops:{hashed}\n")
    with ExitStack() as stack:
        far = stack.enter_context(oci_registry(tmp_path / "far"))
        place = f"{far.url}/v2/team/tiny"
        upload = requests.post(f"{place}/blobs/uploads/", timeout=10)
        where = f"{upload.headers['Location']}&digest={digest}"
        assert requests.put(where, data=blob, timeout=10).status_code == 201
        text = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text(encoding="utf-8"))
        values = {
            **text,
            "registry_home": str(home),
            "registry_mirror_of": far.url,
            "registry_mirror_port": 0,
            "registry_mirror_storage": str(tmp_path / "mirrored"),
        }
        template = {"src": str(ROLE / "templates/mirror.yml.j2"), "dest": f"{home}/mirror.yml"}
        task = {"ansible.builtin.template": {**template, "mode": "0600"}}
        done = run_tasks(tmp_path, [task], "--diff", **values)
        assert done.returncode == 0, done.stdout + done.stderr
        with started(home, home / "mirror.yml") as (host_port, _):
            port = host_port.rpartition(":")[2]
            mirror = f"https://127.0.0.1:{port}/v2/team/tiny/blobs/{digest}"
            session = requests.Session()
            session.trust_env, session.verify = False, str(ca_file)
            assert session.get(mirror, timeout=10).status_code == 401
            session.auth = ("ops", "open sesame")
            assert session.get(mirror, timeout=10).content == blob
            stored = tmp_path / "mirrored" / "docker/registry/v2/blobs/sha256"
            deadline = time.monotonic() + 10
            while not any(stored.rglob("data")) and time.monotonic() < deadline:
                time.sleep(0.05)
            # the other registry is gone, its images too
            shutil.rmtree(far.storage)
            assert session.get(mirror, timeout=10).content == blob


def test_the_server_of_objects_takes_get_and_put_with_a_password_and_nothing_else(
    tmp_path: Path,
) -> None:
    """The role's own settings, and a real nginx."""
    ensure_debian_packages(("nginx-light", "openssl"))
    home, stored, run = (tmp_path / name for name in ("home", "stored", "run"))
    for folder in (home, stored / "objects", run):
        folder.mkdir(parents=True)
    ca_file = make_certificates(home, "127.0.0.1")
    hashed = bcrypt.hashpw(b"open sesame", bcrypt.gensalt(rounds=4)).decode()
    (home / "htpasswd").write_text(f"ops:{hashed}\n")
    port = unused_port()
    values = {
        "registry_home": str(home),
        "registry_objects_port": port,
        "registry_objects_storage": str(stored),
    }
    place = home / "objects.conf"
    task = {
        "ansible.builtin.template": {
            "src": str(ROLE / "templates/objects.conf.j2"),
            "dest": str(place),
            "mode": "0644",
        }
    }
    done = run_tasks(tmp_path, [task], **values)
    assert done.returncode == 0, done.stdout + done.stderr
    # a test may not write to /run, and nginx of root would change to another user
    text = place.read_text().replace("/run/sm120-objects", str(run))
    place.write_text(text if os.geteuid() else f"user root;\n{text}")
    command = ["/usr/sbin/nginx", "-e", "stderr", "-c", str(place), "-g", "daemon off;"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        session = requests.Session()
        session.trust_env, session.verify = False, str(ca_file)
        session.mount("https://", HTTPAdapter(max_retries=Retry(connect=8, backoff_factor=0.1)))
        url = f"https://127.0.0.1:{port}/objects/ab/cdef"
        assert session.put(url, data=b"x", timeout=10).status_code == 401
        session.auth = ("ops", "wrong")
        assert session.get(url, timeout=10).status_code == 401
        session.auth = ("ops", "open sesame")
        assert session.get(url, timeout=10).status_code == 404
        assert session.put(url, data=b"an object", timeout=10).status_code == 201
        assert session.get(url, timeout=10).content == b"an object"
        assert session.delete(url, timeout=10).status_code == 403
        outside = f"https://127.0.0.1:{port}/else"
        assert session.put(outside, data=b"x", timeout=10).status_code == 404
        assert not (stored / "else").exists()
    finally:
        server.terminate()
        server.wait(10)
