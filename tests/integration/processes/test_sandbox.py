"""An engine that tries to get out, and what a gate does where there is no sandbox."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.artifacts.containers import sandbox
from pipeline.artifacts.containers.sandbox import NO_SANDBOX, START, Sandbox
from pipeline.artifacts.containers.start import BARRIERS
from pipeline.artifacts.store.store import open_store
from pipeline.artifacts.store.upkeep import remove_trees, tree_sections
from pipeline.core.errors import GateEnvironment
from pipeline.images.gate.smem import run
from pipeline.images.gate.smem.engine import EngineTree
from pipeline.images.gate.upkeep import GATE_PARTS
from tests.unit.gate.smem.test_run import HEAD, cases, target, worker
from tests.unit.support import Command

__all__ = ["target"]

# Each try that comes back without an error has reached something.
HOSTILE = """
import ctypes, json, os, resource, signal, socket, sys, time

libc = ctypes.CDLL(None, use_errno=True)

def must(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")

def connect(family, address):
    with socket.socket(family) as s:
        s.settimeout(2)
        s.connect(address)

def datagram(port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.sendto(b"x", ("127.0.0.1", port))

def write(path):
    with open(path, "a") as f:
        f.write("x")

def other_environments(pid):
    with open(f"/proc/{pid}/environ", "rb") as f:
        return f.read()

def mount_again():
    must(libc.unshare(0x10000000 | 0x20000))
    must(libc.mount(b"none", b"/", None, 32 | 4096, None))

def see_folder(path):
    os.scandir(path).close()

X86 = os.uname().machine == "x86_64"
KEYCTL, SHMGET, IO_URING = (250, 29, 425) if X86 else (219, 194, 425)

def read_keyring(key):
    buffer = ctypes.create_string_buffer(64)
    must(libc.syscall(KEYCTL, 8, -4, -3))  # link the user's keyring into our session
    must(libc.syscall(KEYCTL, 11, key, buffer, 64))

def open_kernels_ring():
    must(libc.syscall(IO_URING, 8, ctypes.create_string_buffer(120)))

def by_a_handle(path, change):
    handle = os.open(path, os.O_RDONLY)
    try:
        change(handle)
    finally:
        os.close(handle)

def tries(p):
    return {
        "connect to loopback": lambda: connect(socket.AF_INET, ("127.0.0.1", p["port"])),
        "send a datagram": lambda: datagram(p["port"]),
        "connect to a socket file": lambda: connect(socket.AF_UNIX, p["socket"]),
        "connect to an abstract socket": lambda: connect(socket.AF_UNIX, p["abstract"]),
        "read a key in the home": lambda: open(p["key"]).read(),
        "list the home": lambda: see_folder(p["home"]),
        "change a key's mode": lambda: os.chmod(p["key"], 0o666),
        "empty a file in the home": lambda: os.truncate(p["key"], 0),
        "write to the home": lambda: write(p["home"] + "/new"),
        "put something else where the answers are": lambda: os.unlink(sys.argv[2]),
        "change its question": lambda: write(sys.argv[1]),
        "write to the worker": lambda: write(sys.argv[0] + "/__main__.py"),
        "write to the engine": lambda: write(__file__),
        "read the caller's environment": lambda: other_environments(p["pid"]),
        "signal the caller": lambda: os.kill(p["pid"], 0),
        "mount the root again": mount_again,
        "read the system's passwords": lambda: open("/etc/shadow").read(),
        "read the caller's keyring": lambda: read_keyring(p["keyring"]),
        "attach the caller's memory": lambda: must(libc.syscall(SHMGET, p["memory"], 4096, 0o600)),
        "call out of the machine": lambda: socket.socket(40, socket.SOCK_STREAM),
        "ask past the filter": open_kernels_ring,
        "change the engine's mode": lambda: by_a_handle(__file__, lambda h: os.fchmod(h, 0o666)),
        "mark the engine": lambda: by_a_handle(__file__, lambda h: os.setxattr(h, "user.x", b"y")),
        "date a key back": lambda: os.utime(p["key"], (5, 5)),
        "date the engine back": lambda: os.utime(__file__, (5, 5)),
        "limit the caller": lambda: resource.prlimit(p["pid"], resource.RLIMIT_CORE, (0, 0)),
    }

def escape(places):
    reached = []
    for name, attempt in tries(places).items():
        if name in places["spared"]:
            continue
        try:
            attempt()
        except (OSError, AttributeError):
            continue
        reached.append(name)
    return reached

def leave_daemon(path):
    if os.fork() == 0:
        try:
            os.setsid()
        except PermissionError:
            pass
        if os.fork() == 0:
            for _ in range(200):
                with open(path, "w") as f:
                    f.write(str(time.time()))
                time.sleep(0.05)
        os._exit(0)
    deadline = time.time() + 20
    while not os.path.exists(path) and time.time() < deadline:
        time.sleep(0.01)
"""
WORKER = (
    HEAD
    + """
sys.path.insert(0, job["engine"])
import engine
case = job["cases"][0]
begin(case)
places = json.load(open(job["engine"] + "/places.json"))
found = {"reached": engine.escape(places), "environment": sorted(os.environ)}
open(job["cache"] + "/own", "w").write("x")
engine.leave_daemon(job["cache"] + "/alive")
say({"case": case["name"], "ended": "stopped", "message": json.dumps(found)})
"""
)


LIBC = ctypes.CDLL(None)


def keyring_entry() -> int:
    """A secret in the caller's own keyring; 0 where the machine has none."""
    add_key = 248 if os.uname().machine == "x86_64" else 217
    key: int = LIBC.syscall(add_key, b"user", b"sm120-test", b"secret", 6, -4)
    return max(key, 0)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, object]]:
    """What a caller has that nobody should reach: keys, sockets, a process."""
    home = tmp_path / "caller"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id").write_text("secret")
    abstract = f"\0sm120-test-{os.getpid()}"
    memory = os.getpid()
    assert LIBC.shmget(memory, 4096, 0o1600) >= 0
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as file,
        socket.socket(socket.AF_UNIX) as hidden,
        tempfile.TemporaryDirectory() as short,
    ):
        for listener, name in ((file, f"{short}/s"), (hidden, abstract)):
            listener.bind(name)
            listener.listen()
        yield {
            "port": tcp.getsockname()[1],
            "socket": f"{short}/s",
            "abstract": abstract,
            "home": str(home),
            "key": str(home / ".ssh" / "id"),
            "pid": os.getpid(),
            "keyring": keyring_entry(),
            "memory": memory,
            "spared": [],
        }
        LIBC.shmctl(LIBC.shmget(memory, 4096, 0o600), 0, None)


def of_kind(kind: str) -> Sandbox:
    """A sandbox of one kind, or a skip where this machine has none."""
    done = Sandbox.model_validate({"kind": kind, "held": []}).run([], timeout_s=30.0)
    if done.returncode:
        pytest.skip(f"This machine gives no {kind}: {done.stderr.decode().strip()}.")
    return Sandbox.model_validate({"kind": kind, "held": json.loads(done.stdout)})


def escaped(
    target: run.GateTarget, places: dict[str, object], tmp_path: Path
) -> dict[str, list[str]]:
    """What a hostile engine reached, and whether what it left behind is still alive."""
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "engine.py").write_text(HOSTILE)
    (folder / "places.json").write_text(json.dumps(places))
    tree = EngineTree(folder, "engine", "1", f"sha256:{'1' * 64}")
    (answer,) = run.ask_workers(replace(target, tree=tree), cases("a"))
    assert answer.ended == "stopped", answer.message
    result: dict[str, list[str]] = json.loads(answer.message)
    alive = target.folder("kernels") / "alive"
    before = alive.read_text()
    time.sleep(0.4)
    result["daemon"] = [] if alive.read_text() == before else ["still running"]
    assert (target.folder("kernels") / "own").read_text() == "x"
    return result


@pytest.mark.parametrize("kind", ["namespaces", "restrictions"])
def test_an_engine_that_tries_to_get_out_reaches_nothing(
    kind: str,
    target: run.GateTarget,
    places: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    worker(monkeypatch, tmp_path, WORKER)
    inside = of_kind(kind)
    if inside.missing:
        pytest.skip(f"This kernel's {kind} do not cover: {', '.join(inside.missing)}.")
    result = escaped(replace(target, sandbox=inside), places, tmp_path)
    assert result["reached"] == []
    assert result["daemon"] == []
    own = {"HOME", "TMPDIR", "TRITON_HOME", "OMP_NUM_THREADS", "LC_ALL", "PATH", "LC_CTYPE"}
    assert set(result["environment"]) <= own
    assert Path(str(places["key"])).read_text() == "secret"


def test_without_a_sandbox_the_same_engine_reaches_nearly_everything(
    target: run.GateTarget,
    places: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    worker(monkeypatch, tmp_path, WORKER)
    # what would harm this machine or the test itself
    places["spared"] = ["mount the root again", "read the system's passwords"]
    monkeypatch.setattr(run, "hide_environment", lambda: None)
    result = escaped(replace(target, sandbox=NO_SANDBOX), places, tmp_path)
    assert {
        *("connect to loopback", "connect to a socket file", "connect to an abstract socket"),
        *("read a key in the home", "write to the home", "write to the engine"),
        *("read the caller's environment", "signal the caller"),
        *("attach the caller's memory", "change the engine's mode", "date a key back"),
    } <= set(result["reached"])
    assert result["daemon"] == ["still running"]


@pytest.mark.parametrize("kind", ["namespaces", "restrictions"])
def test_an_ordinary_user_gets_a_sandbox_too(kind: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("Only root can become another user.")
    of_kind(kind)
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip("There is no Python of the system that another user could start.")
    with tempfile.TemporaryDirectory() as folder:
        script, key = Path(folder, "start.py"), Path(folder, "key")
        script.write_bytes(START.read_bytes())
        key.write_text("secret")
        for path in (Path(folder, "root"), Path(folder, "work")):
            path.mkdir()
        for path in (Path(folder), *Path(folder).iterdir()):
            os.chown(path, 65534, 65534)
        request = {
            **{"kind": kind, "held": list(BARRIERS), "read": []},
            **{"write": [f"{folder}/work"], "cwd": f"{folder}/work", "root": f"{folder}/root"},
        }
        text = f"id -u; echo x > {folder}/work/x && echo wrote; cat {key} 2>/dev/null; exit 7"
        done = subprocess.run(
            [python, "-I", "-S", str(script), json.dumps(request), "/bin/sh", "-c", text],
            user=65534,
            group=65534,
            extra_groups=[],
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stdout.split()) == (7, ["65534", "wrote"]), done.stderr


def test_a_program_that_is_killed_says_so_as_a_shell_would() -> None:
    done = of_kind("namespaces").run(["/bin/sh", "-c", "kill -9 $$"])
    assert done.returncode == 137


@pytest.mark.parametrize("kind", ["namespaces", "restrictions"])
def test_a_sandbox_that_cannot_be_made_starts_nothing(kind: str, tmp_path: Path) -> None:
    inside = of_kind(kind)
    (tmp_path / "root").mkdir()
    command = inside.command(
        ["/bin/sh", "-c", "echo started"],
        **{"read": [], "write": []},
        root=tmp_path / "root",
        cwd=tmp_path / "is not there",
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (125, "")
    assert "is not there" in done.stderr


def test_fewer_barriers_than_were_found_before_start_nothing(tmp_path: Path) -> None:
    of_kind("restrictions")
    asked = Sandbox.model_construct(kind="restrictions", held=["network", "a moat"])
    (tmp_path / "root").mkdir()
    command = asked.command(
        ["/bin/sh", "-c", "echo started"],
        **{"read": [], "write": [tmp_path]},
        root=tmp_path / "root",
        cwd=tmp_path,
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (125, "")
    assert "a moat" in done.stderr


def test_where_namespaces_are_forbidden_restrictions_stand_in_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {
        "namespaces": (125, b"", b"sandbox: unshare: Operation not permitted\n"),
        "restrictions": (0, b'["files", "capabilities", "environment"]', b""),
    }

    def tried(self: Sandbox, *_: object, **__: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess([], *answers[self.kind])

    monkeypatch.setattr(Sandbox, "run", tried)
    result = sandbox.find_sandbox.__wrapped__()
    assert (result.kind, result.missing) == ("restrictions", ["network", "processes"])
    assert not result.isolates
    assert "unshare: Operation not permitted" in result.sentence()
    assert "network and processes" in result.sentence()
    answers["restrictions"] = (125, b"", b"sandbox: not written for riscv64\n")
    result = sandbox.find_sandbox.__wrapped__()
    assert (result.kind, result.held) == ("none", ["environment"])
    assert "riscv64" in result.sentence()


@pytest.mark.parametrize("held", [[], ["network"], ["files"], ["processes", "capabilities"]])
def test_code_that_no_lock_names_is_not_run_beside_the_callers_files(held: list[str]) -> None:
    weak = Sandbox.model_validate({"kind": "restrictions", "held": held, "reason": "why not"})
    with pytest.raises(GateEnvironment, match="why not") as caught:
        sandbox.require_isolation(weak)
    assert "--without-sandbox" in caught.value.hint


def test_network_and_files_are_enough_to_run_it() -> None:
    enough = Sandbox(kind="restrictions", held=["network", "files"])
    assert enough.isolates
    sandbox.require_isolation(enough)


def test_patches_against_another_version_is_refused_where_nothing_isolates(
    sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.app.gate.find_sandbox", lambda: NO_SANDBOX)
    ended = sm120("gate", "patches", "sglang-k2", "--against", "0.5.9")
    assert ended.error == "GateEnvironment"
    assert "--without-sandbox" in ended.err


def test_an_engine_that_no_lock_names_keeps_its_kernels_for_itself(target: run.GateTarget) -> None:
    other = replace(target, tree=replace(target.tree, is_locked=False))
    assert target.kernels == target.folder("kernels")
    assert other.kernels != target.kernels
    assert not other.kernels.is_relative_to(target.kernels)


def test_this_machine_is_tried_and_not_guessed() -> None:
    result = sandbox.find_sandbox()
    assert result.kind == "none" or result.run(["/bin/true"]).returncode == 0


@pytest.mark.parametrize("kind", ["namespaces", "restrictions"])
def test_root_can_judge_in_a_store_that_is_somebody_elses(
    kind: str, target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("Only root can give files away.")
    worker(monkeypatch, tmp_path, HEAD + KEEPS)
    for name in ("kernels", "answers"):
        folder = target.folder(name)
        folder.mkdir(parents=True)
        folder.chmod(0o700)
        os.chown(folder, 65534, 65534)
    (answer,) = run.ask_workers(replace(target, sandbox=of_kind(kind)), cases("a"))
    assert (answer.ended, answer.message) == ("stopped", "kept")


KEEPS = """
case = job["cases"][0]
begin(case)
open(job["cache"] + "/own", "w").write("x")
try:
    open("/etc/shadow").close()
    message = "read the system's passwords"
except OSError:
    message = "kept"
say({"case": case["name"], "ended": "stopped", "message": message})
"""


@pytest.mark.parametrize("kind", ["namespaces", "restrictions"])
def test_it_ends_with_a_caller_that_was_killed(kind: str, tmp_path: Path) -> None:
    inside = of_kind(kind)
    (tmp_path / "root").mkdir()
    alive = tmp_path / "alive"
    alive.touch()
    beats = f"while true; do date +%s%N > {alive}; sleep 0.05; done"
    command = inside.command(
        ["/bin/sh", "-c", beats],
        **{"read": [], "write": [alive]},
        root=tmp_path / "root",
        cwd=Path("/"),
    )
    start = "import json, subprocess, sys; subprocess.run(json.loads(sys.argv[1]))"
    caller = subprocess.Popen([sys.executable, "-c", start, json.dumps(command)])
    deadline = time.monotonic() + 20
    while not alive.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive.read_text()
    caller.kill()
    caller.wait()
    time.sleep(1)
    before = alive.read_text()
    time.sleep(0.5)
    assert alive.read_text() == before


LINGERS = (
    HEAD
    + """
sys.path.insert(0, job["engine"])
import engine
begin(job["cases"][0])
engine.leave_daemon(job["cache"] + "/alive")
engine.time.sleep(60)
"""
)


@pytest.mark.parametrize("kind", ["namespaces", "restrictions"])
def test_what_an_engine_started_ends_with_a_case_that_took_too_long(
    kind: str, target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker(monkeypatch, tmp_path, LINGERS)
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "engine.py").write_text(HOSTILE)
    tree = EngineTree(folder, "engine", "1", f"sha256:{'1' * 64}")
    slow = [case.model_copy(update={"timeout_s": 2}) for case in cases("a")]
    (answer,) = run.ask_workers(replace(target, tree=tree, sandbox=of_kind(kind)), slow)
    assert answer.ended == "timed out"
    alive = target.folder("kernels") / "alive"
    before = alive.read_text()
    time.sleep(0.4)
    assert alive.read_text() == before


DEEP = """
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")
"""


@pytest.mark.parametrize("kind", ["namespaces", "restrictions"])
def test_folders_without_end_are_removed_again(kind: str, tmp_path: Path) -> None:
    inside = of_kind(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path))
        python = os.path.realpath(sys.executable)
        read = [Path(sys.base_prefix)]
        assert inside.run([python, "-S", "-c", f"import os{DEEP}"], read=read).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_folders_without_end_in_a_workers_folder_harm_no_store(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # not by chmod, which is refused where namespaces are forbidden
    shuts = 'os.mkdir("x", 0)'
    ends = 'say({"case": job["cases"][0]["name"], "ended": "called"})'
    kernels = 'os.chdir(job["cache"])'
    body = f"begin(job['cases'][0])\n{DEEP}\n{shuts}\n{kernels}\n{DEEP}"
    link = 'os.symlink("nowhere", job["cache"] + "/link")'
    worker(monkeypatch, tmp_path, f"{HEAD}\n{link}\n{body}\n{ends}\n")
    (answer,) = run.ask_workers(target, cases("a"))
    assert answer.ended == "called", answer.message
    assert list(target.store.tmp.iterdir()) == []
    assert {shelf.name: shelf.files for shelf in tree_sections(target.store, GATE_PARTS)}[
        "gate kernels"
    ] == 1
    remove_trees([target.folder("kernels")])
    assert not target.folder("kernels").exists()


def test_a_store_behind_a_link_is_reached_by_its_written_name(
    target: run.GateTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker(monkeypatch, tmp_path, HEAD + KEEPS)
    (tmp_path / "a link with blanks").symlink_to(tmp_path)
    there = open_store(tmp_path / "a link with blanks" / "store")
    for kind in ("namespaces", "restrictions"):
        (answer,) = run.ask_workers(replace(target, store=there, sandbox=of_kind(kind)), cases("a"))
        assert (answer.ended, answer.message) == ("stopped", "kept")


def test_where_the_system_forbids_user_namespaces_most_of_it_still_holds() -> None:
    """A namespace that allows none inside it, and no capabilities: as in a container."""
    of_kind("restrictions")
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set -all"
    imported = "from pipeline.artifacts.containers.sandbox import find_sandbox"
    report = f"{imported}; print(find_sandbox().model_dump_json())"
    text = f"{forbid} --inh-caps -all --no-new-privs {sys.executable} -c '{report}'"
    try:
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "/bin/sh", "-c", text],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("There is no unshare here.")
    if done.returncode:
        pytest.skip(f"This machine has no such namespace: {done.stderr.strip()[-100:]}.")
    result = Sandbox.model_validate_json(done.stdout)
    assert result.kind == "restrictions"
    assert "namespaces: unshare" in result.reason
    assert result.isolates


SNOOP = """
import ctypes, os, sys
from pipeline.artifacts.containers.sandbox import hide_environment
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    # another user than the one that started it: the kernel hides such a process by itself
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
if sys.argv[1] == "hidden":
    hide_environment()
if os.fork() == 0:
    try:
        found = open(f"/proc/{os.getppid()}/environ", "rb").read()
    except OSError:
        found = b""
    print("read" if b"secret" in found else "refused", flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize(("how", "want"), [("hidden", "refused"), ("shown", "read")])
def test_where_files_can_be_read_the_callers_variables_are_hidden(how: str, want: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SNOOP, how],
        env={"TOKEN": "secret", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == want
