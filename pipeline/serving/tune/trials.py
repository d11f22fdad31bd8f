"""Asks a worker in an engine's image for trials, and keeps every answer.

An answer is kept before the next question is asked, so that a tuner that was killed asks none of
them again. A trial that fails is kept only if the engine's own choice runs after it: what stops
both is no property of the configuration.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic import Field, ValidationError

from pipeline.core import log, proc
from pipeline.core.errors import StepFailed
from pipeline.core.files import os_errors_explained
from pipeline.core.model import Frozen, canonical_json

WORKER = Path(__file__).with_name("worker")
# A kernel compiles in seconds, and the largest shape runs in tens of milliseconds.
TRIAL_LIMIT_S = 120.0
# An engine's import, and the driver's start on a machine with eight cards.
_START_LIMIT_S = 300.0
_REMOVE_LIMIT_S = 60.0
_MOST_ANSWER_BYTES = 4 << 20
_LOG_END_BYTES = 1 << 14
# Rounding of sums in another order; a kernel that loses a block is off by far more.
_LARGEST_ERROR = 0.02
# What nvidia-smi calls a card, as far as times depend on it.
_IDENTITY = ("name", "driver_version", "uuid")

Config = dict[str, int]


class TuneTrial(Frozen):
    """A configuration beside the engine's own, for a number of tokens; microseconds by turn."""

    tokens: int = Field(ge=1)
    config: Config | None  # none: the engine's own, beside itself
    repeats: int
    failed: str = ""
    default: Config = {}
    error: float | None = None  # the largest difference from the engine's own result
    default_us: list[float] = []
    tried_us: list[float] = []
    card: dict[str, str] = {}

    @property
    def refused(self) -> str:
        """Why its times do not count; empty where they do."""
        if self.failed:
            return self.failed
        # not `>`: that is false for NaN, too
        if self.error is None or not self.error <= _LARGEST_ERROR:
            return "gives other numbers than the engine's own choice"
        is_timed = all(0 < each < math.inf for each in (*self.tried_us, *self.default_us))
        if not is_timed or not len(self.tried_us) == len(self.default_us) == self.repeats:
            return f"did not give {log.count(self.repeats, 'time')}"
        return ""

    @property
    def is_throttled(self) -> bool:
        """Whether the driver held the card back."""
        return any(v == "Active" for k, v in self.card.items() if k.endswith("slowdown"))

    @property
    def ratios(self) -> list[float]:
        """Its time as a share of the engine's own, turn by turn."""
        pairs = zip(self.tried_us, self.default_us, strict=True)
        return [tried / default for tried, default in pairs]


@dataclass
class Journal:
    """Every trial of one tuning, a line each, synced before the next one starts."""

    path: Path
    _known: dict[bytes, TuneTrial] = field(default_factory=dict)

    @staticmethod
    def _key(tokens: int, config: Config | None, repeats: int) -> bytes:
        return canonical_json([tokens, config, repeats])

    def read(self) -> int:
        """Reads what an earlier run kept; returns how many trials."""
        with suppress(FileNotFoundError), os_errors_explained(self.path):
            for line in self.path.read_bytes().splitlines():
                # the last line of a run that was killed may be half of one
                with suppress(ValidationError):
                    trial = TuneTrial.model_validate_json(line)
                    self._known[self._key(trial.tokens, trial.config, trial.repeats)] = trial
        return len(self._known)

    def find(self, tokens: int, config: Config | None, repeats: int) -> TuneTrial | None:
        """What is known of a trial."""
        return self._known.get(self._key(tokens, config, repeats))

    def measured(self, tokens: int, repeats: int) -> list[Config]:
        """The configurations that were measured so often, in their order."""
        trials = [t for t in self._known.values() if (t.tokens, t.repeats) == (tokens, repeats)]
        return [trial.config for trial in trials if trial.config]

    def keep(self, trial: TuneTrial) -> None:
        """Writes a trial to disk."""
        with os_errors_explained(self.path), self.path.open("ab") as file:
            # after half a line of a killed run
            file.write(b"\n" * bool(file.tell()) + trial.model_dump_json().encode())
            file.flush()
            os.fsync(file.fileno())
        self._known[self._key(trial.tokens, trial.config, trial.repeats)] = trial


@dataclass
class TrialWorker:
    """A process in the image that answers requests; started again where it ended."""

    command: Sequence[str]
    env: dict[str, str]
    errors: IO[bytes]  # what it and the engine print
    remove: Sequence[str] = ()  # ends what ending the process leaves running
    card: dict[str, str] = field(default_factory=dict)  # that every trial must be of
    _process: subprocess.Popen[bytes] | None = None
    _asked: int = 0
    _log_begins: int = 0

    def ask(self, request: dict[str, Any], limit_s: float = TRIAL_LIMIT_S) -> dict[str, Any]:
        """The answer to a request, of a second process where the first ends without one."""
        answer = self._answer(request, limit_s) or self._answer(request, limit_s)
        if answer is None:
            with Path(self.errors.name).open("rb") as file:
                file.seek(max(self._log_begins, os.fstat(file.fileno()).st_size - _LOG_END_BYTES))
                output = file.read().decode(errors="replace")
            last = proc.last_line(output, "it printed nothing")
            return {"failed": f"the worker ended without an answer: {last}"}
        return answer

    def _answer(self, request: dict[str, Any], limit_s: float) -> dict[str, Any] | None:
        if self._process is None or self._process.poll() is not None:
            # also what a run that was killed left: its trials would share the card
            self.stop()
            self._log_begins = os.fstat(self.errors.fileno()).st_size
            self._process = proc.talk(self.command, env=self.env, errors=self.errors)
        process, self._asked = self._process, self._asked + 1
        assert process.stdout is not None
        line = json.dumps({"id": self._asked, "limit_s": limit_s, **request})
        with suppress(BrokenPipeError):
            proc.send_line(process, line.encode())
        found, deadline = b"", time.monotonic() + limit_s + _START_LIMIT_S
        # until it ends, the time is up, or a line has no end
        while len(found) < _MOST_ANSWER_BYTES:
            wait_s = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([process.stdout], [], [], wait_s)
            data = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
            if not data:
                break
            *whole, found = (found + data).split(b"\n")
            for each in whole:
                with suppress(ValueError):
                    answer = json.loads(each)
                    if isinstance(answer, dict) and answer.get("id") == self._asked:
                        return answer
        self.stop()
        return None

    def stop(self) -> None:
        """Ends the worker, and what it started."""
        if self._process is not None:
            proc.end(self._process)
            self._process = None
        if self.remove:
            with suppress(subprocess.TimeoutExpired):
                proc.read(self.remove, env=self.env, timeout_s=_REMOVE_LIMIT_S)


def measure(
    worker: TrialWorker,
    journal: Journal,
    tokens: int,
    config: Config | None,
    repeats: int,
    *,
    may_fail: bool = False,
) -> TuneTrial:
    """Returns a trial from the journal, or runs one; a throttled card gets time to cool.

    A failure is kept where it `may_fail`: of what ran before, it says that something else is wrong.
    """
    if known := journal.find(tokens, config, repeats):
        return known
    for wait_s in (30.0, 60.0, 120.0, 0.0):
        trial = _asked(worker, tokens, config, repeats)
        if trial.is_throttled:
            time.sleep(wait_s)
            continue
        if trial.failed and may_fail and (why := _asked(worker, tokens, None, 1).refused):
            raise StepFailed(
                f"a trial failed ({trial.failed}), and after it the engine's own choice: {why}",
                "Look at the card (`nvidia-smi`, `sm120 host check`), at its memory and at the"
                " container engine; then run this again: all trials before this one are kept.",
            )
        if may_fail or not trial.refused:
            journal.keep(trial)
        return trial
    raise StepFailed(
        "the driver slows the card down: its times would be of the heat, not of the kernels",
        "Cool it, or limit its power (`sm120 host provision`, host_tuning); then run this again:"
        " all trials so far are kept.",
    )


def _asked(worker: TrialWorker, tokens: int, config: Config | None, repeats: int) -> TuneTrial:
    own = {"tokens": tokens, "config": config, "repeats": repeats}
    answer = worker.ask(own)
    answer = {k: v for k, v in answer.items() if k in TuneTrial.model_fields}
    try:
        trial = TuneTrial.model_validate({**answer, **own})
    except ValidationError as error:
        trial = TuneTrial.model_validate(
            {**own, "failed": f"an answer that is none ({error})"[:300]}
        )
    names = [name for name in _IDENTITY if name in worker.card]
    want, got = ([card.get(name, "") for name in names] for card in (worker.card, trial.card))
    # a worker that was lost has seen no card
    if want != got and (trial.card or not trial.failed):
        raise StepFailed(
            f"a trial ran on {' '.join(got).strip() or 'a card that nvidia-smi does not name'},"
            f" and the run began on {' '.join(want)}",
            "Its times were not kept. Look at the cards with `nvidia-smi`, then run this again: all"
            " trials before this one are kept.",
        )
    return trial
