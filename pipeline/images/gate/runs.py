"""What running an image proved, kept beside it: `images/<name>/<platform>/runs.json`.

Three kinds of runs: that the image starts, which needs no GPU, how far a recipe's server came up
the smoke ladder, and its quality beside its model's. A failure is kept like a success. The latest
run of a kind and recipe counts, with one exception: a shorter ladder with the same recipe and
weights, in which nothing failed, does not replace the longer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypeVar

from pydantic import ValidationError, model_validator

from pipeline.artifacts.store.store import Store, read_own
from pipeline.core.errors import StoreDamaged
from pipeline.core.files import write_bytes
from pipeline.core.model import FILE_VERSION, Digest, Frozen, Name, Platform
from pipeline.core.verdict import RunVerdict, TestVerdict, worst

if TYPE_CHECKING:
    from pipeline.images.assemble.image import Built

Kept = TypeVar("Kept", bound=Frozen)
# `address`, `quality-address`: of a server of which only the address is known, and no image
RunKind: TypeAlias = Literal["start", "smoke", "address", "quality", "quality-address"]
OF_RECIPE, OF_ADDRESS = ("smoke", "quality"), ("address", "quality-address")
LADDERS = ("smoke", "address")
FILE = "runs.json"
RESULT, EXCHANGES = OUTPUTS = ("smoke.json", "exchanges.jsonl")  # of a ladder; other each time
# of a comparison of quality
QUALITY_RESULT, QUALITY_EXCHANGES = QUALITY_OUTPUTS = ("quality.json", "quality-exchanges.jsonl")
MARK = "sm120_run"  # the field of a statement that tells runs from gates


class RunTest(Frozen):
    """One check; of a ladder it is named `RUNG: CHECK`."""

    name: str
    verdict: TestVerdict
    message: str = ""


class ImageRun(Frozen):
    """One run of an image: with what, where, and what came out."""

    kind: RunKind
    recipe: Name | None = None  # of a run of a recipe's server
    last_good: str | None = None  # the highest rung that passed
    inputs: dict[str, Digest] = {}  # beyond the image: `recipes/NAME.yaml`, weights, exchanges
    machine: dict[str, str] = {}  # how and on what it ran: sandbox, processor, cards, driver
    made_by: dict[str, str] = {}  # versions, and digests of the judging code
    tests: list[RunTest]

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> ImageRun:
        if (self.kind in OF_RECIPE) != (self.recipe is not None):
            raise ValueError("a run of a recipe's server has a recipe, and no other run has one")
        if self.kind not in LADDERS and self.last_good is not None:
            raise ValueError("only a ladder has rungs")
        return self

    @property
    def verdict(self) -> RunVerdict:
        """Counted from its tests; where nothing passed, nothing is known."""
        judged = [test.verdict for test in self.tests if test.verdict != "skipped"]
        return worst(judged, "unknown")

    @property
    def about(self) -> str:
        """Its name: a later run of the same name takes its place."""
        return about_run(self.kind, self.recipe)

    def summary(self) -> str:
        """How far it proved the image, for people."""
        return summary_of(self.kind, self.recipe, self.verdict, self.last_good)


def about_run(kind: object, recipe: object) -> str:
    """The name of a run, as a set of evidence lists it."""
    if kind in OF_ADDRESS:
        return f"{'smoke' if kind == 'address' else 'quality'} of an address"
    return f"{kind} with {recipe}" if kind in OF_RECIPE else str(kind)


def summary_of(
    kind: RunKind, recipe: str | None, verdict: RunVerdict, last_good: str | None
) -> str:
    """One line about a run."""
    if kind == "start":
        outcomes = {"passed": "starts", "failed": "does not start"}
        return outcomes.get(verdict, "not known whether it starts")
    if kind not in LADDERS:
        return f"{about_run(kind, recipe)}: {verdict}"
    reached = f"smoke up to {last_good}" if last_good else "no rung of the ladder"
    with_what = f"with {recipe}" if recipe else "of an address"
    return f"{reached} {with_what}" + (f" ({verdict} after it)" if verdict != "passed" else "")


class ImageRuns(Frozen):
    """All runs of one image that count."""

    format: Annotated[Literal[1], FILE_VERSION] = 1
    image: str
    platform: Platform
    image_digest: Digest
    runs: list[ImageRun]


def runs_path(store: Store, image: str, platform: str) -> Path:
    """The file of an image's runs."""
    return store.image_folder(image, platform) / FILE


def read_beside(path: Path, model: type[Kept], what: str, again: str) -> Kept | None:
    """Reads a record kept beside an image; none if it is missing, an error if it is damaged."""
    try:
        return model.model_validate_json(read_own(path))
    except FileNotFoundError:
        return None
    except (OSError, StoreDamaged, ValidationError) as error:
        raise StoreDamaged(f"{path}: the record of {what} cannot be read", again) from error


def read_runs(store: Store, image: str, platform: str, digest: str) -> list[ImageRun]:
    """The runs of this very image; those of other bytes say nothing about it."""
    path = runs_path(store, image, platform)
    record = read_beside(path, ImageRuns, "its runs", f"Run it again: `sm120 image test {image}`.")
    return record.runs if record and record.image_digest == digest else []


def keep_runs(store: Store, built: Built, new: Sequence[ImageRun]) -> list[ImageRun]:
    """Replaces older runs of the same name; returns all that count now."""
    name, platform, digest = built.name, built.platform, built.digest
    # a start proof and a ladder may end at the same time
    with store.locked(f"runs-{name}-{platform.replace('/', '-')}"):
        latest: dict[str, ImageRun] = {}
        with suppress(StoreDamaged):  # a file that cannot be read is replaced
            latest = {run.about: run for run in read_runs(store, name, platform, digest)}
        for run in new:
            before = latest.get(run.about, run)
            given, given_before = (
                {k: v for k, v in each.inputs.items() if k not in OUTPUTS} for each in (run, before)
            )
            judged, judged_before = (
                {test.name for test in each.tests if test.verdict != "skipped"}
                for each in (run, before)
            )
            # a sound ladder from the same inputs that looked only at a part
            is_sound = run.kind == "smoke" and run.verdict != "failed"
            if not (is_sound and given == given_before and judged < judged_before):
                latest[run.about] = run
        runs = [latest[about] for about in sorted(latest)]
        record = ImageRuns(image=name, platform=platform, image_digest=digest, runs=runs)
        data = (record.model_dump_json(indent=1) + "\n").encode()
        write_bytes(runs_path(store, name, platform), data)
    return runs
