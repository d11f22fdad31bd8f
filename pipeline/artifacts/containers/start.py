"""Starts one program that can reach only the files it was given. Standard library only.

    python start.py REQUEST [PROGRAM ARGUMENT…]

REQUEST is a JSON object: `kind`, the folders to `read` and to `write`, an empty folder `root`, the
working folder `cwd`; with namespaces also the unpacked image to run in (`system`), folders at
other places in it (`mounts`), and the numbers of the image's own `user` and group: then it may
change the image's files as far as that user may. Without a program it only tries, and prints as
JSON which barriers hold.

`namespaces` gives the program a file system, a network, processes and message queues of its own,
as root or through a user namespace. `restrictions` is for systems and containers that forbid this:
Landlock keeps it from files and from signalling others, seccomp from opening sockets and from
what Landlock does not watch. The kernel's keyrings are closed to both.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

BARRIERS = ("network", "files", "processes", "capabilities", "environment")
# Programs of the system that compiling calls, and what they are linked with.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
LARGEST_FILE_BYTES = 4 << 30  # no compiled kernel comes near it, and it does not fill a disk

NEWNS, NEWUTS, NEWIPC, NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
NEWPID, NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 22, 24
CAP_DAC_OVERRIDE = 1
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
# These numbers are the same on every processor.
SYS_MOUNT_SETATTR, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446
# pivot_root(2), and the processor's name as seccomp sees it
_NUMBERS = {"x86_64": (155, 0xC000003E), "aarch64": (41, 0xC00000B7)}
# Kernel keyrings (add_key, request_key, keyctl) belong to users and sessions, not to namespaces.
_REFUSED = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}
_IO_URING_SETUP = 425  # makes sockets, and opens files, past every filter
# What Landlock leaves open: truncate; mode, owner, attributes and times of files, also of those
# opened to be read; System V and POSIX queues; leaving the process group that is ended as one.
_REFUSED_BY_RESTRICTIONS = {
    "x86_64": (
        *(76, 90, 91, 92, 93, 94, 188, 189, 190, 197, 198, 199, 260, 268),
        *(132, 235, 261, 280),
        *(29, 30, 31, 64, 65, 66, 68, 69, 70, 71, 220, 240),
        *(109, 112),
    ),
    "aarch64": (
        *(45, 5, 6, 7, 14, 15, 16, 52, 53, 54, 55),
        88,
        *(180, 186, 187, 188, 189, 190, 191, 192, 193, 194, 195, 196),
        *(154, 157),
    ),
}
_REFUSED_EVERYWHERE = (452, 463, 466)  # fchmodat2, setxattrat, removexattrat
_SOCKET = {"x86_64": 41, "aarch64": 198}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
# A network namespace does not hold others, like AF_VSOCK, which leads out of a virtual machine.
_HELD_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)

_libc = ctypes.CDLL(None, use_errno=True)


def check_call(result: int, what: str) -> int:
    """A system call's result, or an error that names it."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def syscall(number: int, *arguments: Any, what: str) -> int:
    """A system call that the C library has no function for."""
    return check_call(_libc.syscall(ctypes.c_long(number), *arguments), what)


def prctl(option: int, value: int) -> None:
    """Sets a property of this process."""
    zero = ctypes.c_ulong(0)
    check_call(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), "prctl")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    done = _libc.mount(*texts, ctypes.c_ulong(flags), os.fsencode(options) or None)
    check_call(done, f"mount {target}")


def bind(source: str, root: str, *, writable: bool, at: str = "") -> None:
    """A file or folder under a new root, at its own path or at another."""
    target = root + (at or source)
    folder = target if Path(source).is_dir() else str(Path(target).parent)
    Path(folder).mkdir(parents=True, exist_ok=True)
    if folder != target and not Path(target).exists():
        Path(target).touch()
    mount(source, target, None, MS_BIND | MS_REC)
    attributes = MS_NOSUID | MS_NODEV | (0 if writable else MS_RDONLY)
    packed = struct.pack("4Q", attributes, 0, 0, 0)
    call = (ctypes.c_int(AT_FDCWD), os.fsencode(target), ctypes.c_uint(AT_RECURSIVE), packed)
    syscall(SYS_MOUNT_SETATTR, *call, ctypes.c_size_t(len(packed)), what="mount_setattr")


def place_links(path: Path, root: str) -> None:
    """Copies the links on a path: under a new root its written name leads to the same place."""
    for part in (*reversed(path.parents), path):
        if part.is_symlink():
            link = Path(f"{root}{part}")
            if not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(part.resolve())
            return place_links(part.resolve() / path.relative_to(part), root)


def make_root(request: dict[str, Any]) -> None:
    """Makes a file system of the system's programs, the named folders, and nothing else."""
    root = request["root"]
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=16m")
    system = request.get("system")  # the root of an image, in place of this machine's programs
    is_own = "user" in request  # a copy of the image that goes with the run, its /tmp too
    # an image's root without the folders that every container has of its own
    hidden = {"dev", "proc", "sys", *(() if is_own else ("tmp",))}
    names = sorted({*os.listdir(system)} - hidden) if system else []  # noqa: PTH208
    for path in [f"/{name}" for name in names] if system else SYSTEM:
        source = f"{system or ''}{path}"
        if Path(source).is_symlink():
            Path(root + path).symlink_to(Path(source).readlink())
        elif Path(source).exists():
            bind(source, root, writable=is_own, at=path)
    for folder in ("dev/shm", "tmp", "etc", "proc"):
        Path(root, folder).mkdir(parents=True, exist_ok=True)
    for folder in ("dev/shm",) if is_own else ("dev/shm", "tmp"):
        flags = MS_NOSUID | MS_NODEV
        mount("tmpfs", f"{root}/{folder}", "tmpfs", flags, "mode=1777,size=256m")
    named = {str(Path(path).resolve()): False for path in request["read"]}
    named |= {str(Path(path).resolve()): True for path in request["write"]}
    # folders before what lies in them
    for path in sorted(named, key=lambda name: name.count("/")):
        bind(path, root, writable=named[path])
    for path in (*request["read"], *request["write"]):
        place_links(Path(path), root)
    for source, path in request.get("mounts", []):
        bind(source, root, writable=True, at=path)
    for path in DEVICES:
        Path(root + path).touch()
        mount(path, root + path, None, MS_BIND)
    owner = f"nobody:x:{os.geteuid()}:{os.getegid()}::{request['cwd']}:/bin/sh\n"
    if system is None:  # an image has accounts of its own
        Path(f"{root}/etc/passwd").write_text(owner, encoding="ascii")
    # A container hides parts of /proc and forbids a fresh one: then there is none.
    with contextlib.suppress(OSError):
        flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
        mount("proc", f"{root}/proc", "proc", flags)
    os.chdir(root)
    # pivot_root(".", ".") stacks the old root under the new one, to be unmounted at once:
    # https://man7.org/linux/man-pages/man2/pivot_root.2.html
    syscall(_numbers()[0], b".", b".", what="pivot_root")
    check_call(_libc.umount2(b".", MNT_DETACH), "umount2")
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _numbers() -> tuple[int, int]:
    known = _NUMBERS.get(platform.machine())
    if known is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), platform.machine())
    return known


def drop_powers(request: dict[str, Any]) -> None:
    """Drops all capabilities, also for programs that are started later.

    Root in the store of another user keeps the one to open files of any owner: hidden files are not
    mounted at all, and read-only ones are on a read-only mount.
    """
    retained = 0
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            os.setgroups([])
        named = [*request["read"], *request["write"], *(at for _, at in request.get("mounts", []))]
        if "user" not in request and any(Path(path).stat().st_uid != 0 for path in named):
            retained = 1 << CAP_DAC_OVERRIDE
    for number in range(64):
        if retained >> number & 1:
            continue
        if _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) < 0:
            break
    with contextlib.suppress(OSError):
        prctl(PR_CAP_AMBIENT, 4)  # clear them all
    if "user" in request and os.geteuid() == 0:
        uid, gid = request["user"]
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    sets = struct.pack("6I", retained, retained, 0, 0, 0, 0)
    # the third version of the call, which knows 64 capabilities
    check_call(_libc.capset(struct.pack("Ii", 0x20080522, 0), sets), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def forbid_files(request: dict[str, Any]) -> int:
    """Landlock: the named folders and the system's programs. Returns Landlock's version.

    https://docs.kernel.org/userspace-api/landlock.html
    """
    ask = (ctypes.c_void_p(None), ctypes.c_size_t(0), ctypes.c_uint(1))
    version = syscall(SYS_LANDLOCK_CREATE, *ask, what="landlock")
    # every right that the version knows: version 2 added links between folders, 3 truncate, 5 ioctl
    files = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    # 4: to bind and to connect TCP sockets; 6: abstract sockets and signals of other processes
    fields = [files, *([3] if version >= 4 else []), *([3] if version >= 6 else [])]
    packed = struct.pack(f"{len(fields)}Q", *fields)
    create = (packed, ctypes.c_size_t(len(packed)), ctypes.c_uint(0))
    rules = syscall(SYS_LANDLOCK_CREATE, *create, what="landlock_create_ruleset")
    look, look_and_start = 0b1100, 0b1101  # read files and folders; and execute
    own = f"/proc/{os.getpid()}"
    allowed = [(path, look_and_start) for path in (*SYSTEM, *request["read"])]
    allowed += [(path, look) for path in ("/proc/cpuinfo", "/proc/meminfo", own)]
    allowed += [(path, 0b110) for path in DEVICES]
    allowed += [(path, files) for path in request["write"]]
    for path, access in allowed:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        # the kernel refuses rights of folders for a file, which has: run, write, read, truncate
        access &= files if Path(path).is_dir() else 0b100000000000111
        rule = struct.pack("=Qi", access, place)
        arguments = (ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint(0))
        syscall(SYS_LANDLOCK_ADD, *arguments, what="landlock_add_rule")
        os.close(place)
    syscall(SYS_LANDLOCK_RESTRICT, ctypes.c_int(rules), ctypes.c_uint(0), what="landlock_restrict")
    os.close(rules)
    return version


def forbid_calls(refused: Sequence[int], only: dict[int, Sequence[int]]) -> None:
    """seccomp: some system calls not at all, some only with certain first arguments."""
    _, machine = _numbers()
    # instructions and results of a filter, as linux/bpf_common.h and linux/seccomp.h number them
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    refuse, allow, kill = 0x00050000 | errno.EACCES, 0x7FFF0000, 0x80000000
    # A call is four bytes of number, four of machine, then its arguments from byte 16. Numbers from
    # 0x40000000 on are the same calls again for programs with 32-bit pointers.
    steps = [
        (load, 0, 0, 4),
        (equal, 1, 0, machine),
        (end, 0, 0, kill),
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),
        (end, 0, 0, refuse),
    ]
    for number in refused:
        steps += [(equal, 0, 1, number), (end, 0, 0, refuse)]
    for number, arguments in only.items():
        jumps = range(len(arguments), 0, -1)
        compared = [(equal, jump, 0, n) for jump, n in zip(jumps, arguments, strict=True)]
        judged = [(load, 0, 0, 16), *compared, (end, 0, 0, refuse), (end, 0, 0, allow)]
        steps += [(equal, 0, len(judged), number), *judged]
    steps.append((end, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = struct.pack("H6xQ", len(steps), ctypes.addressof(code))
    zero = ctypes.c_ulong(0)
    check_call(_libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), program, zero, zero), "seccomp")


def wait(child: int) -> int:
    """The child's exit status as a shell reports it; other children handed to us are reaped."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def in_namespaces(request: dict[str, Any], command: Sequence[str]) -> int:
    """Runs the program, or only tries, with mounts, network, processes and queues of its own."""
    flags = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0 or _libc.unshare(flags) != 0:
        check_call(_libc.unshare(flags | NEWUSER), "unshare")
        # one's own number is the only one that may be mapped: inside it is the image's user's
        inside_uid, inside_gid = request.get("user") or (uid, gid)
        # without this the kernel refuses a map of groups from a user without capabilities:
        # https://man7.org/linux/man-pages/man7/user_namespaces.7.html
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{inside_uid} {uid} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{inside_gid} {gid} 1", encoding="ascii")
    first = os.fork()
    if first:
        return wait(first)
    # The first process of a namespace: when it ends, the kernel ends all others.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    make_root(request)
    if "hostname" in request:
        socket.sethostname(request["hostname"])
    os.chdir(request["cwd"])
    child = os.fork()
    if child:
        os._exit(wait(child))
    drop_powers(request)
    # keys of the caller, and kinds of sockets that no namespace holds
    machine = platform.machine()
    forbid_calls([*_REFUSED[machine], _IO_URING_SETUP], {_SOCKET[machine]: _HELD_FAMILIES})
    if not command:
        print(json.dumps(BARRIERS), flush=True)
        os._exit(0)
    os.umask(0o022)
    os.execvp(command[0], list(command))


def in_restrictions(request: dict[str, Any], command: Sequence[str]) -> int:
    """Runs the program, or only tries, with as many barriers as a process may set for itself."""

    def end(*_: object) -> NoReturn:
        end_all_children()
        os._exit(128 + signal.SIGTERM)

    # Children that the program leaves running are handed to us, so that we can end them; also when
    # our caller is killed, of which only we get a signal.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, end)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    child = os.fork()
    if child:
        code = wait(child)
        end_all_children()
        return code
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(request["cwd"])
    held = {"capabilities", "environment"}
    drop_powers(request)
    with contextlib.suppress(OSError):
        version = forbid_files(request)
        held |= {"files", "processes"} if version >= 6 else {"files"}
    with contextlib.suppress(OSError):
        # sockets of any family, keys and queues, changes to files, limits of other processes
        machine = platform.machine()
        refused = [*_REFUSED[machine], *_REFUSED_BY_RESTRICTIONS[machine], *_REFUSED_EVERYWHERE]
        forbid_calls([*refused, _SOCKET[machine], _IO_URING_SETUP], {_PRLIMIT[machine]: (0,)})
        held.add("network")
    if not command:
        print(json.dumps([barrier for barrier in BARRIERS if barrier in held]), flush=True)
        os._exit(0)
    missing = [barrier for barrier in request["held"] if barrier not in held]
    if missing:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), " and ".join(missing))
    os.execvp(command[0], list(command))


def end_all_children() -> None:
    """Kills children until none is left: each that dies hands its own children to us."""
    while True:
        try:
            text = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
        except OSError:
            return
        if not text.split():
            return
        for pid in map(int, text.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.wait()


if __name__ == "__main__":
    try:
        request, command = json.loads(sys.argv[1]), sys.argv[2:]
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        limits = [n for n in (hard, LARGEST_FILE_BYTES) if n != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_FSIZE, (min(limits), min(limits)))
        if "memory_bytes" in request:
            # of each process: a compiler that runs away ends itself before the machine is full
            resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"],) * 2)
        if "cpus" in request:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: request["cpus"]])
        kinds = {"namespaces": in_namespaces, "restrictions": in_restrictions}
        # the program's exit status is ours
        sys.exit(kinds[request["kind"]](request, command))
    except OSError as error:
        print(f"sandbox: {error.filename}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(125)
