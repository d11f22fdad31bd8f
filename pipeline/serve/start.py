"""Starting an engine and waiting until it serves; what fails leaves no container behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline import log
from pipeline.errors import (
    AlreadyServed,
    ImageDiffers,
    Interrupted,
    PipelineError,
    ServeFailed,
    StartFailed,
)
from pipeline.host.rules.issues import Finding, findings, match_lines
from pipeline.oci.record import ImageRecord
from pipeline.recipe.container import (
    LOOPBACK,
    RECIPE_LABEL,
    ContainerArguments,
    container_arguments,
    container_name,
)
from pipeline.recipe.launch import Launch
from pipeline.recipe.model import Expectations
from pipeline.serve.container_engine import ContainerEngine
from pipeline.serve.expected import ExpectedLog
from pipeline.serve.facts import ImageFacts, require_own, require_same
from pipeline.serve.health import Door, answers, is_healthy, served_models
from pipeline.serve.log_reader import LogReader
from pipeline.serve.progress import Progress, is_fatal, is_ready, read_progress
from pipeline.store.store import Store

_POLL_S = 0.3
# After the last line that counts: what follows it is the reason, or what a recipe expects.
_AFTERMATH_S = 3.0
# An engine that says it listens, while nobody does at its published port.
_SILENT_S = 60.0
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
    door: Door | None = None  # none: the port of this machine

    @property
    def name(self) -> str:
        return self.launch.recipe

    @property
    def asked_at(self) -> Door:
        """Where it is asked whether it answers."""
        return self.launch.port if self.door is None else self.door


@dataclass(frozen=True)
class Served:
    """An engine that answers."""

    container: str
    url: str
    model: str
    seconds: float


def start_engine(engine: ContainerEngine, store: Store, start: Start) -> Served:
    """Start it, wait for it, compare it with what was built; or remove it and say why."""
    image = loaded_image(engine, store, start)
    arguments = container_arguments(
        start.launch,
        image=image.id,
        cards=start.cards,
        labels=dict(start.labels),
        address=start.address,
    )
    begun = time.monotonic()
    with _created(engine, arguments) as identity, log.step(f"Starting {start.name}"):
        engine.start(identity)
        reader = LogReader(engine.output(identity, follow=True), start.log_file)
        with _failure_explained(start, reader):
            _wait(engine, identity, start, reader)
        _require_built(engine, identity, start)
    url = f"http://127.0.0.1:{start.launch.port}/v1"
    return Served(arguments.name, url, start.launch.model, time.monotonic() - begun)


def loaded_image(engine: ContainerEngine, store: Store, start: Start) -> ImageFacts:
    """The store's image in the container engine, by digest: tags can be moved."""
    record, name = start.record, start.launch.image or ""
    image = _by_digest(engine, record)
    if image is None:
        engine.load(store, name, record.digest)
        image = _by_digest(engine, record)
    require_same(name, record, image)
    assert image is not None
    return image


def _by_digest(engine: ContainerEngine, record: ImageRecord) -> ImageFacts | None:
    return engine.image(record.config) or engine.image(record.digest)


@contextmanager
def _created(engine: ContainerEngine, arguments: ContainerArguments) -> Iterator[str]:
    """A container that stays only where the block ends well: Ctrl-C, too, removes it."""
    identity = engine.create(arguments)
    try:
        yield identity
    except KeyboardInterrupt:
        _remove(engine, identity, arguments.name)
        hint = f"The container {arguments.name} was removed: nothing of it is served."
        raise Interrupted("stopped", hint) from None
    except BaseException:
        _remove(engine, identity, arguments.name)
        raise


def _remove(engine: ContainerEngine, identity: str, name: str) -> None:
    """Remove a container, or say that it is left: an engine that nobody waits for holds cards."""
    try:
        try:
            engine.remove(identity)
        except KeyboardInterrupt:  # who is impatient stops twice
            engine.remove(identity)
    except PipelineError as error:
        command = f"{engine.kind} rm --force {name}"
        error.hint = f"The container may be left: `{command}` removes it. {error.hint}".strip()
        raise


def make_room(engine: ContainerEngine, recipe: str) -> None:
    """One container for each recipe: what ended by itself is removed, what runs is left alone."""
    left = engine.container(container_name(recipe))
    if left is None:
        return
    owner = left.labels.get(RECIPE_LABEL)
    if owner and owner != recipe:
        # `a.b` and `a-b` are one name to systemd and Kubernetes
        raise AlreadyServed(
            f"the container {left.name} is of the recipe {owner}, which has the same name for one",
            f"`sm120 recipe stop {owner}` ends it; or copy one of the two under another name.",
        )
    if not owner:
        raise AlreadyServed(
            f"a container {left.name} is there that was not started by `sm120 serve`",
            f"Look at it, then `{engine.kind} rm {left.name}`.",
        )
    require_own(left)
    if left.running:
        raise AlreadyServed(
            f"{recipe}: is served already, by the container {left.name}",
            f"`sm120 recipe stop {recipe}` ends it; `sm120 recipe status` shows what it is.",
        )
    engine.remove(left.id)


def _wait(engine: ContainerEngine, identity: str, start: Start, reader: LogReader) -> None:
    """Until it serves the model and its log shows what the recipe expects."""
    expected, shown = ExpectedLog(start.name, start.expect), _Shown()
    deadline = time.monotonic() + start.timeout_s
    while not is_healthy(start.asked_at):
        for line in reader.new_lines():
            expected.see(line)
            shown.see(start, line)
            if is_fatal(start.launch.engine, line):
                # the reason stands in the lines after it
                reader.finish(_AFTERMATH_S)
                raise StartFailed(f"{start.name}: {line.strip()[:300]}")
        _require_running(engine, identity, start, reader, expected)
        _require_port(engine, start, shown.ready_at)
        if time.monotonic() > deadline:
            raise StartFailed(
                f"{start.name}: did not answer within {log.seconds(start.timeout_s)}",
                "--timeout gives it more time; the last lines of its log are above.",
            )
        time.sleep(_POLL_S)
    _require_model(start)
    _read_on(reader, expected)
    # one that ends right after its first answer serves nobody
    _require_running(engine, identity, start, reader, expected)
    expected.require_all()


def _require_port(engine: ContainerEngine, start: Start, ready_at: float | None) -> None:
    """Give up where the engine has long been ready, and nobody answers at its port."""
    if ready_at is None or time.monotonic() - ready_at < _SILENT_S or answers(start.asked_at):
        return
    network = (
        "Podman keeps rules of a container that it forgot (after `podman system reset`, or a"
        " cleared /run): another --port, or a restart of the machine, helps."
        if engine.kind == "podman"
        else "A firewall may drop what goes to Docker's network: `docker port` and `iptables -t"
        " nat -S` show where the port leads. --port chooses another one."
    )
    raise StartFailed(
        f"{start.name}: its log says that it is ready, and port {start.launch.port}, where it is"
        f" published, has not answered for {log.seconds(_SILENT_S)}",
        network,
    )


def _read_on(reader: LogReader, expected: ExpectedLog) -> None:
    """Lines that were on their way: for a moment, or until nothing more is expected."""
    deadline = time.monotonic() + _AFTERMATH_S
    while True:
        for line in reader.new_lines():
            expected.see(line)
        if not expected.missing or time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)


def _require_running(
    engine: ContainerEngine, identity: str, start: Start, reader: LogReader, expected: ExpectedLog
) -> None:
    facts = engine.container(identity)
    if facts is not None and facts.running:
        return
    reader.finish(_AFTERMATH_S)
    for line in reader.new_lines():
        expected.see(line)
    if facts is None:
        raise StartFailed(f"{start.name}: somebody removed its container")
    how = "was killed: its memory ended" if facts.out_of_memory else f"ended ({facts.exit_code})"
    said = reader.last[-1].strip()[:300] if reader.last else "it printed nothing"
    raise StartFailed(f"{start.name}: the engine {how}: {said}")


def _require_model(start: Start) -> None:
    models = served_models(start.asked_at)
    # none: an engine with an API key does not tell strangers
    if models is not None and start.launch.model not in models:
        raise StartFailed(
            f"{start.name}: serves {', '.join(models) or 'no model'}, not {start.launch.model}",
            "Another server may listen on that port; --port names another one.",
        )


def _require_built(engine: ContainerEngine, identity: str, start: Start) -> None:
    facts = engine.container(identity)
    if facts is None:
        raise ImageDiffers(
            f"{start.name}: its container is gone",
            "Serve the recipe again; find out who removed the container.",
        )
    require_same(start.name, start.record, engine.image(facts.image))


@contextmanager
def _failure_explained(start: Start, reader: LogReader) -> Iterator[None]:
    """The end of the log, and known issues that are recognised in it, before the error."""
    try:
        yield
    except PipelineError as error:
        for _ in reader.new_lines():
            pass
        for line in list(reader.last)[-_SHOWN_LINES:]:
            log.say(f"  | {line[:400]}")
        known = recognised(reader)
        for finding in known:
            log.say(f"  {finding.issue.id}: {finding.issue.title}\n    {finding.issue.cause}")
        if known:
            error.hint = f"{known[0].issue.title}: {known[0].issue.fix}"
        error.hint = f"{error.hint} Its whole log is {start.log_file}.".strip()
        if isinstance(error, ServeFailed):
            error.issues = tuple(finding.issue.id for finding in known)
        raise


def recognised(reader: LogReader) -> list[Finding]:
    """Known issues in the last lines of a log."""
    return findings([match_lines("log", list(reader.last))])


class _Shown:
    """Progress for a person: a line when something moved, but not for each of 64 files."""

    def __init__(self) -> None:
        self._last, self._at = Progress(""), 0.0
        self.ready_at: float | None = None

    def see(self, start: Start, line: str) -> None:
        progress = read_progress(start.launch.engine, line)
        # eight workers write the same line
        if progress is None or progress == self._last:
            return
        if self.ready_at is None and is_ready(start.launch.engine, progress):
            self.ready_at = time.monotonic()
        now, is_last = time.monotonic(), progress.done == progress.total
        if progress.title != self._last.title or is_last or now - self._at > _PROGRESS_EVERY_S:
            log.say(f"  {progress}")
            self._last, self._at = progress, now
