"""Run a plan: each stage is an `sm120` command, and runs once for the inputs it has.

No scheduler: stages run one after the other in this process's checkout and store, or Slurm gets
them as jobs that wait for each other.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from glob import escape
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from pipeline import __version__
from pipeline.app.workspace import Workspace
from pipeline.core import log, proc
from pipeline.core.errors import Interrupted, MissingTool, PlanFailed, PlanInvalid
from pipeline.core.files import (
    files_below,
    free_bytes,
    locked,
    os_errors_explained,
    read_at_most,
    sha256_of_file,
    write_bytes,
)
from pipeline.core.model import FILE_VERSION, Frozen, Line, Name, canonical_json, sha256_of
from pipeline.core.yaml_file import read_yaml
from pipeline.weights.place import STATE

# A larger file is known by its size and time: a model's shards would take an hour to read.
_READ_WHOLE_BYTES = 16 << 20
# What a plan's record may hold at most; inputs are listed in it by name.
_RECORD_BYTES = 4 << 20
_STOP_S = 60.0


class StageSpec(Frozen):
    """One command of a plan, and what it waits for."""

    run: Line | list[str] = Field(description="the command without `sm120`; no shell reads it")
    needs: list[Name] = Field(default=[], description="stages that must have succeeded")
    after: list[Name] = Field(default=[], description="stages that must have ended, however")
    inputs: list[str] = Field(
        default=[], description="more files and folders whose change runs it again"
    )
    lasts: bool = Field(
        default=True,
        description="false, as of `serve`: the result does not stay, and who needs it runs it",
    )

    @field_validator("run")
    @classmethod
    def _is_a_command(cls, run: str | list[str]) -> list[str]:
        # an unclosed quote is a ValueError, which pydantic reports at its place
        words = shlex.split(run) if isinstance(run, str) else list(run)
        words = words[1:] if words[:1] == ["sm120"] else words
        if not words or words[0].startswith("-"):
            raise ValueError("must begin with a command of sm120")
        if words[0] == "run":
            raise ValueError("a plan does not run plans")
        return words


class RunPlan(Frozen):
    """The file that `sm120 run` reads."""

    format: Annotated[Literal[1], FILE_VERSION]
    stages: dict[Name, StageSpec] = Field(min_length=1, max_length=1000)


class StageRecord(Frozen):
    """How a stage ended the last time, kept in the store."""

    format: Annotated[Literal[1], FILE_VERSION] = 1
    stage: Name
    words: list[str]
    key: str
    inputs: dict[str, str]
    began: str
    seconds: float
    code: int
    line: str = ""  # the error, in the command's own words
    made: list[str] = []  # words of the command that name what it made or changed


@dataclass(frozen=True)
class Stage:
    """A stage as it stands now: what it depends on, and what it leaves."""

    name: str
    words: Sequence[str]
    needs: frozenset[str]
    after: frozenset[str]
    outputs: Sequence[Path]
    inputs: Mapping[str, str]
    needed: Sequence[str]  # the keys of what it needs
    lasts: bool
    record: StageRecord | None

    @property
    def key(self) -> str:
        """Changes with the command, what it reads, and the stages that it needs."""
        inputs = dict(self.inputs)
        return sha256_of(canonical_json([__version__, [*self.words], inputs, [*self.needed]]))


StageState = Literal["done", "run", "left out", "failed"]


@dataclass(frozen=True)
class StageResult:
    """The result of a stage, or its expected result."""

    stage: Stage
    state: StageState
    why: str
    seconds: float | None = None  # of this run, or of the last one
    fetch_bytes: int | None = None
    disk_bytes: int | None = None
    job: str = ""


OnStage = Callable[[int, int, Stage], None]


@dataclass(frozen=True)
class RunRequest:
    """Which plan, and how much of it."""

    path: Path
    first: str | None = None  # --from
    last: str | None = None  # --until
    again: Sequence[str] = ()
    slurm: str | None = None  # --on slurm[:PARTITION]: the partition, or nothing
    is_shown: bool = True  # what commands print, on stderr


def read_stages(workspace: Workspace, path: Path) -> list[Stage]:
    """Read the stages of a plan in a runnable order, with their inputs as they are now."""
    with os_errors_explained(path):
        plan = read_yaml(path, RunPlan)
    home, folder = path.resolve().parent, _records(workspace, path)
    records: dict[str, StageRecord] = {}
    outputs: dict[str, list[Path]] = {}
    written: dict[Path, str] = {}
    for name, spec in plan.stages.items():
        # a record that nobody can read is none: the stage runs again
        with suppress(OSError, ValueError):
            data = read_at_most(folder / f"{name}.json", _RECORD_BYTES)
            records[name] = StageRecord.model_validate_json(data or b"")
        pairs = zip(spec.run, spec.run[1:], strict=False)
        paths = [value for word, value in pairs if word == "--output"]
        paths += [w.removeprefix("--output=") for w in spec.run if w.startswith("--output=")]
        last = records.get(name)
        paths += last.made if last and last.words == list(spec.run) else []
        outputs[name] = [home / each for each in dict.fromkeys(paths)]
        for place in outputs[name]:
            if (other := written.setdefault(place, name)) != name:
                raise PlanInvalid(f"{path.name}: {other} and {name} both write {place}")
    needs: dict[str, set[str]] = {}
    for name, spec in plan.stages.items():
        for other in (*spec.needs, *spec.after):
            if other not in plan.stages or other == name:
                raise PlanInvalid(f"{path.name}: {name} waits for {other!r}, which is no stage")
        # a stage that names a file of another stage needs that one
        values = [home / word.partition("=")[2] for word in spec.run if "=" in word]
        named = [*(home / word for word in spec.run), *values, *(home / i for i in spec.inputs)]
        makers = {written[p] for n in named for p in (n, *n.parents) if p in written}
        needs[name] = {*spec.needs, *(makers - {name})}
    waits = {name: needs[name] | {*spec.after} for name, spec in plan.stages.items()}
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        raise PlanInvalid(f"{path.name}: {' → '.join(error.args[1])} wait for each other") from None
    stages: dict[str, Stage] = {}
    while len(stages) < len(waits):
        # the file's own order, where it leaves a choice
        name = next(n for n in waits if n not in stages and waits[n] <= stages.keys())
        spec = plan.stages[name]
        inputs = _inputs(workspace, home, [*spec.run, *spec.inputs], outputs[name])
        needed = [stages[each].key for each in sorted(needs[name])]
        stages[name] = Stage(
            name,
            spec.run,
            frozenset(needs[name]),
            frozenset(spec.after),
            outputs[name],
            inputs,
            needed,
            spec.lasts,
            records.get(name),
        )
    return list(stages.values())


def _records(workspace: Workspace, path: Path) -> Path:
    name = f"{path.stem}-{sha256_of(str(path.resolve()).encode())[7:19]}"
    return workspace.store_root() / "plans" / name


def _inputs(
    workspace: Workspace, home: Path, words: Sequence[str], outputs: Sequence[Path]
) -> dict[str, str]:
    """Digest what a command reads: the specs, locks, recipes and files that its words name."""
    found: dict[str, Path] = {}
    checkout = workspace.checkout_or_none()
    for word in [*words, *(w.partition("=")[2] for w in words if "=" in w)]:
        if checkout is not None and "/" not in word and word not in ("", ".", ".."):
            root = checkout.root
            named = [root / "images" / word, root / "recipes" / f"{word}.yaml"]
            # its spec and lock, or the lock of each platform
            for kind in ("weights", "images"):
                named += (root / "lockfiles" / kind).glob(f"{escape(word)}.*")
            found |= {str(p.relative_to(root)): p for p in named if p.exists()}
        place = home / word
        is_written = any(place == out or out in place.parents for out in outputs)  # by itself
        # a bare word that is a file's name is one; an image and its folder are the same thing
        if word and not is_written and word not in found and os.path.lexists(place):
            found[word] = place
    if checkout is not None and words[0] == "host":
        for name in ("ansible", "lockfiles/host.yaml"):
            found[name] = checkout.root / name
    inputs = {}
    for name, place in sorted(found.items()):
        if place.is_dir():
            paths = sorted(Path(entry.path) for entry in files_below(place))
            # neither Python's compiled files nor the notes kept beside weights in a folder are
            # inputs: a command that only reads the folder may write them
            given = [p for p in paths if p.suffix != ".pyc" and STATE not in p.parts]
            parts = [[str(p.relative_to(place)), _known(p)] for p in given]
            inputs[name] = sha256_of(canonical_json(parts))
        else:
            inputs[name] = _known(place)
    return inputs


def _known(path: Path) -> str:
    """A file by its bytes, a large one by its size and time."""
    with os_errors_explained(path):
        if not path.is_file():
            return "not a file"
        about = path.stat()
        if about.st_size > _READ_WHOLE_BYTES:
            return f"{about.st_size} bytes, {about.st_mtime_ns}"
        return sha256_of_file(path)


def judge_stages(
    stages: Sequence[Stage], request: RunRequest, ended: Mapping[str, StageResult] | None = None
) -> dict[str, StageResult]:
    """What would run, and why, after those that ended; `--from` takes all before it as done."""
    names = [stage.name for stage in stages]
    for name in (request.first, request.last, *request.again):
        if name is not None and name not in names:
            raise PlanInvalid(
                f"{request.path.name}: there is no stage {name!r}",
                f"Its stages: {', '.join(names)}.",
            )
    first = names.index(request.first) if request.first else 0
    last = names.index(request.last) if request.last else len(names) - 1
    results = dict(ended or {})
    for place, stage in enumerate(stages):
        if stage.name in results:
            continue
        record, why = stage.record, ""
        ran = [n for n in sorted(stage.needs) if results[n].state == "run"]
        if record is None:
            why = "never ran"
        elif record.code != 0:
            why = f"failed the last time: {record.line}"
        elif record.key != stage.key:
            both = {*record.inputs, *stage.inputs}
            other = [i for i in sorted(both) if record.inputs.get(i) != stage.inputs.get(i)]
            own = "the command" if list(record.words) != list(stage.words) else "what it needs"
            why = f"changed: {', '.join(other[:3]) or own}"
        elif gone := [str(p) for p in stage.outputs if not p.exists()]:
            why = f"{gone[0]} is gone"
        elif ran:
            why = f"{ran[0]} runs"
        if stage.name in request.again:
            why = "asked for"
        state: StageState = "run" if why and first <= place <= last else "done"
        # a stage without lasting results runs only for others, as the next loop finds out
        if not stage.lasts and stage.name not in request.again:
            state, why = "done", "nothing that needs it runs"
        outside = "before --from" if place < first else "after --until"
        why = why if first <= place <= last else f"{outside}; {why}" if why else ""
        seconds = record.seconds if record else None
        results[stage.name] = StageResult(stage, state, why or "nothing changed", seconds)
    for place in range(last, first - 1, -1):
        stage = stages[place]
        users = [s.name for s in stages if stage.name in s.needs and results[s.name].state == "run"]
        if not stage.lasts and users and stage.name not in (ended or {}):
            results[stage.name] = replace(
                results[stage.name], state="run", why=f"{users[0]} needs it"
            )
    return results


def dry_run(workspace: Workspace, request: RunRequest) -> tuple[list[StageResult], int]:
    """Say what would run, with the bytes to fetch and write that locks tell; and free bytes."""
    # late: they read locks and specs, which a run leaves to its commands
    from pipeline.app.build import plan_images
    from pipeline.weights.model import WeightsLock

    results = []
    for result in judge_stages(read_stages(workspace, request.path), request).values():
        words, fetch, disk = list(result.stage.words), None, None
        verb = [*words[1:], ""] if words[0] in ("image", "weights") else words
        if result.state == "run" and words[0] in ("build", "image") and verb[0] == "build":
            names = tuple(word for word in verb[1:] if word in workspace.checkout().images())
            at = words.index("--platform") + 1 if "--platform" in words[:-1] else None
            chosen = plan_images(workspace, names, words[at] if at else None)
            fetch = chosen.work.fetch_bytes + chosen.work.base_bytes + chosen.taken_bytes
            disk = chosen.work.disk_bytes + chosen.taken_bytes
        if result.state == "run" and words[0] == "weights" and verb[0] == "fetch":
            fetch = 0
            folder = workspace.checkout().root / "lockfiles" / "weights"
            for path in (folder / f"{word}.lock.yaml" for word in verb[1:]):
                for pin in read_yaml(path, WeightsLock).files if path.is_file() else ():
                    there = [place / pin.path for place in result.stage.outputs]
                    if not any(p.is_file() and p.stat().st_size == pin.size_bytes for p in there):
                        fetch += pin.size_bytes
            disk = fetch
        results.append(replace(result, fetch_bytes=fetch, disk_bytes=disk))
    return results, free_bytes(workspace.store_root())


def run_stages(
    workspace: Workspace, request: RunRequest, on_stage: OnStage | None = None
) -> list[StageResult]:
    """Run what has changed, in order; keep a failure, and run what does not need that stage."""
    workspace.store()  # makes it where there is none
    folder = _records(workspace, request.path)
    ended: dict[str, StageResult] = {}
    began = 0
    # each is judged when it is its turn: an earlier one may have written what it reads
    while left := [
        result
        for name, result in judge_stages(
            read_stages(workspace, request.path), request, ended
        ).items()
        if name not in ended
    ]:
        result = left[0]
        stage = result.stage
        bad = [n for n in sorted(stage.needs) if ended[n].state in ("failed", "left out")]
        if result.state == "run" and bad:
            ended[stage.name] = replace(
                result, state="left out", why=f"{bad[0]} {ended[bad[0]].state}"
            )
            continue
        ended[stage.name] = result
        if result.state != "run":
            continue
        began += 1
        if on_stage:
            on_stage(began, began - 1 + sum(each.state == "run" for each in left), stage)
        wait = f"{request.path.name}: another run of this plan is at {stage.name}"
        # a stage, not the plan: jobs of one plan run side by side
        with locked(
            folder / f"{stage.name}.lock", busy=PlanFailed(wait, "Wait for it, or stop it.")
        ):
            record = _run(workspace, request, stage, folder / f"{stage.name}.log")
            data = record.model_dump_json(indent=1).encode()
            write_bytes(folder / f"{stage.name}.json", data + b"\n")
        ended[stage.name] = replace(
            result,
            state="failed" if record.code else "run",
            why=record.line if record.code else result.why,
            seconds=record.seconds,
        )
    return list(ended.values())


def _run(workspace: Workspace, request: RunRequest, stage: Stage, log_path: Path) -> StageRecord:
    """Run one command, with its output on our stderr and in a file."""
    began, start = datetime.now(UTC), time.monotonic()
    home = request.path.resolve().parent
    before = _inputs(workspace, home, stage.words, [])
    with log_path.open("wb") as file:
        process: subprocess.Popen[bytes] | None = None
        try:
            with proc.undisturbed():
                process = subprocess.Popen(
                    _command(workspace, stage.words),
                    cwd=home,
                    # a play is shown while it runs, not in blocks of many kilobytes
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            assert process.stdout is not None  # it is a pipe
            while piece := os.read(process.stdout.fileno(), 1 << 16):
                file.write(piece)
                if request.is_shown:
                    sys.stderr.write(log.printable(piece.decode(errors="replace")))
                    sys.stderr.flush()
            code = process.wait()
        except BaseException:
            if process is not None:
                # a terminal's Ctrl-C has reached it already, a signal for us alone has not
                with suppress(OSError):
                    process.send_signal(signal.SIGINT)
                try:
                    process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
            raise
        finally:
            if process is not None and process.stdout is not None:
                process.stdout.close()
    text = log_path.read_text("utf-8", "replace")
    if code == Interrupted.exit_code:
        raise Interrupted(f"{stage.name}: stopped")
    lines = [x.removeprefix("sm120: ") for x in text.splitlines() if x.startswith("sm120: ")]
    line = (lines or [proc.last_line(text)])[-1] if code else ""
    # what it made or changed itself is none of its inputs, or it would run for ever
    after = _inputs(workspace, home, stage.words, [])
    made = [w for w in stage.words if w in after and after[w] != before.get(w)]
    # also where it wrote the same bytes again
    last = stage.record
    if last and last.words == list(stage.words):
        made += [w for w in last.made if w in after and w not in made]
    read = {name: value for name, value in stage.inputs.items() if name not in made}
    # what a command was told to write into the checkout, it has read as it is now
    if "--accept" in stage.words or "lock" in stage.words[:2]:
        read |= {name: value for name, value in after.items() if name not in stage.words}
    return StageRecord(
        stage=stage.name,
        words=list(stage.words),
        key=replace(stage, inputs=read).key,
        inputs=read,
        began=began.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - start, 1),
        code=code,
        line=log.redacted(line, logins=True)[:500],
        made=made,
    )


def _command(workspace: Workspace, words: Sequence[str]) -> list[str]:
    """`sm120 …` of this Python, with the same checkout and store."""
    command = [sys.executable, "-m", "pipeline", "--store", str(workspace.store_root())]
    if checkout := workspace.checkout_or_none():
        command += ["--checkout", str(checkout.root)]
    return [*command, *words]


def submit_stages(workspace: Workspace, request: RunRequest) -> list[StageResult]:
    """Give Slurm a job for each stage that would run; each waits for those it needs.

    A job runs this command for its one stage, so that records are the same. Store, checkout and
    the plan's folder must be on a file system that all nodes share.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise MissingTool("sbatch is not installed", "Run it on a machine that submits jobs.")
    workspace.store()
    folder = _records(workspace, request.path)
    folder.mkdir(parents=True, exist_ok=True)
    jobs: dict[str, str] = {}
    results = []
    for result in judge_stages(read_stages(workspace, request.path), request).values():
        stage = result.stage
        if result.state == "run":
            one = ["run", str(request.path.resolve()), "--from", stage.name, "--until", stage.name]
            again = ["--again", stage.name]
            # its own environment: the controller would store ours, with its tokens
            command = shlex.join(_command(workspace, [*one, *again]))
            script = f"export SLURM_EXPORT_ENV=ALL; exec {command}"
            waits = [f"afterok:{jobs[n]}" for n in sorted(stage.needs) if n in jobs]
            waits += [f"afterany:{jobs[n]}" for n in sorted(stage.after - stage.needs) if n in jobs]
            options = ["--parsable", "--export=NONE", f"--job-name=sm120-{stage.name}"]
            options += [f"--chdir={request.path.resolve().parent}"]
            options += [f"--output={folder / stage.name}.slurm.log", "--kill-on-invalid-dep=yes"]
            options += [f"--partition={request.slurm}"] if request.slurm else []
            options += [f"--dependency={','.join(waits)}"] if waits else []
            done = proc.read([sbatch, *options, f"--wrap={script}"], env=proc.child_environment())
            text = done.stdout.decode(errors="replace").strip()
            job = text.partition(";")[0]
            # what is no number is no job, whatever the exit code
            if done.returncode != 0 or not job.isdigit():
                reason = proc.last_line(done.stderr.decode(errors="replace") or text)
                raise PlanFailed(f"{stage.name}: Slurm took no job: {reason}", _SUBMITTED)
            jobs[stage.name] = job
            result = replace(result, job=job)
        results.append(result)
    return results


_SUBMITTED = "`squeue --me` shows the jobs before it; `scancel --me` ends them."
