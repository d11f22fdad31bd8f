"""Starts an engine and waits until it serves; a start that fails leaves no container."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts.containers.container_engine import ContainerEngine
from pipeline.artifacts.containers.facts import (
    ContainerFacts,
    require_own,
    require_same,
)
from pipeline.artifacts.oci.record import ImageRecord
from pipeline.artifacts.store.store import Store
from pipeline.core import errors, log, proc
from pipeline.hosts.rules.issues import issue_findings, match_lines
from pipeline.serving.recipe.container import LOOPBACK, container_arguments, container_name
from pipeline.serving.recipe.launch import Launch
from pipeline.serving.recipe.model import Expectations
from pipeline.serving.serve import log_reader
from pipeline.serving.serve.health import Endpoint, is_healthy, is_listening, served_models

STOP_S = 60  # engines let the requests that they work on finish
_POLL_S = 0.3
# After the last line that counts: what follows it is the reason, or what a recipe expects.
_AFTERMATH_S = 3.0
# For lines that it printed before it answered or ended: a busy machine brings them later than that.
_CATCH_UP_S = 10.0
# An engine that says it listens, while nothing answers at its published port.
_SILENT_S = 60.0
_NETWORK_HINTS = {
    "podman": "Podman keeps rules of a container that it forgot (after `podman system reset`, or a"
    " cleared /run): another --port, or a restart of the machine, helps.",
    "docker": "A firewall may drop what goes to Docker's network: `docker port` and `iptables -t"
    " nat -S` show where the port leads. --port chooses another one.",
}
_SHOWN_LINES = 20
# Often enough to see that hundreds of files are being loaded, seldom enough for a log.
_PROGRESS_EVERY_S = 2.0


@dataclass(frozen=True)
class Start:
    """One start: what is started, from which image, and what its log must show."""

    launch: Launch
    record: ImageRecord
    expect: Expectations
    timeout_s: float
    log_file: Path
    cards: tuple[int, ...] = ()
    address: str = LOOPBACK
    labels: tuple[tuple[str, str], ...] = ()
    door: Endpoint | None = None  # none: the port of this machine
    # containers of the other ranks, without which this one serves nothing
    workers: tuple[tuple[ContainerEngine, str], ...] = ()

    @property
    def name(self) -> str:
        return self.launch.recipe


@dataclass(frozen=True)
class Served:
    """An engine that answers."""

    container: str
    url: str
    model: str
    seconds: float


def start_engine(engine: ContainerEngine, store: Store, start: Start) -> Served:
    """Starts it, waits for it, compares it with what was built; or removes it and says why."""
    name, launch, record = start.name, start.launch, start.record
    # by digest: a tag could be moved meanwhile
    image = engine.image(record.config) or engine.image(record.digest)
    if image is None:
        engine.load(store, launch.image or "", record.digest)
        image = engine.image(record.config) or engine.image(record.digest)
    arguments = container_arguments(
        launch,
        image=require_same(launch.image or "", record, image).id,
        cards=start.cards,
        labels=dict(start.labels),
        address=start.address,
    )
    begun = time.monotonic()
    identity = engine.create(arguments)
    try:
        with log.step(f"Starting {name}"):
            engine.start(identity)
            # a rank above 0 answers nobody: whoever starts rank 0 watches it
            if not launch.rank:
                reader = log_reader.LogReader(engine.output(identity, follow=True), start.log_file)
                with _failure_explained(start, reader):
                    _Wait(engine, identity, start, reader).until_served()
            # what runs counts, not what was ordered
            facts = engine.container(identity)
            if facts is None:
                raise errors.ImageDiffers(
                    f"{name}: its container is gone",
                    "Serve the recipe again; find out who removed the container.",
                )
            require_same(name, record, engine.image(facts.image))
    except KeyboardInterrupt:
        _remove(engine, identity, arguments.name)
        hint = f"The container {arguments.name} was removed: nothing of it is served."
        raise errors.Interrupted("stopped", hint) from None
    except BaseException:
        _remove(engine, identity, arguments.name)
        raise
    url = f"http://127.0.0.1:{launch.port}/v1"
    return Served(arguments.name, url, launch.model, time.monotonic() - begun)


def _remove(engine: ContainerEngine, identity: str, name: str) -> None:
    """Removes a container, or says that it remains: a forgotten engine holds cards."""
    try:
        try:
            engine.remove(identity)
        except KeyboardInterrupt:  # impatient users press Ctrl-C twice
            engine.remove(identity)
    except errors.PipelineError as error:
        command = f"{engine.kind} rm --force {name}"
        error.hint = f"The container may be left: `{command}` removes it. {error.hint}".strip()
        raise


def make_room(engine: ContainerEngine, recipe: str) -> None:
    """Removes the recipe's last container if it has ended; refuses if it runs."""
    last = engine.container(container_name(recipe))
    if last is None:
        return
    owner = last.recipe
    if not owner:
        raise errors.AlreadyServed(
            f"a container {last.name} is there that was not started by `sm120 serve`",
            f"Look at it, then `{engine.kind} rm {last.name}`.",
        )
    if owner != recipe:
        # `a.b` and `a-b` are one name to systemd and Kubernetes
        raise errors.AlreadyServed(
            f"the container {last.name} is of the recipe {owner}, which has the same name for one",
            f"`sm120 recipe stop {owner}` ends it; or copy one of the two under another name.",
        )
    require_own(last)
    if last.running:
        raise errors.AlreadyServed(
            f"{recipe}: is served already, by the container {last.name}",
            f"`sm120 recipe stop {recipe}` ends it; `sm120 recipe status` shows what it is.",
        )
    engine.remove(last.id)


class _Wait:
    """Waits for one start, and reads its log meanwhile."""

    def __init__(
        self, engine: ContainerEngine, identity: str, start: Start, reader: log_reader.LogReader
    ) -> None:
        self._engine, self._identity, self._start, self._reader = engine, identity, start, reader
        self._name, self._launch = start.name, start.launch
        self._door = start.launch.port if start.door is None else start.door
        # the model of the recipe has tried to compile their patterns
        self._missing = start.expect.log
        self._shown, self._shown_at = log_reader.Progress(""), 0.0
        self._ready_at: float | None = None

    def until_served(self) -> None:
        """Waits until it serves the model and its log shows what the recipe expects."""
        deadline = time.monotonic() + self._start.timeout_s
        while not is_healthy(self._door):
            self._read_lines()
            self._require_running()
            silent = self._ready_at is not None and time.monotonic() - self._ready_at >= _SILENT_S
            # it has long been ready, and nothing answers at its port
            if silent and not is_listening(self._door):
                raise errors.StartFailed(
                    f"{self._name}: its log says that it is ready, and port {self._launch.port},"
                    f" where it is published, has not answered for {log.seconds(_SILENT_S)}",
                    _NETWORK_HINTS[self._engine.kind],
                )
            # last: a reason is better than a timeout
            if time.monotonic() > deadline:
                raise errors.StartFailed(
                    f"{self._name}: did not answer within {log.seconds(self._start.timeout_s)}",
                    "--timeout gives it more time; the last lines of its log are above.",
                )
            time.sleep(_POLL_S)
        models, wanted = served_models(self._door), self._launch.model
        # none: an engine with an API key does not list its models
        if models is not None and wanted not in models:
            raise errors.StartFailed(
                f"{self._name}: serves {', '.join(models) or 'no model'}, not {wanted}",
                "Another server may listen on that port; --port names another one.",
            )
        # it chose its backends before it answered: a fallback must not slip through
        printed = self._engine.output(self._identity, follow=False)
        self._reader.catch_up(printed, _CATCH_UP_S)
        # expected lines may still be on their way
        deadline = time.monotonic() + _AFTERMATH_S
        self._read_lines()
        while self._missing and time.monotonic() <= deadline:
            time.sleep(_POLL_S)
            self._read_lines()
        # an engine that ends right after its first answer serves nothing
        self._require_running()
        for line in self._missing:
            raise errors.BackendDiffers(
                f"{self._name}: nothing in the log matches {line.pattern!r} ({line.why})"
            )

    def _see(self, line: str) -> None:
        """Refuses a silent fallback to another backend: some lines must come, and some never."""
        # an engine may print a whole config in a line, which patterns would search for seconds
        short = line[: log_reader.LONGEST]
        self._missing = [each for each in self._missing if not re.search(each.pattern, short)]
        for wanted in self._start.expect.never:
            if re.search(wanted.pattern, short):
                raise errors.BackendDiffers(
                    f"{self._name}: the log must not have {wanted.pattern!r} ({wanted.why}),"
                    f" but says: {short.strip()[:300]}"
                )

    def _read_lines(self) -> None:
        """Prints a line of progress when something moved, but not for each of 64 files."""
        engine = self._launch.engine
        for line in self._reader.new_lines():
            self._see(line)
            if engine == "sglang" and log_reader.SGLANG_FATAL in line[: log_reader.LONGEST]:
                # the reason stands in the lines after it
                self._reader.finish(_AFTERMATH_S)
                raise errors.StartFailed(f"{self._name}: {line.strip()[:300]}")
            progress, now = log_reader.read_progress(engine, line), time.monotonic()
            # eight workers write the same line
            if progress is None or progress == self._shown:
                continue
            # the last stage of each engine: it listens, or is about to
            if self._ready_at is None and progress.title == [*log_reader.STAGES[engine]][-1]:
                self._ready_at = now
            is_news = progress.title != self._shown.title or progress.done == progress.total
            if is_news or now - self._shown_at > _PROGRESS_EVERY_S:
                log.say(f"  {progress}")
                self._shown, self._shown_at = progress, now

    def _require_running(self) -> None:
        for rank, (engine, identity) in enumerate(self._start.workers, 1):
            worker = engine.container(identity)
            if worker is None or not worker.running:
                how = f"ended ({worker.exit_code})" if worker else "is gone"
                output = b"".join(engine.output(identity, follow=False, tail=5)) if worker else b""
                last = proc.last_line(output.decode(errors="replace"), "it printed nothing")
                raise errors.StartFailed(f"{self._name}: rank {rank} {how}: {last[:300]}")
        facts = self._engine.container(self._identity)
        if facts is not None and facts.running:
            return
        self._reader.finish(_CATCH_UP_S)
        for line in self._reader.new_lines():
            self._see(line)
        if facts is None:
            raise errors.StartFailed(f"{self._name}: somebody removed its container")
        is_short = facts.out_of_memory
        how = "was killed: its memory ended" if is_short else f"ended ({facts.exit_code})"
        last = self._reader.last[-1].strip()[:300] if self._reader.last else "it printed nothing"
        raise errors.StartFailed(f"{self._name}: the engine {how}: {last}")


@contextmanager
def _failure_explained(start: Start, reader: log_reader.LogReader) -> Iterator[None]:
    """Prints the end of the log, and known issues that stand in it, before the error."""
    try:
        yield
    except errors.PipelineError as error:
        # the last lines may not have been read yet
        for _ in reader.new_lines():
            pass
        for line in list(reader.last)[-_SHOWN_LINES:]:
            log.say(f"  | {line[:400]}")
        known = [each.issue for each in issue_findings([match_lines("log", list(reader.last))])]
        for issue in known:
            log.say(f"  {issue.id}: {issue.title}\n    {issue.cause}")
        if known:
            error.hint = f"{known[0].title}: {known[0].fix}"
        error.hint = f"{error.hint} Its whole log is {start.log_file}.".strip()
        if isinstance(error, errors.ServeFailed):
            error.issues = tuple(issue.id for issue in known)
        raise


def restart(
    engine: ContainerEngine, facts: ContainerFacts, door: Endpoint, timeout_s: float
) -> None:
    """Ends the engine of a container, starts it again and waits until it answers.

    Files that the engine wrote stay; what it had in memory is gone.
    """
    require_own(facts)
    with log.step(f"Restarting {facts.name}"):
        engine.stop(facts.id, STOP_S)
        # an answer now would be taken for that of the new start
        if is_healthy(door):
            which = f"port {door}" if isinstance(door, int) else "its port"
            raise errors.StartFailed(
                f"{facts.name}: was stopped, and {which} still answers",
                "Another server listens there: `ss -ltnp` names it."
                if facts.running
                else f"{engine.kind} does not know that it runs: `sm120 recipe stop` ends it.",
            )
        engine.start(facts.id)
        deadline = time.monotonic() + timeout_s
        while not is_healthy(door):
            now = engine.container(facts.id)
            if now is None or not now.running:
                how = f"ended ({now.exit_code})" if now else "is gone"
                raise errors.StartFailed(
                    f"{facts.name}: {how} after a restart",
                    f"`{engine.kind} logs {facts.name}` shows why.",
                )
            if time.monotonic() > deadline:
                message = f"{facts.name}: does not answer after a restart"
                raise errors.StartFailed(message, "See its log.")
            time.sleep(_POLL_S)
