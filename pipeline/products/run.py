"""The program `compute` in a container of a recipe's image, on one card of this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from pipeline import log
from pipeline.errors import AlreadyServed, PreflightFailed, StartFailed
from pipeline.files import locked
from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.known import Unknown
from pipeline.oci.record import ImageRecord
from pipeline.products.model import Bound, Card, Computed, Measured, Product
from pipeline.recipe.container import ContainerArguments, container_arguments, container_name
from pipeline.recipe.launch import Launch
from pipeline.recipe.model import Expectations, Recipe
from pipeline.serve.container_engine import ContainerEngine
from pipeline.serve.log_reader import LogReader
from pipeline.serve.preflight import Machine, Plan, idle, require_ready
from pipeline.serve.start import Start, loaded_image
from pipeline.store.store import Store

_Model = TypeVar("_Model", Card, Measured)
RUNS = 10  # of one and the same call
_PROGRAM = Path(__file__).with_name("compute.py")
_MARK = "SM120-PRODUCT "
_LABEL = "sm120.products"  # no label of a server: no other verb shall find it
_PYTHON = "/opt/venv/bin/python"
_MOST_BYTES = 1 << 16
_POLL_S = 0.3
_LAST_LINES_S = 3.0
_SHOWN_LINES = 20


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
    """Stop where there is no such card, or something else runs on it."""
    gpus = machine.facts if isinstance(machine.facts, Unknown) else machine.facts.gpus
    if isinstance(gpus, Unknown):
        raise PreflightFailed(f"no card is known on this machine: {gpus.unknown}", _HINT)
    if not any(each.index == gpu for each in gpus):
        raise PreflightFailed(f"this machine has no GPU {gpu}", _HINT)
    plan = Plan(recipe, recipe.port, True, None, None, cards=(gpu,))
    require_ready(idle(plan, machine))


_HINT = "Products are computed on a card: run it where the recipe is served, or use --dry-run."


def compute(engine: ContainerEngine, store: Store, order: Order) -> Computed:
    """Run the program to its end; the container is removed, however it ends."""
    start = Start(order.launch, order.record, Expectations(), order.timeout_s, order.log_file)
    arguments = program_arguments(order, loaded_image(engine, store, start).id)
    # whose it is, so that the next run can tell it from a container of somebody else
    arguments = arguments.model_copy(update={"labels": {_LABEL: str(store.root)}})
    busy = AlreadyServed(f"{arguments.name}: another run computes products", "Wait for its end.")
    with locked(store.root / "locks" / arguments.name, busy=busy):
        _remove_last(engine, arguments.name, str(store.root))
        identity = engine.create(arguments)
        try:
            with log.step(f"Computing {log.count(len(order.products), 'product')} of {start.name}"):
                engine.start(identity)
                reader = LogReader(engine.output(identity, follow=True), order.log_file)
                computed = read_results(_lines(engine, identity, order, reader))
                return _require_something(order, computed, reader)
        finally:
            engine.remove(identity)


def _remove_last(engine: ContainerEngine, name: str, owner: str) -> None:
    """Remove what a run of this store left that was killed: the name is taken until then."""
    facts = engine.container(name)
    if facts is None:
        return
    if facts.labels.get(_LABEL) != owner:
        raise AlreadyServed(
            f"{name}: a container of this name is not of this store",
            f"Look at it, and remove it if nobody needs it: `docker rm -f {name}`.",
        )
    log.say(f"Removing {name}, which a run that was killed left")
    engine.remove(facts.id)


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
    return recipes_own.model_copy(
        update={
            "name": container_name(order.launch.recipe) + "-products",
            "entrypoint": _PYTHON,
            # as text: the image's user need not be able to read this checkout
            "arguments": ["-c", _PROGRAM.read_text(encoding="utf-8"), json.dumps(job)],
            "mounts": [],
            "labels": {},  # it is not a server, so no other verb shall find it
            "port": None,
        }
    )


def _lines(
    engine: ContainerEngine, identity: str, order: Order, reader: LogReader
) -> Iterator[str]:
    deadline = time.monotonic() + order.timeout_s
    while True:
        # asked first: what an ended container printed is all there once its log has ended
        facts = engine.container(identity)
        if facts is None or not facts.running:
            reader.finish(_LAST_LINES_S)
        yield from reader.new_lines()
        if facts is None or not facts.running:
            return
        if time.monotonic() > deadline:
            raise StartFailed(
                f"{order.launch.recipe}: not done within {log.seconds(order.timeout_s)}",
                "Kernels may be compiled at the first run; --timeout gives it more time.",
            )
        time.sleep(_POLL_S)


def read_results(lines: Iterable[str]) -> Computed | None:
    """The program's own lines among those of the engine's packages; none where it said nothing."""
    card: Card | None = None
    measured: list[Measured] = []
    is_done = False
    for line in lines:
        if not line.startswith(_MARK):
            continue
        said = _read_line(line.removeprefix(_MARK))
        if "measured" in said:
            measured.append(_read(Measured, said["measured"]))
        else:
            card, is_done = _card(said.get("done") or said.get("card")), "done" in said
    return Computed(card=card, measured=measured, is_done=is_done) if card else None


def _read_line(text: str) -> dict[str, Any]:
    try:
        said = read_json(text.encode(), most_bytes=_MOST_BYTES)
    except JsonInvalid as error:
        raise StartFailed(
            f"the program's result cannot be read: {error}",
            "Run it again; if it happens again, please report it.",
        ) from error
    return said if isinstance(said, dict) else {}


def _card(described: Any) -> Card:
    if isinstance(described, dict) and "no_card" in described:
        raise PreflightFailed(f"the container sees no card: {described['no_card']}", _HINT)
    return _read(Card, described)


def _read(model: type[_Model], value: Any) -> _Model:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise StartFailed(
            f"a result of the program has {field}: {first['msg']}",
            "Run it again; if it happens again, please report it.",
        ) from error


def _require_something(order: Order, computed: Computed | None, reader: LogReader) -> Computed:
    """What was computed before an early end still counts; nothing at all is a failed start."""
    if computed is None or not (computed.is_done or computed.measured):
        log.say("\n".join([*reader.last][-_SHOWN_LINES:]))
        raise StartFailed(
            f"{order.launch.recipe}: the image computed nothing",
            f"The last lines of its log are above; all of it is in {order.log_file}.",
        )
    if not computed.is_done:
        log.say("The program ended before it was done: what it did not reach is unknown.")
    return computed
