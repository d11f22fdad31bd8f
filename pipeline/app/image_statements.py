"""Statements about images, which builds, gates and runs write to the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.app.signing import Signing
from pipeline.artifacts.attest.strict import plain
from pipeline.artifacts.store.store import Store
from pipeline.core import log
from pipeline.core.errors import PipelineError
from pipeline.evidence.statements.evidence_set import statements_folder
from pipeline.evidence.statements.stated import (
    SigningProblem,
    Stated,
    find_stated,
    sign_stated,
    state_image,
)
from pipeline.images.assemble.image import Built, find_built
from pipeline.images.assemble.plan import ImagePlan, plan_image
from pipeline.images.gate.runs import ImageRun, keep_runs
from pipeline.images.spec.checkout import Checkout

if TYPE_CHECKING:
    from pipeline.artifacts.attest.keys import Signer


@dataclass(frozen=True)
class ImageStatements:
    """The statements about one image."""

    image: str
    folder: Path
    stated: Stated
    signed: str  # by whom, for a table

    def as_json(self) -> dict[str, Any]:
        return {"folder": str(self.folder), **self.stated.model_dump(exclude={"inputs"})}


def state_images(
    checkout: Checkout, store: Store, images: Iterable[Built], signing: Signing
) -> dict[Built, ImageStatements]:
    """State every image that has no current statements, or whose statements lack our key."""
    done = {}
    for built in images:
        stated = find_stated(checkout, store, built)
        # the id is known without the key, which is loaded only where it has something to sign
        can_sign = stated and signing.key_id not in (None, *stated.signed_by) and signing.signers
        if stated is None or can_sign:
            # stated anew rather than signed as it is: what our key signs was computed here
            stated = state_image(checkout, store, built, signing.signers)
        signed = signing.state(stated.signed_by)
        done[built] = ImageStatements(built.name, statements_folder(store, built), stated, signed)
    return done


def state_gates(checkout: Checkout, store: Store, plan: ImagePlan, signing: Signing) -> None:
    """State the result of a gate that has just run, good or bad."""
    # a gate may judge an unbuilt image, which has no digest to state
    if built := find_built(store, plan):
        _state_and_say(checkout, store, built, signing)


def state_runs(
    checkout: Checkout, store: Store, built: Built, runs: Sequence[ImageRun], signing: Signing
) -> None:
    """Keep the results of running an image, good or bad, and state them."""
    now = {run.about: run for run in keep_runs(store, built, runs)}
    for longer in (now[run.about] for run in runs if now[run.about] != run):
        log.say(f"An earlier run of the ladder tested more, and stays stated: {longer.summary()}")
    _state_and_say(checkout, store, built, signing)


def _state_and_say(checkout: Checkout, store: Store, built: Built, signing: Signing) -> None:
    (done,) = state_images(checkout, store, [built], signing).values()
    made = log.count(len(done.stated.statements), "statement")
    log.say(f"{done.folder}: {made}, {done.signed}")


def sign_store(checkout: Checkout, store: Store, signer: Signer) -> Iterator[str]:
    """Sign the statements of this checkout's images in the store; yields a line about each."""
    # only what the checkout describes: an image that it no longer knows cannot be checked
    names = checkout.variants()
    for name, platform in [(n, p) for n in names for p in checkout.spec(n).platforms]:
        if store.image_record(name, platform) is None:
            continue
        state, wrong = "its statements are signed", dict[str, SigningProblem]()
        try:
            built = find_built(store, plan_image(checkout, name, platform))
            with store.in_use():
                if built is None:
                    state = f"not signed: the checkout has changed since (`sm120 build {name}`)"
                # an image that was built before there were statements
                elif not statements_folder(store, built).is_dir():
                    stated = state_image(checkout, store, built, [signer])
                    state = f"{log.count(len(stated.statements), 'statement')} made and signed"
                else:
                    wrong = sign_stated(checkout, store, built, signer)
        except PipelineError as error:
            # one image that cannot be signed does not keep the others from it
            state = f"not signed: {error}"
        if wrong and built:
            first, why = next(iter(wrong.items()))
            # made by us and wrong: stating it again is safe; a person looks at what others made
            fix = f"`sm120 evidence make {name}` replaces it"
            if why is SigningProblem.UNSIGNED_FOREIGN:
                fix = f"look at it in {statements_folder(store, built)}, and remove it"
            state = f"not signed: {plain(first)} {why.value} ({fix})".replace("\n", " ")
        yield f"{name} for {platform}: {state}"
