"""Another host, its container engine, and the guard that clears up after a lost connection."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any, cast

import pytest

from pipeline.artifacts.containers.arguments import EngineKind
from pipeline.core.errors import DockerUnavailable, HostUnreached
from pipeline.core.known import Unknown
from pipeline.hosts.fleet.tunnel import Tunnel
from pipeline.serving.serve import guard
from pipeline.serving.serve.health import is_healthy, served_models
from pipeline.serving.serve.site import HERE, RemoteSite, find_remote_site, platform_of
from tests.unit.serve.near_tunnel import NearTunnel, said
from tests.unit.serve.recipes import recipe, two_cards

NAME, ATTEMPT = "sm120-tiny-cpu", "20261116T101112-abcdef"


def there(tunnel: NearTunnel, place: str = "/x.sock", kind: EngineKind = "docker") -> RemoteSite:
    return RemoteSite(cast(Tunnel, tunnel), "gpu1", kind, place)


@contextmanager
def unix_server(path: Path, answers: dict[str, Any], seen: list[str]) -> Iterator[None]:
    """HTTP behind a socket; answers by path, 404 for others."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers.get(self.path)
            data = json.dumps(body or {}).encode()
            self.send_response(200 if body is not None else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_DELETE(self) -> None:
            seen.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

        def address_string(self) -> str:
            return ""

    Handler.protocol_version = "HTTP/1.1"
    server = ThreadingUnixStreamServer(str(path), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path: sockets have at most 107 bytes."""
    path = Path(f"/tmp/sm120-test-{os.getpid()}.sock")
    path.unlink(missing_ok=True)
    yield path
    path.unlink(missing_ok=True)


def container(attempt: str = ATTEMPT) -> dict[str, Any]:
    body = {"Id": "f00", "Config": {"Labels": {"sm120.attempt": attempt}}}
    return {f"/containers/{NAME}/json": body}


def guarded_by(place: Path, data: bytes, *, is_cut: bool = True) -> subprocess.Popen[bytes]:
    """The guard as a host runs it, with what the other end writes."""
    process = subprocess.Popen(
        [sys.executable, guard.__file__, "docker", str(place), NAME, ATTEMPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(data)
    process.stdin.flush()
    if is_cut:
        process.stdin.close()
    return process


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_AGAIN_S", (0.0,))


def test_a_container_that_is_to_be_kept_is_kept(place: Path) -> None:
    seen: list[str] = []
    with unix_server(place, container(), seen):
        process = guarded_by(place, guard.BEAT + guard.KEEP, is_cut=False)
        out, _ = process.communicate(timeout=30)
    assert (out, process.returncode, seen) == (guard.KEPT, 0, [])


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("data", [b"", guard.BEAT, b"kee"])
def test_where_the_other_end_goes_away_the_container_is_removed(place: Path, data: bytes) -> None:
    seen: list[str] = []
    with unix_server(place, container(), seen):
        cut_off("docker", place, data=data)
    assert seen == ["/containers/f00?force=true&v=true"]


def cut_off(kind: str, place: Path, attempt: str = ATTEMPT, data: bytes = b"") -> None:
    """The guard in this process, whose other end goes away after these bytes."""
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    with replaced_stdin(reader):
        guard.guard_main(kind, str(place), NAME, attempt)


@contextmanager
def replaced_stdin(handle: int) -> Iterator[None]:
    kept, before = os.dup(0), signal.getsignal(signal.SIGHUP)
    os.dup2(handle, 0)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(handle)
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_at_once")
def test_where_the_other_end_falls_silent_the_container_is_removed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "LIMIT_S", 0.05)
    seen: list[str] = []
    reader, writer = os.pipe()
    with unix_server(place, container(), seen), replaced_stdin(reader):
        guard.guard_main("docker", str(place), NAME, ATTEMPT)
    os.close(writer)
    assert len(seen) == 1


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("answers", [container("20260101T000000-000000"), {}])
def test_a_container_of_another_attempt_is_left_alone(place: Path, answers: dict[str, Any]) -> None:
    seen: list[str] = []
    with unix_server(place, answers, seen):
        cut_off("docker", place)
    assert seen == []


@pytest.mark.usefixtures("_at_once")
def test_podman_s_container_is_removed_by_its_own_program(tmp_path: Path) -> None:
    program, log = tmp_path / "podman", tmp_path / "log"
    program.write_text(f'#!/bin/sh\necho "$@" >>{log}\n[ $1 = inspect ] && echo {ATTEMPT}\n')
    program.chmod(0o755)
    cut_off("podman", program, "another")
    assert "rm --force" not in log.read_text()
    cut_off("podman", program)
    assert f"rm --force --ignore --time=0 --volumes {NAME}" in log.read_text()


def test_a_block_that_ends_well_keeps_its_container() -> None:
    with there(NearTunnel()).guarded(NAME, ATTEMPT):
        pass


def test_an_error_in_the_block_is_the_one_that_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), there(NearTunnel()).guarded(NAME, ATTEMPT):
        raise ZeroDivisionError


def test_a_guard_that_does_not_answer_at_the_end_is_a_lost_connection() -> None:
    class Cut(NearTunnel):
        def command(self, words: Any) -> list[str]:
            return ["true"]

    with (
        pytest.raises(HostUnreached, match="lost at the end"),
        there(Cut()).guarded(NAME, ATTEMPT),
    ):
        pass


def test_a_port_there_is_tried_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        machine = there(NearTunnel()).look(recipe(), taken.getsockname()[1])
    assert machine.port_problem == "Address already in use"
    assert isinstance(machine.facts, Unknown)


def test_a_host_that_cannot_be_looked_at_is_unknown_in_everything() -> None:
    deaf = NearTunnel({"python3": said(code=1, err="no Python")})
    machine = there(deaf).look(two_cards(), 1)
    for fact in (machine.facts, machine.memory_used, machine.port_problem):
        assert isinstance(fact, Unknown)
    garbled = there(NearTunnel({"python3": said("not JSON")})).look(two_cards(), 1)
    assert isinstance(garbled.facts, Unknown)


def test_a_server_there_is_asked_through_a_socket(place: Path) -> None:
    answers = {"/health": {"ok": 1}, "/v1/models": {"data": [{"id": "tiny"}]}}
    with unix_server(place, answers, []):
        door = there(NearTunnel(socket=place)).door(8000)
        assert is_healthy(door)
        assert served_models(door) == ["tiny"]
    assert not is_healthy(door)
    assert not is_healthy(place.with_name("nobody.sock"))
    assert HERE.door(8000) == 8000


def test_docker_s_socket_comes_first_and_podman_is_asked_where_there_is_none() -> None:
    only_podman = NearTunnel({"id": said("1000\n"), "podman": said("podman version 5")})
    site, engine = find_remote_site(cast(Tunnel, only_podman), "gpu1", "auto")
    assert (site.kind, engine.kind) == ("podman", "podman")
    assert only_podman.forwarded == []


def test_another_host_s_podman_is_its_own_program_there(tmp_path: Path) -> None:
    """The connection puts a word before each command, as ssh does."""
    program, log = tmp_path / "there", tmp_path / "log"
    program.write_text(f'#!/bin/sh\necho "$@" >>{log}\n')
    program.chmod(0o755)

    class Prefixed(NearTunnel):
        def command(self, words: Any) -> list[str]:
            return [str(program), *words]

    tunnel = Prefixed({"id": said("0"), "podman": said("podman version 5")})
    _, engine = find_remote_site(cast(Tunnel, tunnel), "gpu1", "podman")
    engine.start("f00")
    engine.stop("f00", 5)
    assert list(engine.output("f00", follow=False)) == []
    assert engine.containers() == []
    assert [line.split()[:2] for line in log.read_text().splitlines()] == [
        ["podman", "start"],
        ["podman", "stop"],
        ["podman", "logs"],
        ["podman", "ps"],
    ]


@pytest.mark.parametrize(
    ("answers", "wanted", "words"),
    [
        ({}, "auto", "neither Docker nor Podman"),
        ({}, "podman", "neither Docker nor Podman"),
        ({}, "docker", "Docker does not run there"),
        ({"test -e": said()}, "docker", "may not use Docker's socket"),
    ],
)
def test_a_host_without_a_container_engine_is_told_apart_from_a_login_without_rights(
    answers: dict[str, Any], wanted: Any, words: str
) -> None:
    tunnel = NearTunnel({"id": said("1000\n"), **answers})
    with pytest.raises(DockerUnavailable, match=words):
        find_remote_site(cast(Tunnel, tunnel), "gpu1", wanted)


def test_images_are_those_of_the_host_s_processor() -> None:
    arm = NearTunnel({"uname": said("aarch64\n")})
    assert platform_of(cast(Tunnel, arm), "gpu1") == "linux/arm64"
    for machine in ("riscv64\n", ""):
        with pytest.raises(DockerUnavailable, match="no image is for its processor"):
            platform_of(cast(Tunnel, NearTunnel({"uname": said(machine)})), "gpu1")
