"""Serve a GGUF model over HTTP with mainline llama.cpp, as `llama-server` would.

The wheel gives llama.cpp's server as a Python class without a command line, so this file is that
command line: the same option names, each mapped onto the field of `CommonParams` that it sets.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXIT_NO_MODEL = 3
EXIT_NO_START = 4

GGUF_MAGIC = b"GGUF"
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})

EPILOG = """\
examples:
  serve.py -m /models/tiny.gguf
  serve.py -m /models/kimi-00001-of-00009.gguf --alias kimi -c 65536 -np 8 -t 32

then:
  curl http://localhost:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'

Give the first file of a split model; the others are found beside it.
-c is shared: with -np 8, each of the 8 requests gets an eighth of it, unless --kv-unified.

exit codes:
  0      stopped by SIGTERM or SIGINT
  2      the command line is wrong
  3      the model file is missing, unreadable or not GGUF
  4      the engine did not start (its own lines above say why)
  128+n  the engine was ended by signal n
"""


class ModelUnusable(Exception):
    """The model file cannot be served; the message is one line for the user."""


@dataclass(frozen=True)
class Option:
    """One `llama-server` option and the field of `CommonParams` that it sets."""

    flags: tuple[str, ...]
    field: str
    help: str
    kind: Callable[[str], object] = int
    metavar: str = "N"


OPTIONS = (
    Option(("-c", "--ctx-size"), "n_ctx", "context, in tokens (default: the model's own)"),
    Option(("-np", "--parallel"), "n_parallel", "requests at once (default: 4, sharing -c)"),
    Option(("-t", "--threads"), "cpuparams.n_threads", "threads for generation"),
    Option(("-tb", "--threads-batch"), "cpuparams_batch.n_threads", "for prompts (default: as -t)"),
    Option(("-b", "--batch-size"), "n_batch", "most tokens of a batch (default: 2048)"),
    Option(("-ub", "--ubatch-size"), "n_ubatch", "most tokens of one pass (default: 512)"),
    Option(("-n", "--predict", "--n-predict"), "n_predict", "most tokens of an answer"),
    Option(("-cram", "--cache-ram"), "cache_ram_mib", "prompt cache, in MiB (default: 8192)"),
    Option(("-to", "--timeout"), "timeout_read", "seconds to wait for a client (default: 3600)"),
    Option(("-lv", "--verbosity"), "verbosity", "log level, 0 to 5 (default: 3)"),
    Option(("--chat-template",), "chat_template", "Jinja text or a built-in name", str, "TEXT"),
)

SWITCHES = (
    Option(("--jinja",), "use_jinja", "use the model's own chat template (default: on)"),
    Option(("-kvu", "--kv-unified"), "kv_unified", "share -c between all requests"),
    Option(("--warmup",), "warmup", "run once before answering (default: on)"),
    Option(("--metrics",), "endpoint_metrics", "answer GET /metrics (default: off)"),
    Option(("--slots",), "endpoint_slots", "answer GET /slots (default: on)"),
)


def build_parser() -> argparse.ArgumentParser:
    """The command line, with the option names of `llama-server`."""
    parser = argparse.ArgumentParser(
        prog="serve.py",
        usage="serve.py -m FILE [options]   (all of them: serve.py --help)",
        description="Serve a GGUF model with llama.cpp: OpenAI-compatible HTTP on port 8080.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-m", "--model", type=Path, required=True, metavar="FILE", help="GGUF file to serve")
    add("-a", "--alias", metavar="NAME", help="model name in answers; several with commas")
    add("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8080, help="port to listen on (default: %(default)s)")
    add("--api-key-file", type=Path, metavar="FILE", help="accepted API keys, one per line")
    for option in OPTIONS:
        add(
            *option.flags,
            dest=option.field,
            type=option.kind,
            metavar=option.metavar,
            help=option.help,
        )
    for switch in SWITCHES:
        add(
            *switch.flags,
            dest=switch.field,
            action=argparse.BooleanOptionalAction,
            help=switch.help,
        )
    return parser


def engine_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What to set on `CommonParams`: only what was asked for, so llama.cpp's defaults stay."""
    given = vars(args)
    fields: dict[str, Any] = {
        option.field: given[option.field]
        for option in (*OPTIONS, *SWITCHES)
        if given[option.field] is not None
    }
    fields |= {"model.path": str(args.model), "hostnames": [args.host], "port": args.port}
    if args.alias:
        fields["model_alias"] = {name.strip() for name in args.alias.split(",")}
    if args.api_key_file:
        fields["api_keys"] = read_api_keys(args.api_key_file)
    if "cpuparams.n_threads" in fields:
        fields.setdefault("cpuparams_batch.n_threads", fields["cpuparams.n_threads"])
    if "n_parallel" not in fields:
        fields["n_parallel"] = 4
        fields.setdefault("kv_unified", True)
    return fields


def read_api_keys(path: Path) -> list[str]:
    """The keys of a file, one per line."""
    return [line.strip() for line in path.read_text().splitlines() if line.strip()]


def check_model(path: Path) -> None:
    """Refuse early and in one line what llama.cpp would refuse late and in six."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ModelUnusable(f"cannot read the model {path}: {error.strerror}") from error
    if magic != GGUF_MAGIC:
        raise ModelUnusable(f"{path} is not a GGUF file: it does not begin with 'GGUF'")


def set_fields(target: object, fields: Mapping[str, Any]) -> None:
    """Set fields by name; a dotted name reaches into a nested object."""
    for name, value in fields.items():
        *parents, last = name.split(".")
        holder = target
        for parent in parents:
            holder = getattr(holder, parent)
        setattr(holder, last, value)


def serve(fields: Mapping[str, Any]) -> int:
    """Load the model and answer requests until a signal ends this process."""
    # Imported here: the wheel is large, and --help and wrong options must answer without it.
    engine = importlib.import_module("xllamacpp")
    params = engine.CommonParams()
    set_fields(params, fields)
    try:
        server = engine.Server(params)
    except RuntimeError as error:
        return complain(f"the engine did not start: {error}", EXIT_NO_START)
    print(f"serve.py: ready on {server.listening_address}", file=sys.stderr, flush=True)
    while True:
        signal.pause()


def supervise(work: Callable[[], int]) -> int:
    """Run `work` in a child process and end it at once when told to stop.

    The engine holds the GIL while it loads and its destructor waits for open streams, so the
    process it lives in cannot answer a signal. It keeps nothing on disk: ending it loses nothing.
    As PID 1 this process also reaps what others left behind.
    """
    watched = {*STOP_SIGNALS, signal.SIGCHLD}
    # Blocked signals stay pending, also for PID 1, so none is lost between here and sigwait.
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    child = os.fork()
    if child == 0:
        run_as_child(work, watched)
    told_to_stop = False
    while True:
        if signal.sigwait(watched) in STOP_SIGNALS:
            told_to_stop = True
            os.kill(child, signal.SIGKILL)
        status = reap(child)
        if status is not None:
            return 0 if told_to_stop else exit_code_of(status)


def run_as_child(work: Callable[[], int], blocked: set[signal.Signals]) -> None:
    """The child's whole life: ordinary signals, then the work, then out without coming back."""
    code = EXIT_NO_START
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        code = work()
    except Exception as error:  # a traceback in front of a user is a bug
        complain(f"the engine did not start: {error}", code)
    finally:
        # No interpreter shutdown: the server's threads would still be running.
        os._exit(code)


def reap(child: int) -> int | None:
    """Collect every ended process; the child's wait status if it is among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == child:
            return status
        if pid == 0:
            return None


def exit_code_of(status: int) -> int:
    """A wait status as a shell would show it, with a word when a signal was the end."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    return complain(f"the engine was ended by {signal.Signals(-code).name}", 128 - code)


def complain(message: str, code: int) -> int:
    """One line for the user, and the code to end with."""
    print(f"serve.py: {message}", file=sys.stderr, flush=True)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Check what can be checked, then hand over to the engine."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        check_model(args.model)
    except ModelUnusable as error:
        return complain(str(error), EXIT_NO_MODEL)
    try:
        fields = engine_fields(args)
    except OSError as error:
        parser.error(f"--api-key-file: {error}")
    return supervise(lambda: serve(fields))


if __name__ == "__main__":
    sys.exit(main())
