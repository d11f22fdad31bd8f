"""`--on slurm`: asks the nodes of a cluster for answers, in chunks.

Each chunk is one `srun` of a command such as `sm120 gate answer` on a node: keys go in on stdin,
answers come back on stdout, one per line (`answer_cases` of app/gate.py). Only cases without an
answer in the store are sent. Slurm is the queue: there is no daemon and no database, and only
the store of this machine keeps the answers.

Another kind of work needs three parts, as app/rebuilds.py and app/bench_nodes.py have them: an
`AnswerTarget` that says what decides an answer, which one fits and how it is kept; a command that
prints a `NodeReply` for each key on its stdin (`answer_rebuilds`, `answer_benches`); and one call
(`rebuild_on_nodes`, `measure_on_nodes`): `kept_or_asked(target, cases)` with
`ask=SlurmNodes(order, words, folder).ask` in the target.

An exit code proves nothing: `srun` ends with 0 when its node dies. An answer counts only if its
line is whole, its key was asked for, and it has the form of an answer to that case. The key is made
of all that decides the answer (worker, environment, engine, card, case), so a node with other code
or another processor can answer none.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import select
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.core import log, proc
from pipeline.core.errors import Interrupted, SlurmUnavailable, SpecInvalid
from pipeline.core.files import os_errors_explained
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import Frozen
from pipeline.images.gate.smem.run import CASES_A_WORKER, AnswerTarget, harmless

# A node may die under a chunk, and the next one, too; after that it is the chunk.
_TRIES = 3
# Each waits for its job in a process of its own; more chunks wait for one of these to end.
_MOST_AT_ONCE = 64
_LOOK_EVERY_S = 0.2
# Slurm looks at limits now and then, and gives processes time to end.
_GRACE_S = 120.0
# Two dozen answers with thousands of kernels each stay below it.
_MOST_BYTES = 64 << 20
# Steps of a job without the caller's environment have no PATH: sandboxes need one.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What a site tells its users to set. Nothing else of the caller's environment reaches a job, and
# `--export` is in the arguments because a job would inherit SLURM_EXPORT_ENV of an outer one.
_OF_SITE = ("SLURM_CONF", "SLURM_ACCOUNT", "SLURM_QOS", "SLURM_RESERVATION")
_HINT = "`sinfo` shows partitions and nodes; docs/slurm.md lists what a node needs."
# 128 + SIGTERM or SIGKILL: what srun ends with at the time limit of its job, the second where the
# job ignores the first; also when somebody cancelled it or its memory was used up.
_TERMINATED = (143, 137)


@dataclass(frozen=True)
class SlurmOrder:
    """Where chunks run, how large they are, how long each may take, and what answers them."""

    partition: str | None = None
    chunk: int | None = None  # else what suits the work
    time_limit_s: float = 3600.0
    command: tuple[str, ...] = ()  # `sm120` on the nodes; else the path that it has here

    @classmethod
    def read(
        cls, on: str | None, chunk: int | None, time_limit_s: float | None, command: str | None
    ) -> SlurmOrder | None:
        """Read the options; None if the work stays on this machine."""
        if on is None:
            if chunk or time_limit_s:
                raise SpecInvalid("--chunk and --time-limit are about nodes", "Add --on slurm.")
            return None
        if not (found := re.fullmatch(r"slurm(?::(\w[\w.-]{0,63}))?", on)):
            hint = "Write --on slurm, or --on slurm:PARTITION; `sinfo` lists partitions."
            raise SpecInvalid(f"--on {on}: is neither slurm nor slurm:PARTITION", hint)
        try:
            words = tuple(shlex.split(command or ""))
        except ValueError as error:
            raise SpecInvalid(f"--node-command: {error}", "Quote it as for a shell.") from error
        if words and not words[0].startswith("/"):
            # a job has no search path of the user's
            hint = "Write its whole path, such as '/opt/sm120/bin/sm120 --store /srv/sm120'."
            raise SpecInvalid(f"--node-command: {words[0]} has no path", hint)
        limit_s = time_limit_s or cls.time_limit_s
        return cls(found[1], chunk, limit_s, words)

    @property
    def minutes(self) -> int:
        """The time limit in whole minutes, as Slurm wants it."""
        return max(1, math.ceil(self.time_limit_s / 60))


class NodeReply(Frozen):
    """A line that a node prints: who answers, with what, and then each answer."""

    node: str = ""
    about: dict[str, str] = {}  # digests of what decides answers, for the message where they differ
    key: str = ""
    answer: dict[str, Any] = {}


@dataclass
class SlurmNodes:
    """The nodes of a cluster, in place of this machine, for one kind of questions."""

    order: SlurmOrder
    words: Sequence[str]  # of the command that answers keys, after `sm120`
    folder: Path  # the checkout, on the nodes at the same path
    noun: str = "case"
    chunk: int = CASES_A_WORKER  # where the order names none
    share: str = "--cpus-per-task=1"  # of a node
    stop: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)  # any job

    def ask(self, target: AnswerTarget[Any, Any], cases: Sequence[Any]) -> list[Any]:
        """Sends cases to nodes; a missing answer is unknown, as after a worker's death."""
        if not cases:
            return []
        proc.find_tool("srun", "Install Slurm's client (Debian: slurm-client), or leave --on out.")
        with os_errors_explained(target.folder("answers")):
            target.folder("answers").mkdir(parents=True, exist_ok=True)
        # spread the longest cases over the chunks
        patient = sorted(cases, key=lambda case: -case.timeout_s)
        count = math.ceil(len(cases) / (self.order.chunk or self.chunk))
        name = f"sm120-{secrets.token_hex(4)}"
        where = f", partition {self.order.partition}" if self.order.partition else ""
        several = f"{log.count(len(cases), self.noun)} in {log.count(count, 'chunk')}"
        limit = log.count(self.order.minutes, "minute")
        log.say(f"  {several} to Slurm{where}, as jobs {name}-*; each may take {limit}")
        answers: list[Any] = []
        with ThreadPoolExecutor(min(count, _MOST_AT_ONCE)) as pool:
            waiting: set[Future[list[Any]]] = set()
            try:
                for i in range(count):
                    left = {target.key(case): case for case in patient[i::count]}
                    waiting.add(pool.submit(Chunk(self, target, left, f"{name}-{i + 1}")))
                with log.counting(count, "chunk") as bar:
                    while waiting:
                        done, waiting = wait(waiting, timeout=1, return_when="FIRST_COMPLETED")
                        answers += [answer for each in done for answer in each.result()]
                        bar.advance(len(done))
            except BaseException:
                # also Ctrl-C: each chunk cancels its own job, and what has arrived stays
                self.stop.set()
                raise
        return answers


@dataclass
class Chunk:
    """Some cases that one job answers, or the next one where that is lost."""

    nodes: SlurmNodes
    target: AnswerTarget[Any, Any]
    left: dict[str, Any]  # cases without an answer, by key
    name: str  # of its jobs

    def __call__(self) -> list[Any]:
        """Asks until every case has its answer, or another try makes no sense."""
        answers, why = [], ""
        for attempt in range(_TRIES):
            if self.nodes.stop.is_set():
                raise Interrupted("stopped")
            got, why, is_last = self.run_job()
            for key, answer in got.items():
                # at once: whatever happens to the others, this one is not asked again
                self.target.keep(self.left.pop(key), answer)
                answers.append(answer)
            if not self.left or is_last:
                break
            again = "; asked again" if attempt + 1 < _TRIES else ""
            log.say(f"  {self.name}: {why}{again}")
        if self.left and not self.nodes.began.is_set():
            # no job ever began: this chunk is not the reason, and the others would fare no better
            raise SlurmUnavailable(f"Slurm started no chunk: {why}", _HINT)
        return answers + [
            self.target.answer_type(case=case.name, ended="died", message=f"{self.name}: {why}")
            for case in self.left.values()
        ]

    def run_job(self) -> tuple[dict[str, Any], str, bool]:
        """Runs one job; returns valid answers, what went wrong, and whether that is final."""
        nodes, order, left, name = self.nodes, self.nodes.order, self.left, self.name
        target, program = self.target, Path(sys.argv[0])
        own = [sys.executable, "-m", "pipeline"]
        own = [str(program.resolve())] if program.name == "sm120" else own
        args = [
            *("srun", "--nodes=1", "--ntasks=1", nodes.share, "--export=NONE"),
            *(f"--job-name={name}", f"--time={order.minutes}", f"--chdir={nodes.folder}"),
            *([f"--partition={order.partition}"] if order.partition else []),
            # others can read arguments, so they hold no secret
            *("/usr/bin/env", f"PATH={_PATH}", "LC_ALL=C.UTF-8"),
            *(*(order.command or own), "--quiet", *nodes.words),
        ]
        output, deadline, wrong = bytearray(), math.inf, ""
        with tempfile.TemporaryFile() as errors:
            process = proc.talk(args, env=proc.child_environment(*_OF_SITE), errors=errors)
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                with suppress(BrokenPipeError):
                    process.stdin.write("".join(f"{key}\n" for key in left).encode())
                    process.stdin.close()
                while not wrong:
                    if nodes.stop.is_set():
                        raise Interrupted("stopped")
                    if select.select([process.stdout], [], [], _LOOK_EVERY_S)[0]:
                        if not (piece := os.read(process.stdout.fileno(), 1 << 16)):
                            break
                        output += piece
                    # a job may wait in the queue for days; it says so when it begins
                    if deadline == math.inf and b"\n" in output:
                        nodes.began.set()
                        deadline = time.monotonic() + 60 * order.minutes + _GRACE_S
                    if len(output) + os.fstat(errors.fileno()).st_size > _MOST_BYTES:
                        wrong = f"printed more than {log.size(_MOST_BYTES)} and was stopped"
                    elif time.monotonic() > deadline:
                        wrong = f"took longer than {order.minutes} min, and Slurm did not end it"
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0 if wrong else _GRACE_S)
            finally:
                was_running = process.poll() is None
                proc.end(process)
                if was_running:
                    # a killed srun leaves its job in the queue, or running
                    with suppress(OSError, subprocess.TimeoutExpired):
                        proc.read(["scancel", "--quiet", f"--name={name}"], timeout_s=_GRACE_S)
            errors.seek(0)
            lines = errors.read(_MOST_BYTES).decode(errors="replace").splitlines()
        got: dict[str, Any] = {}
        node, about, mine = "the node", dict[str, str](), target.digests
        # what follows the last newline is half a line
        for line in bytes(output).split(b"\n")[:-1]:
            with suppress(JsonInvalid, ValidationError):
                value = read_json(line, most_bytes=_MOST_BYTES, any_int=True)
                reply = NodeReply.model_validate(harmless(value))
                node, about = reply.node or node, reply.about or about
                if reply.key in left and about == mine:
                    answer = target.answer_type.model_validate(reply.answer)
                    got |= {reply.key: answer} if target.fits(left[reply.key], answer) else {}
        if wrong:
            return got, wrong, True
        # srun may also end with 0 at the limit: it waited for the step in vain
        if process.returncode in _TERMINATED or time.monotonic() > deadline - _GRACE_S:
            wrong = (
                f"ended on {node} by its limit of {order.minutes} min, or was cancelled or killed"
            )
            return got, wrong, True
        if about and about != mine:
            other = [what for what in mine if about.get(what) != mine[what]]
            wrong = f"{node} has another {' and another '.join(other)} than this machine"
            return got, wrong, False
        # srun's own last line only repeats the exit code of a tool that said why
        reasons = (
            [line for line in lines if line.startswith("sm120: ")] or lines[-1:] or ["no reason"]
        )
        lost = f"{len(got)} of {log.count(len(left), 'answer')}"
        why = f"srun ended with {process.returncode} and {lost}: {harmless(reasons[0])[:300]}"
        return got, why, False
