"""Makes Ansible's tasks cheap on a node: their modules are compiled and imported once a boot.

Ansible sends every task as a zip of sources, and the node compiled and imported the same forty
modules for each of them: nearly all of the time that a task takes. A real host does so too and has
the cores for it. Each task still is a process of its own that runs what Ansible sent.
"""

from __future__ import annotations

import _imp
import _socket
import marshal
import os
import sys
import zipimport

_compile = zipimport._compile_source  # type: ignore[attr-defined]
_LOADER = "ansible.module_utils._internal._ansiballz._loader"
_PLACE = f"/tmp/quick-modules-{os.geteuid()}"
_SERVER = f"{_PLACE}/server"
# with pipelining a task comes on stdin and Python has no arguments; other users are few, and the
# groups of a server would stay those of its start
_IS_TASK = os.geteuid() == 0 and len(sys.orig_argv) == 1 and not os.isatty(0)


def _kept(pathname: str, source: bytes) -> object:
    """What Python compiles of a module in a zip file, which it forgets after each import."""
    name = f"{_PLACE}/{_imp.source_hash(120, source).hex()}-{len(source)}"
    try:
        # no pathlib here: importing it would cost more than is saved
        with open(name, "rb") as file:  # noqa: PTH123
            code = marshal.load(file)
    except (OSError, EOFError, ValueError, TypeError):
        code = _compile(pathname, source)
        try:
            os.makedirs(_PLACE, mode=0o700, exist_ok=True)  # noqa: PTH103
            with open(f"{name}.{os.getpid()}", "wb") as file:  # noqa: PTH123
                marshal.dump(code, file)
            os.replace(f"{name}.{os.getpid()}", name)
        except OSError:  # a test's full disk, or a read-only one
            pass
    # all that tasks share is imported by now, and nothing of this one has run
    zip_file, _, module = pathname.partition(".zip/")
    if _IS_TASK and module.startswith("ansible/modules/") and _LOADER in sys.modules:
        _start_server(f"{zip_file}.zip")
    return code


def _start_server(zip_file: str) -> None:
    """A copy of this process that does the next tasks; it ends with the machine."""
    global _IS_TASK
    if _IS_TASK and os.fork() == 0:
        _IS_TASK = False
        os.setsid()
        os.closerange(3, 256)
        nothing = os.open("/dev/null", os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        try:
            _serve(zip_file)
        finally:
            os._exit(1)
    _IS_TASK = False


def _serve(zip_file: str) -> None:
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    server.bind(f"{_SERVER}.{os.getpid()}")
    server.listen(16)
    os.replace(f"{_SERVER}.{os.getpid()}", _SERVER)
    while True:
        number, _ = server._accept()  # type: ignore[attr-defined]
        if os.fork() == 0:
            server.close()
            _do(_socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, number), zip_file)
        os.close(number)


def _do(client: _socket.socket, zip_file: str) -> None:
    """One task, in the place of the process that was to do it; tells how it ended."""
    import atexit
    import signal
    import traceback
    import types

    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, rights, _flags, _address = client.recvmsg(1 << 16, _socket.CMSG_SPACE(12))
    files = memoryview(rights[0][2]).cast("i")
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    folder, environment, mask = marshal.loads(data)
    os.umask(mask)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0)  # noqa: SIM115
    sys.stdout = open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
    sys.path[:] = [name for name in sys.path if name != zip_file]
    loader = sys.modules[_LOADER]
    run_module = loader.run_module

    def run_here(**values: object) -> None:
        """Imports what is not here yet from the zip file of this task."""
        for module in list(sys.modules.values()):
            path = getattr(module, "__path__", None)
            if isinstance(path, list):
                path[:] = [str(p).replace(zip_file, str(values["modlib_path"]), 1) for p in path]
        run_module(**values)

    loader.run_module = run_here  # type: ignore[attr-defined]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    code = 0
    try:
        exec(compile(sys.stdin.buffer.read(), "<stdin>", "exec"), main.__dict__)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:  # a task that fails prints its reason, as Python alone would
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        client.send(bytes([code & 255]))
        os._exit(code & 255)


def _let_server_do_it() -> None:
    client = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        client.connect(_SERVER)
        mask = os.umask(0)
        os.umask(mask)
        words = marshal.dumps((os.getcwd(), dict(os.environ), mask))  # noqa: PTH109
        files = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
        client.sendmsg([words], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
    except OSError:  # there is none yet, or no folder where this one stands
        client.close()
        return
    # one that was killed says nothing
    os._exit((client.recv(1) or b"\x89")[0])


zipimport._compile_source = _kept  # type: ignore[attr-defined]
if _IS_TASK:
    _let_server_do_it()
