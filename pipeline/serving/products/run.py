"""The program `compute` in a container of a recipe's image, on one card of this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.artifacts.containers.arguments import ContainerArguments
from pipeline.artifacts.containers.container_engine import ContainerEngine
from pipeline.artifacts.oci.record import ImageRecord
from pipeline.artifacts.store.store import Store
from pipeline.core import log
from pipeline.core.errors import AlreadyServed, PreflightFailed, StartFailed
from pipeline.core.files import locked
from pipeline.core.foreign_json import read_json
from pipeline.core.known import Unknown, then
from pipeline.core.model import Frozen
from pipeline.serving.products.model import Bound, Card, Computed, Measured, Product
from pipeline.serving.recipe.container import container_arguments
from pipeline.serving.recipe.launch import Launch
from pipeline.serving.recipe.model import Expectations, Recipe
from pipeline.serving.serve.log_reader import LogReader
from pipeline.serving.serve.preflight import Machine, Plan, idle, require_ready
from pipeline.serving.serve.start import Start, loaded_image

RUNS = 10  # of one and the same call
_PROGRAM = Path(__file__).with_name("compute.py")
_MARK = "SM120-PRODUCT "
_LABEL = "sm120.products"  # no label of a server: no other verb shall find it
_PYTHON = "/opt/venv/bin/python"
_MOST_BYTES = 1 << 16  # of one line
_POLL_S = 0.3
_LAST_LINES_S = 3.0  # the log may come a moment after the end of its container
_SHOWN_LINES = 20


_HINT = "Products are computed on a card: run it where the recipe is served, or use --dry-run."


class _NoCard(Frozen):
    no_card: str


class _Line(Frozen):
    """One line of the program."""

    card: Card | _NoCard | None = None
    measured: Measured | None = None
    done: Card | None = None


@dataclass(frozen=True)
class Order:
    """What is computed, with which image, on which card."""

    launch: Launch
    record: ImageRecord
    products: Sequence[Product]
    tokens: Sequence[int]
    gpu: int
    timeout_s: float
    log_file: Path
    bound: Bound = field(default_factory=Bound)


def require_card(recipe: Recipe, machine: Machine, gpu: int) -> None:
    """Stops where there is no such card, or where something else runs on it."""
    gpus = then(machine.facts, lambda facts: facts.gpus)
    if isinstance(gpus, Unknown):
        raise PreflightFailed(f"no card is known on this machine: {gpus.unknown}", _HINT)
    if not any(each.index == gpu for each in gpus):
        raise PreflightFailed(f"this machine has no GPU {gpu}", _HINT)
    plan = Plan(recipe, recipe.port, True, None, None, cards=(gpu,))
    require_ready(idle(plan, machine))


def compute(engine: ContainerEngine, store: Store, order: Order) -> Computed:
    """Runs the program to its end, and removes its container however it ends."""
    recipe, owner = order.launch.recipe, str(store.root)
    start = Start(order.launch, order.record, Expectations(), order.timeout_s, order.log_file)
    arguments = program_arguments(order, loaded_image(engine, store, start).id)
    arguments = arguments.model_copy(update={"labels": {_LABEL: owner}})
    name = arguments.name
    busy = AlreadyServed(f"{name}: another run computes products", "Wait for its end.")
    with locked(store.root / "locks" / name, busy=busy):
        # a run of this store that was killed may have left it, and the name is taken until then
        if (last := engine.container(name)) is not None:
            if last.labels.get(_LABEL) != owner:
                raise AlreadyServed(
                    f"{name}: a container of this name is not of this store",
                    f"Look at it, and remove it if nobody needs it: `docker rm -f {name}`.",
                )
            log.say(f"Removing {name}, which a run that was killed left")
            engine.remove(last.id)
        identity = engine.create(arguments)
        try:
            with log.step(f"Computing {log.count(len(order.products), 'product')} of {recipe}"):
                engine.start(identity)
                reader = LogReader(engine.output(identity, follow=True), order.log_file)
                computed = read_results(_lines(engine, identity, order, reader))
        finally:
            engine.remove(identity)
    # what was computed before an early end still counts
    if computed is None or not (computed.is_done or computed.measured):
        log.say("\n".join([*reader.last][-_SHOWN_LINES:]))
        raise StartFailed(
            f"{recipe}: the image computed nothing",
            f"The last lines of its log are above; all of it is in {order.log_file}.",
        )
    if not computed.is_done:
        log.say("The program ended before it was done: what it did not reach is unknown.")
    return computed


def program_arguments(order: Order, image: str) -> ContainerArguments:
    """The recipe's own container, with the program in the place of the engine."""
    recipes_own = container_arguments(order.launch, image=image, cards=(order.gpu,))
    job = {
        "engine": order.launch.engine,
        "products": [product.model_dump() for product in order.products],
        "tokens": list(order.tokens),
        "runs": RUNS,
        **order.bound.model_dump(),
    }
    # as text: the image's user need not be able to read this checkout
    words = ["-c", _PROGRAM.read_text(encoding="utf-8"), json.dumps(job)]
    # no label of a server, so that no other command finds it
    bare: dict[str, Any] = {"mounts": [], "labels": {}, "port": None}
    name = f"{recipes_own.name}-products"
    changes = {"name": name, "entrypoint": _PYTHON, "arguments": words, **bare}
    return recipes_own.model_copy(update=changes)


def _lines(
    engine: ContainerEngine, identity: str, order: Order, reader: LogReader
) -> Iterator[str]:
    deadline = time.monotonic() + order.timeout_s
    while True:
        # asked first: what an ended container printed is all there once its log has ended
        facts = engine.container(identity)
        is_running = facts is not None and facts.running
        if not is_running:
            reader.finish(_LAST_LINES_S)
        yield from reader.new_lines()
        if not is_running:
            return
        if time.monotonic() > deadline:
            raise StartFailed(
                f"{order.launch.recipe}: not done within {log.seconds(order.timeout_s)}",
                "Kernels may be compiled at the first run; --timeout gives it more time.",
            )
        time.sleep(_POLL_S)


def read_results(lines: Iterable[str]) -> Computed | None:
    """The program's own lines among those of the engine's packages; none without any."""
    card: Card | None = None
    measured: list[Measured] = []
    is_done = False
    for line in lines:
        if not line.startswith(_MARK):
            continue
        try:
            text = line.removeprefix(_MARK).encode()
            found = _Line.model_validate(read_json(text, most_bytes=_MOST_BYTES))
        except ValueError as error:
            raise StartFailed(
                f"the program's result cannot be read: {' '.join(str(error).split())[:300]}",
                "Run it again; if it happens again, please report it.",
            ) from error
        described = found.done or found.card
        if isinstance(described, _NoCard):
            raise PreflightFailed(f"the container sees no card: {described.no_card}", _HINT)
        if found.measured is not None:
            measured.append(found.measured)
        card, is_done = described or card, is_done or found.done is not None
    return Computed(card=card, measured=measured, is_done=is_done) if card else None
