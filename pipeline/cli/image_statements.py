"""Statements about images, which builds, gates and runs leave in the store by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import log
from pipeline.assemble.image import Built, find_built
from pipeline.assemble.plan import ImagePlan, plan_image
from pipeline.attest.strict import plain
from pipeline.cli.signing import Signing
from pipeline.errors import PipelineError
from pipeline.evidence.evidence_set import folder_of
from pipeline.evidence.runs import Run, keep_runs
from pipeline.evidence.stated import (
    Problem,
    Stated,
    find_stated,
    sign_stated,
    state_image,
)
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store

if TYPE_CHECKING:
    from pipeline.attest.keys import Signer


@dataclass(frozen=True)
class Left:
    """The statements beside an image, as a verb names them at its end."""

    image: str
    folder: Path
    stated: Stated

    def signed(self, signing: Signing) -> str:
        return signing.state(self.stated.signed_by)

    def row(self, signing: Signing) -> list[str]:
        names = ", ".join(self.stated.statements)
        return [self.image, self.signed(signing), names, str(self.folder)]

    def as_json(self) -> dict[str, Any]:
        return {"folder": str(self.folder), **self.stated.model_dump(exclude={"inputs"})}


def leave_statements(
    checkout: Checkout,
    store: Store,
    images: Iterable[Built],
    signing: Signing,
) -> dict[Built, Left]:
    """State every image that has no current statements, or whose statements lack our key."""
    left = {}
    for built in images:
        stated = find_stated(checkout, store, built)
        if stated is None or _can_sign(stated, signing):
            # stated anew rather than signed as it lies there: what is signed was computed here
            stated = state_image(checkout, store, built, signing.signers)
        left[built] = Left(built.name, folder_of(store, built), stated)
    return left


def _can_sign(stated: Stated, signing: Signing) -> bool:
    # the id is known without the key, which is loaded only where it has something to sign
    return signing.key_id not in (None, *stated.signed_by) and bool(signing.signers)


def evidence_table(left: Iterable[Left], signing: Signing) -> str:
    """Which statements there are, who signed them and where they are."""
    return log.table(["image", "evidence", "statements", "folder"], [x.row(signing) for x in left])


def leave_gate_statements(
    checkout: Checkout, store: Store, plan: ImagePlan, signing: Signing
) -> None:
    """State the result of a gate that has just run, good or bad."""
    built = find_built(store, plan)
    # a gate may judge an image that is not built; then there is no digest to state it of
    if built is None:
        return
    _leave_and_say(checkout, store, built, signing)


def leave_runs(
    checkout: Checkout, store: Store, built: Built, runs: Sequence[Run], signing: Signing
) -> None:
    """Keep what running an image has just proved, good or bad, and state it."""
    now = {run.about: run for run in keep_runs(store, built, runs)}
    for longer in (now[run.about] for run in runs if now[run.about] != run):
        log.say(f"An earlier climb looked at more, and stays stated: {longer.summary()}")
    _leave_and_say(checkout, store, built, signing)


def _leave_and_say(checkout: Checkout, store: Store, built: Built, signing: Signing) -> None:
    (left,) = leave_statements(checkout, store, [built], signing).values()
    made = log.count(len(left.stated.statements), "statement")
    log.say(f"{left.folder}: {made}, {left.signed(signing)}")


def sign_store(checkout: Checkout, store: Store, signer: Signer) -> Iterator[str]:
    """Sign the statements of this checkout's images in the store; a line about each."""
    # only what the checkout describes: an image that it no longer knows cannot be checked
    for name in checkout.images():
        for platform in checkout.spec(name).platforms:
            if store.image_record(name, platform) is not None:
                yield f"{name} for {platform}: {_signed(checkout, store, name, platform, signer)}"


def _signed(checkout: Checkout, store: Store, name: str, platform: str, signer: Signer) -> str:
    try:
        plan = plan_image(checkout, name, platform)
        built = find_built(store, plan)
        if built is None:
            return f"not signed: the checkout has changed since (`sm120 build {name}`)"
        with store.in_use():
            # an image that was built before there were statements
            if not folder_of(store, built).is_dir():
                stated = state_image(checkout, store, built, [signer])
                return f"{log.count(len(stated.statements), 'statement')} made and signed"
            wrong = sign_stated(checkout, store, built, signer)
    except PipelineError as error:
        # one image that cannot be signed does not keep the others from it
        return f"not signed: {error}"
    if not wrong:
        return "its statements are signed"
    first, why = next(iter(wrong.items()))
    # made by us and wrong: stating it again is safe; what others left is for a person to look at
    fix = f"`sm120 evidence make {name}` replaces it"
    if why is Problem.UNSIGNED_FOREIGN:
        fix = f"look at it in {folder_of(store, built)}, and remove it"
    return f"not signed: {plain(first)} {why.value} ({fix})".replace("\n", " ")
