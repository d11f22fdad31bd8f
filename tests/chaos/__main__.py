"""`nox -s chaos`: every stage meets every fault; a table of what was tried, survived and lost."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType

from pipeline.core import log
from tests.chaos.disk import Disk
from tests.chaos.faults import FAULTS, Attempt, Fault, Usual, count_calls
from tests.chaos.judge import Ended, Expected, Outcome, Verdict, judge, listing
from tests.chaos.stages import STAGES as FIRST
from tests.chaos.stages import Stage
from tests.chaos.stages_more import MORE
from tests.chaos.world import World, new_world
from tests.testbed.packages import CannotHave, ensure_debian_packages, find_program

PACKAGES = ("strace", "libfaketime", "iptables", "iproute2", "e2fsprogs")
# The slow ones last: a run that is stopped has tried most of them.
SLOW = ("build", "image collect", "unbundle", "source build", "bench", "report", "run PLAN")
STAGES = sorted(
    [*FIRST, *MORE], key=lambda stage: stage.name in SLOW and SLOW.index(stage.name) + 1
)
INSIDE = "SM120_CHAOS_INSIDE"
FAILED, CANNOT, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True)
class Trial:
    """What was tried, and what became of it."""

    stage: str
    fault: str
    moment: str
    outcome: Outcome
    why: str
    seconds: float


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What follows `--`; `chosen` is what it asks for."""
    parser = argparse.ArgumentParser(prog="nox -s chaos --", description=__doc__)
    parser.add_argument(
        "--only", action="append", metavar="STAGE|FAULT", help="these alone; repeatable"
    )
    parser.add_argument("--seed", type=int, default=120, help="fixes every moment [120]")
    parser.add_argument("--times", type=int, default=1, help="moments of each stage and fault [1]")
    parser.add_argument("--keep", type=Path, help="leave the folder of the run there")
    parser.add_argument("--json", action="store_true", help="print every trial as JSON")
    parser.add_argument("--list", action="store_true", help="list the stages and faults, and end")
    given = parser.parse_args(words)
    given.chosen = [
        (stage, fault)
        for stage in STAGES
        for fault in FAULTS.values()
        if fault.name in stage.faults and is_wanted(stage, fault, given.only)
    ]
    if not given.chosen:
        parser.error(f"no stage and no fault is named {' or '.join(given.only)}: --list")
    return given


def main(words: list[str] | None = None) -> int:
    """Exit code 0 where nothing was lost, 1 where something was, 2 where nothing can be tried."""
    given = read_options(words)
    if given.list:
        for stage in STAGES:
            print(f"{stage.name}: {', '.join(stage.faults)}")
        for fault in FAULTS.values():
            print(f"{fault.name}: {fault.about}")
        return 0
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    if not os.environ.get(INSIDE):
        return enter()
    trials: list[Trial] = []
    start = time.monotonic()
    home = Path(os.environ[INSIDE])
    try:
        with ExitStack() as stack:
            run(new_world(home, stack), given.chosen, given.seed, given.times, trials)
    except BaseException as error:
        print(table(trials), file=sys.stderr)
        if not isinstance(error, KeyboardInterrupt):
            raise
        print("chaos: stopped; its mounts, networks and processes are gone", file=sys.stderr)
        return INTERRUPTED
    finally:
        if given.keep:
            shutil.copytree(home / "logs", given.keep, dirs_exist_ok=True)
    if given.json:
        print(json.dumps([asdict(trial) for trial in trials], indent=1))
    print(table(trials), file=sys.stderr if given.json else sys.stdout)
    log.say(f"{len(trials)} trials in {log.seconds(time.monotonic() - start)}, seed {given.seed}")
    return 0 if all(trial.outcome.is_good for trial in trials) else FAILED


def is_wanted(stage: Stage, fault: Fault, only: list[str] | None) -> bool:
    """Names of stages choose among stages, names of faults among faults."""
    stages = {s.name for s in STAGES} & {*(only or ())}
    faults = {*FAULTS} & {*(only or ())}
    wanted = (not stages or stage.name in stages) and (not faults or fault.name in faults)
    return wanted and (not only or bool(stages or faults))


def enter() -> int:
    """Go on in namespaces of our own: whatever ends this, the kernel takes all of it away."""
    try:
        if os.geteuid() != 0:
            raise CannotHave("Mounts and networks of its own need root.")
        ensure_debian_packages(PACKAGES)
    except CannotHave as why:
        print(f"chaos: {why}", file=sys.stderr)
        return CANNOT
    home = Path(tempfile.mkdtemp(prefix="sm120-chaos-", dir=os.environ.get("TMPDIR", "/tmp")))
    own = ["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = ["sh", "-c", 'ip link set lo up && exec "$@"', "chaos", sys.executable, "-m"]
    inner = subprocess.Popen(
        [find_program("unshare"), *own, *command, "tests.chaos", *sys.argv[1:]],
        env={**os.environ, INSIDE: str(home)},
        # Ctrl-C is for us: unshare does not pass it on
        start_new_session=True,
    )
    try:
        return inner.wait()
    except KeyboardInterrupt:
        with suppress(OSError, ValueError):
            children = Path(f"/proc/{inner.pid}/task/{inner.pid}/children").read_text()
            os.kill(int(children.split()[0]), signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            inner.wait(60)
        return INTERRUPTED
    finally:
        inner.kill()
        inner.wait()
        shutil.rmtree(home, ignore_errors=True)


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def run(
    world: World,
    chosen: list[tuple[Stage, Fault]],
    seed: int,
    times: int,
    trials: list[Trial],
) -> None:
    """All trials, one after the other: each has the machine's clock, wires and disk for itself."""
    todo = [(stage, fault, number) for stage, fault in chosen for number in range(times)]
    began = time.monotonic()
    usual: Usual | None = None
    expected: Expected | None = None
    for done, (stage, fault, number) in enumerate(todo):
        if usual is None or todo[done - 1][0] is not stage:
            usual, expected = undisturbed(world, stage)
        if usual is None or expected is None:
            continue
        dice = random.Random(f"{seed} {stage.name} {fault.name} {number}")
        start = time.monotonic()
        attempt = Attempt(world, stage, dice, usual)
        verdict = attempted(attempt, fault, expected)
        took = time.monotonic() - start
        trials.append(
            Trial(stage.name, fault.name, attempt.moment, verdict.outcome, verdict.why, took)
        )
        left = (time.monotonic() - began) / (done + 1) * (len(todo) - done - 1)
        mark = "" if verdict.outcome.is_good else "!!! "
        log.say(
            f"{mark}{done + 1}/{len(todo)} {stage.name} × {fault.name} ({attempt.moment}):"
            f" {verdict.outcome}{': ' if verdict.why else ''}{verdict.why[:300]}"
            f" [{took:.1f} s; {log.seconds(left)} left]"
        )


def undisturbed(world: World, stage: Stage) -> tuple[Usual, Expected] | tuple[None, None]:
    """Prepare a stage's state, run it once in peace, and know what to expect."""
    world.calm()
    world.clear()
    world.place.mkdir()
    try:
        stage.prepare(world)
    except CannotHave as why:
        log.say(f"{stage.name}: left out: {why}")
        return None, None
    state = world.home / "states" / stage.name.replace(" ", "-")
    if state.exists():
        shutil.rmtree(state)
    shutil.copytree(world.place, state, symlinks=True)
    fresh(world, stage, state)
    before, had, size = stage.result(world), listing(world.place), used_bytes(world.place)
    attempt = Attempt(world, stage, random.Random(0), Usual(0, 0, {}, {}))
    start = time.monotonic()
    ended = attempt.start().wait()
    seconds = time.monotonic() - start
    if ended.code != 0:
        raise RuntimeError(f"{stage.name} does not work without a fault: {ended.err[-2000:]}")
    result, have = stage.result(world), listing(world.place)
    assert result is not None, f"{stage.name} made nothing"
    kept = {
        name: digest
        for name, digest in had.items()
        if have.get(name) == digest and not any(fnmatch(name, each) for each in stage.makes)
    }
    added = max(1 << 16, used_bytes(world.place) - size)
    wires = {name: wire.sent_bytes for name, wire in world.wires.items()}
    fresh(world, stage, state)
    calls = count_calls(attempt)
    usual = Usual(seconds, added, wires, calls)
    log.say(f"{stage.name}: {seconds:.1f} s, {log.size(added)}, {sum(calls.values())} calls")
    return usual, Expected(result, before, kept, stage.is_done_once)


def used_bytes(folder: Path) -> int:
    return sum(p.lstat().st_blocks * 512 for p in folder.rglob("*"))


def fresh(world: World, stage: Stage, state: Path) -> None:
    """The state as it was prepared, and servers without faults."""
    world.calm()
    world.clear()
    world.copy_state(state)
    stage.reset(world)


def attempted(attempt: Attempt, fault: Fault, expected: Expected) -> Verdict:
    """One trial; one that came too late to strike is tried again, sooner."""
    world, stage = attempt.world, attempt.stage
    state = world.home / "states" / stage.name.replace(" ", "-")
    for _ in range(3):
        world.clear()
        if fault.on_disk:
            size = used_bytes(state) + 2 * attempt.usual.added_bytes + (96 << 20)
            attempt.disk = Disk(world.home / "disk", world.place, size)
        try:
            world.calm()
            world.copy_state(state)
            stage.reset(world)
            if attempt.disk:
                attempt.disk.settle()
            attempt.has_struck, attempt.spoilt = True, set()
            ended = fault.strike(attempt)
            if not attempt.has_struck:
                continue
            return judged(attempt, ended, expected)
        finally:
            if attempt.disk:
                attempt.disk.unmount()
    return Verdict(Outcome.WENT_ON, "three times it was through before the fault")


def judged(attempt: Attempt, ended: Ended, expected: Expected) -> Verdict:
    """Ask the judge; the command that runs again meets no fault."""
    world, stage = attempt.world, attempt.stage

    def again() -> Ended:
        return attempt.start().wait()

    def heal() -> None:
        world.calm()
        if attempt.spoilt and not stage.heal:
            # it is brought again from where it came
            attempt.unspoil()
        if attempt.spoilt:
            for words in stage.heal:
                models = str(world.place / "models")
                world.sm120(*(models if word == "MODELS" else word for word in words), expect=None)

    return judge(
        expected,
        ended,
        lambda: stage.result(world),
        world.place,
        again,
        frozenset(attempt.spoilt),
        heal,
    )


def table(trials: list[Trial]) -> str:
    """Tried, survived and lost: by stage, then by fault, then whatever must not happen."""
    rows = []
    for kind in ("stage", "fault"):
        names = list(dict.fromkeys(getattr(t, kind) for t in trials))
        head = (kind, "tried", "went on", "refused", "killed", "lost")
        body = []
        for name in [*names, "all"]:
            own = [t for t in trials if name in ("all", getattr(t, kind))]
            counts = [
                sum(t.outcome == o for t in own)
                for o in (Outcome.WENT_ON, Outcome.REFUSED, Outcome.KILLED)
            ]
            body.append((name, len(own), *counts, len(own) - sum(counts)))
        rows.append(log.table(head, [tuple(map(str, row)) for row in body]))
    bad = [t for t in trials if not t.outcome.is_good]
    lines = [f"{t.outcome}: {t.stage} × {t.fault} ({t.moment}): {t.why}" for t in bad]
    return "\n\n".join([*rows, *lines])


if __name__ == "__main__":
    sys.exit(main())
