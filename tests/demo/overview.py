"""What the demo shows: each step with its time, what comes next, and tables at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.core import log

State = Literal["done", "left out", "failed"]


@dataclass
class StepRecord:
    """One step, and how it went."""

    title: str
    state: State = "failed"
    seconds: float = 0.0
    result: str = ""
    commands: list[str] = field(default_factory=list)
    stages: list[StepRecord] = field(default_factory=list)  # of the plan that it runs

    def as_json(self) -> dict[str, Any]:
        stages = [stage.as_json() for stage in self.stages]
        return {**vars(self), "seconds": round(self.seconds, 1), "stages": stages}


@dataclass(frozen=True)
class Noticed:
    """Something that was broken on purpose, and who noticed."""

    broken: str
    command: str
    code: int
    line: str


class LeftOut(Exception):
    """This machine cannot have what a step needs; the message is the reason, one sentence."""


class Overview:
    """The steps in their order; those that ran, and which one runs now."""

    def __init__(self, titles: Sequence[str]) -> None:
        self.titles = list(titles)
        self.records: list[StepRecord] = []
        self.noticed: list[Noticed] = []
        self._start = time.monotonic()
        # a time says little of a machine that had other work
        self._load = os.getloadavg()[0]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    @contextmanager
    def step(self) -> Iterator[StepRecord]:
        """The next step; what it cannot have is a reason, and not an error."""
        number = len(self.records)
        record = StepRecord(self.titles[number])
        self.records.append(record)
        begun = time.monotonic()
        log.say(f"[{number + 1}/{len(self.titles)}] {record.title}{self._next(number)}")
        try:
            yield record
            record.state = "done"
        except LeftOut as why:
            record.state, record.result = "left out", str(why)
        except BaseException as error:
            record.result = str(error) or type(error).__name__
            raise
        finally:
            record.seconds = time.monotonic() - begun
            left = "left out: " if record.state == "left out" else ""
            log.say(f"    {log.seconds(record.seconds)}: {left}{record.result}")

    def _next(self, number: int) -> str:
        later = self.titles[number + 1 : number + 2]
        return f"  (next: {later[0]})" if later else ""

    def typed(self, line: str) -> None:
        """A command of the step that runs."""
        self.records[-1].commands.append(line.removeprefix("$ "))
        log.say(f"    {line}")

    def ended(self, stage: StepRecord) -> None:
        """A stage of the plan that the present step runs."""
        self.records[-1].stages.append(stage)
        left = "left out: " if stage.state == "left out" else ""
        log.say(f"    {stage.title}, {log.seconds(stage.seconds)}: {left}{stage.result}")

    def tables(self) -> str:
        """All of it, for the end of a run."""
        rows = [
            [x.state, log.seconds(x.seconds), x.title if x is r else f"  {x.title}", x.result]
            for r in self.records
            for x in (r, *r.stages)
        ]
        text = log.table(["state", "time", "step", "result"], rows)
        if self.noticed:
            found = [[n.broken, n.command, n.code, n.line] for n in self.noticed]
            text += "\n\n" + log.table(["broken", "noticed by", "code", "its line"], found)
        return text

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "seconds": round(self.seconds, 1),
            "cores": len(os.sched_getaffinity(0)),
            "load": [round(self._load, 1), round(os.getloadavg()[0], 1)],
            "steps": [record.as_json() for record in self.records],
            "noticed": [vars(each) for each in self.noticed],
        }
