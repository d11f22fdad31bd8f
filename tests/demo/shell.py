"""Commands typed as a user would type them: shown, kept, and judged by their exit codes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

from pipeline.core import proc

ROOT = Path(__file__).resolve().parents[2]
# `sm120 serve` removes its container when it is interrupted, and needs a moment for it
_GRACE_S = 30.0
_STAGE = re.compile(r"\[\d+/\d+\] \S+: sm120 .*")


class StepFailed(Exception):
    """A command did not end as it should; the message says which, and where its output is."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    shown: str
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line with which the command says what is wrong, else its last."""
        lines = [line for line in self.err.splitlines() if line.startswith("sm120: ")]
        return lines[-1].removeprefix("sm120: ") if lines else proc.last_line(self.err or self.out)


@dataclass
class Shell:
    """A terminal in the demo's checkout."""

    cwd: Path
    logs: Path
    env: dict[str, str]
    show: Callable[[str], None]
    names: Mapping[str, str] = field(default_factory=dict)  # what a path is shown as
    count: int = 0

    def sm120(
        self,
        *words: str,
        expect: int = 0,
        env: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> Ended:
        """`sm120 …`; another exit code than the expected one ends the story.

        `before` are words that are typed before it: a program that starts it.
        """
        shown = self.shown(shlex.join([*before, "sm120", *words]))
        self.show(f"$ {shown}")
        command = [*before, sys.executable, "-m", "pipeline", *words]
        ended = self._kept(shown, *self._run(command, {**self.env, **(env or {})}))
        if ended.code != expect:
            wanted = f", not with {expect}" if expect else ""
            raise StepFailed(
                f"`{shown}` ended with {ended.code}{wanted}: {ended.line} (all of it: {self._log})"
            )
        return ended

    def shown(self, text: str) -> str:
        """A line with short names in place of long paths."""
        for path, name in self.names.items():
            text = text.replace(path, name)
        return text

    @property
    def _log(self) -> Path:
        return self.logs / f"{self.count:02}.txt"

    def _kept(self, shown: str, code: int, out: str, err: str) -> Ended:
        self.count += 1
        self._log.write_text(f"$ {shown}\n{err}{out}exit code {code}\n", encoding="utf-8")
        return Ended(shown, code, out, err)

    def _run(self, command: list[str], env: Mapping[str, str]) -> tuple[int, str, str]:
        out = TemporaryFile("w+", errors="replace")  # noqa: SIM115 -- its process writes to it
        process = subprocess.Popen(
            command,
            cwd=self.cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Ctrl-C is for us: we end it and all that it started, and then the machines
            start_new_session=True,
        )
        assert process.stderr
        lines = []
        try:
            for line in process.stderr:
                lines.append(line)
                # of `sm120 run`, when it begins one
                if stage := _STAGE.match(line):
                    self.show(self.shown(stage[0]))
            process.wait()
        except BaseException:
            end_group(process)
            raise
        out.seek(0)
        return process.returncode, out.read(), "".join(lines)


def end_group(process: subprocess.Popen[str]) -> None:
    """Interrupt a command as Ctrl-C does, and kill it and its children if that is not enough."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.communicate(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
