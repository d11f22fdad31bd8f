"""The faults: what happens to a command, at a moment that the dice choose."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.disk import NAMES_WRITTEN, NOTHING_WRITTEN, Disk
from tests.chaos.docker_part import restartable_docker
from tests.chaos.judge import Ended
from tests.chaos.stages import Stage, flip
from tests.chaos.wire import partitioned, write_names
from tests.chaos.world import Process, World
from tests.testbed.packages import find_program

# calls after which another state is on the disk: a kill between two of them is a state of its own
_CALLS = "rename,renameat,renameat2,link,linkat,unlink,unlinkat,fsync,mkdir,symlink"


@dataclass(frozen=True)
class Usual:
    """The run without a fault, in numbers."""

    seconds: float
    added_bytes: int
    wire_bytes: dict[str, int]
    calls: dict[str, int]  # each of `_CALLS`, by the thread that makes most of them


@dataclass
class Attempt:
    """One trial under way."""

    world: World
    stage: Stage
    dice: random.Random
    usual: Usual
    disk: Disk | None = None
    moment: str = ""
    has_struck: bool = True
    spoilt: set[str] = field(default_factory=set)
    unspoil: Callable[[], None] = lambda: None

    def start(self, before: Sequence[str] = (), **env: str) -> Process:
        words = self.stage.command(self.world)
        return self.world.start(words, before, {**self.stage.env(self.world), **env})

    def wait_for_share(self, process: Process, least: float = 0.15) -> None:
        """A share of the usual time; a fifth of all comes right after the usual end."""
        share = self.dice.uniform(least, 1.2)
        self.moment = f"after {share:.0%} of the usual {self.usual.seconds:.1f} s"
        end = process.began + share * self.usual.seconds
        while process.popen.poll() is None and time.monotonic() < end:
            time.sleep(0.002)


def kill(attempt: Attempt) -> Ended:
    """kill -9, of the command alone or of all that it started."""
    process = attempt.start()
    attempt.wait_for_share(process)
    process.kill(whole=(whole := attempt.dice.random() < 0.5))
    attempt.moment += ", with its children" if whole else ", alone"
    attempt.has_struck = process.was_killed
    return process.wait()


def kill_at_write(attempt: Attempt) -> Ended:
    """kill -9 between two changes of the disk: strace counts them."""
    calls = attempt.usual.calls
    (call,) = attempt.dice.choices(list(calls), list(calls.values()))
    number = attempt.dice.randint(1, calls[call])
    attempt.moment = f"at {call} {number} of {calls[call]}"
    # strace counts each call of each thread by itself
    inject = f"inject={call}:signal=SIGKILL:when={number}"
    log = attempt.world.home / "calls"
    ended = attempt.start([*_traced(call), "-o", str(log), "-e", inject]).wait()
    # perhaps of a child, whose end the command then reports in its own way
    attempt.has_struck = "killed by SIGKILL" in log.read_text(errors="replace")
    return ended._replace(was_killed=ended.code == -9)


def disk_error(attempt: Attempt) -> Ended:
    """The disk cannot write out what it took: fsync fails with EIO."""
    number = attempt.dice.randint(1, max(1, attempt.usual.calls.get("fsync", 1)))
    attempt.moment = f"from fsync {number} on"
    inject = f"inject=fsync:error=EIO:when={number}+"
    return attempt.start([*_traced("fsync"), "-o", "/dev/null", "-e", inject]).wait()


def _traced(calls: str = _CALLS) -> list[str]:
    # without --seccomp-bpf, which is faster, and with which no signal is injected
    return [find_program("strace"), "-f", "-qq", "-e", f"trace={calls}"]


def count_calls(attempt: Attempt) -> dict[str, int]:
    """How often the busiest thread of an undisturbed run changes the disk, by kinds."""
    log = attempt.world.home / "calls"
    attempt.start([*_traced(), "-o", str(log)]).wait()
    lines = re.findall(r"^(\d+) +(\w+)\(", log.read_text(errors="replace"), re.M)
    most: dict[str, int] = {}
    for (_, call), number in Counter(lines).items():
        most[call] = max(number, most.get(call, 0))
    return most


def _disk(attempt: Attempt) -> Disk:
    assert attempt.disk
    return attempt.disk


def full(attempt: Attempt) -> Ended:
    """The disk has room for a part of what comes."""
    share = attempt.dice.uniform(0, 0.95)
    ballast = _disk(attempt).fill(int(share * attempt.usual.added_bytes))
    attempt.moment = f"with room for {share:.0%} of what it writes"
    ended = attempt.start().wait()
    ballast.unlink(missing_ok=True)
    return ended


def read_only(attempt: Attempt) -> Ended:
    """The disk can only be read: ext4 does that to itself after an error."""
    process = attempt.start()
    attempt.wait_for_share(process, least=0.0)
    attempt.has_struck = process.popen.poll() is None
    _disk(attempt).become_read_only()
    ended = process.wait()
    _disk(attempt).come_back()
    return ended


def power(attempt: Attempt) -> Ended:
    """All that was not written out is gone, in the middle of a write or just after the end."""
    process = attempt.start()
    attempt.wait_for_share(process)
    how = attempt.dice.choice([NAMES_WRITTEN, NOTHING_WRITTEN])
    lost = "all but names" if how == NAMES_WRITTEN else "all"
    attempt.moment += f", {lost} that was not synced is lost"
    _disk(attempt).cut_power(how)
    process.kill()
    ended = process.wait()
    _disk(attempt).come_back()
    # what it said no longer matters: with the power its terminal is gone, too
    return ended._replace(code=-9, was_killed=True)


def clock(attempt: Attempt) -> Ended:
    """The clock of the machine jumps, by months, forth or back."""
    days = attempt.dice.choice([-4000, -400, -1, 1, 400, 4000])
    setting = attempt.world.home / "clock"
    setting.write_text("+0\n")
    library = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))[0]
    process = attempt.start(
        LD_PRELOAD=str(library),
        FAKETIME_TIMESTAMP_FILE=str(setting),
        FAKETIME_NO_CACHE="1",
        FAKETIME_DONT_FAKE_MONOTONIC="1",
        NO_FAKE_STAT="1",
    )
    attempt.wait_for_share(process, least=0.0)
    setting.write_text(f"{days:+}d\n")
    attempt.moment += f", by {days:+} days"
    return process.wait()


def twice(attempt: Attempt) -> Ended:
    """The same command, started again while it runs."""
    first = attempt.start()
    attempt.wait_for_share(first, least=0.0)
    second = attempt.start()
    ends = [first.wait(), second.wait()]
    # whichever of them did not succeed is the one to judge
    return next((end for end in ends if end.code != 0), ends[0])


def rot(attempt: Attempt) -> Ended:
    """One bit of what it reads has changed since it was written."""
    place = attempt.world.place
    files = sorted({p for g in attempt.stage.rot for p in place.glob(g) if p.stat().st_size})
    path = attempt.dice.choice(files)
    at = attempt.dice.randrange(path.stat().st_size)
    flip(path, at)
    name = str(path.relative_to(place))
    attempt.spoilt.add(name)
    attempt.unspoil = lambda: flip(path, at)
    attempt.moment = f"byte {at} of {name}"
    return attempt.start().wait()


def down(attempt: Attempt) -> Ended:
    """The server goes away in the middle of an answer, for some seconds or for good."""
    wire = attempt.world.wires[attempt.dice.choice(attempt.stage.wires)]
    at = attempt.dice.randrange(max(1, attempt.usual.wire_bytes[wire.name]))
    wire.cut_at = at
    back_s = attempt.dice.choice([None, 2.0])
    attempt.moment = f"{wire.name} after {at} bytes, {'for good' if back_s is None else 'for 2 s'}"
    process = attempt.start()
    while process.popen.poll() is None and not wire.has_struck:
        time.sleep(0.005)
    attempt.has_struck = wire.has_struck
    if back_s is not None:
        time.sleep(back_s)
        wire.come_back()
    return process.wait()


def lies(attempt: Attempt) -> Ended:
    """One bit of the server's answers is wrong: of a header, a manifest, a list or a file."""
    wire = attempt.world.wires[attempt.dice.choice(attempt.stage.wires)]
    at = attempt.dice.randrange(max(1, attempt.usual.wire_bytes[wire.name]))
    # most bytes are of files: half of the lies are about what comes before them
    if attempt.dice.random() < 0.5:
        at = attempt.dice.randrange(max(1, min(4000, attempt.usual.wire_bytes[wire.name])))
    wire.lie_at = at
    attempt.moment = f"{wire.name}, byte {at}"
    ended = attempt.start().wait()
    attempt.has_struck = wire.has_struck
    return ended


def partition(attempt: Attempt) -> Ended:
    """No packet passes between the command and its servers, for some seconds."""
    process = attempt.start()
    attempt.wait_for_share(process, least=0.0)
    seconds = attempt.dice.uniform(1, 4)
    attempt.moment += f", for {seconds:.0f} s"
    with partitioned(*(attempt.world.wires[name].port for name in attempt.stage.wires)):
        time.sleep(seconds)
    return process.wait()


def dns(attempt: Attempt) -> Ended:
    """From a moment on, no name can be resolved."""
    process = attempt.start()
    attempt.wait_for_share(process, least=0.0)
    write_names(())
    return process.wait()


def docker_restarted(attempt: Attempt) -> Ended:
    """Docker dies without a word, and is started again."""
    daemon = restartable_docker(attempt.world)
    process = attempt.start()
    attempt.wait_for_share(process, least=0.3)
    daemon.kill()
    if is_back := attempt.dice.random() < 0.5:
        daemon.start()
    attempt.moment += ", back at once" if is_back else ", back when the command has ended"
    ended = process.wait()
    if not is_back:
        daemon.start()
    return ended


def slurm_lost(attempt: Attempt) -> Ended:
    """The controller of Slurm is gone, before the first job or after some."""
    number = attempt.dice.randrange(3)
    attempt.moment = f"after {number} jobs"
    lost = attempt.world.home / "slurm" / "lost-after"
    lost.write_text(str(number))
    ended = attempt.start().wait()
    lost.unlink()
    return ended


@dataclass(frozen=True)
class Fault:
    """What happens, and whether it needs a disk of its own."""

    name: str
    strike: Callable[[Attempt], Ended]
    on_disk: bool = False

    @property
    def about(self) -> str:
        return (self.strike.__doc__ or "").strip()


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill", kill),
        Fault("kill-write", kill_at_write),
        Fault("power", power, on_disk=True),
        Fault("full", full, on_disk=True),
        Fault("read-only", read_only, on_disk=True),
        Fault("disk-error", disk_error),
        Fault("clock", clock),
        Fault("twice", twice),
        Fault("rot", rot),
        Fault("down", down),
        Fault("lies", lies),
        Fault("partition", partition),
        Fault("dns", dns),
        Fault("docker", docker_restarted),
        Fault("slurm-lost", slurm_lost),
    )
}
