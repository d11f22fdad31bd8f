"""What a climb says about the image that served, stated and signed beside that image.

Of an address there is no image: the statement is beside the result.
"""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path

from pipeline import log
from pipeline.attest.envelope import SUFFIX
from pipeline.attest.names import TEST_RESULT
from pipeline.attest.statement import moment, state_about, subject
from pipeline.cli.file_statements import keep_beside
from pipeline.cli.image_statements import leave_runs
from pipeline.cli.images import find_image
from pipeline.cli.signing import Signing
from pipeline.cli.smoke.recipe_server import RecipeServer
from pipeline.errors import UnknownImage
from pipeline.evidence.results import run_predicate
from pipeline.evidence.runs import OUTPUTS, RESULT
from pipeline.files import sha256_of_file
from pipeline.known import Unknown
from pipeline.model import sha256_of
from pipeline.recipe.find import Recipes
from pipeline.recipe.model import Recipe
from pipeline.serve.run import recipe_digest
from pipeline.serve.site import HERE
from pipeline.smoke.model import SmokeResult
from pipeline.smoke.record import as_run
from pipeline.smoke.session import Session


def state_climb(
    server: RecipeServer, recipes: Recipes, session: Session, result: SmokeResult, signing: Signing
) -> None:
    """Keep a result, good or bad; only of an image that this checkout builds."""
    checkout, store, recipe = server.request.checkout, server.request.store, server.recipe
    try:
        built = find_image(checkout, store, recipe.image or "", None)
    except UnknownImage:
        built = None
    if built is None or server.status.built != "same" or built.digest != server.status.digest:
        log.say("Nothing is stated: what runs is not the image that this checkout builds.")
        return
    run = as_run(
        result,
        session.client.exchanges,
        recipe=recipe.name,
        inputs=_inputs(server, recipes),
        machine=_machine(server),
    )
    with store.in_use():
        leave_runs(checkout, store, built, [run], signing)


def state_address(
    folder: Path, session: Session, result: SmokeResult, recipe: Recipe | None, signing: Signing
) -> None:
    """State a climb of an address beside its result; what runs there is not known."""
    run = as_run(
        result,
        session.client.exchanges,
        recipe=None,
        # what it was held to; the server may run anything else
        inputs={f"expected/{recipe.name}": recipe_digest(recipe)} if recipe else {},
        machine={"address": result.url},
    )
    subjects = [subject(name, sha256_of_file(folder / name)) for name in OUTPUTS]
    statement = state_about(subjects, TEST_RESULT, run_predicate(run), moment())
    left = keep_beside(folder / f"{RESULT}{SUFFIX}", statement, signing)
    log.say(f"statement: {left.file}, {left.state}")


def _inputs(server: RecipeServer, recipes: Recipes) -> dict[str, str]:
    """Digests of all that ran beside the image."""
    shipped = server.request.checkout.root / "recipes"
    # a user's own recipes are not looked for in the checkout when the statement is verified
    inputs = {
        f"{'recipes' if path.parent == shipped else 'own'}/{path.name}": sha256_of(
            path.read_bytes()
        )
        for path in recipes.files(server.recipe.name)
    }
    inputs["recipe"] = recipe_digest(server.recipe)
    if server.begun and server.begun.weights_digest:
        inputs["weights"] = server.begun.weights_digest
    return inputs


def _machine(server: RecipeServer) -> dict[str, str]:
    machine = {"engine": server.engine.kind, "processor": platform.machine()}
    facts = HERE.look(server.recipe, server.recipe.port).facts
    if not isinstance(facts, Unknown) and not isinstance(facts.gpus, Unknown):
        counted = Counter(gpu.name for gpu in facts.gpus)
        machine["cards"] = ", ".join(f"{count}x {name}" for name, count in sorted(counted.items()))
    return machine
