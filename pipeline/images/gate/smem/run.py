"""Puts cases to workers, in parallel; keeps answers, so that it asks each question once."""

from __future__ import annotations

import io
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic, Literal, Protocol, TypeVar

from pydantic import ValidationError

from pipeline.artifacts.containers.sandbox import Sandbox, find_sandbox, hide_environment
from pipeline.artifacts.store.store import Store
from pipeline.core import log, proc
from pipeline.core.errors import Interrupted
from pipeline.core.files import os_errors_explained, write_bytes
from pipeline.core.model import canonical_json, sha256_of
from pipeline.images.assemble.plan import GATE_WORKER, program_digest
from pipeline.images.gate.files import EngineSetup
from pipeline.images.gate.smem.cases import Gates, KernelCase
from pipeline.images.gate.smem.engine import EngineTree, mark_used, modules_defining
from pipeline.images.gate.smem.environment import Environment
from pipeline.images.gate.smem.limits import Card
from pipeline.images.gate.smem.results import CaseReply, CaseResult, WorkerAnswer, judge_case

# From the start of a process to its first case: importing torch, Triton and the engine's parts.
START_S = 180.0
# How often a worker's answers are read again; cases take seconds.
_LOOK_EVERY_S = 0.05
# A worker takes a few seconds to import torch; more cases to one make the last one's wait longer.
CASES_A_WORKER = 24
# A name like `forward` is in many modules; more places than these do not help.
_MOST_PLACES = 3


class Question(Protocol):
    """A case, as far as putting it to a worker goes."""

    @property
    def name(self) -> str: ...

    @property
    def timeout_s(self) -> int: ...


Case = TypeVar("Case", bound=Question)
Answer = TypeVar("Answer", bound=CaseReply)


@dataclass(frozen=True)
class AnswerTarget(Generic[Case, Answer]):
    """Questions whose answers are kept under their keys, whoever gives them."""

    store: Store
    # in place of `ask_workers`, as of a context
    ask: Callable[[Any, Sequence[Any]], list[Any]] | None = field(default=None, kw_only=True)

    @property
    def answer_type(self) -> type[Answer]:
        raise NotImplementedError

    @property
    def digests(self) -> dict[str, str]:
        """What decides answers besides the case, for the message where two machines differ."""
        raise NotImplementedError

    def key(self, case: Case) -> str:
        """Everything that decides the answer to a case."""
        raise NotImplementedError

    def folder(self, name: str) -> Path:
        return self.store.root / "gate" / name

    def answer_path(self, case: Case) -> Path:
        return self.folder("answers") / f"{self.key(case).removeprefix('sha256:')}.json"

    def fits(self, case: Case, answer: Answer) -> bool:
        """Whether what another machine sent for a case is an answer to it."""
        return answer.case == case.name

    def keep(self, case: Case, answer: Answer) -> None:
        """Keeps an answer under its key, unless another try might fare better."""
        # a worker died or was stopped, or the environment lacks a module: no fault of the kernel
        if answer.ended not in ("died", "timed out", "not imported"):
            write_bytes(self.answer_path(case), answer.model_dump_json().encode())


@dataclass(frozen=True)
class WorkerTarget(AnswerTarget[Case, Answer]):
    """One engine tree in one environment, and the program that asks it."""

    environment: Environment
    tree: EngineTree
    sandbox: Sandbox = field(default_factory=find_sandbox, kw_only=True)

    @property
    def program(self) -> Path:
        """The worker's own folder."""
        raise NotImplementedError

    @property
    def most_bytes(self) -> int:
        """What a worker may write at most; one answer, an eighth of it."""
        # the longest real answers, with thousands of kernels, are a few megabytes
        return 128 << 20

    @property
    def readable(self) -> list[Path]:
        """Folders that a worker reads, beside its environment, the engine and its own program."""
        return []

    @property
    def writable(self) -> list[Path]:
        """Folders that a worker may write to, beside its own."""
        return []

    def job(self, cases: Sequence[Any]) -> dict[str, Any]:
        """What a worker is given, as JSON."""
        return {
            "engine": str(self.tree.folder),
            "package": self.tree.package,
            "cases": [case.model_dump() for case in cases],
        }

    @property
    def absent(self) -> list[str]:
        """Modules of the image that a worker puts stand-ins for; the engine's own is there."""
        return [name for name in self.environment.absent if name != self.tree.package]

    def key_of(self, **asked: Any) -> str:
        """A key of these, and of the environment and the engine."""
        own = {"environment": self.environment.key, "absent": self.environment.absent}
        return sha256_of(canonical_json({**own, "engine": self.tree.digest, **asked}))

    def variables(self, cases: Sequence[Case], work: Path) -> dict[str, str]:
        """A worker's environment."""
        return {
            **self.environment.variables(),
            **dict.fromkeys(("HOME", "TMPDIR"), str(work)),
            # one thread each: there is a worker for every core
            **{"OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"},
        }

    @property
    def digests(self) -> dict[str, str]:
        """What decides answers besides the case, for the message where two machines differ."""
        worker = program_digest(self.program)
        return {"worker": worker, "environment": self.environment.key, "engine": self.tree.digest}


@dataclass(frozen=True)
class GateTarget(WorkerTarget[KernelCase, WorkerAnswer]):
    """An engine's kernels, judged for one card."""

    setup: EngineSetup
    card: Card

    @property
    def program(self) -> Path:
        return GATE_WORKER

    @property
    def answer_type(self) -> type[WorkerAnswer]:
        return WorkerAnswer

    @property
    def writable(self) -> list[Path]:
        return [self.kernels]

    def job(self, cases: Sequence[KernelCase]) -> dict[str, Any]:
        return {
            **super().job(cases),
            "bare": self.setup.bare,
            "absent": self.absent,
            "card": self.card.model_dump(),
            "cuda": self.environment.facts.cuda,
            "cache": str(self.kernels),
            "interpret": cases[0].numerics is not None,
        }

    def variables(self, cases: Sequence[KernelCase], work: Path) -> dict[str, str]:
        return {
            **super().variables(cases, work),
            # Triton writes its cache below TRITON_HOME and C sources to TMPDIR
            "TRITON_HOME": str(work),
            **({"TRITON_INTERPRET": "1"} if cases[0].numerics is not None else {}),
        }

    def key(self, case: KernelCase) -> str:
        """Everything that decides the answer to a case."""
        # these only decide the verdict, so an answer outlives a change of them
        asked = case.model_dump(exclude={"gate", "stands_for", "kernels", "spill_free", "base"})
        setup = self.setup.model_dump(exclude={"not_judged"})
        card = self.card.model_dump()
        return self.key_of(worker=program_digest(GATE_WORKER), setup=setup, card=card, case=asked)

    @property
    def kernels(self) -> Path:
        """The folder where workers keep what compiled kernels need.

        Engines of the lock share it. One that no lock names has its own: it could write anything.
        """
        if self.tree.is_locked:
            return self.folder("kernels")
        return self.folder("kernels-unlocked") / self.tree.digest.removeprefix("sha256:")


def judge_cases(target: GateTarget, gates: Gates, cases: Sequence[KernelCase]) -> list[CaseResult]:
    """Judges every case."""
    return [
        judge_case(case, answer, target.card, gates.gates[case.gate].accepted, cached=cached)
        for case, answer, cached in answered(target, cases)
    ]


def answered(
    target: GateTarget, cases: Sequence[KernelCase]
) -> list[tuple[KernelCase, WorkerAnswer, bool]]:
    """Returns each case with its answer, and whether that was kept from an earlier run."""
    results, tree = [], target.tree
    for case, answer, is_kept in kept_or_asked(target, cases):
        if answer.ended == "function gone":
            names = sorted({function.partition(":")[2] for function in case.function})
            places = ", ".join(modules_defining(tree, names)[:_MOST_PLACES])
            search = f"search that version's source for `def {names[0]}`, or its history for"
            where = f"now in {places}" if places else f"{search} where it went"
            message = (
                f"{tree.project} {tree.version} has no {' and no '.join(case.function)}, which case"
                f" {case.name} calls ({where}); correct `function` in gates/{case.gate}.yaml"
            )
            answer = answer.model_copy(update={"message": message})
        results.append((case, answer, is_kept))
    return results


def kept_or_asked(
    target: AnswerTarget[Case, Answer], cases: Sequence[Case]
) -> list[tuple[Case, Answer, bool]]:
    """Takes answers from the store, and asks workers for the others."""
    known: dict[str, Answer] = {}
    for case in cases:
        path = target.answer_path(case)
        try:
            answer = target.answer_type.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            continue  # a damaged or half-written answer counts as none
        mark_used(path)
        known |= {case.name: answer} if answer.case == case.name else {}
    if known:
        log.say(f"  {len(known)} of {log.count(len(cases), 'case')} judged before, from the store")
    asked = [case for case in cases if case.name not in known]
    ask: Callable[[Any, Sequence[Any]], list[Any]] = target.ask or ask_workers
    new = {answer.case: answer for answer in ask(target, asked)}
    return [(case, known.get(case.name) or new[case.name], case.name in known) for case in cases]


def ask_workers(target: WorkerTarget[Case, Answer], cases: Sequence[Case]) -> list[Answer]:
    """Puts cases to workers, a process a core, and keeps their answers."""
    if not cases:
        return []
    with os_errors_explained(target.folder("answers")):
        for folder in (*target.writable, target.folder("answers")):
            folder.mkdir(parents=True, exist_ok=True)
    if "files" not in target.sandbox.held:
        hide_environment()
    processes = min(len(os.sched_getaffinity(0)), len(cases))
    # what may take longest begins first, so that no core waits for it alone at the end
    patient = sorted(cases, key=lambda case: -case.timeout_s)
    count = min(len(cases), max(processes, len(cases) // CASES_A_WORKER))
    shares = [patient[i::count] for i in range(count)]
    stop = threading.Event()
    with ThreadPoolExecutor(processes) as pool, log.counting(len(cases), "case") as bar:
        try:
            batches = pool.map(lambda share: _ask_in_turn(target, share, stop, bar), shares)
            return [answer for batch in batches for answer in batch]
        except BaseException:
            stop.set()
            raise


def _ask_in_turn(
    target: WorkerTarget[Case, Answer], cases: list[Case], stop: threading.Event, bar: log.Bar
) -> list[Answer]:
    """Starts one process after the other until all cases have answers: a bad case ends its own."""
    answers: list[Answer] = []
    while len(answers) < len(cases):
        todo, gauge = cases[len(answers) :], log.Gauge(bar)
        with target.store.scratch() as scratch:
            new = _one_process(target, todo, scratch, stop, gauge)
        # also those that a worker began and did not live to answer
        gauge.at(len(new))
        for case, answer in zip(todo, new, strict=False):
            target.keep(case, answer)
        answers += new
    return answers


def _one_process(
    target: WorkerTarget[Case, Answer],
    cases: list[Case],
    scratch: Path,
    stop: threading.Event,
    gauge: log.Gauge,
) -> list[Answer]:
    """Returns one worker's answers until it is done, dies or is stopped; at least one."""
    # We read nothing in the worker's own folder: it may have put anything there.
    job_file, answers_file, output = (scratch / n for n in ("job.json", "answers", "output"))
    root, work = scratch / "root", scratch / "work"
    for folder in (root, work):
        folder.mkdir()
    job_file.write_text(json.dumps(target.job(cases)), encoding="utf-8")
    answers_file.touch()
    program = target.program
    command = target.sandbox.command(
        target.environment.command(str(program), str(job_file), str(answers_file)),
        read=[
            *(*target.environment.readable, *target.readable),
            *(target.tree.folder, program, job_file),
        ],
        write=[work, answers_file, *target.writable],
        root=root,
        cwd=work,
    )
    variables = target.variables(cases, work)
    # opened once: the worker may put another file in its place
    with answers_file.open("rb") as reader:
        with proc.running(command, env=variables, output=output, cwd=work) as process:
            ended = _watch(process, reader, cases, stop, gauge, target.most_bytes)
        # one line when a case begins, one when it ends
        lines = _lines(reader, 2 * len(cases), target.most_bytes)
    began = sum("begins" in line for line in lines)
    answers: list[Answer] = []
    # in the order of the cases, as far as they are answers to them
    for line, case in zip((x for x in lines if "begins" not in x), cases, strict=False):
        try:
            answer = target.answer_type.model_validate(line)
        except ValidationError:
            break
        if answer.case != case.name:
            break
        answers.append(answer)
    is_done = process.returncode == 0 and answers and began == len(answers)
    if is_done or len(answers) == len(cases):
        return answers
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - 4096))
        last = proc.last_line(file.read(4096).decode(errors="replace"), "without output")
    message = f"the worker died: {harmless(last)[:300]}" if ended == "died" else ""
    unanswered = cases[len(answers) : len(answers) + 1]
    if ended == "died" and not began:
        # where it could not even begin, no later case would fare better
        answers, unanswered = [], cases
    failed = [
        target.answer_type(case=case.name, ended=ended, message=message) for case in unanswered
    ]
    return answers + failed


def _watch(
    process: subprocess.Popen[bytes],
    reader: BinaryIO,
    cases: Sequence[Question],
    stop: threading.Event,
    gauge: log.Gauge,
    most_bytes: int,
) -> Literal["died", "timed out"]:
    """Waits for the worker to end, or for a case to take longer than it may."""
    lines, size, deadline = 0, 0, time.monotonic() + START_S
    while process.poll() is None:
        if (now := os.fstat(reader.fileno()).st_size) != size:
            size = now
            if size >= most_bytes:
                return "died"
            reader.seek(0)
            before, lines = lines, reader.read(most_bytes).count(b"\n")
            if lines != before:
                current = min(lines // 2, len(cases) - 1)
                allowed = float(cases[current].timeout_s) if lines % 2 else START_S
                deadline = time.monotonic() + allowed
        # also where nothing ended: a case may take minutes, and silence looks like a hang
        gauge.at(min(lines // 2, len(cases)))
        if time.monotonic() > deadline:
            return "timed out"
        if stop.wait(_LOOK_EVERY_S):
            raise Interrupted("stopped")
    return "died"


def _lines(reader: BinaryIO, most: int, most_bytes: int) -> list[dict[str, Any]]:
    """Reads the first lines that are JSON objects; endless output of a worker fills no memory."""
    lines: list[dict[str, Any]] = []
    reader.seek(0)
    for line in io.BytesIO(reader.read(most_bytes)):
        if len(lines) == most:
            break
        try:
            is_whole = line.endswith(b"\n") and len(line) <= most_bytes // 8
            value = json.loads(line.decode(errors="replace")) if is_whole else None
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            lines.append(harmless(value))
    return lines


def harmless(value: Any) -> Any:
    """Removes terminal control characters: engine code chose some of this text."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c == "\n" else " " for c in value)
    if isinstance(value, list):
        return [harmless(part) for part in value]
    if isinstance(value, dict):
        return {harmless(key): harmless(part) for key, part in value.items()}
    return value
