#!/usr/bin/python3
"""Takes a host out of service after an Xid that leaves a card unusable.

    sm120-health check      reads the kernel's log since the last time; a timer runs it
    sm120-health status     prints the state; ends with 3 where the host is out of service
    sm120-health return     brings the host back, after a boot or a reset of the card

Out of service means: /run/sm120/out-of-service names the reason, which keeps units with
ConditionPathExists=!/run/sm120/out-of-service from starting, and the Slurm node drains where there
is one. Running work is left alone. Only a person brings the host back.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# NVIDIA: Xid catalogue (Analyzing Xid Errors with the Xid Catalog), column Immediate Action: those
# that ask for a reset of the card, a restart of the machine or a look at its cables. Faults of
# programs are not among them, nor what a card repaired while other programs may go on (63, 92, 94).
FATAL = {
    46: "the GPU stopped processing (RESET_GPU)",
    48: "an ECC error of two bits (WORKFLOW_XID_48)",
    54: "auxiliary power is not connected (CHECK_MECHANICALS)",
    62: "a micro-controller of the GPU halted (RESET_GPU)",
    64: "a faulty row of memory could not be replaced (RESET_GPU)",
    74: "an NVLink failed (WORKFLOW_NVLINK_ERR: reset or reboot)",
    79: "the GPU has fallen off the bus (RESTART_BM)",
    95: "a memory error that reached other applications (RESET_GPU)",
    109: "a context switch timed out (RESET_GPU)",
    110: "a security fault (RESET_GPU)",
    119: "the GPU's system processor does not answer (RESET_GPU)",
    120: "the GPU's system processor failed (RESET_GPU)",
    136: "an NVLink could not be trained (RESET_GPU)",
    140: "an ECC error that was not recovered (RESET_GPU)",
    143: "the GPU could not be initialised (RESET_GPU)",
    155: "an error of NVLink's software (RESET_GPU)",
    156: "a part of the GPU was retired (RESET_GPU)",
    158: "a fatal timeout of the GPU (RESET_GPU)",
}
# 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)
_RECOVERY = re.compile(r"action changed from .{1,80}? to 0x([0-9a-fA-F]{1,8}) \(([^)]{1,60})\)")
_ADDRESS = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
_XID = re.compile(rf"NVRM: Xid \(PCI:({_ADDRESS})\): (\d{{1,4}})\b(.*)")
# A line of the kernel has about a thousand bytes; a longer one is not the driver's.
_MOST_BYTES = 64 * 1024
_OUT_OF_SERVICE = 3
# of scontrol; a queue that does not answer is asked again by the next check
_TIME_LIMIT_S = 20
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class HealthState:
    """Where the log was read to, and why the host is out of service, if it is."""

    def __init__(self, root: Path) -> None:
        self.file = root / "var/lib/sm120/health/state.json"
        # in /run, where units ask for it before disks are mounted; made anew after each boot
        self.mark = root / "run/sm120/out-of-service"
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # none yet, or damaged: the log of this boot is read again
            found = None
        self.kept = found if isinstance(found, dict) else {}
        cursor, out = self.kept.get("cursor"), self.kept.get("out")
        self.cursor = cursor if isinstance(cursor, str) else ""
        self.out: dict[str, Any] | None = dict(out) if isinstance(out, dict) else None

    def keep(self) -> None:
        """Write what changed since it was read."""
        now = {"cursor": self.cursor, "out": self.out}
        if now != self.kept:
            replace(self.file, json.dumps(now, sort_keys=True) + "\n")
            self.kept = now


def replace(path: Path, text: str) -> None:
    """Whole or not at all, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def entries(cursor: str) -> Iterator[tuple[str, str, str]]:
    """Cursor, boot and text of each line of the kernel since then; without a cursor, of this boot.

    Not by `journalctl -k`, which means this boot only: a card may fail just before a reboot. What
    programs write to the journal has another transport, whatever it says.
    """
    since = [f"--after-cursor={cursor}"] if cursor else ["--boot"]
    argv = ["journalctl", "--quiet", "--no-pager", "--output=json", "--output-fields=MESSAGE"]
    with subprocess.Popen([*argv, *since, "_TRANSPORT=kernel"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        is_whole = True
        while line := process.stdout.readline(_MOST_BYTES):
            was_whole, is_whole = is_whole, line.endswith(b"\n")
            try:
                entry = json.loads(line if was_whole and is_whole else b"")
                found = entry["__CURSOR"], entry["_BOOT_ID"], entry["MESSAGE"]
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            # what is no text comes as a list of numbers, a field that is too long as null
            if all(isinstance(each, str) for each in found):
                yield found
    if process.returncode:
        raise OSError(f"journalctl ended with {process.returncode}")


def reason_of(text: str) -> str:
    """Why a card is not usable after this line; empty for every other line."""
    match = _XID.match(text)
    if match is None:
        return ""
    address, code, rest = match[1].lower(), int(match[2]), match[3]
    if code != 154:
        return f"Xid {code} at {address}: {FATAL[code]}" if code in FATAL else ""
    action = _RECOVERY.search(rest)
    # back to none, or in words that we do not know: the Xid that came before it decides
    if action is None or int(action[1], 16) == 0:
        return ""
    return f"Xid 154 at {address}: the driver asks for: {re.sub('[^A-Za-z0-9 ]', '', action[2])}"


def check(state: HealthState) -> None:
    """Reads on; the first fatal line takes the host out of service, and others change nothing."""
    last, first = state.cursor, None
    try:
        for cursor, boot, text in entries(state.cursor):
            last = cursor
            if first is None and (why := reason_of(text)):
                first = {"why": why, "boot": boot, "drained": False}
    except OSError:
        if not state.cursor:
            raise
        # the journal was deleted, or cannot seek to the cursor: nothing of this boot is missed
        print("sm120-health: the log was not found as it was read; reading this boot again")
        state.cursor = ""
        return check(state)
    state.cursor = last
    if state.out is None and first is not None:
        state.out = {**first, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        print(f"sm120-health: out of service: {first['why']}")
    if state.out is not None:
        # the mark before all else: it needs no disk, and keeps new work away
        if not state.mark.exists():
            replace(state.mark, f"{state.out.get('why')}\n")
        has_slurm = shutil.which("slurmd") and shutil.which("scontrol")
        if has_slurm and not state.out.get("drained"):
            # no quotes, commas or signs that scontrol would read
            words = re.sub("[^A-Za-z0-9:. ]", "", str(state.out.get("why")).partition(": ")[0])
            state.out["drained"] = set_node("DRAIN", f"Reason=sm120-health: {words}")
    state.keep()
    return None


def set_node(state: str, *words: str) -> bool:
    """Tell the queue about this node, by the name that the role slurm gives it."""
    name = os.uname().nodename.partition(".")[0]
    argv = ["scontrol", "update", f"NodeName={name}", f"State={state}", *words]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False
        )
        error = "" if done.returncode == 0 else (done.stderr.strip() or f"code {done.returncode}")
    except (OSError, subprocess.TimeoutExpired) as failure:
        error = str(failure)
    if error:
        print(f"sm120-health: `{' '.join(argv[:4])}` failed: {error.splitlines()[-1][:200]}")
    return not error


def bring_back(state: HealthState, was_reset: bool) -> int:
    """A person says that the card works again."""
    # what was logged until now is read first: it is about the card as it was
    check(state)
    if state.out is None:
        print("in service; nothing to do")
        return 0
    # the journal writes boots without dashes
    now = _BOOT.read_text(encoding="ascii").strip().replace("-", "")
    if state.out.get("boot") == now and not was_reset:
        print(f"sm120-health: still out of service: {state.out.get('why')}")
        print("       Reboot the host; or reset the card (`nvidia-smi --gpu-reset -i N`),")
        print("       then `sm120-health return --card-was-reset`.")
        return 1
    was_drained, state.out = state.out.get("drained"), None
    state.keep()
    state.mark.unlink(missing_ok=True)
    print("back in service")
    # a node that a person drained is not ours to resume
    return 0 if not was_drained or set_node("RESUME") else 1


def main() -> int:
    """The command line; one run at a time."""
    parser = argparse.ArgumentParser(
        prog="sm120-health", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path("/"), help=argparse.SUPPRESS)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("check", help="read the kernel's log since the last time")
    verbs.add_parser("status", help="print the state; ends with 3 where it is out of service")
    back = verbs.add_parser("return", help="bring the host back into service")
    back.add_argument("--card-was-reset", action="store_true", help="it works without a boot")
    given = parser.parse_args()
    if given.verb == "status":
        out = HealthState(given.root).out
        print(f"out of service since {out.get('at')}: {out.get('why')}" if out else "in service")
        return _OUT_OF_SERVICE if out else 0
    try:
        folder = given.root / "var/lib/sm120/health"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = HealthState(given.root)
            if given.verb == "return":
                return bring_back(state, given.card_was_reset)
            check(state)
            return 0
    except OSError as error:
        print(f"sm120-health: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
