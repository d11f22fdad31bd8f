"""Stock clients and an independent mirror against the server."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pipeline.weights.place import LockedFolder
from tests.testbed.forked import run_forked
from tests.testbed.locked_set import COMMIT, SMALL, contents, make_set, random_bytes
from tests.testbed.ports import unused_port

ROOT = Path(__file__).resolve().parents[2]
_BIG = "model-00001.safetensors"
TOKEN = "hf_a_token_for_tests"


@cache
def large_files() -> dict[str, bytes]:
    """Made by the first test that asks: every test process imports this file."""
    return {_BIG: random_bytes(200_000_000), "sub dir/b.safetensors": random_bytes(9_000_000, 1)}


@dataclass
class Serving:
    endpoint: str
    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def port(self) -> int:
        return urlsplit(self.endpoint).port or 0

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8")

    def health(self) -> dict[str, object]:
        kind: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if self.endpoint.startswith("https"):
            kind = partial(http.client.HTTPSConnection, context=ssl._create_unverified_context())
        connection = kind("127.0.0.1", self.port, timeout=20)
        connection.request("GET", "/healthz")
        answer: dict[str, object] = json.loads(connection.getresponse().read())
        connection.close()
        return answer

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        while self.health()["status"] != "ready":
            assert time.monotonic() < deadline, self.health()
            time.sleep(0.1)


@contextmanager
def serving(tmp_path: Path, *args: str, port: int = 0) -> Iterator[Serving]:
    """The real command in a process of its own."""
    log_file = tmp_path / f"serve-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "pipeline", "weights", "serve", *args]
    with log_file.open("wb") as err:
        process = subprocess.Popen(
            [*command, "--json", "--port", str(port)], stdout=subprocess.PIPE, stderr=err, cwd=ROOT
        )
    try:
        assert process.stdout
        output = json.loads(process.stdout.readline() or b"{}")
        assert output, log_file.read_text(encoding="utf-8")
        yield Serving(output["endpoint"], process, log_file)
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


@dataclass
class Hf:
    """The stock client, with a home and cache of its own."""

    home: Path

    def start(
        self, endpoint: str, *args: str, token: str = "", **more: str
    ) -> subprocess.Popen[bytes]:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "HF_HOME": str(self.home / "hf"),
            "HF_ENDPOINT": endpoint,
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "no_proxy": "127.0.0.1",
            **({"HF_TOKEN": token} if token else {}),
            **more,
        }
        command = str(Path(sys.executable).with_name("hf"))
        return subprocess.Popen(
            [command, *args], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def __call__(self, endpoint: str, *args: str, token: str = "", **more: str) -> tuple[int, str]:
        process = self.start(endpoint, *args, token=token, **more)
        output = process.communicate(timeout=300)[0].decode()
        return process.returncode, output


@pytest.fixture
def hf(tmp_path: Path) -> Hf:
    (tmp_path / "home").mkdir()
    return Hf(tmp_path / "home")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> LockedFolder:
    return make_set(tmp_path_factory.mktemp("plain"), SMALL, large_files())


@pytest.fixture(scope="module")
def cache_place(tmp_path_factory: pytest.TempPathFactory) -> LockedFolder:
    return make_set(tmp_path_factory.mktemp("cache"), SMALL, large_files(), hub_cache=True)


@pytest.mark.parametrize("layout", [pytest.param("plain", marks=pytest.mark.big), "hub-cache"])
def test_hf_download_and_hf_cache_verify_pass(
    place: LockedFolder, cache_place: LockedFolder, layout: str, hf: Hf, tmp_path: Path
) -> None:
    served = place if layout == "plain" else cache_place
    with serving(tmp_path, str(served.root)) as server:
        server.wait_until_ready()
        to = tmp_path / "got"
        code, output = hf(server.endpoint, "download", "org/tiny", "--local-dir", str(to))
        assert code == 0, output
        assert contents(to) == {**SMALL, **large_files()}
        code, output = hf(server.endpoint, "cache", "verify", "org/tiny", "--local-dir", str(to))
        assert (code, "All checksums match" in output) == (0, True), output
        code, output = hf(server.endpoint, "download", "org/tiny", "--revision", COMMIT)
        assert code == 0, output
        snapshot = next((tmp_path / "home").rglob(f"snapshots/{COMMIT}"))
        assert contents(snapshot) == {**SMALL, **large_files()}
        again = ["cache", "verify", "org/tiny", "--revision", COMMIT, "--fail-on-missing-files"]
        code, output = hf(server.endpoint, *again)
        assert code == 0, output


def test_library_calls_of_engines_are_answered(
    place: LockedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import HfApi, HfFileSystem, snapshot_download

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(tmp_path, str(place.root)) as server:
        server.wait_until_ready()
        api = HfApi(endpoint=server.endpoint, token=False)
        assert set(api.list_repo_files("org/tiny")) == {*SMALL, *large_files()}
        assert api.file_exists("org/tiny", "config.json")
        assert not api.file_exists("org/tiny", "nothing.json")
        assert api.repo_exists("org/tiny")
        assert not api.repo_exists("org/other")
        assert api.revision_exists("org/tiny", COMMIT)
        assert not api.revision_exists("org/tiny", "v9")
        assert api.list_repo_refs("org/tiny").branches[0].target_commit == COMMIT
        info = api.model_info("org/tiny", files_metadata=True)
        sizes = {s.rfilename: s.size for s in info.siblings or []}
        assert sizes == {path: len(data) for path, data in {**SMALL, **large_files()}.items()}
        entries = api.get_paths_info("org/tiny", ["sub dir", "config.json"], expand=True)
        assert {entry.path for entry in entries} == {"sub dir", "config.json"}
        disk = HfFileSystem(endpoint=server.endpoint, token=False)
        with disk.open("org/tiny/model-00001.safetensors", "rb", block_size=1 << 20) as file:
            file.seek(123_456_789)
            assert file.read(1000) == large_files()[_BIG][123_456_789 : 123_456_789 + 1000]
        folder = snapshot_download(
            "org/tiny",
            endpoint=server.endpoint,
            cache_dir=tmp_path / "cache",
            allow_patterns=["*.json"],
            token=False,
        )
        assert set(contents(Path(folder))) == {p for p in SMALL if p.endswith(".json")}


def test_our_own_lock_and_fetch_go_full_circle(place: LockedFolder, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "images").mkdir(parents=True)
    (checkout / "lockfiles" / "weights").mkdir(parents=True)
    spec = {
        "name": "tiny",
        "repository": "org/tiny",
        "format": "safetensors",
        "quant": "bf16",
        "about": "A set of weights that is only here for the tests.",
    }
    folder = checkout / "lockfiles" / "weights"
    (folder / "tiny.yaml").write_text(json.dumps(spec), encoding="utf-8")
    with serving(tmp_path, str(place.root)) as server:
        server.wait_until_ready()

        def sm120(endpoint: str, *args: str) -> None:
            env = {"HF_ENDPOINT": endpoint, "HOME": str(tmp_path)}
            env |= {"no_proxy": "127.0.0.1", "HF_HOME": str(tmp_path / "hf")}
            done = run_forked("--checkout", str(checkout), "weights", *args, env=env)
            assert done.returncode == 0, done.stderr

        sm120(server.endpoint, "lock", "tiny")
        assert (folder / "tiny.lock.yaml").read_bytes() == place.lock_file.read_bytes()
        to = tmp_path / "got"
        nowhere = "http://127.0.0.1:9"
        sm120(nowhere, "fetch", "tiny", "--output", str(to), "--from", server.endpoint)
        assert contents(to) == {**SMALL, **large_files()}
        sm120(nowhere, "verify", str(to), "--full")


def test_ranges_in_parallel_make_up_the_file(place: LockedFolder, tmp_path: Path) -> None:
    with serving(tmp_path, str(place.root)) as server:
        server.wait_until_ready()
        step = 3_333_333

        def fetch(start: int) -> bytes:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            path = f"/org/tiny/resolve/{COMMIT}/model-00001.safetensors"
            connection.request("GET", path, headers={"Range": f"bytes={start}-{start + step - 1}"})
            answer = connection.getresponse()
            assert answer.status == 206
            data = answer.read()
            connection.close()
            return data

        with ThreadPoolExecutor(64) as pool:
            parts = list(pool.map(fetch, range(0, len(large_files()[_BIG]), step)))
        got = hashlib.sha256(b"".join(parts)).hexdigest()
        assert got == hashlib.sha256(large_files()[_BIG]).hexdigest()


def test_hf_goes_on_where_it_was_when_the_server_dies_and_comes_back(
    place: LockedFolder, hf: Hf, tmp_path: Path
) -> None:
    to = tmp_path / "got"
    with serving(tmp_path, str(place.root)) as server:
        server.wait_until_ready()
        port = server.port
        client = hf.start(server.endpoint, "download", "org/tiny", "--local-dir", str(to))
        deadline = time.monotonic() + 60
        while _largest_partial(to) < 20_000_000:
            assert client.poll() is None, "the download was over before it could be broken off"
            assert time.monotonic() < deadline
            time.sleep(0.002)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with serving(tmp_path, str(place.root), port=port) as again:
        again.wait_until_ready()
        output = client.communicate(timeout=120)[0].decode()
        assert client.returncode == 0, output
        assert contents(to) == {**SMALL, **large_files()}
        assert "model-00001.safetensors 206 " in again.log


def _largest_partial(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*.incomplete"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return max(sizes)


def test_hf_with_the_token_gets_in_and_without_or_with_another_does_not(
    place: LockedFolder, hf: Hf, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# for tests\n{TOKEN}\n", encoding="utf-8")
    tokens.chmod(0o600)
    with serving(tmp_path, str(place.root), "--token-file", str(tokens)) as server:
        ask = ["download", "org/tiny", "config.json"]
        assert hf(server.endpoint, *ask, token=TOKEN)[0] == 0
        code, output = hf(
            server.endpoint, "download", "org/tiny", "empty.txt", token="hf_another_one"
        )
        assert code != 0, output
        assert "empty.txt 401 0 " in server.log
        assert "(Invalid credentials in Authorization header)" in server.log
        code, output = hf(
            server.endpoint, "download", "org/tiny", "--local-dir", str(tmp_path / "x")
        )
        assert code != 0, output
        assert "needs a token: set HF_TOKEN" in server.log
        assert TOKEN not in server.log
        assert "hf_another_one" not in server.log


def guarded(tmp_path: Path) -> list[str]:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\n", encoding="utf-8")
    return ["--token-file", str(tokens)]


def test_hundreds_of_silent_clients_do_not_shut_out_one_with_a_token(
    place: LockedFolder, hf: Hf, tmp_path: Path
) -> None:
    with serving(tmp_path, str(place.root), *guarded(tmp_path)) as server, ExitStack() as stack:
        for _ in range(600):
            address = ("127.0.0.1", server.port)
            stack.enter_context(socket.create_connection(address, timeout=20))
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        path = f"/org/tiny/resolve/{COMMIT}/config.json"
        connection.request("GET", path, headers={"Authorization": f"Bearer {TOKEN}"})
        assert connection.getresponse().status == 200  # at once, not when they are let go
        connection.close()
        code, output = hf(server.endpoint, "download", "org/tiny", "config.json", token=TOKEN)
        assert code == 0, output


def test_a_server_without_a_file_handle_left_says_so_and_keeps_its_proofs(
    place: LockedFolder, tmp_path: Path
) -> None:
    with serving(tmp_path, str(place.root)) as server:
        server.wait_until_ready()
        pid = server.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)

        def status() -> tuple[int, str | None]:
            connection.request("HEAD", "/org/tiny/resolve/main/model-00001.safetensors")
            answer = connection.getresponse()
            answer.read()
            return answer.status, answer.headers["Retry-After"]

        assert status() == (200, None)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
        assert status() == (503, "10")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert status() == (200, None)
        connection.close()
        assert server.health()["status"] == "ready"


def test_hf_over_tls_with_an_own_certificate(place: LockedFolder, hf: Hf, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    files = ("--tls-cert", str(cert), "--tls-key", str(key))
    with serving(tmp_path, str(place.root), *files) as server:
        server.wait_until_ready()
        to = tmp_path / "got"
        ask = ["download", "org/tiny", "--local-dir", str(to)]
        code, output = hf(server.endpoint, *ask, SSL_CERT_FILE=str(cert))
        assert code == 0, output
        assert contents(to) == {**SMALL, **large_files()}
        assert server.endpoint.startswith("https://")
        assert hf(server.endpoint.replace("https", "http"), *ask[:2])[0] != 0


def test_a_flipped_byte_never_reaches_hf(hf: Hf, tmp_path: Path) -> None:
    large = {"model.safetensors": random_bytes(9_000_000, 2)}
    place = make_set(tmp_path / "set", SMALL, large)
    with serving(tmp_path, str(place.root)) as server:
        server.wait_until_ready()
        with (place.root / "model.safetensors").open("r+b") as file:
            file.seek(4_000_000)
            byte = file.read(1)
            file.seek(4_000_000)
            file.write(bytes([byte[0] ^ 1]))
        code, output = hf(
            server.endpoint, "download", "org/tiny", "model.safetensors", "--local-dir", "got"
        )
        assert code != 0, output
        assert "does not have the locked bytes" in server.log
        assert server.health()["status"] == "damaged"


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.big), signal.SIGTERM]
)
def test_a_signal_ends_it_at_once_and_well(
    place: LockedFolder, tmp_path: Path, number: signal.Signals
) -> None:
    with serving(tmp_path, str(place.root)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20):
            time.sleep(0.2)
            start = time.monotonic()
            server.process.send_signal(number)
            assert server.process.wait(30) == 0
        assert time.monotonic() - start < 10
        assert "stopped after" in server.log
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def olah(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An independent mirror of the Hub; its packages are not ours, so it has its own room."""
    if program := shutil.which("olah-cli"):
        return program
    if not request.config.getoption("--big"):
        pytest.skip("olah (an independent Hub mirror, on PyPI) comes with --big.")
    room = tmp_path_factory.mktemp("olah")
    subprocess.run([sys.executable, "-m", "venv", str(room)], check=True)
    install = [str(room / "bin" / "pip"), "install", "--quiet", "olah==0.5.4"]
    subprocess.run(install, check=True, timeout=300)
    return str(room / "bin" / "olah-cli")


# olah forgets to encode a `#` in a name once more, so there is none in this set
MIRRORED = {path: data for path, data in SMALL.items() if "#" not in path}


@cache
def mirrored_large() -> dict[str, bytes]:
    """Like the large files of the other sets."""
    return {"a b/ü.safetensors": random_bytes(70_000_000, 3)}


@contextmanager
def mirroring(olah: str, folder: Path, behind: Serving) -> Iterator[str]:
    """olah before a server; the address at which it answers."""
    port, place = unused_port(), urlsplit(behind.endpoint).netloc
    command = [olah, "--host", "127.0.0.1", "--port", str(port), "--hf-scheme", "http"]
    command += ["--hf-netloc", place, "--hf-lfs-netloc", place]
    command += ["--repos-path", str(folder / "repos"), "--log-path", str(folder / "logs")]
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "no_proxy": "127.0.0.1"}
    with (folder / "olah.log").open("wb") as log_file:
        mirror = subprocess.Popen(command, env=env, stdout=log_file, stderr=log_file, cwd=folder)
    try:
        _wait_for(port, mirror)
        yield f"http://127.0.0.1:{port}"
    finally:
        mirror.kill()
        mirror.wait()


def test_olah_mirrors_the_server_and_hf_gets_the_same_bytes_through_it(
    olah: str, hf: Hf, tmp_path: Path
) -> None:
    place = make_set(tmp_path / "set", MIRRORED, mirrored_large())
    with serving(tmp_path, str(place.root)) as server:
        server.wait_until_ready()
        with mirroring(olah, tmp_path, server) as here:
            to = tmp_path / "got"
            code, output = hf(here, "download", "org/tiny", "--local-dir", str(to))
            assert code == 0, output
            assert contents(to) == {**MIRRORED, **mirrored_large()}
            code, output = hf(here, "cache", "verify", "org/tiny", "--local-dir", str(to))
            assert code == 0, output
        assert "a%20b/%C3%BC.safetensors 206 " in server.log


def test_a_set_is_fetched_from_olah_and_a_byte_it_keeps_wrong_is_refused(
    olah: str, tmp_path: Path
) -> None:
    place = make_set(tmp_path / "set", MIRRORED, mirrored_large())
    checkout = tmp_path / "checkout"
    (checkout / "images").mkdir(parents=True)
    (checkout / "lockfiles" / "weights").mkdir(parents=True)
    spec = {"name": "tiny", "repository": "org/tiny", "format": "safetensors", "quant": "bf16"}
    spec["about"] = "A set of weights that is only here for the tests."
    (checkout / "lockfiles" / "weights" / "tiny.yaml").write_text(json.dumps(spec))
    with serving(tmp_path, str(place.root)) as server:
        server.wait_until_ready()
        with mirroring(olah, tmp_path, server) as here:
            ended = sm120(checkout, here, "weights", "lock", "tiny")
            assert ended.returncode == 0, ended.stderr
            ended = fetch(checkout, here, tmp_path / "got")
            assert ended.returncode == 0, ended.stderr
            assert contents(tmp_path / "got") == {**MIRRORED, **mirrored_large()}
            assert spoil(tmp_path / "repos", mirrored_large()["a b/ü.safetensors"][5_000:5_032])
            server.process.kill()
            ended = fetch(checkout, here, tmp_path / "again")
            assert ended.returncode != 0, ended.stderr
            assert not (tmp_path / "again" / "a b" / "ü.safetensors").exists()


def fetch(checkout: Path, endpoint: str, to: Path) -> subprocess.CompletedProcess[str]:
    """Our own client."""
    return sm120(checkout, endpoint, "weights", "fetch", "tiny", "--output", str(to))


def sm120(checkout: Path, endpoint: str, *args: str) -> subprocess.CompletedProcess[str]:
    """The command with another Hub."""
    env = {"HF_ENDPOINT": endpoint, "no_proxy": "127.0.0.1"}
    return run_forked("--checkout", str(checkout), *args, env=env)


def spoil(folder: Path, known: bytes) -> bool:
    """Change one byte of what a mirror keeps, where these bytes lie."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        if (at := path.read_bytes().find(known)) >= 0:
            with path.open("r+b") as handle:
                handle.seek(at)
                handle.write(bytes([known[0] ^ 1]))
            return True
    return False


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
